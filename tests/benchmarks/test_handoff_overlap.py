"""What a kept run of the hand-off says: how much of it is hidden, and its picture."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.handoff_overlap import summarise

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "handoff_overlap.py"
SVG = "{http://www.w3.org/2000/svg}"


def write(chunk: int, *, stored: float, begun: float, landed: float) -> dict[str, Any]:
    return {
        "chunk": chunk, "layer": 9, "num_bytes": 1_000, "num_descriptors": 2,
        "posted_s": 0.0, "stored_s": stored, "begun_s": begun, "landed_s": landed,
    }  # fmt: skip


def kept() -> dict[str, Any]:
    """Two chunks of a second each; of four writes the last lands 50 ms behind the second."""
    return {
        "machine": {},
        "settings": {"layers": 10, "tokens": 128, "chunk": 64, "transport": "local", "gpus": 2},
        "compute_alone_s": 1.9,
        "host_s": 1.0,
        "send_alone_s": 0.2,
        "block_bytes_per_s": 1e9,
        "chunks": [
            {"begin": 0, "end": 64, "started_s": 0.0, "computed_s": 1.0},
            {"begin": 64, "end": 128, "started_s": 1.0, "computed_s": 2.0},
        ],
        "writes": [
            write(0, stored=0.5, begun=0.52, landed=0.6),
            write(0, stored=1.0, begun=1.01, landed=1.1),
            write(1, stored=1.5, begun=1.5, landed=1.6),
            write(1, stored=1.99, begun=2.0, landed=2.05),
        ],
    }


def test_exposed_is_what_lands_behind_the_last_pass() -> None:
    summary = summarise(kept())
    assert summary["computed_s"] == 2.0
    assert summary["exposed_s"] == pytest.approx(0.05)
    assert summary["hidden"] == 0.75
    assert summary["hidden_time"] == pytest.approx(0.75)
    assert summary["late_s"] == pytest.approx(0.01)
    assert summary["sending_bytes_per_s"] == 20_000


def test_what_lands_within_the_last_pass_is_hidden() -> None:
    result = kept()
    result["writes"].pop()
    summary = summarise(result)
    assert (summary["exposed_s"], summary["hidden"], summary["hidden_time"]) == (0.0, 1.0, 1.0)


def test_a_kept_run_becomes_a_picture_and_a_table(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(kept()))
    command = [sys.executable, str(SCRIPT), "--plot", str(tmp_path / "run.json"), "--to", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "hidden: 75.00% of the bytes" in ran.stdout
    figure = ElementTree.parse(tmp_path / "handoff_overlap.svg").getroot()
    colours = [box.attrib["fill"] for box in figure.iter(f"{SVG}rect")]
    assert colours.count("#ffd166") == 1 + 2 + 1  # the legend's, both chunks, and the last one enlarged
    assert colours.count("#219ebc") == 1 + 4 + 2
    words = [element.text or "" for element in figure.iter(f"{SVG}text")]
    assert any("50.00 ms later" in word for word in words)
    for box in figure.iter(f"{SVG}rect"):
        assert float(box.attrib.get("x", 0)) + float(box.attrib["width"]) <= 860
