"""Sampling parameters hold at every place of a run of drafts, and what is reported about tokens is true."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.drafting.draft import DraftSource
from specdec.drafting.scripted_draft import ScriptedDraft
from tests.support.engines import (
    VOCAB_SIZE,
    Ask,
    Checkpoints,
    drawn,
    greedy,
    plain_logits,
    plain_logprobs,
    prompt_of,
    script_of,
    serve,
    tokens,
)

DRAFT_COUNTS = (0, 1, 2, 3, 5)
PROMPT = prompt_of(9)


def constant_draft(checkpoints: Checkpoints, asks: Sequence[Ask]) -> DraftSource:
    """Proposes what the model would say without the rules of these asks."""
    output = checkpoints.plain(Ask(PROMPT, greedy(16)))
    return ScriptedDraft(script_of(asks, [output] * len(asks)), vocab_size=VOCAB_SIZE)


def sources(checkpoints: Checkpoints, asks: Sequence[Ask]) -> tuple[DraftSource | None, ...]:
    return None, constant_draft(checkpoints, asks)


@pytest.mark.parametrize("num_draft_tokens", DRAFT_COUNTS)
@pytest.mark.parametrize("how", ["banned_token_ids", "logit_bias", "allowed_token_ids"])
def test_excluded_token_never_appears(how: str, num_draft_tokens: int, checkpoints: Checkpoints) -> None:
    output = checkpoints.plain(Ask(PROMPT, greedy(12)))
    excluded = sorted(set(output))
    rules_by_name: dict[str, list[dict[str, Any]]] = {
        "banned_token_ids": [{"banned_token_ids": [token]} for token in excluded],
        "logit_bias": [{"logit_bias": {token: -100.0}} for token in excluded],
        "allowed_token_ids": [{"allowed_token_ids": sorted(set(range(VOCAB_SIZE)) - {token})} for token in excluded],
    }
    asks = [Ask(PROMPT, greedy(12, seed=index, **rule)) for index, rule in enumerate(rules_by_name[how])]
    for source in sources(checkpoints, asks):
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens, draft_source=source)
        outputs = tokens(serve(engine, asks))
        for ask, token, emitted in zip(asks, excluded, outputs, strict=True):
            assert token not in emitted
            assert emitted == checkpoints.plain(ask)


@pytest.mark.parametrize("num_draft_tokens", DRAFT_COUNTS)
def test_min_p_of_one_gives_the_greedy_text_at_any_temperature(num_draft_tokens: int, checkpoints: Checkpoints) -> None:
    output = checkpoints.plain(Ask(PROMPT, greedy(12)))
    asks = [Ask(PROMPT, drawn(seed, 12, min_p=1.0)) for seed in range(4)]
    asks += [Ask(PROMPT, drawn(seed, 12, top_k=1, temperature=2.0)) for seed in range(4, 8)]
    for source in sources(checkpoints, asks):
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens, draft_source=source)
        assert tokens(serve(engine, asks)) == [output] * len(asks)


@pytest.mark.parametrize("num_draft_tokens", DRAFT_COUNTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_strong_bias_gives_only_that_token(temperature: float, num_draft_tokens: int, checkpoints: Checkpoints) -> None:
    asks = [Ask(PROMPT, drawn(token, 12, temperature=temperature, logit_bias={token: 100.0})) for token in (0, 77, 511)]
    for source in sources(checkpoints, asks):
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens, draft_source=source)
        assert tokens(serve(engine, asks)) == [(token,) * 12 for token in (0, 77, 511)]


def kept_ids(logits_V: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Ids that the cuts leave, by their definitions."""
    probs_V = (logits_V.double() / temperature).softmax(dim=-1)
    kept = set(torch.nonzero(probs_V >= min_p * probs_V.max() * (1 - 1e-6))[:, 0].tolist())
    ranked = [token for token in probs_V.argsort(descending=True, stable=True).tolist() if token in kept]
    ranked = ranked[: top_k or None]
    mass_left = [0.0, *torch.tensor([float(probs_V[token]) for token in ranked]).double().cumsum(0).tolist()]
    return {token for token, before in zip(ranked, mass_left, strict=False) if before / mass_left[-1] < top_p + 1e-9}


