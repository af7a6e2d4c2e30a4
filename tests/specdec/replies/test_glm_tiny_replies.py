"""glm-tiny thinks and calls tools: streamed or not, with speculation or without, the reply is the same."""

import json
from typing import Any

import pytest

from specdec import Engine, SamplingParams
from specdec.replies.reply_markup import ReplyMarkup
from tests.support.replies import Reply, parsed

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHAT = [{"role": "user", "content": "What is the weather in Lisbon?"}]


@pytest.fixture(scope="module", params=[0, 4])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine.from_pretrained("glm-tiny", num_draft_tokens=request.param)


def replies(engine: Engine, params: SamplingParams, **variables: Any) -> tuple[Reply, Reply]:
    """Give a reply unstreamed and streamed."""
    assert engine.tokenizer is not None
    prompt = engine.apply_chat_template(CHAT, tools=[WEATHER], variables=variables)
    markup = ReplyMarkup.of(engine.tokenizer, end_ids=engine.eos_ids)
    is_inside = markup.starts_in_reasoning(prompt)
    assert is_inside == variables.get("enable_thinking", True)
    result = engine.generate([prompt], params)[0]
    with engine.stream(prompt, params) as stream:
        pushes = [(delta.token_ids, delta.text) for delta in stream]
    whole, streamed = (
        parsed(given, tools=[WEATHER], starts_in_reasoning=is_inside, markup=markup)
        for given in ([(result.token_ids, result.text)], pushes)
    )
    return whole, streamed


def test_a_question_becomes_reasoning_and_a_call(engine: Engine) -> None:
    whole, streamed = replies(engine, SamplingParams(temperature=0, max_tokens=80, skip_special_tokens=False))
    assert streamed == whole
    assert "Lisbon" in whole.reasoning
    assert whole.content == ""
    ((name, arguments),) = whole.calls
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Lisbon"})
    assert not whole.has_unfinished_call


def test_without_thinking_there_is_no_reasoning(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=80, skip_special_tokens=False)
    whole, streamed = replies(engine, params, enable_thinking=False)
    assert streamed == whole
    assert (whole.reasoning, whole.num_reasoning_tokens) == ("", 0)
    assert whole.calls


@pytest.mark.parametrize("max_tokens", [1, 10, 17, 19, 24])
def test_a_reply_cut_by_its_length_is_the_same_streamed(engine: Engine, max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, skip_special_tokens=False)
    whole, streamed = replies(engine, params)
    assert streamed == whole
    assert whole.num_reasoning_tokens <= max_tokens
