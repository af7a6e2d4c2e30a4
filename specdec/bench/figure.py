"""A picture of a run: latencies and load over time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.bench.measure import Objectives
from specdec.bench.request_record import Outcome, RequestRecord
from specdec.errors import ConfigError

FORMATS = (".png", ".svg")
_NUM_BINS = 60
_Points = list[tuple[float, float]]  # seconds since the run began, and a value


def check_figure_path(path: Path) -> None:
    """Refuse a file whose name tells no known format.

    Raises:
        ConfigError: It ends in something else.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--figure must end in {' or '.join(FORMATS)}, got {path}")


def draw_figure(
    path: Path, records: Sequence[RequestRecord], *, begin_s: float, objectives: Objectives, title: str
) -> None:
    """Draw TTFT, TPOT and the load, one above the other, over the time since the run began.

    A request stands where it was sent: a point if it completed, a cross at the top if it failed.

    Args:
        path: File to write, .png or .svg.
        records: Of the requests.
        begin_s: When the run began, on the clock of the records.
        objectives: Drawn as lines.
        title: Above the picture.

    Raises:
        ConfigError: The file cannot be written.
    """
    done = [record for record in records if record.outcome is Outcome.COMPLETED]
    ttfts = [(record.sent_s - begin_s, record.ttft_s * 1000) for record in done if record.ttft_s is not None]
    tpots = [(record.sent_s - begin_s, record.tpot_s * 1000) for record in done if record.tpot_s is not None]
    failed_s = [record.sent_s - begin_s for record in records if record.outcome is Outcome.FAILED]
    figure = Figure(figsize=(9, 8), layout="constrained")
    first, second, third = figure.subplots(3, 1, sharex=True)
    first.set_title(title, loc="left", fontsize="medium", parse_math=False)
    for axes, name, points, objective_ms in (
        (first, "TTFT", ttfts, objectives.ttft_ms),
        (second, "TPOT", tpots, objectives.tpot_ms),
    ):
        _draw_latency(axes, points, failed_s, objective_ms)
        axes.set_ylabel(f"{name} (ms)")
    _draw_load(third, records, begin_s)
    third.set_xlabel("seconds since the run began")
    try:
        figure.savefig(path, format=path.suffix[1:].lower(), dpi=150)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _draw_latency(axes: Axes, points: _Points, failed_s: Sequence[float], objective_ms: float | None) -> None:
    axes.scatter([x for x, _ in points], [y for _, y in points], s=9, alpha=0.6, linewidths=0, color="tab:blue")
    if failed_s:
        heights = np.full(len(failed_s), 0.97)
        top = axes.get_xaxis_transform()
        axes.scatter(failed_s, heights, transform=top, marker="x", color="tab:red", label="failed")
    if objective_ms is not None:
        axes.axhline(objective_ms, color="tab:green", linestyle="--", linewidth=1, label=f"SLO {objective_ms:g} ms")
    if failed_s or objective_ms is not None:
        axes.legend(loc="upper right", fontsize="small")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_load(axes: Axes, records: Sequence[RequestRecord], begin_s: float) -> None:
    """Requests under way as steps, output tokens per second in bins."""
    begins = [(record.sent_s - begin_s, 1) for record in records]
    changes = sorted(begins + [(record.ended_s - begin_s, -1) for record in records])
    times_s = [time_s for time_s, _ in changes]
    axes.step(times_s, np.cumsum([change for _, change in changes]), where="post", color="tab:gray", linewidth=1)
    axes.set_ylabel("requests under way", color="tab:gray")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    tokens: _Points = []
    for record in records:
        tokens += zip((chunk_s - begin_s for chunk_s in record.chunks_s), _tokens_of_chunks(record), strict=True)
    if not tokens or times_s[-1] <= 0:
        return
    edges_s = np.linspace(0, times_s[-1], _NUM_BINS + 1)
    counts, _ = np.histogram([time_s for time_s, _ in tokens], edges_s, weights=[count for _, count in tokens])
    right = axes.twinx()
    right.stairs(counts / (edges_s[1] - edges_s[0]), edges_s, color="tab:orange")
    right.set_ylabel("output tokens/s", color="tab:orange")
    right.set_ylim(bottom=0)


def _tokens_of_chunks(record: RequestRecord) -> Sequence[float]:
    """Tokens of each chunk; evenly shared where only their sum is known."""
    if record.tokens_per_chunk is not None:
        return record.tokens_per_chunk
    num_chunks = len(record.chunks_s)
    return [record.num_output_tokens / num_chunks] * num_chunks if num_chunks else ()
