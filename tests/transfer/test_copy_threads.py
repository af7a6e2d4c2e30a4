"""Copies by several threads, against one range after the other."""

import os
import threading

import numpy as np
import pytest

from specdec.transfer import copy_threads
from specdec.transfer.copy_threads import CopyThreads


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda cores: f"{cores}-cores")
def threads(request, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(request.param)))
    monkeypatch.setattr(copy_threads, "_SHARE_BYTES", 64 << 10)
    opened = CopyThreads()
    yield opened
    opened.close()


def ranges(rng, sizes):
    """Random places of ranges that do not overlap, in memory with gaps."""
    places = []
    for _ in range(2):
        gaps = rng.integers(0, 50, len(sizes))
        order = rng.permutation(len(sizes))
        starts = np.empty(len(sizes), np.int64)
        starts[order] = np.cumsum(np.append(0, sizes[order])[:-1] + gaps[order])
        places.append(starts)
    return places


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [1],
        [32 << 10],
        [(32 << 10) - 1],
        [1_000_003],
        [1 << 20] * 7,
        [656] * 1000,
        [656] * 100 + [132] * 100 + [1],
        [40_000, 656, 300_001, 656, 33_333, 5, 1 << 20],
        [200_000] + [32 << 10] * 40,
    ],
    ids=lambda sizes: f"{len(sizes)}-of-{sum(sizes)}",
)
def test_the_same_bytes_arrive_as_one_range_after_the_other(threads, sizes):
    rng = np.random.default_rng(len(sizes))
    length_X = np.array(sizes, np.int64)
    to_X, from_X = ranges(rng, length_X)
    source = rng.integers(0, 256, 4 << 20 << 1, np.uint8)
    destination = rng.integers(0, 256, 4 << 20 << 1, np.uint8)
    expected = destination.copy()
    for to, start, size in zip(to_X, from_X, sizes, strict=True):
        expected[to : to + size] = source[start : start + size]

    threads.copy(destination, source, to_X, from_X, length_X)

    assert np.array_equal(destination, expected)


def test_every_thread_gets_a_share(threads, monkeypatch):
    copied = {}
    copy_each = copy_threads._copy_each
    everybody = threading.Barrier(threads._num_threads)

    def record(*share):
        everybody.wait(30)  # nobody may take two shares
        copied[threading.get_ident()] = int(share[-1].sum())
        copy_each(*share)

    monkeypatch.setattr(copy_threads, "_copy_each", record)
    memory = np.zeros(4 << 20, np.uint8)
    threads.copy(memory, memory, np.array([0]), np.array([2 << 20]), np.array([1 << 20]))

    assert len(copied) == threads._num_threads
    assert sum(copied.values()) == 1 << 20
    assert max(copied.values()) - min(copied.values()) <= 1


def test_nothing_is_copied_any_more_when_an_error_is_raised(threads):
    memory = np.zeros(1 << 20, np.uint8)
    with pytest.raises(ValueError, match="broadcast"):  # the range does not fit the destination
        threads.copy(memory[: 300 << 10], memory, np.array([0]), np.array([0]), np.array([512 << 10]))
    assert threads._others._work_queue.empty()
