"""Replies with a grammar are valid, and are those of plain decoding, whatever is drafted and wherever a reasoning ends.

The checkpoints of these tests know nothing of JSON: every reply is held by its mask alone. Tags such as O11 are
explained in `tests/INVARIANTS.md`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafting.draft import DraftSource
from specdec.drafting.scripted_draft import ScriptedDraft, random_draft
from specdec.grammar.grammar import Grammar
from specdec.result import Choice
from specdec.sampling.accept import AcceptanceRule
from specdec.sampling.sampling_params import SamplingParams
from tests.support.engines import (
    SPARSE,
    VOCAB_SIZE,
    Ask,
    Checkpoints,
    RaggedDraft,
    flipping_draft,
    prompt_of,
    script_of,
    serve,
    tokens,
)
from tests.support.grammars import FORECAST, is_valid
from tests.support.thread_engine import ThreadEngines

THINK, END_THINK, CALL, USER = map(SPARSE.special_id, ("<think>", "</think>", "<tool_call>", "<|user|>"))
NUM_DRAFTS = 5
NUM_REPLIES = 32
RULES: Sequence[dict[str, Any]] = (
    {},
    {"repetition_penalty": 1.2},
    {"top_k": 9, "top_p": 0.9},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"min_p": 0.05, "banned_token_ids": (2, 5)},
    {"min_tokens": 20},
)


@dataclass(frozen=True)
class Replies:
    """Requests whose replies think and then hold to a schema, and what plain decoding gives each of them alone."""

    checkpoints: Checkpoints
    asks: Sequence[Ask]
    outputs: Sequence[tuple[int, ...]]

    def text_of(self, choice: Choice) -> str:
        """The text behind the reasoning."""
        token_ids = choice.token_ids[choice.token_ids.index(END_THINK) + 1 :]
        return self.checkpoints.tokenizer().decode(token_ids, skip_special_tokens=True)

    def oracle(self, *, wrong_at: int | None = None) -> ScriptedDraft:
        return ScriptedDraft(script_of(self.asks, self.outputs), vocab_size=VOCAB_SIZE, wrong_at=wrong_at)


def params_of(checkpoints: Checkpoints, seed: int, **asked: Any) -> SamplingParams:
    """Replies that think for a few tokens; a model without a clue would write white space as long as it may."""
    spaces = dict.fromkeys((checkpoints.tokenizer().encode(space)[0] for space in " \n\r\t"), -8.0)
    given = {
        "grammar": Grammar.json_schema(FORECAST),
        "temperature": float(seed % 2),
        "seed": seed,
        "max_tokens": 110,
        "logit_bias": {END_THINK: 6.0, **spaces},
    }
    return SamplingParams(**{**given, **asked})


@pytest.fixture(scope="module")
def replies(checkpoints: Checkpoints) -> Replies:
    asks = [
        Ask((*prompt_of(1 + seed % 9, seed=seed), THINK), params_of(checkpoints, seed, **RULES[seed % len(RULES)]))
        for seed in range(NUM_REPLIES)
    ]
    engine = checkpoints.engine(num_draft_tokens=0, prefix_cache=False)
    return Replies(checkpoints, asks, [serve(engine, [ask])[0].token_ids for ask in asks])


def offset_of(output: Sequence[int]) -> int | None:
    """Place in its run, 0..K, at which the reasoning ends where all drafts are right; None for the very first token."""
    place = output.index(END_THINK)
    return None if place == 0 else (place - 1) % (NUM_DRAFTS + 1)


def test_o11_plain_replies_are_valid_and_end_their_reasoning_anywhere(replies: Replies) -> None:
    engine = replies.checkpoints.engine(num_draft_tokens=0, max_num_requests=NUM_REPLIES)
    results = serve(engine, replies.asks)
    assert tokens(results) == list(replies.outputs)
    for result in results:
        (choice,) = result.choices
        assert choice.finish_reason == "stop"
        assert is_valid(FORECAST, replies.text_of(choice))
    assert {offset_of(output) for output in replies.outputs} >= set(range(NUM_DRAFTS + 1))


@pytest.mark.parametrize("concurrency", [1, 8, 32])
@pytest.mark.parametrize("wrong_at", [None, 0, 3])
def test_o11_reasoning_may_end_at_every_offset_of_a_run(
    wrong_at: int | None, concurrency: int, replies: Replies
) -> None:
    engine = replies.checkpoints.engine(
        num_draft_tokens=NUM_DRAFTS, draft_source=replies.oracle(wrong_at=wrong_at), max_num_requests=concurrency
    )
    asks, outputs = replies.asks, list(replies.outputs)
    if concurrency == 1:  # one reply for each offset
        chosen = {offset_of(output): place for place, output in enumerate(outputs)}
        asks = [asks[place] for place in chosen.values()]
        outputs = [outputs[place] for place in chosen.values()]
    results = serve(engine, asks)
    assert tokens(results) == outputs
    assert all(is_valid(FORECAST, replies.text_of(result.choices[0])) for result in results)
    if wrong_at is None:
        lengths = [result.speculation.acceptance_length for result in results]
        assert min(length for length in lengths if length is not None) > NUM_DRAFTS - 1


SOURCES: dict[str, Callable[[Replies], DraftSource | None]] = {
    "mtp": lambda _: None,
    "flipping": lambda replies: flipping_draft(script_of(replies.asks, replies.outputs), right=0.7, seed=0),
    "ragged": lambda replies: RaggedDraft(script_of(replies.asks, replies.outputs), seed=1),
    "random": lambda _: random_draft(vocab_size=VOCAB_SIZE, seed=0),
    # What must come from nowhere but its own place: ends and markers.
    "ends": lambda _: ScriptedDraft(lambda _: [USER, END_THINK, USER, CALL, END_THINK] * 40, vocab_size=VOCAB_SIZE),
    "markers": lambda _: ScriptedDraft(lambda _: [CALL, THINK, END_THINK] * 60, vocab_size=VOCAB_SIZE),
}


@pytest.mark.parametrize(
    ("source", "num_draft_tokens"),
    [("mtp", 3), ("flipping", 5), ("ragged", 7), ("random", 1), ("ends", 7), ("markers", 2)],
)
def test_every_draft_gives_the_plain_reply(source: str, num_draft_tokens: int, replies: Replies) -> None:
    engine = replies.checkpoints.engine(
        num_draft_tokens=num_draft_tokens,
        draft_source=SOURCES[source](replies),
        max_num_requests=7,
        prefill_chunk_tokens=5,
    )
    asks, outputs = replies.asks[:14], list(replies.outputs[:14])
    assert tokens(serve(engine, asks)) == outputs
    assert engine.kv_pages()[0] == engine.kv_pages()[1]


scalars = st.sampled_from(
    [
        {"enum": ["a", 12, None, True]},
        {"type": "integer", "minimum": -20, "maximum": 20},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[ab]{1,2}(é|c)?$"},
        {"type": "boolean"},
        {"const": {"b": [1]}},
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(
            lambda a, b, required: {
                "type": "object",
                "properties": {"a": a, "b": b},
                "required": required,
                "additionalProperties": False,
            },
            inner,
            inner,
            st.sampled_from([["a"], ["b", "a"], []]),
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=15)
@given(schema=values, seed=st.integers(0, 99), is_thinking=st.booleans(), num_draft_tokens=st.integers(1, 6))
def test_any_small_schema_is_held_to_with_and_without_drafts(
    schema: dict[str, Any], seed: int, is_thinking: bool, num_draft_tokens: int, replies: Replies
) -> None:
    checkpoints = replies.checkpoints
    ask = Ask((5, THINK) if is_thinking else (5,), params_of(checkpoints, seed, grammar=Grammar.json_schema(schema)))
    (plain,) = serve(checkpoints.engine(num_draft_tokens=0), [ask])
    source = flipping_draft(script_of([ask], [plain.token_ids]), right=0.8, seed=seed)
    engine = checkpoints.engine(num_draft_tokens=num_draft_tokens, draft_source=source)
    assert tokens(serve(engine, [ask])) == [plain.token_ids]
    (choice,) = plain.choices
    text = replies.text_of(choice) if is_thinking and END_THINK in choice.token_ids else choice.text
    assert choice.finish_reason == "length" or is_valid(schema, text)


@pytest.mark.full
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_every_draft_gives_the_plain_reply_in_every_batch(
    source: str, num_draft_tokens: int, concurrency: int, replies: Replies
) -> None:
    engine = replies.checkpoints.engine(
        num_draft_tokens=num_draft_tokens,
        draft_source=SOURCES[source](replies),
        max_num_requests=concurrency,
    )
    assert tokens(serve(engine, replies.asks)) == list(replies.outputs)


def test_free_replies_beside_them_are_not_touched(replies: Replies) -> None:
    free = [Ask(ask.prompt, replace(ask.params, grammar=None, max_tokens=20)) for ask in replies.asks[:6]]
    expected = [replies.checkpoints.plain(ask) for ask in free]
    mixed = [ask for pair in zip(free, replies.asks[:6], strict=True) for ask in pair]
    engine = replies.checkpoints.engine(num_draft_tokens=3, max_num_requests=12)
    assert tokens(serve(engine, mixed)) == [
        ids for pair in zip(expected, replies.outputs[:6], strict=True) for ids in pair
    ]


@pytest.mark.parametrize("draft", ["mtp", "oracle"])
def test_reply_goes_on_after_its_pages_were_taken_away(draft: str, replies: Replies) -> None:
    engine = replies.checkpoints.engine(
        num_draft_tokens=4,
        draft_source=replies.oracle() if draft == "oracle" else None,
        num_pages=32,
        max_num_requests=8,
        prefill_chunk_tokens=7,
    )
    results = serve(engine, replies.asks[:6])
    assert tokens(results) == list(replies.outputs[:6])
    assert sum(result.usage.num_preemptions for result in results) > 0


def test_reply_may_start_over_before_any_round(replies: Replies) -> None:
    place = next(i for i, output in enumerate(replies.outputs) if offset_of(output) == 2 and len(output) < 50)
    ask, output = replies.asks[place], replies.outputs[place]
    engine = replies.checkpoints.engine(num_draft_tokens=3, draft_source=replies.oracle(wrong_at=2))
    for num_rounds in range(0, 14):
        stream = engine.stream(ask.prompt, ask.params)
        for _ in range(num_rounds):
            engine.step()
        scheduler = engine.core.scheduler
        for slot in np.flatnonzero(scheduler.slots.active_S).tolist():
            scheduler.preempt(slot)
        assert stream.result().token_ids == output


def test_choices_of_a_prompt_stand_in_their_own_places(replies: Replies) -> None:
    ask = replies.asks[3]
    params = replace(ask.params, n=5)
    alone = serve(replies.checkpoints.engine(num_draft_tokens=0), [Ask(ask.prompt, params)])[0]
    together = serve(replies.checkpoints.engine(num_draft_tokens=3), [Ask(ask.prompt, params)])[0]
    assert [choice.token_ids for choice in together.choices] == [choice.token_ids for choice in alone.choices]
    assert alone.choices[0].token_ids == replies.outputs[3]
    assert len({choice.token_ids for choice in alone.choices}) == 5
    assert all(is_valid(FORECAST, replies.text_of(choice)) for choice in alone.choices)


@pytest.mark.parametrize(
    ("tp_size", "dcp_size"),
    [(2, 2), *(pytest.param(*size, marks=pytest.mark.full) for size in ((4, 2), (4, 4), (8, 8)))],
)
def test_every_rank_decides_under_the_same_masks(
    tp_size: int, dcp_size: int, replies: Replies, thread_engines: ThreadEngines
) -> None:
    asks = replies.asks[:6]
    found = []
    for num_draft_tokens in (0, 3):
        with thread_engines.open(tp_size=tp_size, dcp_size=dcp_size, num_draft_tokens=num_draft_tokens) as running:
            engine = running.engine(tokenizer=replies.checkpoints.tokenizer())
            audit = engine.start_audit(rate=1.0)
            results = serve(engine, asks)
            assert audit.num_decisions > 0
            assert audit.num_disagreements == 0
        found.append(tokens(results))
        assert all(is_valid(FORECAST, replies.text_of(result.choices[0])) for result in results)
    assert found[0] == found[1]


def test_ranks_that_see_other_numbers_still_hold_to_the_grammar(
    replies: Replies, thread_engines: ThreadEngines
) -> None:
    asks = [Ask(ask.prompt, replace(ask.params, temperature=1.0)) for ask in replies.asks[:6]]
    with thread_engines.open(tp_size=2, dcp_size=2, num_draft_tokens=3, logits_noise=1.0) as running:
        engine = running.engine(tokenizer=replies.checkpoints.tokenizer())
        audit = engine.start_audit(rate=1.0)
        results = serve(engine, asks)
    assert audit.num_disagreements > 0
    for result in results:
        (choice,) = result.choices
        assert choice.finish_reason == "length" or is_valid(FORECAST, replies.text_of(choice))
    assert sum(result.choices[0].finish_reason == "stop" for result in results) > len(results) / 2


@pytest.mark.parametrize("draft", ["mtp", "random", "ends"])
def test_greedy_replies_are_the_same_under_the_other_rule(draft: str, replies: Replies) -> None:
    engine = replies.checkpoints.engine(
        num_draft_tokens=3,
        acceptance=AcceptanceRule.REJECTION,
        draft_source=SOURCES[draft](replies),
        max_num_requests=8,
    )
    assert tokens(serve(engine, replies.asks[:16:2])) == list(replies.outputs[:16:2])


def test_reply_whose_prompt_ends_outside_the_reasoning_begins_with_the_grammar(checkpoints: Checkpoints) -> None:
    for prompt in ((5, THINK, END_THINK), (5, 6), (THINK, 5, USER)):
        outputs = []
        for num_draft_tokens in (0, 4):
            engine = checkpoints.engine(num_draft_tokens=num_draft_tokens)
            (result,) = serve(engine, [Ask(prompt, params_of(checkpoints, 1))])
            assert is_valid(FORECAST, result.text)
            assert END_THINK not in result.token_ids
            outputs.append(result.token_ids)
        assert outputs[0] == outputs[1]


def test_reply_may_begin_inside_the_reasoning_with_the_grammar(checkpoints: Checkpoints) -> None:
    grammar = Grammar.json_schema(FORECAST, begins_after_reasoning=False)
    params = params_of(checkpoints, 1, grammar=grammar)
    (result,) = serve(checkpoints.engine(num_draft_tokens=3), [Ask((5, THINK), params)])
    assert is_valid(FORECAST, result.text)
