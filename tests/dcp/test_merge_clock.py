"""What a rank's clock counts: over thread ranks, and with events that end when the test says so."""

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest
import torch

from specdec.dcp import merge_clock
from specdec.dcp.communicator import ParallelGroups
from specdec.dcp.exchange import ExchangeStrategy, exchange_states
from specdec.dcp.merge_clock import MergeClock, MergeTime
from specdec.kernels.lse_merge import AttentionState
from tests.support.thread_ranks import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class FakeEvent:
    """An event a millisecond behind the one recorded before it."""

    number = count()
    has_passed = False
    is_capturing = False

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = -1

    def record(self, stream: object) -> None:
        assert stream == "stream of cuda"
        self.at_ms = next(FakeEvent.number)

    def query(self) -> bool:
        assert self.at_ms >= 0
        return FakeEvent.has_passed

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.query()
        assert end.query()
        return end.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeEvent]]:
    """A GPU that has nothing but events; they pass when the test says so."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: FakeEvent.is_capturing)
    yield FakeEvent
    FakeEvent.has_passed = FakeEvent.is_capturing = False


def test_waiting_for_a_late_rank_counts() -> None:
    late_s = 0.02
    is_waiting = threading.Event(), threading.Event()

    def merge(groups: ParallelGroups) -> MergeTime:
        state = AttentionState(torch.zeros(3, 4, 8), torch.zeros(3, 4))
        first_owner_T = torch.zeros(3, dtype=torch.int64)
        for merge_is_waited_for in is_waiting:
            if groups.dcp.rank == 1:
                merge_is_waited_for.wait()
                time.sleep(late_s)
            with groups.merge_clock.timing(CPU):
                merge_is_waited_for.set()
                exchange_states(state, groups.dcp, ExchangeStrategy.PACKED, first_owner_T=first_owner_T)
        return groups.merge_clock.read()

    early, late = run_ranks(merge, tp_size=2, dcp_size=2)
    assert (early.num_merges, late.num_merges) == (2, 2)
    assert early.seconds >= 2 * late_s
    assert late.seconds > 0


def test_a_merge_that_fails_does_not_count() -> None:
    clock = MergeClock()
    with pytest.raises(RuntimeError), clock.timing(CPU):
        raise RuntimeError
    assert clock.read() == MergeTime(0, 0.0)


def test_a_gpu_is_never_waited_for(gpu: type[FakeEvent]) -> None:
    clock = MergeClock()
    for _ in range(3):
        with clock.timing(CUDA):
            pass
    assert clock.read() == MergeTime(0, 0.0)
    gpu.has_passed = True
    assert clock.read() == MergeTime(3, pytest.approx(0.003))
    assert clock.read() == MergeTime(3, pytest.approx(0.003))


def test_events_that_nobody_reads_are_read_once_they_are_many(
    gpu: type[FakeEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_clock, "_MOST_PENDING", 4)
    clock = MergeClock()
    for _ in range(6):  # two find no room
        with clock.timing(CUDA):
            pass
    assert len(clock._pending) == 4
    gpu.has_passed = True
    with clock.timing(CUDA):
        pass
    assert len(clock._pending) == 1
    assert clock.read() == MergeTime(5, pytest.approx(0.005))


def test_what_a_graph_captures_is_not_timed(gpu: type[FakeEvent]) -> None:
    clock = MergeClock()
    gpu.has_passed = gpu.is_capturing = True
    with clock.timing(CUDA):
        pass
    assert clock.read() == MergeTime(0, 0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU")
def test_a_gpu_is_timed_on_its_own_stream() -> None:
    clock = MergeClock()
    device = torch.device("cuda", torch.cuda.device_count() - 1)  # also where it is not the current one
    x = torch.zeros(1, device=device).add_(1)  # once before: a kernel's first launch waits for the GPU
    with clock.timing(device), torch.cuda.device(device):
        torch.cuda._sleep(1_000_000_000)  # cycles: some 0.5 s
        x.add_(1)
    assert clock.read() == MergeTime(0, 0.0)  # it was not waited for
    torch.cuda.synchronize(device)
    num_merges, seconds = clock.read()
    assert num_merges == 1
    assert seconds > 0.1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph), clock.timing(device):
        x.add_(1)
    graph.replay()
    torch.cuda.synchronize(device)
    assert clock.read() == MergeTime(num_merges, seconds)
