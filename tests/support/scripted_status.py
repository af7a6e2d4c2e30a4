"""A server that only tells how it is: /health, /ready and /metrics by a script."""

import json
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.scripted_server import Cut, ScriptedServer


def metrics_text(
    counters: Mapping[str, float] | None = None,
    *,
    gauges: Mapping[str, float] | None = None,
    buckets: Mapping[str, Mapping[float, float]] | None = None,
    started_at_s: float | None = None,
    prefix: str = "specdec:",
    model_name: str = "tiny",
) -> str:
    """Write what a server says.

    Args:
        counters: By name without prefix, with any labels behind it: `request_success_total{finished_reason="stop"}`.
        gauges: The same.
        buckets: Of histograms, observations up to each bound.
        started_at_s: When the process began.
        prefix: In front of every name.
        model_name: A label of every series.
    """
    lines: list[str] = []

    def write(series: str, kind: str, value: float) -> None:
        name, _, labels = series.partition("{")
        rest = f",{labels}" if labels else "}"
        lines.append(f"# TYPE {prefix}{name} {kind}")
        lines.append(f'{prefix}{name}{{model_name="{model_name}"{rest} {value}')

    for series, value in (counters or {}).items():
        write(series, "counter", value)
    for series, value in (gauges or {}).items():
        write(series, "gauge", value)
    for name, counts in (buckets or {}).items():
        lines.append(f"# TYPE {prefix}{name} histogram")
        for bound, count in counts.items():
            label = "+Inf" if bound == math.inf else repr(float(bound))
            lines.append(f'{prefix}{name}_bucket{{model_name="{model_name}",le="{label}"}} {count}')
    if started_at_s is not None:
        lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started_at_s}"]
    return "\n".join(lines) + "\n"


@dataclass(kw_only=True)
class StatusServer(ScriptedServer):
    """The server; `metrics` and `is_down` are those of its class.

    Attributes:
        answers: Status and message of a path, where it is not 200.
        asked: Paths in the order they were asked for.
    """

    script: Any = None
    metrics: list[str] = field(default_factory=lambda: [metrics_text({"generation_tokens_total": 0})])
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def answer(self, path: str, body: Mapping[str, Any]) -> tuple[int, str, AsyncIterator[bytes]]:
        if self.is_down:
            raise Cut
        self.asked.append(path)
        status, message = self.answers.get(path, (200, ""))
        if status != 200:
            return status, "application/json", _once(json.dumps({"error": {"message": message}}).encode())
        if path == "/metrics":
            return await super().answer(path, body)
        return status, "application/json", _once(b"{}")


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
