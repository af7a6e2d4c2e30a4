"""Replies joined from any deltas are the reply as a whole, and that is what the model meant."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.replies.reply_markup import Marker
from tests.support.replies import (
    Part,
    Push,
    Reply,
    call_parts,
    delivered,
    function,
    glm_tiny_markup,
    parsed,
    special,
    token_ids,
)

END_THINK, CALL, END_CALL = Marker.END_THINK, Marker.CALL, Marker.END_CALL
KEY, END_KEY, VALUE, END_VALUE = Marker.KEY, Marker.END_KEY, Marker.VALUE, Marker.END_VALUE

ANY_TOOL = {"type": "function", "function": {"name": "anything"}}
TOOLS = [
    function(
        "write_file",
        path={"type": "string"},
        text={"type": "string"},
        mode={"type": "integer"},
        options={"type": "object"},
        note={"anyOf": [{"type": "string"}, {"type": "null"}]},
    ),
    function("now"),
    ANY_TOOL,
]

# The replies of a report about lost arguments, and what they mean.
REPLIES: dict[str, tuple[list[Part], list[tuple[str, dict[str, Any]]], str]] = {
    "one argument": (call_parts("write_file", {"path": "a.py"}), [("write_file", {"path": "a.py"})], ""),
    "three arguments": (
        call_parts("write_file", {"path": "a.py", "text": "x = 1\n", "mode": 420}),
        [("write_file", {"path": "a.py", "text": "x = 1\n", "mode": 420})],
        "",
    ),
    "nested value": (
        call_parts("write_file", {"options": {"a": [1, {"b": "</x>"}, None], "ü": True}}),
        [("write_file", {"options": {"a": [1, {"b": "</x>"}, None], "ü": True}})],
        "",
    ),
    "no argument": (call_parts("now", {}), [("now", {})], ""),
    "two calls": (
        [*call_parts("now", {}), *call_parts("write_file", {"path": "b"})],
        [("now", {}), ("write_file", {"path": "b"})],
        "",
    ),
    "white space between": (
        ["\n", CALL, "write_file\n", KEY, "path", END_KEY, "\n ", VALUE, " b ", END_VALUE, "\n", END_CALL, "\n\n",
         *call_parts("now", {}), "\n"],
        [("write_file", {"path": " b "}), ("now", {})],
        "",
    ),
    "text before a call": (["Let me look.\n\n", *call_parts("now", {})], [("now", {})], "Let me look."),
    "text around calls": (
        ["One ", *call_parts("now", {}), " two\n", *call_parts("now", {}), "\n three \n"],
        [("now", {}), ("now", {})],
        "One  two\n\n three \n",
    ),
    "CJK and emoji": (
        call_parts("write_file", {"path": "東京.txt", "text": "🙂👩‍👩‍👧 Grüße", "note": "é́"}),
        [("write_file", {"path": "東京.txt", "text": "🙂👩‍👩‍👧 Grüße", "note": "é́"})],
        "",
    ),
    "values with <": (
        call_parts("write_file", {"text": "if a < b: <p> </arg_value> <tool_call>", "note": "<"}),
        [("write_file", {"text": "if a < b: <p> </arg_value> <tool_call>", "note": "<"})],
        "",
    ),
    "quotes and controls": (
        call_parts("write_file", {"text": '"\\\n\t\x00\x7f\u2028', "path": ""}),
        [("write_file", {"text": '"\\\n\t\x00\x7f\u2028', "path": ""})],
        "",
    ),
    "nobody knows the tool": (
        call_parts("other", {"a": 1, "b": "text", "c": "1 more", "d": [True], "e": None}),
        [("other", {"a": 1, "b": "text", "c": "1 more", "d": [True], "e": None})],
        "",
    ),
}  # fmt: skip


def reply_of(name: str) -> tuple[list[int], Reply]:
    """Give the ids of one of `REPLIES`, after some reasoning, and the reply that they are as a whole."""
    parts, calls, content = REPLIES[name]
    ids = token_ids("Hm, 東京.", END_THINK, *parts, special("<|observation|>" if calls else "<|user|>"))
    reply = parsed(delivered(ids, [len(ids)]), tools=TOOLS, starts_in_reasoning=True)
    assert reply.reasoning == "Hm, 東京."
    assert [(name, json.loads(arguments)) for name, arguments in reply.calls] == calls
    assert reply.content == content
    assert not reply.has_unfinished_call
    return ids, reply


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("run_length", range(1, 9))
def test_calls_streamed_in_runs_equal_the_whole(name: str, run_length: int) -> None:
    """O20."""
    ids, reply = reply_of(name)
    for first in range(1, run_length + 1):
        pushes = delivered(ids, [first, *[run_length] * len(ids)])
        assert parsed(pushes, tools=TOOLS, starts_in_reasoning=True) == reply


@pytest.mark.parametrize("name", REPLIES)
def test_calls_cut_at_every_character_equal_the_whole(name: str) -> None:
    """O20."""
    ids, reply = reply_of(name)
    text = "".join(text for _, text in delivered(ids, [len(ids)]))
    for place in range(len(text) + 1):
        pushes: list[Push] = [(ids, text[:place]), ((), text[place:])]
        assert parsed(pushes, tools=TOOLS, starts_in_reasoning=True) == reply
    one_by_one: list[Push] = [(ids, ""), *(((), character) for character in text)]
    assert parsed(one_by_one, tools=TOOLS, starts_in_reasoning=True) == reply


# Any order of markers and text, most of it no sensible reply.
PARTS = st.one_of(
    st.sampled_from([marker for marker in Marker if marker is not Marker.SPECIAL]),
    st.sampled_from(
        ["write_file", "now", "path", "mode", " ", "\n", "<", "</think>", "1", "null", "tr", "[1", "東", "🙂"]
    ),
    st.just(special("<sop>")),
    st.text(max_size=3),
)
RUNS = st.lists(st.integers(1, 8), min_size=1).map(itertools.cycle)


@given(parts=st.lists(PARTS, max_size=25), runs=RUNS, thinks=st.booleans(), calls=st.booleans())
def test_any_tokens_in_any_runs_give_the_same_reply(parts: list[Part], runs: Any, thinks: bool, calls: bool) -> None:
    ids = token_ids(*parts)
    whole, streamed = (
        parsed(pushes, tools=TOOLS, starts_in_reasoning=thinks, parses_tool_calls=calls)
        for pushes in (delivered(ids, [len(ids)]), delivered(ids, runs))
    )
    assert streamed == whole
    for place, (_, arguments) in enumerate(whole.calls):
        if place < len(whole.calls) - 1 or not whole.has_unfinished_call:
            assert isinstance(json.loads(arguments), dict)


@given(
    parts=st.lists(PARTS, max_size=12),
    runs=RUNS,
    stop=st.sampled_from(["<", ">", "</think>", "ol", "_call><", "\n", "東", "nu", "h><"]),
    max_tokens=st.integers(1, 30),
)
def test_cut_replies_are_the_same_in_any_runs(parts: list[Part], runs: Any, stop: str, max_tokens: int) -> None:
    ids = token_ids("a", *parts, "end")
    whole, streamed = (
        parsed(pushes, tools=TOOLS, starts_in_reasoning=True)
        for pushes in (
            delivered(ids, [len(ids)], stop=(stop,), max_tokens=max_tokens),
            delivered(ids, runs, stop=(stop,), max_tokens=max_tokens),
        )
    )
    assert streamed == whole


def whole(*parts: Part, starts_in_reasoning: bool = False, parses_tool_calls: bool = True, **cut: Any) -> Reply:
    ids = token_ids(*parts)
    return parsed(
        delivered(ids, [len(ids)], **cut),
        tools=TOOLS,
        starts_in_reasoning=starts_in_reasoning,
        parses_tool_calls=parses_tool_calls,
    )


def test_reasoning_ends_at_its_marker_and_keeps_what_looks_like_one() -> None:
    reply = whole("a </think> <tool_call>\n", Marker.END_VALUE, END_THINK, "b </think>", starts_in_reasoning=True)
    assert reply.reasoning == "a </think> <tool_call>\n</arg_value>"
    assert reply.content == "b </think>"
    assert reply.num_reasoning_tokens == len(token_ids("a </think> <tool_call>\n"))


def test_a_call_ends_reasoning_that_was_not_closed() -> None:
    reply = whole("Look it up.\n", *call_parts("now", {}), "ok", starts_in_reasoning=True)
    assert (reply.reasoning, reply.content, reply.calls) == ("Look it up.\n", "ok", (("now", "{}"),))
    assert reply.num_reasoning_tokens == len(token_ids("Look it up.\n"))


def test_a_mention_of_the_call_marker_ends_nothing() -> None:
    reply = whole("I write ", CALL, " and so", END_CALL, END_THINK, "Use ", CALL, " so", starts_in_reasoning=True)
    assert (reply.reasoning, reply.content, reply.calls) == (
        "I write <tool_call> and so</tool_call>",
        "Use <tool_call> so",
        (),
    )
    reply = whole("I write ", CALL, " and so on", END_THINK, "a", starts_in_reasoning=True)
    assert (reply.reasoning, reply.content) == ("I write <tool_call> and so on", "a")
    assert reply.num_reasoning_tokens == len(token_ids("I write ")) + len(token_ids(" and so on"))


def test_a_model_may_open_and_close_its_reasoning_itself() -> None:
    assert whole("\n", Marker.THINK, "a", END_THINK, "b") == whole("a", END_THINK, "\nb", starts_in_reasoning=True)
    assert whole(Marker.THINK, "a", END_THINK, END_THINK, "b", starts_in_reasoning=True).content == "b"
    assert whole(END_THINK, "b").content == "b"


def test_think_markers_inside_text_are_text() -> None:
    assert whole("The ", Marker.THINK, " and ", END_THINK, " tags").content == "The <think> and </think> tags"
    assert whole("The ", Marker.THINK, " tag", END_THINK, "a", starts_in_reasoning=True).reasoning == "The <think> tag"


def test_without_tools_the_markup_of_calls_is_text() -> None:
    reply = whole(
        "a", END_THINK, " \n", *call_parts("now", {"a": 1}), " ", starts_in_reasoning=True, parses_tool_calls=False
    )
    assert reply.content == " \n<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value></tool_call> "
    assert not reply.calls


def test_special_tokens_are_never_shown() -> None:
    box, image = special("<|begin_of_box|>"), special("<|image|>")
    reply = whole(box, "a", image, END_THINK, box, "b", image, *call_parts("anything", {}), starts_in_reasoning=True)
    assert (reply.reasoning, reply.content, reply.calls) == ("a", "b", (("anything", "{}"),))
    assert reply.num_reasoning_tokens == 1


def test_the_end_of_the_turn_is_not_shown_even_where_it_does_not_stop() -> None:
    ids = token_ids("a", special("<|user|>"), "b", special("<|observation|>"))
    text = glm_tiny_markup().tokenizer.decode(ids, skip_special_tokens=False)
    assert parsed([(ids, text)]).content == "ab"


# Values that the schema makes numbers or strings.


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, ' "a" ', ' "a" '),
        ({"type": "integer"}, " 1\n", 1),
        ({"type": "integer"}, "one", "one"),
        ({"type": "integer"}, '"1"', "1"),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", "True"),
        ({"type": "object"}, "", ""),
        ({"type": "array"}, "[1, ", "[1, "),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nullify", "nullify"),
        ({"type": ["string", "null"]}, "1", "1"),
        ({"type": ["string", "integer"]}, "1", 1),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": ["string", "integer"]}, "-", "-"),
        ({"type": ["string", "number"]}, "1.5", 1.5),
        ({"type": ["string", "object"]}, "{}", {}),
        ({"type": ["string", "object"]}, "[]", "[]"),
        ({"type": ["string", "object"]}, "{a}", "{a}"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({}, "1", 1),
        ({}, ' {"a": 1} ', {"a": 1}),
        ({}, '"a"', '"a"'),
        ({}, "1 a", "1 a"),
        ({}, " ", " "),
        ({}, "", ""),
        ({}, "[" * 5_000, "[" * 5_000),
    ],
)
def test_values_are_of_the_type_that_the_schema_allows(schema: dict[str, Any], text: str, value: Any) -> None:
    ids = token_ids(CALL, "f", KEY, "a", END_KEY, VALUE, text, END_VALUE, END_CALL)
    for run_length in (1, len(ids)):
        reply = parsed(delivered(ids, itertools.repeat(run_length)), tools=[function("f", a=schema)])
        ((_, arguments),) = reply.calls
        found = json.loads(arguments)["a"]
        assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", ["9" * 5000, "1e999", "0.1000000000000000055511151231257827"])
def test_numbers_keep_every_digit(text: str) -> None:
    assert whole(CALL, "anything", KEY, "a", END_KEY, VALUE, text, END_VALUE, END_CALL).calls == (
        ("anything", f'{{"a": {text}}}'),
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, "1"),
        ({"type": ["string", "null"]}, "1"),
        ({"type": ["string", "null"]}, "no"),
        ({"type": ["string", "object"]}, "["),
        ({}, 'words and "words"'),
        ({}, " 3 words"),
        ({}, "trues"),
    ],
)
def test_strings_are_streamed_as_soon_as_they_can_be_nothing_else(schema: dict[str, Any], text: str) -> None:
    ids = token_ids(CALL, "f", KEY, "a", END_KEY, VALUE, text)
    for run_length in (1, len(ids)):
        reply = parsed(delivered(ids, itertools.repeat(run_length)), tools=[function("f", a=schema)])
        assert reply.calls == (("f", '{"a": ' + json.dumps(text)[:-1]),)


@pytest.mark.parametrize("text", ["", " ", "3", "nul", "[1]", "t", "{"])
def test_what_may_be_something_else_waits(text: str) -> None:
    assert whole(CALL, "anything", KEY, "a", END_KEY, VALUE, text).calls == (("anything", '{"a": '),)


# Slips of a model.


def test_the_first_of_two_arguments_with_one_name_stands() -> None:
    a, b = ([KEY, "path", END_KEY, VALUE, value, END_VALUE] for value in ("a", "b"))
    assert whole(CALL, "write_file", *a, *b, END_CALL).calls == (("write_file", '{"path": "a"}'),)


def test_markers_inside_a_value_are_text() -> None:
    text: list[Part] = [CALL, "x", KEY, "k", END_KEY, VALUE, END_CALL, Marker.THINK, END_THINK]
    reply = whole(CALL, "write_file", KEY, "text", END_KEY, VALUE, *text, END_VALUE, END_CALL)
    expected = "<tool_call>x<arg_key>k</arg_key><arg_value></tool_call><think></think>"
    assert reply.calls == (("write_file", json.dumps({"text": expected})),)


def test_forgotten_markers_between_arguments_are_understood() -> None:
    expected = (("write_file", '{"path": "a"}'), ("now", "{}"))
    argument: list[Part] = [KEY, "path", END_KEY, VALUE, "a", END_VALUE]
    assert whole(CALL, "write_file", *argument, CALL, "now", special("<|observation|>")).calls == expected
    assert (
        whole(CALL, "write_file", KEY, "path", VALUE, "a", END_VALUE, END_CALL, CALL, "now", END_CALL).calls == expected
    )
    assert whole(CALL, "write_file", *argument, special("<|user|>")).has_unfinished_call is False


def test_what_has_no_place_in_a_call_is_dropped() -> None:
    parts: list[Part] = [CALL, "write_file", KEY, "a", END_KEY, "x", KEY, "path", END_KEY, VALUE, "b", END_VALUE, "y",
                         END_VALUE, END_THINK, VALUE, "z", END_VALUE, KEY, "k", END_CALL]  # fmt: skip
    assert whole(*parts).calls == (("write_file", '{"path": "b"}'),)


@pytest.mark.parametrize(
    "parts",
    [
        [CALL, END_CALL],
        [CALL, "get weather", END_CALL],
        [CALL, "\n", KEY, "a"],
        [CALL, "f", VALUE, "a", END_VALUE],
        [CALL, '{"name": "f", "arguments": {}}', END_CALL],
        [CALL, "x" * 300, END_CALL],
        [CALL, CALL],
        [CALL, Marker.THINK, "f", END_CALL],
        [" ", CALL, "a b\n"],
    ],
)
def test_what_is_no_call_is_given_back_as_text(parts: list[Part]) -> None:
    text = "".join(part.value if isinstance(part, Marker) else str(part) for part in parts)
    for run_length in (1, 100):
        reply = parsed(delivered(token_ids("So: ", *parts), itertools.repeat(run_length)))
        assert (reply.content, reply.calls) == ("So: " + text, ())


# Replies that end early.


def test_a_cut_call_keeps_what_was_delivered_and_is_said_to_be_cut() -> None:
    ids = token_ids("go\n", *call_parts("write_file", {"text": 'a "quoted" text', "mode": 420, "options": {"a": 1}}))
    (complete,) = parsed(delivered(ids, [len(ids)]), tools=TOOLS).calls
    for max_tokens in range(1, len(ids) + 1):
        reply = parsed(delivered(ids, [3] * len(ids), max_tokens=max_tokens), tools=TOOLS)
        assert reply.has_unfinished_call == (bool(reply.calls) and max_tokens < len(ids))
        if reply.calls:
            ((name, arguments),) = reply.calls
            assert name == complete[0]
            assert complete[1].startswith(arguments)
            assert reply.content == "go"
            if reply.has_unfinished_call:
                with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
                    json.loads(arguments)
        else:  # its name was not known yet
            assert reply.content == glm_tiny_markup().tokenizer.decode(ids[:max_tokens], skip_special_tokens=False)


@pytest.mark.parametrize("run_length", [1, 5, 100])
def test_reasoning_tokens_are_those_delivered(run_length: int) -> None:
    ids = token_ids("I am thinking about 東京 and more")
    for place in range(len(ids) + 1):  # the turn ends at each offset of the run
        ended = [*ids[:place], special("<|user|>"), *ids[place:], *token_ids(END_THINK, "b")]
        reply = parsed(delivered(ended, itertools.repeat(run_length)), starts_in_reasoning=True)
        assert reply.num_reasoning_tokens == place
        assert reply.content == ""
    for place in range(1, len(ids) + 1):
        pushes = delivered(ids, itertools.repeat(run_length), max_tokens=place)
        assert parsed(pushes, starts_in_reasoning=True).num_reasoning_tokens == place


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("think", ("I ", "", 0)),
        ("more", ("I think ", "", 0)),
        ("</think>", ("I think more", "", 0)),
        ("hink>Yes", ("I think more", "", 0)),
        ("Yes", ("I think more", "", 0)),
        ("_call><", ("I think more", "Yes<tool_call>now", 0)),
        ("path", ("I think more", "Yes", 1)),
    ],
)
def test_text_cut_by_a_stop_string_stays_cut(stop: str, expected: tuple[str, str, int]) -> None:
    ids = token_ids("I think more", END_THINK, "Yes", *call_parts("now", {}), *call_parts("write_file", {"path": "a"}))
    for run_length in (1, 4, len(ids)):
        pushes = delivered(ids, itertools.repeat(run_length), stop=(stop,))
        reply = parsed(pushes, starts_in_reasoning=True)
        assert (reply.reasoning, reply.content, min(1, len(reply.calls))) == expected
        assert reply.num_reasoning_tokens <= sum(len(pushed) for pushed, _ in pushes)


def test_stopping_at_the_end_of_a_call_leaves_one_whole_call() -> None:
    ids = token_ids("a", *call_parts("write_file", {"path": "a"}), *call_parts("now", {}))
    end_call = glm_tiny_markup().id_by_marker[END_CALL]
    for run_length in (1, 3, len(ids)):
        reply = parsed(delivered(ids, itertools.repeat(run_length), stop_token_ids=(end_call,)), tools=TOOLS)
        assert reply.calls == (("write_file", '{"path": "a"}'),)
        assert not reply.has_unfinished_call
