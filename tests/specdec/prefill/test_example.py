"""`examples/disaggregated.py` compares prefill and decode apart with one engine, and its exit code says how it went."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.processes import await_end, children_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "disaggregated.py"


@pytest.mark.xdist_group("handoff_processes")
def test_two_prefills_and_a_decode_group_give_the_text_of_one_engine() -> None:
    before = children_of(os.getpid())
    run = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    assert re.search(r"^3 prompts received, [0-9.]+ s each$", run.stdout, flags=re.MULTILINE)
    assert run.stdout.endswith("equal to one engine: True\n")
    assert not await_end(children_of(os.getpid()) - before, timeout_s=10)


@pytest.mark.parametrize(("alone", "exit_code"), [([(1, 2)], 0), ([(1, 3)], 1)])
def test_the_exit_code_tells_whether_the_texts_are_equal(
    alone: list[tuple[int, ...]],
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec: Any = importlib.util.spec_from_file_location("disaggregated", EXAMPLE)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    @contextlib.contextmanager
    def prefill(*_: str) -> Iterator[str]:
        yield "127.0.0.1:1"

    @contextlib.contextmanager
    def engine(*_: str, **settings: Any) -> Iterator[Any]:
        counts = SimpleNamespace(num_received=1, wait_s=0.0)
        yield SimpleNamespace(intake=SimpleNamespace(counts=counts) if "prefill" in settings else None)

    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    monkeypatch.setattr(module, "prefill", prefill)
    monkeypatch.setattr(module, "Engine", SimpleNamespace(from_pretrained=engine))
    monkeypatch.setattr(module, "generate", lambda engine: [(1, 2)] if engine.intake else alone)
    assert module.main() == exit_code
    assert capsys.readouterr().out.endswith(f"equal to one engine: {exit_code == 0}\n")