@pytest.mark.parametrize(
    "cuts",
    [
        {"top_p": 0.8},
        {"top_k": 3},
        {"min_p": 0.1},
        {"top_p": 0.8, "top_k": 3, "min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("acceptance", ["sampled", "rejection"])
def test_nothing_outside_the_cuts_is_drawn(acceptance: str, cuts: dict[str, Any], checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3, acceptance=acceptance, max_num_requests=32)
    (result,) = engine.generate([PROMPT], drawn(1, 6, temperature=1.3, n=24, **cuts))
    whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for choice in result.choices:
        logits_TV = plain_logits(checkpoints.load(), (*PROMPT, *choice.token_ids))
        for place, token in enumerate(choice.token_ids):
            assert token in kept_ids(logits_TV[len(PROMPT) - 1 + place], temperature=1.3, **(whole | cuts))
    assert len({choice.token_ids for choice in result.choices}) > 12


@pytest.mark.parametrize("acceptance", ["sampled", "rejection"])
def test_speculation_at_temperature_one_does_not_turn_into_argmax(acceptance: str, checkpoints: Checkpoints) -> None:
    output = checkpoints.plain(Ask(PROMPT, greedy(10)))
    ask = [Ask(PROMPT, drawn(0, 10, n=16))]
    source = ScriptedDraft(script_of(ask, [output]), vocab_size=VOCAB_SIZE)
    for draft_source in (None, source):
        engine = checkpoints.engine(num_draft_tokens=3, acceptance=acceptance, draft_source=draft_source)
        (result,) = serve(engine, ask)
        assert len({choice.token_ids for choice in result.choices}) == 16


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5])
def test_logprobs_are_those_of_plain_decoding(num_draft_tokens: int, checkpoints: Checkpoints) -> None:
    asks = [
        Ask(PROMPT, greedy(12, logprobs=3)),
        Ask(PROMPT, drawn(7, 12, logprobs=3, temperature=0.8, top_k=20, repetition_penalty=1.2)),
    ]
    outputs = [checkpoints.plain(ask) for ask in asks]
    expected = [result.choices[0].logprobs for result in serve(checkpoints.engine(num_draft_tokens=0), asks)]
    source = ScriptedDraft(script_of(asks, outputs), vocab_size=VOCAB_SIZE, wrong_at=3)
    for draft_source in (None, source):
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens, draft_source=draft_source)
        results = serve(engine, asks)
        assert [result.choices[0].logprobs for result in results] == expected
        for result in results:
            logprobs = result.choices[0].logprobs
            assert logprobs is not None
            assert tuple(entry.token_id for entry in logprobs) == result.token_ids
            raw = plain_logprobs(checkpoints.load(), PROMPT + result.token_ids)[len(PROMPT) - 1 :]
            assert [entry.raw_logprob for entry in logprobs] == raw
            assert all(len(entry.raw_top) == 3 for entry in logprobs)


def test_logprob_of_a_drawn_token_is_that_of_the_distribution_it_was_drawn_from(checkpoints: Checkpoints) -> None:
    params = drawn(7, 10, logprobs=0, temperature=0.7, top_k=5)
    (result,) = serve(checkpoints.engine(num_draft_tokens=3), [Ask(PROMPT, params)])
    logits_TV = plain_logits(checkpoints.load(), PROMPT + result.token_ids)[len(PROMPT) - 1 :]
    assert result.choices[0].logprobs is not None
    for entry, logits_V in zip(result.choices[0].logprobs, logits_TV, strict=False):
        kept = kept_ids(logits_V, temperature=0.7, top_k=5, top_p=1.0, min_p=0.0)
        scaled = {token: float(logits_V[token]) / 0.7 for token in kept}
        normaliser = math.log(sum(math.exp(value) for value in scaled.values()))
        assert entry.logprob == pytest.approx(scaled[entry.token_id] - normaliser, abs=1e-4)


@pytest.mark.parametrize("num_draft_tokens", [0, 5])
def test_usage_counts_the_tokens_that_were_delivered(num_draft_tokens: int, checkpoints: Checkpoints) -> None:
    """With the end of the text at every place of a run; counts do not depend on how the run was cut."""
    output = checkpoints.plain(Ask(PROMPT, greedy(12)))
    asks = [Ask(PROMPT, greedy(12, seed=place, stop_token_ids=[output[place]])) for place in range(12)]
    source = ScriptedDraft(script_of(asks, [output] * 12), vocab_size=VOCAB_SIZE)
    for draft_source in (None, source):
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens, draft_source=draft_source)
        for place, (ask, result) in enumerate(zip(asks, serve(engine, asks), strict=True)):
            num_tokens = output.index(output[place]) + 1
            assert result.token_ids == output[:num_tokens]
            assert result.usage.num_prompt_tokens == len(PROMPT)
            assert result.usage.num_completion_tokens == num_tokens
            assert result.usage.num_total_tokens == len(PROMPT) + num_tokens
            with engine.stream(ask.prompt, ask.params) as stream:
                streamed = [token for delta in stream for token in delta.token_ids]
                assert tuple(streamed) == result.token_ids
                assert stream.result().usage.num_completion_tokens == num_tokens


def test_choices_draw_with_their_own_noise_and_the_first_equals_a_single_one(checkpoints: Checkpoints) -> None:
    outputs = []
    for num_draft_tokens in (0, 3):
        engine = checkpoints.engine(num_draft_tokens=num_draft_tokens)
        (several,) = engine.generate([PROMPT], drawn(3, 10, n=5))
        (single,) = engine.generate([PROMPT], drawn(3, 10))
        assert several.choices[0].token_ids == single.token_ids
        assert [choice.index for choice in several.choices] == list(range(5))
        assert several.usage.num_completion_tokens == 50
        outputs.append([choice.token_ids for choice in several.choices])
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) == 5
