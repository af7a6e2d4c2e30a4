"""The Grafana dashboard charts what a server exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.serving.metric_names import METRICS, PREFIX, MetricName

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "dashboards/specdec.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
METRIC_BY_SERIES = {PREFIX + metric.name + suffix: metric for metric in METRICS for suffix in SUFFIXES[metric.kind]}
FROM_PROMETHEUS = {"model_name", "instance"}


def expressions() -> Iterator[str]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield target["expr"]


def series(expression: str) -> list[str]:
    return re.findall(rf"{re.escape(PREFIX)}\w+", expression)


def labels(metric: MetricName, name: str) -> set[str]:
    return {*metric.labels, *FROM_PROMETHEUS} | ({"le"} if name.endswith("_bucket") else set())


def test_every_series_is_exported() -> None:
    queries = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
    charted = {name for text in (*expressions(), *queries) for name in series(text)}
    assert charted
    assert charted <= METRIC_BY_SERIES.keys()


def test_every_metric_is_charted() -> None:
    charted = {METRIC_BY_SERIES[name].name for expression in expressions() for name in series(expression)}
    assert {metric.name for metric in METRICS} <= charted, "give the new metric a panel in dashboards/specdec.json"


def test_every_label_is_one_of_the_series() -> None:
    for expression in expressions():
        for name, matchers in re.findall(rf"({re.escape(PREFIX)}\w+)\{{([^}}]*)\}}", expression):
            matched = set(re.findall(r"(\w+)=", matchers))
            assert FROM_PROMETHEUS <= matched <= labels(METRIC_BY_SERIES[name], name), expression
        sums = re.findall(rf"by \(([^)]*)\) \(\w*\(?({re.escape(PREFIX)}\w+)", expression)
        assert len(sums) == expression.count(" by ("), expression
        for grouped, name in sums:
            assert set(grouped.split(", ")) <= labels(METRIC_BY_SERIES[name], name), expression


def test_counters_are_charted_as_rates_and_gauges_as_they_are() -> None:
    for expression in expressions():
        for before, name in re.findall(rf"(\w*\(?)({re.escape(PREFIX)}\w+)", expression):
            assert (before == "rate(") == (METRIC_BY_SERIES[name].kind != "gauge"), expression


def test_legends_show_labels_that_are_left() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            is_whole = series(target["expr"]) == [target["expr"].partition("{")[0]]
            left = FROM_PROMETHEUS if is_whole else {label for labels in grouped for label in labels.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left, target


def test_rows_tell_all_sides_of_a_server() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Speculation", "Cache and pages", "Ranks and agreement", "Hand-off"]


def test_panels_lie_beside_each_other() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (column, line)
            for column in range(place["x"], place["x"] + place["w"])
            for line in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(0 <= column < 24 for column, _ in cells), panel["title"]
        taken |= cells


def test_every_panel_asks_the_chosen_prometheus() -> None:
    for panel in PANELS:
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert DASHBOARD["templating"]["list"][0]["name"] == "datasource"
