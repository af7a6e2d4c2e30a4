"""What the three transports have in common: regions, addresses, checks, and a sending thread for each peer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import torch

from specdec.kernels.errors import ConfigError, TransferError
from specdec.transfer.address import (
    HOST_DEVICE,
    VERSION,
    AddressRecord,
    ProcessRecord,
    RegionRecord,
    decode_address,
    encode_address,
)
from specdec.transfer.descriptors import MOST_LAYER_STEP, MOST_LAYERS, MOST_REPEATS
from specdec.transfer.gate import GateVisit
from specdec.transfer.gpu_memory import GpuMemory
from specdec.transfer.placement import I64
from specdec.transfer.queued_write import GpuSource, QueuedWrite
from specdec.transfer.sending_thread import Link, SendingThread
from specdec.transfer.transport import DEFAULT_TIMEOUT_S, Peer, RegionCopies

NO_TARGET = -1  # base of a region that peers cannot write to


@dataclass(frozen=True, eq=False, slots=True)
class ConnectedPeer:
    """A peer, its link and its thread; which of its regions are on a GPU."""

    name: str
    regions: Mapping[str, int]
    on_gpu: frozenset[str]
    address: bytes
    link: Link
    sending: SendingThread


class QueuedTransport(ABC):
    """A transport that hands every write to the sending thread of its peer.

    Args:
        timeout_s: Seconds that a write may take, from the call on.
    """

    name: str

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not 0.0 < timeout_s < float("inf"):
            raise ConfigError(f"timeout_s of a transport must be positive and finite, got {timeout_s}")
        self._timeout_s = timeout_s
        self._regions: dict[str, torch.Tensor] = {}
        self._records: tuple[RegionRecord, ...] = ()
        self._peers: dict[bytes, ConnectedPeer] = {}  # by address
        self._gpu_memory: GpuMemory | None = None
        self._is_closed = False

    # What each transport adds.

    @abstractmethod
    def _register(self, regions: Mapping[str, torch.Tensor]) -> Mapping[str, int]:
        """Tell the library of all regions, or of none and raise `TransferError`; gives the base of each record."""

    @abstractmethod
    def _endpoint(self) -> bytes:
        """What a peer needs beside the regions."""

    @abstractmethod
    def _link(self, record: AddressRecord, gate: GateVisit | None) -> Link:
        """Open the way to a peer; raises `TransferError` where it is known not to exist.

        Args:
            record: Its address.
            gate: To its GPU memory, where it has such and is on this host.
        """

    @abstractmethod
    def _close(self) -> None:
        """Give back what the library holds. No link is used any more, but one that is stuck in the library."""

    # The protocol.

    def allocate(self, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Give zeroed memory that peers can be let into."""
        if nbytes < 1:
            raise ConfigError(f"memory of at least 1 byte can be allocated, got {nbytes}")
        device = torch.device(device)
        if device.type == "cpu":
            return self._allocate(nbytes)
        return self._on_gpu(device).allocate(nbytes)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def _on_gpu(self, device: torch.device) -> GpuMemory:
        """Give this transport's memory of a GPU; there is one GPU, that of the rank.

        Raises:
            ConfigError: It cannot reach that device.
        """
        if device.type != "cuda":
            raise ConfigError(f"transport {self.name} moves memory of the host and of CUDA GPUs, got device {device}")
        if self._gpu_memory is None:
            try:
                index = torch.cuda.current_device() if device.index is None else device.index
                self._gpu_memory = GpuMemory(torch.device("cuda", index))
            except (RuntimeError, AssertionError) as error:  # torch raises the second where it was built without CUDA
                raise ConfigError(
                    f"transport {self.name} cannot take memory of {device}, only of the host: {error}"
                ) from error
        if device.index not in (None, self._gpu_memory.device.index):
            raise ConfigError(
                f"the GPU memory of a transport is on one GPU, here {self._gpu_memory.device}, got {device}: open a "
                "transport for each"
            )
        return self._gpu_memory

    def register(self, regions: Mapping[str, torch.Tensor]) -> None:
        """Let regions take part in writes."""
        self._check_open()
        if self._regions:
            raise ConfigError(f"regions are registered once, all together; there are {sorted(self._regions)} already")
        _check_regions(regions)
        for region in regions.values():
            if region.device.type != "cpu":
                self._on_gpu(region.device)
        bases = self._register(regions)
        self._regions = dict(regions)
        self._records = tuple(
            RegionRecord(
                name=name,
                nbytes=region.nbytes,
                base=bases[name],
                device=region.device.index if region.is_cuda else HOST_DEVICE,
            )
            for name, region in regions.items()
        )

    def address(self) -> bytes:
        """Give what a peer needs to connect."""
        self._check_open()
        if not self._regions:
            raise ConfigError("an address holds the regions: register them first")
        return encode_address(
            AddressRecord(
                version=VERSION,
                transport=self.name,
                process=ProcessRecord.of_this_process(),
                endpoint=self._endpoint(),
                regions=self._records,
                gate=None if self._gpu_memory is None else self._gpu_memory.gate.record,
            )
        )

    def connect(self, address: bytes) -> Peer:
        """Get to know a peer."""
        self._check_open()
        if (known := self._peers.get(address)) is not None:
            if known.link.cause_of_end() is None:
                return known
            self.disconnect(known)
        record = decode_address(address, transport=self.name)
        if record.process.is_gone:
            raise TransferError(f"process {record.process.pid}, which gave this address, has ended: get a new address")
        gate = None
        if record.gate is not None and record.process.is_on_this_host:
            gate = GateVisit(record.process, record.gate)
        link = self._link(record, gate)
        targets = [region for region in record.regions if region.base != NO_TARGET]
        peer = ConnectedPeer(
            name=f"{self.name} peer (process {record.process.pid})",
            regions={region.name: region.nbytes for region in targets},
            on_gpu=frozenset(region.name for region in targets if region.is_on_gpu),
            address=address,
            link=link,
            sending=SendingThread(link, name=f"{self.name}-{record.process.pid}", gate=gate),
        )
        self._peers[address] = peer
        return peer

    def write(self, peer: Peer, copies: Sequence[RegionCopies]) -> QueuedWrite:
        """Copy into a peer's memory."""
        connected = self._connected(peer)
        own = {name: region.nbytes for name, region in self._regions.items()}
        for copy in copies:
            _check_copy(copy, own, peer)
            self._check_kinds(copy, connected)
        source = None
        if self._gpu_memory is not None and any(self._regions[copy.source_region].is_cuda for copy in copies):
            device = self._gpu_memory.device
            source = GpuSource(device, torch.cuda.current_stream(device).record_event())
        write = QueuedWrite(copies, peer=peer.name, timeout_s=self._timeout_s, gpu_source=source)
        connected.sending.put(write)
        return write

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer."""
        connected = self._connected(peer)
        del self._peers[connected.address]
        connected.sending.close()

    def close(self) -> None:
        """End."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._gpu_memory is not None:
            self._gpu_memory.gate.shut()
        while self._peers:
            self._peers.popitem()[1].sending.close()
        self._close()
        self._regions.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_kinds(self, copy: RegionCopies, peer: ConnectedPeer) -> None:
        """Refuse to copy between a GPU and a host."""
        sides = (self._regions[copy.source_region].is_cuda, copy.destination_region in peer.on_gpu)
        if sides[0] != sides[1]:
            here, there = ("on a GPU" if side else "in memory of the host" for side in sides)
            raise TransferError(
                f"region {copy.source_region} is {here} and region {copy.destination_region} of {peer.name} {there}: "
                "keep both on GPUs, or both on hosts"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferError(f"this {self.name} transport was closed")

    def _connected(self, peer: Peer) -> ConnectedPeer:
        if not isinstance(peer, ConnectedPeer) or self._peers.get(peer.address) is not peer:
            raise TransferError(f"{peer.name} is not connected to this {self.name} transport: connect to its address")
        return peer


def _check_regions(regions: Mapping[str, torch.Tensor]) -> None:
    """Refuse what cannot be registered, before the library sees any of it."""
    if not regions:
        raise ConfigError("at least one region must be registered")
    for name, region in regions.items():
        if not region.is_contiguous() or region.nbytes < 1:
            raise ConfigError(f"region {name} must be contiguous and not empty, got {tuple(region.shape)}")
    ranges = sorted((region.data_ptr(), region.data_ptr() + region.nbytes, name) for name, region in regions.items())
    for (_, end, name), (begin, _, other) in pairwise(ranges):
        if begin < end:
            raise ConfigError(f"regions {name} and {other} overlap: a library would lose one of them")


def _check_copy(copy: RegionCopies, own: Mapping[str, int], peer: Peer) -> None:
    """Refuse copies that are not inside of both regions.

    Raises:
        TransferError: They are not.
    """
    descriptors = copy.descriptors
    source_X, destination_X, length_X = (
        descriptors.source_offset_X,
        descriptors.destination_offset_X,
        descriptors.length_X,
    )
    if not source_X.shape == destination_X.shape == length_X.shape:
        raise TransferError(
            f"as many source as destination offsets as lengths must be given for {copy.source_region}, got "
            f"{source_X.shape}, {destination_X.shape}, {length_X.shape}"
        )
    repeats = descriptors.repeats or ()
    if any(array.shape != length_X.shape for array in repeats):
        raise TransferError(
            f"as many counts and steps as descriptors must be given for {copy.source_region}, got "
            f"{[array.shape for array in repeats]} for {length_X.shape}"
        )
    if any(array.dtype != np.int64 for array in (source_X, destination_X, length_X, *repeats)):
        raise TransferError(f"offsets, lengths and repeats for {copy.source_region} must be i64")
    if not all(_is_below(array, MOST_REPEATS) for array in repeats):
        raise TransferError(f"counts and steps for {copy.source_region} must be 0..{MOST_REPEATS - 1}")
    count, *steps = descriptors.layers
    if not 1 <= count < MOST_LAYERS or not all(0 <= step < MOST_LAYER_STEP for step in steps):
        raise TransferError(
            f"1..{MOST_LAYERS - 1} layers can be copied for {copy.source_region}, at steps of 0..{MOST_LAYER_STEP - 1} "
            f"bytes, got {descriptors.layers}"
        )
    source_end_X, destination_end_X = descriptors.ends()
    sides = (
        ("this side", copy.source_region, own, source_X, source_end_X),
        (peer.name, copy.destination_region, peer.regions, destination_X, destination_end_X),
    )
    for side, region, known, offset_X, end_X in sides:
        if region not in known:
            raise TransferError(f"{side} has no region {region!r} for this, only {sorted(known)}")
        bytes_of_region = known[region]
        if all(_is_below(array, bytes_of_region + 1) for array in (offset_X, length_X, end_X)):
            continue
        # An end that is too large for 64 bits is negative, for offset and length alone may have the region's size.
        bad_X = (length_X < 0) | (offset_X < 0) | (length_X > bytes_of_region) | (offset_X > bytes_of_region)
        bad_X |= (end_X < 0) | (end_X > bytes_of_region)
        first = int(np.flatnonzero(bad_X)[0])
        raise TransferError(
            f"descriptor {first} is outside of region {region} of {side}: offset {offset_X[first]}, "
            f"{length_X[first]} bytes, the region has {bytes_of_region}"
        )


def _is_below(array: I64, bound: int) -> bool:
    """Whether all numbers are 0..bound - 1, in one pass: what is negative is large without a sign."""
    return not len(array) or int(array.view(np.uint64).max()) < bound
