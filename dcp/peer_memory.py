"""Memory of one GPU that the ranks on the other GPUs of its host have mapped, and theirs here: CUDA IPC.

Every rank of a group allocates a slab, the ranks tell each other its handle through a store, and each maps all others.
Either all ranks of a group have done so in the end, or none.

A slab is never freed, since a peer may have it mapped for a while longer: it is kept for the next group of this process
that wants one of its size. Nobody writes to it then. A rank lets go once its own kernels have ended, and each of them
ends only when all that its peers send it has come. Kernels of a group that was given up end before: its slabs serve
nobody again.

N = ranks of the group.
"""

import ctypes
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.distributed_c10d import Store

from specdec.kernels.errors import ConfigError, SpecdecError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HANDLE_BYTES = 64


class PeerMemoryError(SpecdecError):
    """The ranks of a group cannot map each other's memory: the message says why, the same on every rank."""


class Slab(NamedTuple):
    """Memory of this rank.

    Attributes:
        address: Where it begins.
        handle: By which another process maps it.
    """

    address: int
    handle: bytes


class PeerDevice(Protocol):
    """A GPU, as far as sharing its memory goes. What it refuses is a RuntimeError."""

    @property
    def bus_id(self) -> str:
        """Give its name on its host."""

    def allocate(self, num_bytes: int) -> Slab:
        """Take memory of its own and make it ready to be shared."""

    def clear(self, slab: Slab, num_bytes: int) -> None:
        """Fill a slab with zeros, and wait until it is."""

    def reaches(self, bus_id: str) -> bool:
        """Whether this GPU may access the memory of another, as far as can be told."""

    def map(self, handle: bytes) -> int:
        """Map another process's slab; gives where it begins here."""

    def unmap(self, address: int) -> None:
        """Let go of it."""

    def synchronize(self) -> None:
        """Wait for all that the GPU was told to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """What a rank tells the others.

    Attributes:
        host: The start of the host that it runs on, whose processes can share memory.
        bus_id: Its GPU.
        handle: Of its slab, in hexadecimal digits.
        refusal: Why it takes no part; None where it does.
    """

    host: str
    bus_id: str = ""
    handle: str = ""
    refusal: str | None = None


_kept: dict[tuple[str, int], list[Slab]] = defaultdict(list)  # slabs that no group uses, by GPU and size


class PeerMemory:
    """The slabs of a group, mapped. Waits for the other ranks.

    Args:
        num_bytes: Of a slab; it begins as zeros.
        rank: Of this process in the group.
        size: N.
        store: For this group alone.
        timeout: How long to wait for the others.
        open_device: Gives the GPU of this rank; a RuntimeError or a ConfigError says why it can take no part.

    Attributes:
        addresses: Where this rank has each slab, its own among them.

    Raises:
        PeerMemoryError: A rank cannot map the memory of another, on every rank alike; nothing is mapped.
        RuntimeError: A rank did not come.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        rank: int,
        size: int,
        store: Store,
        timeout: timedelta,
        open_device: Callable[[], PeerDevice],
    ) -> None:
        self._num_bytes = num_bytes
        self._device: PeerDevice | None = None
        self._own: Slab | None = None
        self._mapped: list[int] = []
        try:
            self.addresses = self._meet(_Round(store, rank=rank, size=size, timeout=timeout), open_device)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the others' slabs, once this rank's kernels have ended; its own is kept for a next group."""
        if self._device is None:
            return
        self._device.synchronize()
        while self._mapped:
            self._device.unmap(self._mapped.pop())
        if self._own is not None:
            _kept[self._device.bus_id, self._num_bytes].append(self._own)
            self._own = None

    def _meet(self, ranks: "_Round", open_device: Callable[[], PeerDevice]) -> list[int]:
        offer = _Offer(host=_BOOT_ID.read_text().strip())
        try:
            device = self._device = open_device()
            own = self._own = self._take_slab(device)
            offer = replace(offer, bus_id=device.bus_id, handle=own.handle.hex())
        except (RuntimeError, ConfigError) as error:
            offer = replace(offer, refusal=f"its GPU takes no part: {error}")
        offers = ranks.exchange("offer", offer)
        _check(offers)
        addresses = []
        try:
            for rank, each in enumerate(offers):
                addresses.append(own.address if rank == ranks.rank else self._map(device, each, rank))
        except RuntimeError as error:
            offer = replace(offer, refusal=str(error))
        _check(ranks.exchange("mapped", offer))
        return addresses

    def _take_slab(self, device: PeerDevice) -> Slab:
        kept = _kept[device.bus_id, self._num_bytes]
        slab = kept.pop() if kept else device.allocate(self._num_bytes)
        device.clear(slab, self._num_bytes)
        return slab

    def _map(self, device: PeerDevice, offer: _Offer, rank: int) -> int:
        if not device.reaches(offer.bus_id):
            raise RuntimeError(f"its GPU {device.bus_id} has no access to {offer.bus_id} of rank {rank}")
        try:
            self._mapped.append(device.map(bytes.fromhex(offer.handle)))
        except RuntimeError as error:
            raise RuntimeError(f"it cannot map the memory of rank {rank}: {error}") from error
        return self._mapped[-1]


class _Round:
    """The ranks of a group, each with something to say."""

    def __init__(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> None:
        self.rank = rank
        self._store, self._size, self._timeout = store, size, timeout

    def exchange(self, stage: str, offer: _Offer) -> list[_Offer]:
        """Give what every rank says at this stage."""
        keys = [f"{stage}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self.rank], json.dumps(asdict(offer)))
        self._store.wait(keys, self._timeout)
        return [_Offer(**json.loads(self._store.get(key))) for key in keys]


def _check(offers: Sequence[_Offer]) -> None:
    """Raise a PeerMemoryError where the ranks of these offers cannot share memory."""
    for rank, offer in enumerate(offers):
        if offer.refusal is not None:
            raise PeerMemoryError(f"rank {rank}: {offer.refusal}")
    for rank, offer in enumerate(offers):
        if offer.host != offers[0].host:
            raise PeerMemoryError(f"ranks 0 and {rank} are on different hosts")


class CudaPeerDevice:
    """A GPU of this process.

    Args:
        device: Which.

    Raises:
        RuntimeError: The driver refuses, or its Python bindings are not installed.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver  # noqa: PLC0415
        except ImportError as error:
            raise RuntimeError("the Python bindings of the CUDA driver are not installed: cuda-bindings") from error
        self._driver, self._device = driver, device
        self._number = self._checked(driver.cuDeviceGet(device.index))
        self._context = self._checked(driver.cuDevicePrimaryCtxRetain(self._number))  # torch's

    @property
    def bus_id(self) -> str:
        """Give its PCI address."""
        name: bytes = self._checked(self._driver.cuDeviceGetPCIBusId(32, self._number))
        return name.split(b"\0", 1)[0].decode()

    def allocate(self, num_bytes: int) -> Slab:
        """Take memory of its own: a handle names a whole allocation, and torch's hold more than one tensor."""
        address = self._call("cuMemAlloc", num_bytes)
        try:
            handle = self._call("cuIpcGetMemHandle", address)
        except RuntimeError:
            self._call("cuMemFree", address)
            raise
        return Slab(int(address), ctypes.string_at(handle.getPtr(), _HANDLE_BYTES))

    def clear(self, slab: Slab, num_bytes: int) -> None:
        """Fill a slab with zeros, and wait until it is."""
        self._call("cuMemsetD8", slab.address, 0, num_bytes)
        self._call("cuCtxSynchronize")

    def reaches(self, bus_id: str) -> bool:
        """Ask the driver; a GPU that this process does not see counts as reached, until it cannot be mapped."""
        if bus_id == self.bus_id:
            return True
        status, other = self._driver.cuDeviceGetByPCIBusId(bus_id.encode())
        return bool(int(status) or self._call("cuDeviceCanAccessPeer", self._number, other))

    def map(self, handle: bytes) -> int:
        """Map another process's slab; the driver enables access between the GPUs by itself."""
        record = self._driver.CUipcMemHandle()
        ctypes.memmove(record.getPtr(), handle, _HANDLE_BYTES)
        lazily = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", record, int(lazily)))

    def unmap(self, address: int) -> None:
        """Let go of it."""
        self._call("cuIpcCloseMemHandle", address)

    def synchronize(self) -> None:
        """Wait for all that the GPU was told to do."""
        torch.cuda.synchronize(self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        self._checked(self._driver.cuCtxSetCurrent(self._context))
        return self._checked(getattr(self._driver, name)(*arguments))

    def _checked(self, result: tuple[Any, ...]) -> Any:
        status, *values = result
        if int(status):
            raise RuntimeError(f"CUDA: {status.name}")
        return values[0] if values else None
