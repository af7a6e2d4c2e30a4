"""What ranks exchange: the few collectives the model and the engine use, and a record of each.

    all_gather(x)      every rank's x, in rank order
    all_to_all(x_N)    row r goes to rank r; row r of the result came from rank r
    broadcast(x)       one rank's x
    ordered_sum(x)     the sum over ranks, added in rank order

A sum is a gather and an addition in rank order: the ring and tree sums of communication libraries add in an order that
depends on the size of the message, so a row among six would differ from the same row alone.

N = ranks of the group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from specdec.dcp.merge_clock import MergeClock
from specdec.kernels.errors import CollectiveError
from specdec.kernels.sum_in_order import sum_in_order


class Collective(NamedTuple):
    """One collective as a rank saw it.

    Attributes:
        group: Name of the group, such as "tp" or "dcp".
        kind: "all_gather", "all_to_all" or "broadcast".
        num_bytes: Bytes this rank sent to other ranks; of a broadcast the bytes that each rank had from the one.
    """

    group: str
    kind: str
    num_bytes: int


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


@dataclass(slots=True)
class CollectiveRecord:
    """The collectives a rank took part in, in order, while `is_recording`; for proofs, not for the hot path."""

    is_recording: bool = False
    collectives: list[Collective] = field(default_factory=list)

    def take(self) -> list[Collective]:
        """Return what was recorded and start over."""
        taken, self.collectives = self.collectives, []
        return taken


class Communicator(Protocol):
    """One group of ranks, seen from one of them.

    Every rank of the group calls the same methods in the same order with tensors of the same shape and dtype; results
    are the same bits on every rank.

    Attributes:
        name: What the group is, such as "tp".
        size: N.
        rank: This rank's place, 0..N - 1.
        record: What was exchanged.
    """

    name: str
    size: int
    rank: int
    record: CollectiveRecord

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack every rank's tensor in rank order: [N, *shape]."""

    def all_to_all(self, tensor_N: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; row r of the result, of the same shape, came from rank r."""

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> torch.Tensor:
        """Give every rank the tensor of rank `source`; what the others hand in may be written to."""


def ordered_sum(tensor: torch.Tensor, communicator: Communicator, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Sum a tensor over the ranks, in rank order and in its own dtype; the tensor itself where there is one rank.

    Args:
        tensor: This rank's.
        communicator: The ranks.
        out: Takes the sum where there are several, and may be the tensor; None makes one.
    """
    if communicator.size == 1:
        return tensor
    *others, last = communicator.all_gather(tensor)
    return torch.add(sum_in_order(others), last, out=out)


class SingleRank:
    """The group of one rank: nothing travels and nothing is recorded."""

    size = 1
    rank = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.record = CollectiveRecord()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the tensor its axis of ranks."""
        return tensor[None]

    def all_to_all(self, tensor_N: torch.Tensor) -> torch.Tensor:
        """Give the only row back."""
        return tensor_N

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> torch.Tensor:
        """Give the tensor back; `source` is 0."""
        return tensor


class ProcessCommunicator:
    """A group of `torch.distributed`: gloo on the CPU, NCCL on GPUs.

    Args:
        name: What the group is.
        group: The process group; this process belongs to it.
        record: Shared by the groups of a rank, so that their order is kept.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, record: CollectiveRecord) -> None:
        self.name = name
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.record = record

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack every rank's tensor in rank order: [N, *shape]."""
        tensor = tensor.contiguous()
        self.note("all_gather", tensor.nbytes * (self.size - 1))
        gathered = tensor.new_empty((self.size * tensor.numel(),))
        with _naming(self.name, "all_gather"):
            _all_gather(gathered, tensor.view(-1), group=self.group)
        return gathered.view(self.size, *tensor.shape)

    def all_to_all(self, tensor_N: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; row r of the result, of the same shape, came from rank r."""
        tensor_N = tensor_N.contiguous()
        self.note("all_to_all", tensor_N.nbytes // self.size * (self.size - 1))
        received_N = torch.empty_like(tensor_N)
        with _naming(self.name, "all_to_all"):
            dist.all_to_all_single(received_N, tensor_N, group=self.group)
        return received_N

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> torch.Tensor:
        """Give every rank the tensor of rank `source`; what the others hand in may be written to."""
        tensor = tensor.contiguous()
        self.note("broadcast", tensor.nbytes)
        with _naming(self.name, "broadcast"):
            dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def abort(self) -> None:
        """Lead this rank out of what it waits for, for good; any thread may call. Waits until the group has ended."""
        self.group.abort()

    def close(self) -> None:
        """Let go of the group, whose threads end with its last reference; no collective is possible any more."""
        del self.group

    def note(self, kind: str, num_bytes: int) -> None:
        """Record a collective of the group, while collectives are recorded."""
        if self.record.is_recording:
            self.record.collectives.append(Collective(self.name, kind, num_bytes))


@contextmanager
def _naming(group: str, kind: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # a peer hung up, or did not come in time
        raise CollectiveError(f"{kind} over the {group} ranks broke off: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """The groups a rank belongs to. The ranks of `dcp` are ranks of `tp`: dcp rank = tp rank % dcp size.

    Attributes:
        tp: Tensor parallelism: heads, MLP widths or experts, vocabulary rows.
        dcp: Decode context parallelism: pages of the target pool.
        cp: Context parallelism of a layer split: rows of a pass, and layers of the pools. One of `tp` and `cp` has one
            rank.
        merge_clock: Times what this rank merges with those of `dcp`.
    """

    tp: Communicator
    dcp: Communicator
    cp: Communicator = field(default_factory=lambda: SingleRank("cp"))
    merge_clock: MergeClock = field(default_factory=MergeClock)

    @property
    def all_ranks(self) -> Communicator:
        """Every rank of the engine."""
        return self.tp if self.cp.size == 1 else self.cp

    @property
    def record(self) -> CollectiveRecord:
        """The collectives of all groups, in order."""
        return self.all_ranks.record


def single_rank_groups() -> ParallelGroups:
    """Give the groups of a model that runs on one rank."""
    return ParallelGroups(tp=SingleRank("tp"), dcp=SingleRank("dcp"))
