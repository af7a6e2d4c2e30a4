"""Figures of what `bench_kernels.py` kept: every kernel beside its best peer and its floor, and what speculation gains.

Writes kernels.svg and, where rounds were measured, tpot_speedup.svg, whose numbers are printed as a Markdown table.
Where several files have a shape, the last one counts.

    python benchmarks/plot_kernels.py [--to docs/figures] [benchmarks/results/*.json]
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "docs")]
from dcp_figures import Figure  # noqa: E402

from benchmarks.draft_speedup import CASE as ROUND  # noqa: E402
from benchmarks.draft_speedup import draw_speedups, round_times, speedup_table  # noqa: E402

Result = Mapping[str, Any]

_COLOURS = {"ours": "#219ebc", "peer": "#ffb703", "floor": "#d0d0d0"}
_COLUMNS, _WIDTH, _LONGEST, _BAR = 2, 440, 230, 11  # of panels; of a panel, of its longest bar, of a bar's height
_SHAPE, _PANEL, _HEAD = 18, 44, 70  # heights of a shape's name, around a panel's shapes, of the head
_MOST_LINEAR = 30.0  # times between the shortest and the longest bar


def read_results(files: Iterable[Path]) -> tuple[list[str], list[Result]]:
    """Give the machines, one a line, and the results, of each case and shape the last.

    Raises:
        ValueError: A file holds something else.
    """
    machines: dict[str, None] = {}
    results: dict[tuple[str, str], Result] = {}
    for file in files:
        content = json.loads(file.read_text())
        if not isinstance(content, dict) or content.keys() != {"machine", "results"}:
            raise ValueError(f"{file} must hold machine and results, as bench_kernels.py --json writes them")
        machine = content["machine"]
        machines[
            f"{machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}, NVRTC {machine['nvrtc']}"
        ] = None
        results |= {(result["case"], result["shape"]): result for result in content["results"]}
    return list(machines), list(results.values())


def bars(result: Result) -> dict[str, float]:
    """Give the microseconds of a shape's bars by what they are: ours, the best peer's if there is one, the floor."""
    peers = result["peers_us"].values()
    return {"ours": result["ours_us"], **({"peer": min(peers)} if peers else {}), "floor": result["floor_us"]}


def draw_kernels(machines: Sequence[str], results: Iterable[Result]) -> Figure:
    """Draw a panel for each case; bars are of the logarithm where a case has very short and very long ones."""
    cases: dict[str, list[Result]] = {}
    for result in results:
        cases.setdefault(result["case"], []).append(result)
    heights = [_PANEL + sum(_SHAPE + len(bars(result)) * _BAR for result in of_case) for of_case in cases.values()]
    tops: list[tuple[int, int]] = []
    ends = [_HEAD + 14 * len(machines)] * _COLUMNS
    for height in heights:  # into the column that ends first
        column = ends.index(min(ends))
        tops.append((20 + column * _WIDTH, ends[column]))
        ends[column] += height
    figure = Figure(20 + _COLUMNS * _WIDTH, max(ends) + 10)
    figure.label(20, 26, "Kernels: microseconds, medians of graph replays", anchor="start", size=14)
    for place, (name, colour) in enumerate(_COLOURS.items()):
        figure.box(20 + 110 * place, 36, 14, 12, "", colour)
        figure.label(40 + 110 * place, 46, "best peer" if name == "peer" else name, anchor="start")
    for line, machine in enumerate(machines):
        figure.label(20, 66 + 14 * line, machine, anchor="start", size=10)
    for (x, y), (case, of_case) in zip(tops, cases.items(), strict=True):
        _draw_case(figure, x, y, case, of_case)
    return figure


def _draw_case(figure: Figure, x: int, y: int, case: str, results: Sequence[Result]) -> None:
    times = [microseconds for result in results for microseconds in bars(result).values() if microseconds > 0]
    shortest, longest = min(times), max(times)
    is_log = longest > _MOST_LINEAR * shortest
    decades = math.log10(longest / shortest) + 0.5 if is_log else 1.0

    def length(microseconds: float) -> float:
        """Of a bar; half a decade for the shortest of a logarithmic panel."""
        if not is_log or microseconds <= 0:
            return round(_LONGEST * microseconds / longest, 1)
        return round(_LONGEST * (math.log10(microseconds / shortest) + 0.5) / decades, 1)

    figure.label(x, y + 24, f"{case}, logarithmic" if is_log else case, anchor="start", size=13)
    y += 30
    for result in results:
        figure.label(x, y + 13, result["shape"], anchor="start", size=10)
        y += _SHAPE
        for name, microseconds in bars(result).items():
            figure.box(x, y, length(microseconds), _BAR - 1, "", _COLOURS[name])
            figure.label(x + length(microseconds) + 6, y + 9, _in_words(result, name), anchor="start", size=10)
            y += _BAR


def _in_words(result: Result, name: str) -> str:
    """What stands behind a bar: its time, and whose it is or what of the floor."""
    microseconds = bars(result)[name]
    time = f"{microseconds:.3g}" if microseconds < 1000 else f"{microseconds:,.0f}"
    if name == "peer":
        return f"{time} {min(result['peers_us'], key=result['peers_us'].__getitem__)}"
    return f"{time} ({result['floor_us'] / microseconds:.2f} of floor)" if name == "ours" else time


def main() -> None:
    """Read, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: all of benchmarks/results")
    parser.add_argument("--to", type=Path, default=_ROOT / "docs" / "figures", help="folder of the figures")
    arguments = parser.parse_args()
    files = arguments.files or sorted((_ROOT / "benchmarks" / "results").glob("*.json"))
    if not files:
        print("no results: bench_kernels.py --json makes them on a GPU")
        return
    machines, results = read_results(files)
    folder = arguments.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [result for result in results if result["case"] != ROUND]
    if kernels:
        draw_kernels(machines, kernels).write(str(folder / "kernels.svg"))
    times = round_times(results)
    if times:
        draw_speedups(times).write(str(folder / "tpot_speedup.svg"))
        print(speedup_table(times))


if __name__ == "__main__":
    main()
