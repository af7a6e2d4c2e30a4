"""The audit's own flags and its table; what it finds is tested below `specdec.audit`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specdec.audit
from specdec import Engine
from specdec.audit import AuditedRun, DeviceRounds
from tests.specdec.cli.conftest import Run

RANKS = ("--tp-size", 2)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_arguments: Any, **_settings: Any) -> list[AuditedRun]:
        raise AssertionError("the audit ran")

    monkeypatch.setattr(specdec.audit, "audit", run)


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_arguments: Any, **_settings: Any) -> Engine:
        raise AssertionError("a checkpoint was loaded")

    monkeypatch.setattr(Engine, "from_pretrained", load)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp-size", 3), "tp_size must divide num_attention_heads 8"),
        (("--tp-size", 4, "--dcp-size", 3), "dcp_size must divide tp_size 4, got 3"),
        ((*RANKS, "--num-draft-tokens", 50), "num_draft_tokens must lie in 0..32, got 50"),
        ((*RANKS, "--temperature", 101), "temperature must be in 0..100"),
        ((*RANKS, "--prompt", "a", "--batch", "b"), "give --prompt or --batch, or neither; got both"),
        ((*RANKS, "--batch", "/nowhere"), "/nowhere: cannot be read"),
    ],
)
def test_what_cannot_be_audited_is_refused_before_anything_is_loaded(
    run: Run, model: str, arguments: tuple[Any, ...], message: str
) -> None:
    outcome = run("audit", "--model", model, *arguments)
    assert (outcome.exit_code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert message in outcome.err
    assert "--messages" not in outcome.err


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-tokens", 5000), "--max-tokens must leave room for a prompt and be at most 255, got 5000"),
        (("--prompt", ""), "the prompt is empty"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_before_anything_is_printed(
    run: Run, model: str, arguments: tuple[Any, ...], message: str
) -> None:
    outcome = run("audit", "--model", model, *RANKS, *arguments)
    assert (outcome.exit_code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert message in outcome.err


@pytest.mark.usefixtures("nothing_runs")
def test_parameters_of_a_line_are_not_dropped_without_a_word(
    run: Run, model: str, lines_file: Callable[..., Path]
) -> None:
    outcome = run("audit", "--model", model, *RANKS, "--batch", lines_file('{"prompt": "a", "top_p": 0.5}'))
    assert outcome.exit_code == 2
    assert "line 1: an audit asks the same of every prompt, with its own flags: leave out top_p" in outcome.err


def test_the_table_fits_into_80_columns(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def audited(*_arguments: Any, **_settings: Any) -> list[AuditedRun]:
        fields: dict[str, Any] = {
            "num_tokens": 224,
            "differences": (),
            "max_logit_distance": 3.6e-6,
            "max_row_error": 1e-6,
        }
        fields |= {"changed_by_drafts": ()}
        fields |= {"num_selections": 12345, "num_selection_differences": 0, "num_decisions": 224, "num_rounds": 32}
        fields |= {"acceptance_length": 2.57, "is_sequence_equal": True}
        return [
            AuditedRun(
                tp_size=size,
                dcp_size=size,
                num_draft_tokens=num_draft_tokens,
                disagreements_per_rank=(0,) * size,
                collectives_per_rank=(2000,) * size,
                **fields,
            )
            for size in (1, 2)
            for num_draft_tokens in (0, 3)
        ]

    monkeypatch.setattr(specdec.audit, "audit", audited)
    monkeypatch.setenv("COLUMNS", "80")
    outcome = run("audit", "--model", model, *RANKS, "--prompt", "a")
    assert outcome.exit_code == 0
    rows = [line for line in outcome.out.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == [
        "tokens",
        "logit distance",
        "selected sets",
        "own decisions",
        "acceptance length",
        "collectives/round",
        "same on all ranks",
    ]


@pytest.mark.parametrize(("row_error", "said"), [(0.5, "0.50"), (math.nan, "nan")])
def test_what_kernels_do_not_give_is_said_and_what_nothing_excuses_is_named(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch, row_error: float, said: str
) -> None:
    def audited(*_arguments: Any, **_settings: Any) -> list[AuditedRun]:
        rounds = DeviceRounds(num_rounds=2100, num_decisions=8400, disagreements_per_rank=(0, 3), other_texts=(1,))
        return [
            AuditedRun(
                tp_size=2, dcp_size=2, num_draft_tokens=5, num_tokens=9000, differences=(), changed_by_drafts=(0, 2),
                max_logit_distance=0.4, max_row_error=row_error, num_selections=None, num_selection_differences=0,
                disagreements_per_rank=(0, 0), num_decisions=9000, acceptance_length=2.0, num_rounds=2200,
                collectives_per_rank=(9, 9), is_sequence_equal=True, on_device=rounds,
            )
        ]  # fmt: skip

    monkeypatch.setattr(specdec.audit, "audit", audited)
    monkeypatch.setenv("COLUMNS", "80")
    outcome = run("audit", "--model", model, *RANKS, "--prompt", "a")
    assert outcome.exit_code == 1
    for words in (
        "2100",
        "3 of 16800 differ",
        "not given",
        "tp 2 dcp 2, 5 drafts: drafts changed the tokens of prompts 0, 2",
        "rounds on the device gave other tokens than passes for prompts 1",
        f"logits of a row are off by {said} of their norm, above 0.25",
        "the kernels give no selected positions: these are not compared",
    ):
        assert words in outcome.out, words
