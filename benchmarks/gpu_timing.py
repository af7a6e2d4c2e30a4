"""Times kernels as an engine runs them: in a CUDA graph, on inputs that the last call left out of the cache."""

import statistics
from collections.abc import Callable, Sequence

import torch

CACHE_BYTES = 60 << 20  # of the H200's second level
_REPLAYS = 20


def graph_us(calls: Sequence[Callable[[], object]], *, replays: int = _REPLAYS) -> float:
    """Microseconds of a call: the median over replays of one graph that holds all calls, divided by their number.

    Args:
        calls: The same call on several sets of inputs that together pass the cache; their outputs are apart, too.
        replays: How often the graph runs.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return replay_us(graph.replay, replays=replays) / len(calls)


def replay_us(replay: Callable[[], object], *, replays: int = _REPLAYS) -> float:
    """Microseconds that the GPU takes for a replay: the median; all have ended then."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def num_sets(bytes_of_a_set: int, *, least: int = 2, most: int = 64) -> int:
    """Sets of inputs whose use in turn leaves none in the cache: twice its size in all."""
    return min(most, max(least, -(-2 * CACHE_BYTES // max(bytes_of_a_set, 1))))


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference by the norm of what was expected, in float64; nan where any value is."""
    expected = expected.double()
    return float((out.double() - expected).norm() / expected.norm())
