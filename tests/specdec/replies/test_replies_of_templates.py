"""What a template writes into a prompt is read back from a reply as it was."""

import itertools
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.models.glm.released import locate_checkpoint
from specdec.text.chat_template import load_chat_template
from tests.support.replies import BFCL_TOOLS, delivered, function, glm_tiny_markup, parsed, special

MARKUP = glm_tiny_markup()
ADDED_TOKENS = [MARKUP.tokenizer.decode([i], skip_special_tokens=False) for i in range(special("<|endoftext|>"), 3072)]
TOOL = function(
    "typed",
    text={"type": "string"},
    count={"type": "integer"},
    either={"type": ["string", "integer"]},
    many={"type": "array"},
    some={"anyOf": [{"type": "object"}, {"type": "null"}]},
)


def is_plain(text: str) -> bool:
    """Say whether a text stays ordinary tokens inside a prompt."""
    return not any(token in text for token in ADDED_TOKENS)


def is_no_number(text: str) -> bool:
    try:
        return not isinstance(json.loads(text), int)
    except ValueError:
        return True


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(is_plain)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=6,
)
NO_STRINGS = JSON_VALUES.filter(lambda value: not isinstance(value, str))
KEYS = TEXTS.filter(lambda key: key == key.strip())
TYPED_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(),
        "either": st.integers() | TEXTS.filter(is_no_number),
        "many": st.lists(JSON_VALUES, max_size=3),
        "some": st.none() | st.dictionaries(TEXTS, JSON_VALUES, max_size=3),
    },
)
CALLS = st.one_of(
    st.tuples(st.just("typed"), TYPED_ARGUMENTS),
    st.tuples(st.from_regex(r"[a-zA-Z0-9_.:-]{1,20}", fullmatch=True), st.dictionaries(KEYS, NO_STRINGS, max_size=3)),
)
RUNS = st.lists(st.integers(1, 8), min_size=1)


TEMPLATE = load_chat_template(locate_checkpoint("glm-tiny"))


def reply_ids(message: dict[str, Any]) -> list[int]:
    """Give the ids of an assistant's turn, as the model would have to write it."""
    assert TEMPLATE is not None
    text = TEMPLATE.render([{"role": "user", "content": "Q"}, message], add_generation_prompt=False)
    _, _, reply = text.partition("<|assistant|><think>")
    return MARKUP.tokenizer.encode(reply)


@settings(max_examples=200)
@given(reasoning=TEXTS, content=TEXTS, calls=st.lists(CALLS, max_size=3), runs=RUNS)
def test_random_turns_are_read_back(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], runs: list[int]
) -> None:
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    ids = [*reply_ids(message), special("<|observation|>" if calls else "<|user|>")]
    for run_lengths in (itertools.cycle(runs), itertools.repeat(len(ids))):
        reply = parsed(delivered(ids, run_lengths), tools=[TOOL], starts_in_reasoning=True)
        assert reply.reasoning == reasoning.strip()
        assert reply.content == content.strip()
        assert [(name, json.loads(arguments)) for name, arguments in reply.calls] == calls
        assert not reply.has_unfinished_call


def test_the_calls_of_a_public_benchmark_are_read_back() -> None:
    for row in map(json.loads, BFCL_TOOLS.read_text(encoding="utf-8").splitlines()):
        calls = [
            (name, {key: accepted[0] for key, accepted in arguments.items()})
            for call in row["ground_truth"]
            for name, arguments in call.items()
        ]
        message = {
            "role": "assistant",
            "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
        }
        ids = reply_ids(message)
        for run_length in (1, 2, 3, 5, 8):
            reply = parsed(delivered(ids, itertools.repeat(run_length)), tools=row["tools"], starts_in_reasoning=True)
            assert [(name, json.loads(arguments)) for name, arguments in reply.calls] == calls
