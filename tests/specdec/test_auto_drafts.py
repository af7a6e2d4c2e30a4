"""Rounds may have any number of drafts, another one each time: the output and the draft KV stay what they are."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdec.drafting.draft_length import DraftLength
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError
from specdec.models.glm.mtp import MtpIndexSharing
from specdec.sampling.accept import AcceptanceRule
from specdec.slot_table import Int64Array
from tests.support.engines import Ask, Checkpoints, CoreRun, drawn, greedy, prompt_of, serve, tokens
from tests.support.matrix import asks_of, name_of, source_of
from tests.support.pairwise import Row, pairwise_rows
from tests.support.thread_engine import ThreadEngines

MOST = 5
AXES: Mapping[str, Sequence[Any]] = {
    "draft": (*MtpIndexSharing, "oracle", "flipping", "random"),
    "prefill_chunk_tokens": (3, 64),
    "page_size": (1, 4),
    "memory": ("ample", "one request"),
    "prefix_cache": (False, True),
}


class ScriptedLength(DraftLength):
    """Takes lengths from a list, or at random once that has ended."""

    def __init__(self, *lengths: int, seed: int = 0) -> None:
        super().__init__(MOST, prefill_chunk_tokens=256)
        self.chosen: list[int] = []
        self.num_rounds_with_drafts = 0
        self._lengths = list(lengths)
        self._generator = np.random.default_rng(seed)

    def choose(self, num_requests: int, *, num_prompt_tokens: int) -> int:
        assert num_requests >= 1
        assert num_prompt_tokens >= 0
        at_random = int(self._generator.choice([0, 0, *range(MOST + 1)]))
        self.chosen.append(self._lengths.pop(0) if self._lengths else at_random)
        return self.chosen[-1]

    def observe(self, num_drafts_F: Int64Array, num_accepted_F: Int64Array, *, round_s: float) -> None:
        assert round_s > 0
        assert (num_accepted_F <= num_drafts_F).all()
        assert (num_drafts_F <= self.chosen[-1]).all()
        self.num_rounds_with_drafts += bool(num_drafts_F.any())


@pytest.mark.parametrize("row", pairwise_rows(AXES, seed=2), ids=name_of)
def test_output_is_that_of_plain_decoding_whatever_lengths_the_rounds_have(row: Row, checkpoints: Checkpoints) -> None:
    asks = asks_of("both", num_drafts=MOST)
    expected = [checkpoints.plain(ask) for ask in asks]
    memory = {"num_pages": 96 // row["page_size"]} if row["memory"] == "one request" else {}
    draft = row["draft"]
    run = CoreRun(
        checkpoints.load(),
        draft_source=source_of(draft, asks, expected, num_drafts=MOST),
        num_draft_tokens=MOST,
        is_draft_length_auto=True,
        mtp_index_sharing=draft if isinstance(draft, MtpIndexSharing) else None,
        max_model_len=96,
        **{name: row[name] for name in ("prefill_chunk_tokens", "page_size", "prefix_cache")},
        **memory,
    )
    length = run.core.scheduler.draft_length = ScriptedLength(MOST, 0, 2)
    for ask in asks:
        run.add(ask)
    assert run.finish() == expected
    assert {0, 2, MOST} <= set(length.chosen)
    assert length.num_rounds_with_drafts


@pytest.mark.parametrize("acceptance", list(AcceptanceRule))
def test_measured_lengths_give_the_plain_output(acceptance: AcceptanceRule, checkpoints: Checkpoints) -> None:
    asks = asks_of("zero" if acceptance is AcceptanceRule.REJECTION else "both", num_drafts=MOST)
    expected = [checkpoints.plain(ask) for ask in asks]
    engine = checkpoints.engine(num_draft_tokens=MOST, is_draft_length_auto=True, acceptance=acceptance)
    for _ in range(2):
        assert tokens(serve(engine, asks)) == expected


def test_draft_kv_is_whole_after_rounds_without_drafts(checkpoints: Checkpoints) -> None:
    lengths = (0, 3, 0, 0, 1, 5, 0, 2)
    for num_rounds in range(1, len(lengths) + 1):
        run = CoreRun(checkpoints.load(), num_draft_tokens=MOST, is_draft_length_auto=True)
        run.poison()
        length = run.core.scheduler.draft_length = ScriptedLength(*lengths)
        request = run.add(Ask(prompt_of(13), greedy(40)))
        run.step_until_decoding(request)
        for _ in range(num_rounds):
            run.step()
        assert length.chosen == list(lengths[:num_rounds])
        whole_run = CoreRun(checkpoints.load(), num_draft_tokens=MOST, prefill_chunk_tokens=512)
        whole = whole_run.add(Ask(run.known_ids(request), greedy(40)))
        whole_run.step_until_decoding(whole)
        known_ids = run.known_ids(request)
        assert whole_run.known_ids(whole)[: len(known_ids)] == known_ids
        for part, all_at_once in zip(run.draft_kv(request), whole_run.draft_kv(whole), strict=True):
            assert part.isfinite().all()
            assert torch.equal(part, all_at_once[: len(part)])


def test_all_ranks_take_the_length_that_the_leader_chose(
    checkpoints: Checkpoints, thread_engines: ThreadEngines
) -> None:
    asks = [Ask(prompt_of(length), drawn(length, 12)) for length in (3, 9, 20)]
    expected = [checkpoints.plain(ask, "parallel") for ask in asks]
    with thread_engines.open(tp_size=2, dcp_size=2, num_draft_tokens=MOST, is_draft_length_auto=True) as running:
        run = running.core_run()
        length = run.core.scheduler.draft_length = ScriptedLength()
        for ask in asks:
            run.add(ask)
        assert run.finish() == expected
        assert 0 < running.channel.sent.count("propose") == length.num_rounds_with_drafts < len(length.chosen)


def test_lengths_are_chosen_only_where_that_was_asked_for_and_something_drafts(checkpoints: Checkpoints) -> None:
    for settings, is_chosen in (
        ({"num_draft_tokens": 2, "is_draft_length_auto": True}, True),
        ({"num_draft_tokens": 2}, False),
        ({"num_draft_tokens": 0, "is_draft_length_auto": True}, False),
    ):
        assert (checkpoints.engine(**settings).core.scheduler.draft_length is not None) == is_chosen
    with pytest.raises(ConfigError, match="is_draft_length_auto must be true or false, got 'auto'"):
        EngineConfig(is_draft_length_auto="auto")  # type: ignore[arg-type]
