"""The ranks of one host whose GPUs write into each other's memory: small exchanges are one kernel each.

What is larger than a slab takes, and broadcasts, go by the process group as before. The results are the same bits.
"""

import sys
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import Store

from specdec.dcp.communicator import ProcessCommunicator
from specdec.dcp.peer_memory import CudaPeerDevice, PeerDevice, PeerMemory, PeerMemoryError
from specdec.kernels.cuda_program import as_current
from specdec.kernels.errors import CollectiveError
from specdec.kernels.peer_add_norm import peer_add_norm, takes_rows
from specdec.kernels.peer_exchange import load_peer_exchange, peer_all_gather, peer_all_to_all
from specdec.kernels.peer_merge import peer_merge, takes_states
from specdec.kernels.peer_slab import MAX_RANKS, PeerSlabs, SlabLayout


class PeerCommunicator:
    """A group of GPUs of one host. On one stream at a time; a CUDA graph may hold its collectives.

    Args:
        wrapped: The same ranks over a process group.
        memory: Their slabs.
        device: Of this rank.

    Attributes:
        slabs: For kernels that meet their peers themselves.
    """

    def __init__(self, wrapped: ProcessCommunicator, memory: PeerMemory, *, device: torch.device) -> None:
        self.name, self.size, self.rank, self.record = wrapped.name, wrapped.size, wrapped.rank, wrapped.record
        self._wrapped, self._memory = wrapped, memory
        self.slabs = PeerSlabs(memory.addresses, rank=wrapped.rank, device=device)

    def takes(self, row_bytes: int) -> bool:
        """Whether an exchange in which a rank has so much for each other goes through the GPUs' memory."""
        return row_bytes <= self.slabs.layout.most_row_bytes

    def all_gather(self, tensor: torch.Tensor, *, axis: int = 0) -> torch.Tensor:
        """Stack every rank's tensor in rank order: [*shape[:axis], N, *shape[axis:]]."""
        self._check("all_gather")
        if not self.takes(tensor.nbytes):
            return self._wrapped.all_gather(tensor).movedim(0, axis)
        self._wrapped.note("all_gather", tensor.nbytes * (self.size - 1))
        with as_current(tensor.device):
            return peer_all_gather(tensor.contiguous(), self.slabs, axis=axis)

    def all_to_all(self, tensor_N: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; row r of the result, of the same shape, came from rank r."""
        row_bytes = tensor_N.nbytes // self.size
        self._check("all_to_all")
        if not self.takes(row_bytes):
            return self._wrapped.all_to_all(tensor_N)
        self._wrapped.note("all_to_all", row_bytes * (self.size - 1))
        with as_current(tensor_N.device):
            return peer_all_to_all(tensor_N.contiguous(), self.slabs)

    def adds_rows(self, x_TH: torch.Tensor) -> bool:
        """Whether `add_norm` takes as many rows as these, of as many features."""
        return takes_rows(self.slabs.layout, *x_TH.shape)

    def add_norm(
        self,
        x_TH: torch.Tensor,
        delta_TH: torch.Tensor,
        weight_H: torch.Tensor,
        *,
        eps: float,
        normed_TH: torch.Tensor,
    ) -> None:
        """Add what the ranks have to the residual stream and norm the sum: `peer_add_norm`, which has the arguments."""
        self._check("all_gather")
        self._wrapped.note("all_gather", delta_TH.nbytes * (self.size - 1))
        with as_current(x_TH.device):
            peer_add_norm(x_TH, delta_TH, weight_H, self.slabs, eps=eps, normed_TH=normed_TH)

    def takes_states(self, out_TGL: torch.Tensor) -> bool:
        """Whether `merge_states` takes outputs like these."""
        return takes_states(self.slabs.layout, *out_TGL.shape)

    def merge_states(
        self,
        out_TGL: torch.Tensor,
        lse_TG: torch.Tensor,
        *,
        first_owner_B: torch.Tensor,
        out_TAL: torch.Tensor,
        lse_TA: torch.Tensor,
    ) -> None:
        """Send heads to the ranks that keep them and merge this rank's: `peer_merge`, which has the arguments."""
        self._check("all_to_all")
        self._wrapped.note("all_to_all", (out_TAL.nbytes + lse_TA.nbytes) * (self.size - 1))
        with as_current(out_TGL.device):
            peer_merge(out_TGL, lse_TG, self.slabs, first_owner_B=first_owner_B, out_TAL=out_TAL, lse_TA=lse_TA)

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> torch.Tensor:
        """Give every rank the tensor of rank `source`; what the others hand in may be written to."""
        return self._wrapped.broadcast(tensor, source=source)

    def abort(self) -> None:
        """Lead this rank out of what it waits for, for good; any thread may call. Waits for the process group's end."""
        self.slabs.give_up()
        self._wrapped.abort()

    def close(self) -> None:
        """Let go of the group and, once this rank's kernels have ended, of its memory. Graphs that hold any go before.

        After `abort` the memory stays as it is until this process ends: a rank that was lost may still write.
        """
        if not self.slabs.is_given_up:
            self._memory.close()
            self.slabs.give_up()
        self._wrapped.close()

    def _check(self, kind: str) -> None:
        """Raise a CollectiveError where the group was closed or given up."""
        if self.slabs.is_given_up:
            raise CollectiveError(f"{kind} over the {self.name} ranks broke off: the group was left")


def over_peer_memory(
    wrapped: ProcessCommunicator, *, store: Store, timeout: timedelta, device: torch.device
) -> ProcessCommunicator | PeerCommunicator:
    """Give the group over its GPUs' memory where all its ranks can, and as it is where one cannot, which is said once.

    Waits for the other ranks.

    Args:
        wrapped: The group.
        store: For it alone.
        timeout: How long to wait for the others.
        device: GPU of this rank.

    Raises:
        RuntimeError: A rank did not come.
    """

    def open_device() -> PeerDevice:
        with as_current(device):
            load_peer_exchange(layout)
        return CudaPeerDevice(device)

    try:
        if wrapped.size > MAX_RANKS:
            raise PeerMemoryError(f"at most {MAX_RANKS} ranks do, and there are {wrapped.size}")
        layout = SlabLayout(wrapped.size)
        memory = PeerMemory(
            layout.num_bytes, rank=wrapped.rank, size=wrapped.size,
            store=store, timeout=timeout, open_device=open_device,
        )  # fmt: skip
    except PeerMemoryError as error:
        if wrapped.rank == 0:
            print(
                f"specdec: the {wrapped.name} ranks exchange all by NCCL, not through their GPUs' memory: {error}",
                file=sys.stderr,
            )
        return wrapped
    return PeerCommunicator(wrapped, memory, device=device)
