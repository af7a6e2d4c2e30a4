"""Sizes that do not fit are refused, with sizes that do, before anything is loaded or started."""

from typing import Any

import pytest

import specdec.ranks.rank_group
import specdec.ranks.start_ranks
from specdec.ranks.place import Place
from tests.specdec.cli.conftest import Run


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(specdec.ranks.start_ranks, "RankGroup", start)
    monkeypatch.setattr(specdec.ranks.start_ranks, "load_rank", start)


@pytest.mark.parametrize("tp_flag", ["--tp-size", "--tensor-parallel-size", "-tp"])
@pytest.mark.parametrize("dcp_flag", ["--dcp-size", "--decode-context-parallel-size", "-dcp"])
def test_every_name_of_the_sizes_is_understood(tp_flag: str, dcp_flag: str, run: Run, model: str) -> None:
    outcome = run("generate", "--model", model, "--prompt", "x", tp_flag, 4, dcp_flag, 3)
    assert outcome.exit_code == 2
    assert "dcp_size must divide tp_size 4, got 3" in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        (["--tp-size", 3], "tp_size must divide num_attention_heads 8, vocab_size 512"),
        (["--tp-size", 3], "got 3: take one of 1, 2, 4, 8"),
        (["--tp-size", 16, "--dcp-size", 16], "tp_size must divide num_attention_heads 8"),
        (["--tp-size", 0], "tp_size must be an integer >= 1, got 0"),
        (["--tp-size", 2, "--dcp-size", 0], "dcp_size must be an integer >= 1, got 0"),
        (["--dcp-size", 2], "dcp_size must divide tp_size 1, got 2"),
        (["--tp-size", 8, "--dcp-size", 6], "ranks, take one of 1, 2, 4, 8"),
        (["--tp-size", 8, "--expert-split", "expert", "--dcp-size", 5], "dcp_size must divide tp_size 8, got 5"),
        (["--tp-size", 2, "--exchange", "letter"], "exchange must be one of"),
        (["--tp-size", 2, "--rank-timeout-s", 0], "rank_timeout_s must be positive"),
        (["--tp-size", 2, "--page-size", 4, "--num-pages", 1], "needs 64 pages of 4 tokens on each rank"),
        (["--tp-size", 2, "--dcp-size", 2, "--page-size", 4, "--num-pages", 31], "needs 32 pages of 4 tokens"),
        (["--tp-size", 2, "--max-model-len", 4096], "max_model_len must be at most"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: list[Any], complaint: str, run: Run, model: str) -> None:
    outcome = run("generate", "--model", model, "--prompt", "x", *sizes)
    assert outcome.exit_code == 2
    assert complaint in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert outcome.out == ""


def test_other_number_of_ranks_than_the_launcher_started_is_refused(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(rank=0, size=4, local_rank=0, host="localhost", port=1, has_store=True)
    for name, value in place.environ().items():
        monkeypatch.setenv(name, value)
    for sizes in ([], ["--tp-size", 2]):
        outcome = run("generate", "--model", model, "--prompt", "x", *sizes)
        assert outcome.exit_code == 2
        assert "the launcher started 4 processes (WORLD_SIZE)" in outcome.err
