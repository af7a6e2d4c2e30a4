"""How long a rank takes to merge partial attention with the others of its dcp group, waiting for them included.

A CPU's collectives return when they are done. Those of a GPU are only queued then: pairs of timing events stand around
them on its stream, and are read once they have passed, so that nothing ever waits for the clock.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

_MOST_PENDING = 4096  # merges timed on a GPU and not read yet: several passes of the largest model


class _EventPair(NamedTuple):
    """Events around one merge; used again once they have been read, which takes half the time of new ones."""

    began: torch.cuda.Event
    ended: torch.cuda.Event


class MergeTime(NamedTuple):
    """Merges that have been timed, and the seconds that all of them took."""

    num_merges: int
    seconds: float


class MergeClock:
    """Times the merges of one rank; where it is the only one of its group there are none to time."""

    def __init__(self) -> None:
        self._time = MergeTime(0, 0.0)
        self._pending: deque[_EventPair] = deque()
        self._spare: list[_EventPair] = []

    @contextmanager
    def timing(self, device: torch.device) -> Iterator[None]:
        """Time one merge on a device: what is done inside of the block.

        What a CUDA graph captures is not timed, and on a GPU that has fallen far behind nothing is until it catches up.
        """
        if device.type != "cuda":
            began_s = time.perf_counter()
            yield
            self._count(time.perf_counter() - began_s)
            return
        pair = None if torch.cuda.is_current_stream_capturing() else self._free_pair()
        if pair is None:
            yield
            return
        stream = torch.cuda.current_stream(device)
        pair.began.record(stream)
        yield
        pair.ended.record(stream)
        self._pending.append(pair)

    def read(self) -> MergeTime:
        """Give what is known by now; does not wait for a GPU."""
        while self._pending and self._pending[0].ended.query():
            pair = self._pending.popleft()
            self._count(pair.began.elapsed_time(pair.ended) / 1000)
            self._spare.append(pair)
        return self._time

    def _free_pair(self) -> _EventPair | None:
        """Give events that are not pending; None where too many are."""
        if not self._spare:
            self.read()
        if self._spare:
            return self._spare.pop()
        if len(self._pending) == _MOST_PENDING:
            return None
        return _EventPair(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def _count(self, seconds: float) -> None:
        self._time = MergeTime(self._time.num_merges + 1, self._time.seconds + seconds)
