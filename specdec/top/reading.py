"""What a server says on /metrics at one time: counts that only grow, and gauges."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

_Labels = frozenset[tuple[str, str]]
_Series = tuple[str, _Labels]  # name behind the prefix of the engine, and labels without those below

_ENGINE_LABELS = frozenset({"model_name", "engine"})
_START_TIME = "process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters and histograms, since the server began or between two readings; summed over engines and models."""

    value_by_series: Mapping[_Series, float] = field(default_factory=dict)

    def total(self, name: str) -> float | None:
        """Sum over the series of a counter; None where the server has none."""
        values = [value for (each, _), value in self.value_by_series.items() if each == name]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The values of a counter by one of its labels; empty where the server has none."""
        values: dict[str, float] = {}
        for (each, labels), value in self.value_by_series.items():
            if each == name and (key := dict(labels).get(label)) is not None:
                values[key] = values.get(key, 0.0) + value
        return values

    def count_by_bound(self, name: str) -> dict[float, float]:
        """Observations of a histogram up to each bound; empty where the server has none."""
        return {float(bound): count for bound, count in self.by_label(f"{name}_bucket", "le").items()}

    def since(self, earlier: "Counts") -> "Counts":
        """What was counted between."""
        before = earlier.value_by_series
        return Counts({series: value - before.get(series, 0.0) for series, value in self.value_by_series.items()})

    def is_behind(self, earlier: "Counts") -> bool:
        """Whether anything was counted that is not counted any more."""
        return any(self.value_by_series.get(series, 0.0) < value for series, value in earlier.value_by_series.items())

    def __add__(self, other: "Counts") -> "Counts":
        """Count both."""
        series = self.value_by_series.keys() | other.value_by_series.keys()
        return Counts(
            {each: self.value_by_series.get(each, 0.0) + other.value_by_series.get(each, 0.0) for each in series}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One reading.

    Attributes:
        read_at_s: When it came, on any clock that runs evenly.
        model_name: Of the first series that bears one, or "".
        started_at_s: When the server's process began, on the server's clock; None where it is not told.
        counts: Since then.
        gauges: By name and labels.
    """

    read_at_s: float
    model_name: str = ""
    started_at_s: float | None = None
    counts: Counts = field(default_factory=Counts)
    gauges: Mapping[_Series, float] = field(default_factory=dict)

    def gauge(self, name: str, **labels: str) -> float | None:
        """The value of a gauge; None where the server has none."""
        return self.gauges.get((name, frozenset(labels.items())))

    def gauges_named(self, name: str) -> list[tuple[dict[str, str], float]]:
        """The labels and values of a gauge, in the order of their labels."""
        found = [(sorted(labels), value) for (each, labels), value in self.gauges.items() if each == name]
        return [(dict(labels), value) for labels, value in sorted(found)]

    def follows_restart(self, earlier: "Reading") -> bool:
        """Whether the server was started again in between, and counts from 0."""
        return self.started_at_s != earlier.started_at_s or self.counts.is_behind(earlier.counts)


def parse_metrics(text: str, *, read_at_s: float) -> Reading:
    """Read Prometheus' text format; gauges of the same labels are summed over engines and models.

    Raises:
        ValueError: It is not in that format.
    """
    counts: dict[_Series, float] = {}
    gauges: dict[_Series, float] = {}
    model_name = ""
    started_at_s = None
    for family in _families(text):
        values = counts if family.type in ("counter", "histogram") else gauges
        for sample in family.samples:
            if math.isnan(sample.value):
                continue
            labels = {key: value for key, value in sample.labels.items() if key not in _ENGINE_LABELS}
            if "le" in labels:
                labels["le"] = str(float(labels["le"]))  # 1 and 1.0 are one bound
            series = (sample.name.rpartition(":")[2], frozenset(labels.items()))
            values[series] = values.get(series, 0.0) + sample.value
            model_name = model_name or sample.labels.get("model_name", "")
            if sample.name == _START_TIME:
                started_at_s = sample.value
    return Reading(
        read_at_s=read_at_s,
        model_name=model_name,
        started_at_s=started_at_s,
        counts=Counts(counts),
        gauges=gauges,
    )


def _families(text: str) -> Iterator[Metric]:
    try:
        yield from text_string_to_metric_families(text)
    except IndexError as error:  # of the library, for some lines that end early
        raise ValueError("the text is not in Prometheus' format") from error
