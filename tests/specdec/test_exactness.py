"""Speculation changes nothing: every output equals that of plain decoding, alone, in one piece.

The definition of the right output is `plain`: no drafts, no neighbours, the whole prompt in one pass, no cached prefix.
Everything else that an engine can be set to must give the same tokens.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from specdec.drafting.scripted_draft import ScriptedDraft
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.models.glm.mtp import MtpIndexSharing
from specdec.sampling.accept import AcceptanceRule
from tests.support.engines import (
    VOCAB_SIZE,
    Ask,
    Checkpoints,
    RaggedDraft,
    drawn,
    greedy,
    kv_settings,
    prompt_of,
    script_of,
    serve,
    tokens,
)
from tests.support.matrix import NUMBERS, asks_of, name_of, source_of
from tests.support.pairwise import Row, all_rows, pairwise_rows
from tests.support.tiny_checkpoint import reference_model

MAX_MODEL_LEN = 96
AXES: Mapping[str, Sequence[Any]] = {
    "num_draft_tokens": (0, 1, 2, 3, 5, 7),
    "draft": (*MtpIndexSharing, "oracle", "first wrong", "second wrong", "last wrong", "flipping", "random"),
    "num_requests": (1, 2, 3, 4, 5, 6, 7, 8),
    "prefill_chunk_tokens": (1, 7, 64),
    "page_size": (1, 4, 64),
    "numbers": tuple(NUMBERS),
    "memory": ("ample", "one request"),
    "prefixes": ("off", "cold", "warm"),
    "temperature": ("zero", "one", "both"),
    "attention": ("sparse", "dense"),
}
# The whole matrix of what interacts; the batches are always mixed and full there.
FULL_AXES: Mapping[str, Sequence[Any]] = {
    **AXES,
    "num_draft_tokens": (1, 2, 3, 5, 7),
    "draft": (*MtpIndexSharing, "oracle", "first wrong", "last wrong", "flipping", "random"),
    "num_requests": (8,),
    "prefixes": ("cold",),
    "temperature": ("both",),
    "attention": ("sparse",),
}


@pytest.mark.parametrize("row", pairwise_rows(AXES, seed=1), ids=name_of)
def test_every_setting_gives_the_plain_output(row: Row, checkpoints: Checkpoints) -> None:
    check(row, checkpoints)


def test_sample_holds_every_pair_of_values() -> None:
    rows = pairwise_rows(AXES, seed=1)
    for first, second in itertools.combinations(AXES, 2):
        found = {(row[first], row[second]) for row in rows}
        assert found == set(itertools.product(AXES[first], AXES[second]))


def repeats_another(row: Row) -> bool:
    """With one draft, nothing is recycled and the first draft is the last."""
    others = (MtpIndexSharing.ANCHOR, MtpIndexSharing.ANCHOR_AND_DRAFTS, "last wrong")
    return row["num_draft_tokens"] == 1 and row["draft"] in others


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in all_rows(FULL_AXES) if not repeats_another(row)], ids=name_of)
def test_every_combination_of_settings_gives_the_plain_output(row: Row, checkpoints: Checkpoints) -> None:
    check(row, checkpoints)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5, 7])
def test_draft_that_is_wrong_at_one_place_is_cut_there(num_draft_tokens: int, checkpoints: Checkpoints) -> None:
    asks = asks_of("both", num_drafts=num_draft_tokens)
    expected = [checkpoints.plain(ask) for ask in asks]
    for wrong_at in range(num_draft_tokens):
        source = ScriptedDraft(script_of(asks, expected), vocab_size=VOCAB_SIZE, wrong_at=wrong_at)
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens, draft_source=source)
        results = serve(engine, asks)
        assert tokens(results) == expected
        kept = [result.speculation.accepted_per_position for result in results]
        assert all(any(counts[place] for counts in kept if place < len(counts)) for place in range(wrong_at))
        assert not any(any(counts[wrong_at:]) for counts in kept)


@pytest.mark.parametrize("acceptance", list(AcceptanceRule))
def test_draft_source_may_propose_fewer_drafts_or_none(acceptance: AcceptanceRule, checkpoints: Checkpoints) -> None:
    asks = asks_of("zero" if acceptance is AcceptanceRule.REJECTION else "both", num_drafts=5)
    expected = [checkpoints.plain(ask) for ask in asks]
    for seed in range(4):
        source = RaggedDraft(script_of(asks, expected), seed=seed)
        engine = checkpoints.engine(num_draft_tokens=5, acceptance=acceptance, draft_source=source)
        assert tokens(serve(engine, asks)) == expected


@pytest.mark.parametrize("draft", [MtpIndexSharing.ANCHOR, "flipping"])
def test_long_contexts_give_the_plain_output(draft: MtpIndexSharing | str, checkpoints: Checkpoints) -> None:
    """Beyond the 256 positions that are scored in one piece, with neighbours of other lengths."""
    lengths = (250, 255, 256, 257, 700, 3)
    asks = [Ask(prompt_of(length), drawn(length, 10) if length % 2 else greedy(10)) for length in lengths]
    expected = [checkpoints.plain(ask, "long", max_model_len=1024) for ask in asks]
    engine = checkpoints.engine(
        "long",
        num_draft_tokens=3,
        max_model_len=1024,
        page_size=64,
        prefill_chunk_tokens=100,
        draft_source=source_of(draft, asks, expected, num_drafts=3),
    )
    assert tokens(serve(engine, asks)) == expected


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_greedy_output_equals_that_of_transformers(attention: str, checkpoints: Checkpoints) -> None:
    asks = [Ask(prompt_of(length), greedy(12)) for length in (1, 3, 8, 9, 40)]
    model = reference_model(checkpoints.path(attention))
    expected = []
    for ask in asks:
        token_ids = torch.tensor([ask.prompt])
        with torch.inference_mode():
            for _ in range(12):
                next_id = model(token_ids).logits[:, -1:].argmax(dim=-1)
                token_ids = torch.cat((token_ids, next_id), dim=1)
        expected.append(tuple(token_ids[0, len(ask.prompt) :].tolist()))
    for num_draft_tokens in (0, 3):
        engine = checkpoints.engine(attention, num_draft_tokens=num_draft_tokens, latent_norm_eps=1e-6)
        assert tokens(serve(engine, asks)) == expected


def check(row: Row, checkpoints: Checkpoints) -> None:
    asks = asks_of(row["temperature"], num_drafts=row["num_draft_tokens"])[: row["num_requests"]]
    dtype, kv_format = NUMBERS[row["numbers"]]
    kv = kv_settings(kv_format)
    checkpoint = checkpoints.load(row["attention"], dtype)
    expected = [checkpoints.plain(ask, row["attention"], dtype=dtype, **kv) for ask in asks]

    page_size, draft = row["page_size"], row["draft"]
    config = EngineConfig(
        num_draft_tokens=row["num_draft_tokens"],
        mtp_index_sharing=draft if isinstance(draft, MtpIndexSharing) else None,
        page_size=page_size,
        num_pages=-(-MAX_MODEL_LEN // page_size) if row["memory"] == "one request" else None,
        max_num_requests=8,
        max_model_len=MAX_MODEL_LEN,
        prefill_chunk_tokens=row["prefill_chunk_tokens"],
        prefix_cache=row["prefixes"] != "off",
        **kv,
    )
    engine = Engine(
        checkpoint, config, draft_source=source_of(draft, asks, expected, num_drafts=row["num_draft_tokens"])
    )
    if row["prefixes"] == "warm":  # part of each prompt, and what followed the prompts of half of them
        serve(engine, [Ask(ask.prompt[: (len(ask.prompt) + 1) // 2], ask.params) for ask in asks])
        serve(engine, asks[::2])
    assert tokens(serve(engine, asks)) == expected
    assert engine.kv_pages()[0] == engine.kv_pages()[1]
