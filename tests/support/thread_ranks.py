"""Ranks as threads of this process: many groups and faults in a test, without spawning processes.

The collectives are those of `Communicator`; the same code runs over processes in the tests that spawn them.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from specdec.dcp.communicator import Collective, CollectiveRecord, ParallelGroups

T = TypeVar("T")
_TIMEOUT_S = 120  # a rank that does not come is a bug of the code under test; far above any wait of a correct run


class _Board:
    """Where the threads of one group leave their tensors for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.posted: list[tuple[str, torch.Tensor] | None] = [None] * size

    def exchange(self, rank: int, kind: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.posted[rank] = kind, tensor
        self.barrier.wait(_TIMEOUT_S)
        posted = [entry for entry in self.posted if entry is not None]
        kinds = {(kind, tensor.shape, tensor.dtype) for kind, tensor in posted}
        self.barrier.wait(_TIMEOUT_S)
        if len(kinds) != 1:
            raise AssertionError(f"ranks met in different collectives: {sorted(map(str, kinds))}")
        return [tensor for _, tensor in posted]


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

    def _note(self, kind: str, num_bytes: int) -> None:
        if self.record.is_recording:
            self.record.collectives.append(Collective(self.name, kind, num_bytes))


def run_ranks(function: Callable[[ParallelGroups], T], *, tp_size: int, dcp_size: int) -> list[T]:
    """Call `function` once a tensor-parallel rank, each in its own thread; returns what they returned, by rank.

    The first exception of any rank is raised; the other ranks then leave their collectives with a broken barrier.
    """
    tp_board = _Board(tp_size)
    dcp_boards = [_Board(dcp_size) for _ in range(tp_size // dcp_size)]
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(tp_rank: int) -> None:
        record = CollectiveRecord()
        dcp_board = dcp_boards[tp_rank // dcp_size]
        groups = ParallelGroups(
            tp=ThreadCommunicator("tp", tp_board, size=tp_size, rank=tp_rank, record=record),
            dcp=ThreadCommunicator("dcp", dcp_board, size=dcp_size, rank=tp_rank % dcp_size, record=record),
        )
        try:
            with torch.inference_mode():
                results[tp_rank] = function(groups)
        except BaseException as error:
            failures.append(error)
            for board in (tp_board, *dcp_boards):
                board.barrier.abort()

    threads = [threading.Thread(target=run, args=(tp_rank,), name=f"rank {tp_rank}") for tp_rank in range(tp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[tp_rank] for tp_rank in range(tp_size)]
