"""What is read from the events of a stream, in the dialects of different servers."""

import json
from typing import Any

import pytest

from specdec.bench.prompt_writer import ReplyContent
from specdec.bench.reply_stream import ReplyStream, StreamFault
from specdec.bench.request_record import TokenUsage


def read(*events: dict[str, Any] | str) -> ReplyStream:
    """Read events that come a second apart, the first at second 1."""
    stream = ReplyStream()
    for second, event in enumerate(events, start=1):
        stream.push(event if isinstance(event, str) else json.dumps(event), float(second))
    return stream


def text(text: str, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, **fields}]}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def usage(num_output: int, **fields: Any) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 5, "completion_tokens": num_output, **fields}}


def test_token_ids_tell_the_tokens_of_each_chunk() -> None:
    stream = read(
        text("", token_ids=[]),
        text("a", token_ids=[7]),
        text("", token_ids=[8, 9]),  # half a character: tokens without text
        text("bc", token_ids=[]),  # and text that is late
        text("d", token_ids=[10], finish_reason="length"),
        {"choices": [], **usage(4)},
        "[DONE]",
    )
    assert stream.chunks_s == [2.0, 3.0, 5.0]
    assert stream.tokens_per_chunk == (1, 2, 1)
    assert stream.content == ReplyContent(text="abcd", token_ids=(7, 8, 9, 10))
    assert stream.finish_reason == "length"
    assert stream.is_whole


def test_a_running_usage_tells_the_tokens_of_each_chunk() -> None:
    stream = read({**text("a"), **usage(1)}, {**text("b"), **usage(4)}, {**text("", finish_reason="stop"), **usage(5)})
    assert stream.chunks_s == [1.0, 2.0, 3.0]  # the end of sequence is a token too
    assert stream.tokens_per_chunk == (1, 3, 1)
    assert stream.content.token_ids is None


def test_a_usage_beside_the_last_choice_counts_the_whole_reply() -> None:
    stream = read(text("a"), text("b"), {**text("", finish_reason="stop"), **usage(9)})
    assert stream.chunks_s == [1.0, 2.0]
    assert stream.tokens_per_chunk is None
    assert stream.usage.num_output == 9


def test_as_many_chunks_as_tokens_are_one_token_each() -> None:
    stream = read(text("a"), text("b"), {"choices": [], **usage(2)})
    assert stream.tokens_per_chunk == (1, 1)


def test_a_chat_has_a_role_reasoning_and_tool_calls() -> None:
    stream = read(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(reasoning="hm"),
        delta(content="yes"),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": None},
        "[DONE]",
    )
    assert stream.chunks_s == [2.0, 3.0, 4.0, 5.0]
    assert stream.content.text == "yes"
    assert stream.tokens_per_chunk is None
    assert stream.finish_reason == "tool_calls"


def test_usage_has_details_where_the_server_gives_them() -> None:
    details = {
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2},
    }
    assert read({"choices": [], **usage(9, **details)}).usage == TokenUsage(
        num_prompt=5, num_output=9, num_cached=3, num_accepted=6, num_rejected=2
    )
    odd = usage(9, prompt_tokens_details=None, completion_tokens_details={"accepted_prediction_tokens": None})
    assert read({"choices": [], **odd}).usage == TokenUsage(num_prompt=5, num_output=9)


@pytest.mark.parametrize(
    ("event", "kind", "detail"),
    [
        ("{", "bad_stream", "truncated"),
        ("[]", "bad_stream", "Expected `object`"),
        ({"error": {"message": "no room"}}, "error_in_stream", "no room"),
        ({"error": "no room"}, "error_in_stream", "no room"),
    ],
)
def test_what_is_no_chunk_is_a_fault(event: dict[str, Any] | str, kind: str, detail: str) -> None:
    with pytest.raises(StreamFault, match=detail) as caught:
        read(text("a"), event)
    assert caught.value.kind == kind


@pytest.mark.parametrize("event", [{}, {"choices": None}, {"choices": [None]}, {"choices": {}}, {"object": "ping"}])
def test_an_event_without_a_choice_carries_nothing(event: dict[str, Any]) -> None:
    stream = read(event)
    assert stream.chunks_s == []
    assert not stream.is_whole
