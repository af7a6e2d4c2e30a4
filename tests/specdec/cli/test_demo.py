import json
import re

import pytest

from specdec import Engine
from specdec.cli.demo_prompt import DEMO_PROMPT
from tests.specdec.cli.conftest import Run

SHORT = ("demo", "--max-tokens", 12, "--repeats", 1)


def test_the_demo_shows_both_speeds_and_that_the_outputs_are_equal(run: Run) -> None:
    outcome = run(*SHORT)
    assert outcome.exit_code == 0
    assert DEMO_PROMPT in outcome.out
    assert "outputs equal: yes, all 12 tokens" in outcome.out
    assert re.search(r"speed-up: [0-9.]+x", outcome.out)
    assert "\x1b" not in outcome.out  # no colours where there is no terminal


def test_the_demo_as_json(run: Run) -> None:
    record = json.loads(run(*SHORT, "--num-draft-tokens", 2, "--json").out)
    assert record["outputs_equal"] is True
    assert record["num_prompt_tokens"] >= 96
    assert record["num_new_tokens"] == 12
    assert 1 <= record["acceptance_length"] <= 3
    assert len(record["acceptance_per_position"]) == 2
    assert record["tokens_per_second"].keys() == {"off", "on"}


def test_the_demo_fails_if_the_outputs_differ(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    encode = Engine.encode

    def encode_differently(self: Engine, prompt: str) -> list[int]:
        return encode(self, prompt)[: -1 if self.config.num_draft_tokens else None]

    monkeypatch.setattr(Engine, "encode", encode_differently)
    outcome = run(*SHORT)
    assert outcome.exit_code == 1
    assert "outputs equal: no" in outcome.out
