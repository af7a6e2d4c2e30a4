"""Copies ranges of bytes within the memory of a host, several threads at a time.

One core moves 10 to 15 GB/s, a good deal less than the memory behind it takes.

X = descriptors.
"""

import os
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt

from specdec.transfer.placement import I64

_MOST_THREADS = 4
_SHARE_BYTES = 2 << 20  # a thread is woken for so much: 200 us of copying against 50 of waking
_LONG_BYTES = 32 << 10  # from here on a copy of its own is as fast as any, below its overhead shows
_GATHER_BYTES = 256 << 10  # short copies pass through a buffer that stays in the cache
_U8 = npt.NDArray[np.uint8]


class CopyThreads:
    """Threads that copy for the one that calls; it copies a share itself."""

    def __init__(self) -> None:
        self._num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._others = ThreadPoolExecutor(self._num_threads, thread_name_prefix="specdec-copy")

    def copy(
        self, destination: _U8, source: _U8, destination_offset_X: I64, source_offset_X: I64, length_X: I64
    ) -> None:
        """Copy ranges between two arrays [bytes], without the interpreter's lock wherever it takes long.

        Long ranges are dealt out in shares of equal bytes; short ones of equal length are copied together, through a
        buffer that fits the cache. When this returns, or raises, no thread copies any more.
        """
        is_long_X = length_X >= _LONG_BYTES
        long = destination_offset_X[is_long_X], source_offset_X[is_long_X], length_X[is_long_X]
        shares = _shares(*long, most=self._num_threads)
        copying = [self._others.submit(_copy_each, destination, source, *share) for share in shares[1:]]
        try:
            if shares:
                _copy_each(destination, source, *shares[0])
            if not is_long_X.all():
                short = destination_offset_X[~is_long_X], source_offset_X[~is_long_X], length_X[~is_long_X]
                _copy_short(destination, source, *short)
        finally:
            wait(copying)
        for share in copying:
            share.result()

    def close(self) -> None:
        """End the threads, after what they are copying."""
        self._others.shutdown()


def _shares(destination_offset_X: I64, source_offset_X: I64, length_X: I64, *, most: int) -> list[tuple[I64, I64, I64]]:
    """Cut ranges into at most `most` lists of about equal bytes, through the middle of a range where that is due."""
    end_X = np.cumsum(length_X)
    total = int(end_X[-1]) if len(end_X) else 0
    count = min(most, -(-total // _SHARE_BYTES))
    shares = []
    for share in range(count):
        low, high = total * share // count, total * (share + 1) // count
        first, last = np.searchsorted(end_X, low, side="right"), np.searchsorted(end_X, high, side="left") + 1
        skipped_X = np.maximum(low - (end_X - length_X)[first:last], 0)
        cut_X = np.maximum(end_X[first:last] - high, 0)
        shares.append(
            (
                destination_offset_X[first:last] + skipped_X,
                source_offset_X[first:last] + skipped_X,
                length_X[first:last] - skipped_X - cut_X,
            )
        )
    return shares


def _copy_each(destination: _U8, source: _U8, destination_offset_X: I64, source_offset_X: I64, length_X: I64) -> None:
    """Copy ranges one by one."""
    for to, start, size in zip(destination_offset_X.tolist(), source_offset_X.tolist(), length_X.tolist(), strict=True):
        destination[to : to + size] = source[start : start + size]


def _copy_short(destination: _U8, source: _U8, destination_offset_X: I64, source_offset_X: I64, length_X: I64) -> None:
    """Copy ranges of equal length together."""
    order_X = length_X.argsort(kind="stable")
    lengths, first_of = np.unique(length_X[order_X], return_index=True)
    for length, same_X in zip(lengths.tolist(), np.split(order_X, first_of[1:]), strict=True):
        to_rows, from_rows = _rows(destination, length), _rows(source, length)
        rows_at_once = max(1, _GATHER_BYTES // length)
        for first in range(0, len(same_X), rows_at_once):
            part_X = same_X[first : first + rows_at_once]
            to_rows[destination_offset_X[part_X]] = from_rows[source_offset_X[part_X]]


def _rows(memory: _U8, length: int) -> npt.NDArray[np.void]:
    """View an array so that its item i is the `length` bytes from byte i on."""
    return np.ndarray((len(memory) - length + 1,), np.dtype((np.void, length)), memory, 0, (1,))
