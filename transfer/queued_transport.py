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
    VERSION,
    AddressRecord,
    ProcessRecord,
    RegionRecord,
    decode_address,
    encode_address,
)
from specdec.transfer.queued_write import QueuedWrite
from specdec.transfer.sending_thread import Link, SendingThread
from specdec.transfer.transport import DEFAULT_TIMEOUT_S, Peer, RegionCopies

NO_TARGET = -1  # base of a region that peers cannot write to


@dataclass(frozen=True, eq=False, slots=True)
class ConnectedPeer:
    """A peer, its link and its thread."""

    name: str
    regions: Mapping[str, int]
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
        self._is_closed = False

    # What each transport adds.

    @abstractmethod
    def _register(self, regions: Mapping[str, torch.Tensor]) -> Mapping[str, int]:
        """Tell the library of all regions, or of none and raise `TransferError`; gives the base of each record."""

    @abstractmethod
    def _endpoint(self) -> bytes:
        """What a peer needs beside the regions."""

    @abstractmethod
    def _link(self, record: AddressRecord) -> Link:
        """Open the way to a peer; raises `TransferError` where it is known not to exist."""

    @abstractmethod
    def _close(self) -> None:
        """Give back what the library holds. No link is used any more, but one that is stuck in the library."""

    # The protocol.

    def allocate(self, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Give zeroed memory that peers can be let into."""
        if torch.device(device).type != "cpu":
            raise ConfigError(f"transport {self.name} moves memory of the host only, got device {device}")
        if nbytes < 1:
            raise ConfigError(f"memory of at least 1 byte can be allocated, got {nbytes}")
        return self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def register(self, regions: Mapping[str, torch.Tensor]) -> None:
        """Let regions take part in writes."""
        self._check_open()
        if self._regions:
            raise ConfigError(f"regions are registered once, all together; there are {sorted(self._regions)} already")
        _check_regions(regions, self.name)
        bases = self._register(regions)
        self._regions = dict(regions)
        self._records = tuple(
            RegionRecord(name=name, nbytes=region.nbytes, base=bases[name]) for name, region in regions.items()
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
        link = self._link(record)
        peer = ConnectedPeer(
            name=f"{self.name} peer (process {record.process.pid})",
            regions={region.name: region.nbytes for region in record.regions if region.base != NO_TARGET},
            address=address,
            link=link,
            sending=SendingThread(link, name=f"{self.name}-{record.process.pid}"),
        )
        self._peers[address] = peer
        return peer

    def write(self, peer: Peer, copies: Sequence[RegionCopies]) -> QueuedWrite:
        """Copy into a peer's memory."""
        connected = self._connected(peer)
        own = {name: region.nbytes for name, region in self._regions.items()}
        for copy in copies:
            _check_copy(copy, own, peer)
        write = QueuedWrite(copies, peer=peer.name, timeout_s=self._timeout_s)
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
        while self._peers:
            self._peers.popitem()[1].sending.close()
        self._close()
        self._regions.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferError(f"this {self.name} transport was closed")

    def _connected(self, peer: Peer) -> ConnectedPeer:
        if not isinstance(peer, ConnectedPeer) or self._peers.get(peer.address) is not peer:
            raise TransferError(f"{peer.name} is not connected to this {self.name} transport: connect to its address")
        return peer


def _check_regions(regions: Mapping[str, torch.Tensor], transport: str) -> None:
    """Refuse what cannot be registered, before the library sees any of it."""
    if not regions:
        raise ConfigError("at least one region must be registered")
    for name, region in regions.items():
        if region.device.type != "cpu":
            raise ConfigError(
                f"transport {transport} moves memory of the host only, region {name} is on {region.device}"
            )
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
    arrays = copy.descriptors
    lengths = arrays.length_X
    if not arrays.source_offset_X.shape == arrays.destination_offset_X.shape == lengths.shape:
        raise TransferError(
            f"as many source as destination offsets as lengths must be given for {copy.source_region}, got "
            f"{arrays.source_offset_X.shape}, {arrays.destination_offset_X.shape}, {lengths.shape}"
        )
    if any(array.dtype != np.int64 for array in (arrays.source_offset_X, arrays.destination_offset_X, lengths)):
        raise TransferError(f"offsets and lengths for {copy.source_region} must be i64")
    sides = (
        ("this side", copy.source_region, own, arrays.source_offset_X),
        (peer.name, copy.destination_region, peer.regions, arrays.destination_offset_X),
    )
    for side, region, known, offset_X in sides:
        if region not in known:
            raise TransferError(f"{side} has no region {region!r} for this, only {sorted(known)}")
        # Written so that no sum can overflow.
        bad_X = (lengths < 0) | (offset_X < 0) | (offset_X > known[region] - lengths)
        if bad_X.any():
            first = int(np.flatnonzero(bad_X)[0])
            raise TransferError(
                f"descriptor {first} is outside of region {region} of {side}: offset {offset_X[first]}, "
                f"{lengths[first]} bytes, the region has {known[region]}"
            )
