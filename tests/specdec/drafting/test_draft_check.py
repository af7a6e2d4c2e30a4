"""A draft source that breaks its contract fails its own round, by name; it never changes what is emitted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from specdec.drafting.draft import DraftBatch, Drafts, ObservedRows
from specdec.errors import RoundError
from specdec.result import BatchError
from tests.support.engines import VOCAB_SIZE, Ask, Checkpoints, drawn, greedy, prompt_of, serve

LARGEST_ID = VOCAB_SIZE - 1


class AlteredDraft:
    """Proposes fixed tokens with even probabilities, and alters the proposal when told to."""

    def __init__(self) -> None:
        self.alter: Callable[[Drafts], Any] | None = None

    def observe(self, rows: ObservedRows) -> None:
        pass

    def propose(self, batch: DraftBatch) -> Drafts:
        num_requests, most = len(batch.num_drafts_B), int(batch.num_drafts_B.max())
        drafts = Drafts(
            token_id_BK=np.full((num_requests, most), 7),
            num_drafts_B=batch.num_drafts_B,
            draft_probs_BKV=torch.full((num_requests, most, VOCAB_SIZE), 1 / VOCAB_SIZE),
        )
        return drafts if self.alter is None else cast(Drafts, self.alter(drafts))


def with_token(token_id: int) -> Callable[[Drafts], Drafts]:
    def alter(drafts: Drafts) -> Drafts:
        token_id_BK = drafts.token_id_BK.copy()
        token_id_BK[0, -1] = token_id
        return replace(drafts, token_id_BK=token_id_BK)

    return alter


def with_probs(change: Callable[[torch.Tensor], Any]) -> Callable[[Drafts], Drafts]:
    def alter(drafts: Drafts) -> Drafts:
        assert drafts.draft_probs_BKV is not None
        return replace(drafts, draft_probs_BKV=change(drafts.draft_probs_BKV.clone()))

    return alter


def with_last_probs(value: float) -> Callable[[Drafts], Drafts]:
    return with_probs(lambda probs_BKV: probs_BKV.index_fill_(1, torch.tensor([probs_BKV.shape[1] - 1]), value))


BREACHES: dict[str, tuple[Callable[[Drafts], Any], str]] = {
    "an id of the vocabulary size": (
        with_token(VOCAB_SIZE),
        rf"draft 1 of request \d+ must be an id in 0..{LARGEST_ID}, got {VOCAB_SIZE}",
    ),
    "a negative id": (with_token(-1), rf"draft 1 of request \d+ must be an id in 0..{LARGEST_ID}, got -1"),
    "an id that wraps in 32 bits": (with_token(1 << 32), f"got {1 << 32}"),
    "more drafts than wanted": (
        lambda drafts: Drafts(
            token_id_BK=np.repeat(drafts.token_id_BK, 2, axis=1), num_drafts_B=drafts.num_drafts_B * 2
        ),
        r"request \d+ must get 0..2 drafts, got 4",
    ),
    "a negative number of drafts": (
        lambda drafts: replace(drafts, num_drafts_B=drafts.num_drafts_B - 3),
        r"request \d+ must get 0..2 drafts, got -1",
    ),
    "fewer columns than drafts": (
        lambda drafts: replace(drafts, token_id_BK=drafts.token_id_BK[:, :1]),
        r"token_id_BK must have a column for each of 2 drafts, got shape \(1, 1\)",
    ),
    "no row for a request": (
        lambda drafts: replace(drafts, token_id_BK=drafts.token_id_BK[1:]),
        r"token_id_BK must be an integer array \[1, K\], got int64 \[0, 2\]",
    ),
    "ids that are fractions": (
        lambda drafts: replace(drafts, token_id_BK=drafts.token_id_BK / 2),
        r"token_id_BK must be an integer array \[1, K\], got float64",
    ),
    "counts in a list": (
        lambda drafts: replace(drafts, num_drafts_B=drafts.num_drafts_B.tolist()),
        r"num_drafts_B must be an integer array \[1\], got list",
    ),
    "nothing": (lambda _drafts: None, "must propose Drafts, got NoneType"),
    "probabilities of another vocabulary": (
        with_probs(lambda probs_BKV: probs_BKV[..., 1:]),
        rf"draft_probs_BKV must be float32 \[1, 2, {VOCAB_SIZE}\], got torch.float32 \[1, 2, {LARGEST_ID}\]",
    ),
    "probabilities for too few drafts": (
        with_probs(lambda probs_BKV: probs_BKV[:, :1]),
        rf"draft_probs_BKV must be float32 \[1, 2, {VOCAB_SIZE}\]",
    ),
    "probabilities in an array": (with_probs(lambda probs_BKV: probs_BKV.numpy()), "got ndarray"),
    "probabilities in half precision": (with_probs(lambda probs_BKV: probs_BKV.half()), "got torch.float16"),
    "probabilities with another sum": (
        with_last_probs(2 / VOCAB_SIZE),
        r"draft 1 of request \d+ must be drawn from probabilities that.*the sum 1, got the sum 2",
    ),
    "infinite probabilities": (with_last_probs(float("inf")), "got the sum inf"),
    "negative probabilities": (
        with_probs(lambda probs_BKV: probs_BKV.add_(torch.eye(VOCAB_SIZE)[0] - torch.eye(VOCAB_SIZE)[1])),
        "got the sum 1, the least -0.99",
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_source_that_breaks_its_contract_is_named_and_nothing_it_proposed_is_used(
    breach: str, checkpoints: Checkpoints
) -> None:
    alter, message = BREACHES[breach]
    draft = AlteredDraft()
    engine = checkpoints.engine(num_draft_tokens=2, draft_source=draft, acceptance="rejection", prefix_cache=False)
    pages = engine.kv_pages()
    params = greedy(4)  # a prompt's round, then one with two drafts
    draft.alter = alter
    with pytest.raises(RoundError, match=f"draft source AlteredDraft.*{message}"):
        serve(engine, [Ask(prompt_of(6), params)])
    assert engine.kv_pages() == pages
    draft.alter = None
    assert serve(engine, [Ask(prompt_of(6), params)])[0].token_ids == checkpoints.plain(Ask(prompt_of(6), params))


def test_one_wrong_draft_fails_the_round_it_is_in_and_no_later_one(checkpoints: Checkpoints) -> None:
    draft = AlteredDraft()
    engine = checkpoints.engine(num_draft_tokens=2, draft_source=draft)
    draft.alter = with_token(VOCAB_SIZE)
    with pytest.raises(BatchError) as caught:
        serve(engine, [Ask(prompt_of(length), greedy(6)) for length in (2, 5)])
    assert set(caught.value.failures) == {0, 1}
    draft.alter = None
    ask = Ask(prompt_of(5), greedy(6))
    assert serve(engine, [ask])[0].token_ids == checkpoints.plain(ask)


def test_probabilities_are_not_looked_at_where_no_rule_reads_them(checkpoints: Checkpoints) -> None:
    draft = AlteredDraft()
    draft.alter = with_last_probs(9.0)
    engine = checkpoints.engine(num_draft_tokens=2, draft_source=draft, acceptance="sampled")
    ask = Ask(prompt_of(5), drawn(3, 8))
    assert serve(engine, [ask])[0].token_ids == checkpoints.plain(ask)


def test_drafts_from_the_first_undrawable_one_on_do_not_count(checkpoints: Checkpoints) -> None:
    """What a damaged draft layer computes: NaN from some position on. It costs drafts, not the request."""
    draft = AlteredDraft()
    engine = checkpoints.engine(num_draft_tokens=3, draft_source=draft, acceptance="rejection")
    ask = Ask(prompt_of(5), drawn(3, 9))
    (all_drawn,) = serve(engine, [ask])

    def lose_second(drafts: Drafts) -> Drafts:
        assert drafts.draft_probs_BKV is not None
        drafts.draft_probs_BKV[:, 1:2, ::5] = torch.nan
        return drafts

    draft.alter = lose_second
    (cut,) = serve(engine, [ask])
    draft.alter = lambda drafts: Drafts(
        token_id_BK=drafts.token_id_BK,
        num_drafts_B=np.minimum(drafts.num_drafts_B, 1),
        draft_probs_BKV=drafts.draft_probs_BKV,
    )
    (one_drawn,) = serve(engine, [ask])
    assert (cut.token_ids, cut.speculation) == (one_drawn.token_ids, one_drawn.speculation)
    assert len(cut.speculation.accepted_per_position) == 1
    assert len(all_drawn.speculation.accepted_per_position) == 3


def test_columns_behind_the_drafts_may_hold_anything(checkpoints: Checkpoints) -> None:
    draft = AlteredDraft()
    draft.alter = lambda drafts: Drafts(
        token_id_BK=np.pad(drafts.token_id_BK, ((0, 0), (0, 200)), constant_values=-5),
        num_drafts_B=drafts.num_drafts_B,
    )
    engine = checkpoints.engine(num_draft_tokens=2, draft_source=draft)
    ask = Ask(prompt_of(5), greedy(8))
    assert serve(engine, [ask])[0].token_ids == checkpoints.plain(ask)
