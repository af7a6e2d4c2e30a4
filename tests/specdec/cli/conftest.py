from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from tests.support.tiny_checkpoint import tiny_spec, write_tiny_checkpoint


@dataclass(frozen=True)
class Outcome:
    """What one command line left."""

    exit_code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("model"), tiny_spec()))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process."""

    def run_here(*arguments: Any) -> Outcome:
        exit_code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(exit_code, captured.out, captured.err)

    return run_here


@pytest.fixture
def lines_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a file of the given lines."""

    def write(*lines: str) -> Path:
        path = tmp_path / "batch.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write
