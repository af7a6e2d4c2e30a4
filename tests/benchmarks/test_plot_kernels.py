"""Kept results become figures, and measured rounds the speed-up of speculation."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plot_kernels.py"
MACHINE = {"gpu": "GPU <of a test>", "torch": "2.0", "triton": "3.0", "nvrtc": "13.0", "driver": "1", "python": "3"}
SVG = "{http://www.w3.org/2000/svg}"


def result(case: str, shape: str, ours: float, floor: float = 1.0, **peers: float) -> dict[str, Any]:
    return {
        "case": case, "shape": shape, "ours_us": ours, "floor_us": floor, "error": 0.0, "peers_us": peers, "note": "",
    }  # fmt: skip


def plot(folder: Path, *files: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    paths = [folder / f"{number}.json" for number in range(len(files))]
    for path, results in zip(paths, files, strict=True):
        path.write_text(json.dumps({"machine": MACHINE, "results": results}))
    command = [sys.executable, str(SCRIPT), "--to", str(folder), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def texts(figure: Path) -> list[str]:
    return [str(element.text) for element in ElementTree.parse(figure).getroot().iter(f"{SVG}text") if element.text]


def test_each_shape_has_a_bar_for_ours_the_best_peer_and_the_floor(tmp_path: Path) -> None:
    outdated = [result("merge", "T=6 & N=8", 99.0)]
    measured = [
        result("merge", "T=6 & N=8", 4.0, 2.0, torch=9.0, other=8.0),
        result("experts", "T=1", 2.0, 0.5),
        result("experts", "T=768", 500.0, 250.0),
    ]
    ran = plot(tmp_path, outdated, measured)
    assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "tpot_speedup.svg").exists()
    figure = ElementTree.parse(tmp_path / "kernels.svg").getroot()
    widths: dict[str, list[float]] = {}
    for box in figure.iter(f"{SVG}rect"):
        if "rx" in box.attrib:
            widths.setdefault(box.attrib["fill"], []).append(float(box.attrib["width"]))
    ours, peer, floor = (widths[colour][1:] for colour in ("#219ebc", "#ffb703", "#d0d0d0"))  # behind the legend's
    assert len(ours) == len(floor) == 3
    assert ours[0] == floor[0] * 2 == peer[0] / 2  # 4, 2 and 8
    assert ours[1] < ours[2] < 4 * ours[1]  # of the logarithm
    words = texts(tmp_path / "kernels.svg")
    assert {"merge", "experts, logarithmic", "4 (0.50 of floor)", "8 other", "T=6 & N=8"} <= set(words)
    assert any("GPU <of a test>" in word for word in words)


def test_speedup_is_round_times_accept_length(tmp_path: Path) -> None:
    rounds = [result("round", f"B=1 K={length} context=32K", us) for length, us in ((0, 5000), (1, 6000), (5, 8000))]
    rounds += [result("round", f"B=32 K={length} context=128K", us) for length, us in ((0, 10000), (1, 14000))]
    rounds += [result("round", "B=2 K=0 context=32K", 4000), result("round", "B=2 K=8 context=32K", 40000)]
    ran = plot(tmp_path, rounds)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "| B | context | ms a token, K = 0 | K = 1 | K = 5 | K = 8 | best K | ms a token there |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1 | 32K | 5.00 | 1.53 | 2.26 |  | 5 | 2.22 |",  # 5 / 6 * 1.84, 5 / 8 * 3.61; 8 / 3.61
        "| 2 | 32K | 4.00 |  |  | 0.41 | 0 | 4.00 |",
        "| 32 | 128K | 10.00 | 1.31 |  |  | 1 | 7.61 |",
    ]
    assert not (tmp_path / "kernels.svg").exists()
    words = texts(tmp_path / "tpot_speedup.svg")
    assert {"B = 1, context 32K", "B = 32, context 128K", "2.26", "1.53", "1.00"} <= set(words)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([result("round", "B=1 K=5 context=32K", 1.0)], "K=0 must be measured, got K=[5]"),
        ([result("round", "B=1 K=9 context=32K", 1.0)], "K of 0..8, got 'B=1 K=9 context=32K'"),
        ([result("round", "B=1 q=6", 1.0)], "got 'B=1 q=6'"),
    ],
)
def test_rounds_that_cannot_be_compared_are_refused(
    results: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    ran = plot(tmp_path, results)
    assert ran.returncode != 0
    assert message in ran.stderr


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text("[]")
    command = [sys.executable, str(SCRIPT), "--to", str(tmp_path), str(tmp_path / "0.json")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "0.json must hold machine and results" in ran.stderr
