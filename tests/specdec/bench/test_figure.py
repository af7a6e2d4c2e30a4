"""The picture of a run is written and holds what was measured."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from specdec.bench.figure import check_figure_path, draw_figure
from specdec.bench.measure import Objectives
from specdec.bench.request_record import Outcome, RequestRecord
from specdec.errors import ConfigError
from tests.specdec.bench.test_measure import record

SVG = "{http://www.w3.org/2000/svg}"


def records() -> list[RequestRecord]:
    done = [record(100.5 + k, 101 + k, 101.5 + k, sent_s=100.0 + k, tokens=(1, 3, 2)) for k in range(7)]
    return [*done, record(sent_s=103.0, outcome=Outcome.FAILED), record(104.0, 105.0, sent_s=103.5)]


def draw(path: Path, drawn: list[RequestRecord], **fields: Any) -> None:
    objectives = fields.pop("objectives", Objectives(ttft_ms=400.0))
    draw_figure(path, drawn, begin_s=100.0, objectives=objectives, title="a $run_1")


def test_an_svg_has_a_point_for_each_completed_request_and_a_cross_for_each_failed(tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    draw(path, records())
    root = ET.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    groups = [group for group in root.iter(f"{SVG}g") if group.get("id", "").startswith("PathCollection")]
    points = [len(group.findall(f".//{SVG}use")) for group in groups]
    assert points == [8, 1, 1, 8, 1, 1]  # of TTFT and of TPOT: points, crosses, and the cross of the legend
    comments = path.read_text()
    for text in ("TTFT (ms)", "TPOT (ms)", "requests under way", "output tokens/s", "SLO 400 ms", "a $run_1"):
        assert f"<!-- {text} -->" in comments


def test_a_png_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.PNG"
    draw(path, records())
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")


@pytest.mark.parametrize("drawn", [[], [record(sent_s=100.0, outcome=Outcome.FAILED)], [record(100.0, sent_s=100.0)]])
def test_a_run_with_next_to_nothing_is_drawn_too(tmp_path: Path, drawn: list[RequestRecord]) -> None:
    path = tmp_path / "run.svg"
    draw(path, drawn, objectives=Objectives())
    assert ET.parse(path).getroot().tag == f"{SVG}svg"


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--figure must end in .png or .svg, got run.pdf"):
        check_figure_path(Path("run.pdf"))
    with pytest.raises(ConfigError, match=r"run.svg: cannot be written: No such file"):
        draw(tmp_path / "nowhere" / "run.svg", records())
