"""Memory of a GPU that processes of its host can map: taken from the driver, and given back only when nobody has it.

A handle by which others map memory names a whole allocation, and torch's hold many tensors; so this is the driver's
own, in whole pages, for the driver cuts what is smaller out of a page that it would let others into. What a peer has
mapped must be neither freed nor handed to anybody. Memory whose tensor is gone is kept until the gate says that nobody
has it mapped, or, for memory of the same size again, that nobody writes to it.
"""

import threading
import time
import weakref
from typing import NamedTuple

import torch

from specdec.dcp.peer_memory import CudaPeerDevice, Slab
from specdec.kernels.cuda_program import as_current
from specdec.kernels.errors import TransferError
from specdec.transfer.gate import Gate

_LAST_WRITES_S = 1.0  # that were in flight when the gate was shut
_POLL_S = 1e-3
_PAGE_BYTES = 2 << 20


class GpuDevice(CudaPeerDevice):
    """A GPU of this process that memory can be given back to."""

    def free(self, slab: Slab) -> None:
        """Give memory back, which no process has mapped."""
        self._call("cuMemFree", slab.address)

    def access(self, device: torch.device) -> None:
        """Let this GPU's kernels into memory of another GPU that this process has taken there."""
        if device.index == self._device.index:
            return
        other = self._checked(self._driver.cuDeviceGet(device.index))
        context = self._checked(self._driver.cuDevicePrimaryCtxRetain(other))  # torch's
        try:
            self._call("cuCtxEnablePeerAccess", context, 0)
        except RuntimeError as error:
            if "ALREADY_ENABLED" not in str(error):
                raise


class _Kept(NamedTuple):
    """Memory whose tensor is gone, and the gates of all transports that had it: peers of any may have it mapped."""

    slab: Slab
    num_bytes: int
    gates: tuple[Gate, ...]


class _Owner:
    """What a tensor is made of; it lives as long as the tensor's storage."""

    def __init__(self, slab: Slab, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (slab.address, False), "version": 3
        }  # fmt: skip


_kept: dict[torch.device, list[_Kept]] = {}
_address_by_handle: dict[bytes, int] = {}  # of what this process has taken: it cannot map that
_taking = threading.Lock()


class GpuMemory:
    """What one transport has taken of one GPU.

    Args:
        device: The GPU.

    Attributes:
        device: The GPU.
        gpu: Its driver's view.
        gate: What peers pass to write there.

    Raises:
        RuntimeError: The driver refuses, or its Python bindings are not installed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with as_current(device):
            self.gpu = GpuDevice(device)
        self.gate = Gate()
        self._handles: dict[int, bytes] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Give zeroed memory, u8 [num_bytes].

        Raises:
            RuntimeError: The GPU has no room.
        """
        taken_bytes = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        with _taking, as_current(self.device):
            slab, old_gates = self._take(taken_bytes)
            owner = _Owner(slab, num_bytes)
            kept = _kept.setdefault(self.device, [])
            weakref.finalize(owner, kept.append, _Kept(slab, taken_bytes, (*old_gates, self.gate))).atexit = False
            self.gpu.clear(slab, num_bytes)
            self._handles[slab.address] = slab.handle
            _address_by_handle[slab.handle] = slab.address
            memory = _tensor_of(owner, self.device)
            assert memory.data_ptr() == slab.address
            return memory

    def handle_of(self, memory: torch.Tensor) -> bytes:
        """Give the handle of what `allocate` gave; empty for other memory."""
        return self._handles.get(memory.data_ptr(), b"")

    def _take(self, num_bytes: int) -> tuple[Slab, tuple[Gate, ...]]:
        """Take memory; gives the gates, too, by which peers may have it mapped from earlier."""
        kept = _kept.get(self.device, [])
        for place, each in enumerate(kept):
            # The newest gate says it: memory came to it only once nobody wrote by those before, which are shut.
            if each.num_bytes == num_bytes and _is_quiet(each.gates[-1]):
                del kept[place]
                return each.slab, tuple(gate for gate in each.gates if gate.is_mapped)
        for each in [each for each in kept if not any(gate.is_mapped for gate in each.gates)]:
            kept.remove(each)
            del _address_by_handle[each.slab.handle]
            self.gpu.free(each.slab)
        return self.gpu.allocate(num_bytes), ()


class MappedMemory:
    """Memory of a peer, as this process has it.

    Args:
        gpu: The GPU that writes.
        handle: Of the memory.
        bus_id: Name of the GPU that has it, on this host.
        here: That GPU, where it is memory of this process; None where it is another's.

    Attributes:
        address: Where it begins.

    Raises:
        TransferError: It cannot be mapped.
    """

    def __init__(self, gpu: GpuDevice, handle: bytes, *, bus_id: str, here: torch.device | None) -> None:
        self._gpu = gpu
        self._is_mapped = here is None
        if not gpu.reaches(bus_id):
            raise TransferError(f"GPU {gpu.bus_id} has no access to memory of GPU {bus_id}: take nixl or mooncake")
        try:
            if here is None:
                self.address = gpu.map(handle)
            else:
                gpu.access(here)
                self.address = _address_by_handle[handle]
        except RuntimeError as error:
            raise TransferError(f"GPU {gpu.bus_id} cannot map the peer's memory on GPU {bus_id}: {error}") from error

    def close(self) -> None:
        """Let go of it; nothing is written to it any more."""
        if self._is_mapped:
            self._gpu.unmap(self.address)


def _tensor_of(owner: _Owner, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(owner, device=device)


def _is_quiet(gate: Gate) -> bool:
    """Whether nobody writes there; waits a moment for the last ones."""
    until = time.monotonic() + _LAST_WRITES_S
    while gate.is_written:
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True
