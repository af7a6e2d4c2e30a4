"""Ranks as threads of this process: many groups and faults in a test, without spawning processes.

The collectives are those of `Communicator`; the same code runs over processes in the tests that spawn them.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from specdec.dcp.communicator import Collective, CollectiveRecord, Communicator, ParallelGroups, SingleRank
from specdec.errors import CollectiveError

T = TypeVar("T")
_TIMEOUT_S = 120  # a rank that does not come is a bug of the code under test; far above any wait of a correct run


class _Board:
    """Where the threads of one group leave their tensors for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.posted: list[tuple[str, torch.Tensor] | None] = [None] * size

    def exchange(self, rank: int, kind: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.posted[rank] = kind, tensor
        self._meet(kind)
        posted = [entry for entry in self.posted if entry is not None]
        kinds = {(kind, tensor.shape, tensor.dtype) for kind, tensor in posted}
        self._meet(kind)
        if len(kinds) != 1:
            raise AssertionError(f"ranks met in different collectives: {sorted(map(str, kinds))}")
        return [tensor for _, tensor in posted]

    def _meet(self, kind: str) -> None:
        try:
            self.barrier.wait(_TIMEOUT_S)
        except threading.BrokenBarrierError as error:
            raise CollectiveError(f"{kind} broke off: a rank left, or did not come") from error


class ThreadCommunicator:
    """One group of threads, seen from one of them."""

    def __init__(self, name: str, board: _Board, *, size: int, rank: int, record: CollectiveRecord) -> None:
        self.name = name
        self.size = size
        self.rank = rank
        self.record = record
        self._board = board

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note("all_gather", tensor.nbytes * (self.size - 1))
        return torch.stack(self._board.exchange(self.rank, "all_gather", tensor.clone()))

    def all_to_all(self, tensor_N: torch.Tensor) -> torch.Tensor:
        if len(tensor_N) != self.size:
            raise AssertionError(f"all_to_all over {self.size} ranks was given {len(tensor_N)} rows")
        self._note("all_to_all", tensor_N.nbytes // self.size * (self.size - 1))
        posted = self._board.exchange(self.rank, "all_to_all", tensor_N.clone())
        return torch.stack([tensor[self.rank] for tensor in posted])

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> torch.Tensor:
        self._note("broadcast", tensor.nbytes)
        return self._board.exchange(self.rank, "broadcast", tensor.clone())[source].clone()

    def _note(self, kind: str, num_bytes: int) -> None:
        if self.record.is_recording:
            self.record.collectives.append(Collective(self.name, kind, num_bytes))


class ThreadGroups:
    """The groups of all ranks of one engine or function.

    Attributes:
        ranks: The groups that each tensor-parallel rank sees.
    """

    def __init__(self, *, tp_size: int, dcp_size: int, cp_size: int = 1) -> None:
        self._boards = [_Board(tp_size * cp_size), *(_Board(dcp_size) for _ in range(tp_size // dcp_size))]
        if cp_size > 1:
            self.ranks = [self._of_layer_split(rank, cp_size) for rank in range(cp_size)]
        else:
            self.ranks = [self._of_rank(rank, tp_size=tp_size, dcp_size=dcp_size) for rank in range(tp_size)]

    def abort(self) -> None:
        """Let every rank leave its collectives, with an error."""
        for board in self._boards:
            board.barrier.abort()

    def _of_rank(self, tp_rank: int, *, tp_size: int, dcp_size: int) -> ParallelGroups:
        record = CollectiveRecord()
        dcp: Communicator = SingleRank("dcp")
        if dcp_size > 1:
            board = self._boards[1 + tp_rank // dcp_size]
            dcp = ThreadCommunicator("dcp", board, size=dcp_size, rank=tp_rank % dcp_size, record=record)
        tp = ThreadCommunicator("tp", self._boards[0], size=tp_size, rank=tp_rank, record=record)
        return ParallelGroups(tp=tp, dcp=dcp)

    def _of_layer_split(self, rank: int, cp_size: int) -> ParallelGroups:
        cp = ThreadCommunicator("cp", self._boards[0], size=cp_size, rank=rank, record=CollectiveRecord())
        return ParallelGroups(tp=SingleRank("tp"), dcp=SingleRank("dcp"), cp=cp)

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call `function` with each rank in a thread of its own; returns what they returned, by rank.

        The first exception of any rank is raised; the other ranks then leave their collectives with an error.
        """
        results: dict[int, T] = {}
        failures: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                with torch.inference_mode():
                    results[rank] = function(rank)
            except BaseException as error:
                failures.append(error)
                self.abort()

        threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return [results[rank] for rank in range(len(self.ranks))]


def run_ranks(function: Callable[[ParallelGroups], T], *, tp_size: int, dcp_size: int) -> list[T]:
    """Call `function` once a tensor-parallel rank, each in its own thread; returns what they returned, by rank."""
    groups = ThreadGroups(tp_size=tp_size, dcp_size=dcp_size)
    return groups.run(lambda rank: function(groups.ranks[rank]))
