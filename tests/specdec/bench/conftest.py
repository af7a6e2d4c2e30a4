from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.bench.length_scale import LengthScale
from specdec.bench.traces.read_workload import read_workload
from specdec.bench.workload import Workload

SAMPLES = Path(__file__).parents[3] / "benchmarks" / "data"

ReadLines = Callable[..., Workload]


@pytest.fixture
def read(tmp_path: Path) -> ReadLines:
    """Read a workload of the given lines."""

    def read_lines(*lines: str, scale: float = 1.0, **options: Any) -> Workload:
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return read_workload(path, scale=LengthScale(scale), num_output_tokens=options.get("num_output_tokens"))

    return read_lines


def read_sample(name: str, *, scale: float = 1.0) -> Workload:
    """Read one of the committed samples."""
    return read_workload(SAMPLES / f"{name}.jsonl", scale=LengthScale(scale), num_output_tokens=None)
