"""How much shorter speculation makes the time per output token: measured rounds, accept lengths of the model.

    time per token(K) = round(K) / accept length(K)          accept length(0) = 1
    speed-up(K)       = time per token(0) / time per token(K)

B = requests, K = drafts of a round. Accept lengths, tokens that a request gains in a round, are GLM-5.2's of
SemiAnalysisAI/InferenceX, golden_al_distribution/glm5.2_mtp.yaml.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dcp_figures import Figure  # of docs/, which plot_kernels.py puts on the path

CASE = "round"
ACCEPT_LENGTHS = (1.0, 1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06)  # by K
_SHAPE = re.compile(r"B=(\d+) K=(\d+) context=(\d+)K")
_BEST, _OTHER = "#219ebc", "#cfe8ef"
_COLUMN, _BAR, _HEIGHT, _HEAD = 240, 20, 110, 62  # of a panel


class Batch(NamedTuple):
    """What rounds of different K are compared for: B requests, each behind so many thousand tokens."""

    num_requests: int
    context: int


def round_times(results: Iterable[Mapping[str, Any]]) -> dict[Batch, dict[int, float]]:
    """Give the microseconds of a round by batch and K.

    Args:
        results: What `bench_kernels.py` keeps; cases other than `round` are left out.

    Raises:
        ValueError: A shape is not "B=.. K=.. context=..K", its K has no accept length, or a batch has no K = 0.
    """
    times: dict[Batch, dict[int, float]] = {}
    for result in results:
        if result["case"] != CASE:
            continue
        shape = _SHAPE.fullmatch(result["shape"])
        if not shape or int(shape[2]) >= len(ACCEPT_LENGTHS):
            most = len(ACCEPT_LENGTHS) - 1
            raise ValueError(
                f'a round must have a shape "B=1 K=5 context=32K", K of 0..{most}, got {result["shape"]!r}'
            )
        num_requests, num_drafts, context = map(int, shape.groups())
        times.setdefault(Batch(num_requests, context), {})[num_drafts] = result["ours_us"]
    for batch, of_batch in times.items():
        if 0 not in of_batch:
            raise ValueError(f"a round of K=0 must be measured, got K={sorted(of_batch)} for {batch}")
    return dict(sorted(times.items()))


def speedups(round_us: Mapping[int, float]) -> dict[int, float]:
    """Give the speed-up of each K from the microseconds of a round of each K, 0 included."""
    return {
        num_drafts: round_us[0] / microseconds * ACCEPT_LENGTHS[num_drafts]
        for num_drafts, microseconds in sorted(round_us.items())
    }


def best_length(of_length: Mapping[int, float]) -> int:
    """Give the K with the largest speed-up, the smallest on a tie."""
    return max(sorted(of_length), key=lambda num_drafts: of_length[num_drafts])


def speedup_table(times: Mapping[Batch, Mapping[int, float]]) -> str:
    """Write the speed-ups as a Markdown table, a row for each batch."""
    lengths = sorted({num_drafts for of_batch in times.values() for num_drafts in of_batch} - {0})
    head = ["B", "context", "ms a token, K = 0", *(f"K = {length}" for length in lengths), "best K", "ms a token there"]
    rows = [head, ["---:"] * len(head)]
    for batch, round_us in times.items():
        of_length = speedups(round_us)
        best = best_length(of_length)
        cells = [f"{of_length[length]:.2f}" if length in of_length else "" for length in lengths]
        rows.append([
            str(batch.num_requests), f"{batch.context}K", f"{round_us[0] / 1e3:.2f}", *cells,
            str(best), f"{round_us[best] / 1e3 / ACCEPT_LENGTHS[best]:.2f}",
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw_speedups(times: Mapping[Batch, Mapping[int, float]]) -> Figure:
    """Draw a panel for each batch: a bar for each K, the best one in another colour."""
    columns = min(3, len(times))
    figure = Figure(max(20 + _COLUMN * columns, 640), _HEAD + (_HEIGHT + 70) * -(-len(times) // columns))
    figure.label(
        20, 24, "Time per output token: speed-up over K = 0, by drafts of a round (K)", anchor="start", size=14
    )
    figure.label(20, 44, "measured rounds, accept lengths of GLM-5.2", anchor="start", size=11)
    most = max(max(speedups(round_us).values()) for round_us in times.values())
    for place, (batch, round_us) in enumerate(times.items()):
        x, floor = 20 + place % columns * _COLUMN, _HEAD + place // columns * (_HEIGHT + 70) + 32 + _HEIGHT
        figure.label(x, floor - _HEIGHT - 18, f"B = {batch.num_requests}, context {batch.context}K", anchor="start")
        of_length = speedups(round_us)
        best = best_length(of_length)
        for column, (length, speedup) in enumerate(of_length.items()):
            left, height = x + column * (_BAR + 4), round(_HEIGHT * speedup / most, 1)
            figure.box(left, floor - height, _BAR, height, "", _BEST if length == best else _OTHER)
            figure.label(left + _BAR / 2, floor - height - 4, f"{speedup:.2f}", size=10)
            figure.label(left + _BAR / 2, floor + 13, str(length), size=10)
    return figure
