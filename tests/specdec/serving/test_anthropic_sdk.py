"""The Anthropic SDK against a server with glm-tiny."""

from typing import Any

import anthropic
import pytest

from tests.support.running_server import RunningServer

pytestmark = pytest.mark.xdist_group("glm_tiny_server")

WEATHER: Any = {
    "name": "get_weather",
    "description": "Current weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client(tiny_server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=tiny_server.url, api_key="none", max_retries=0)


def test_tool_is_called_and_answered_streamed_and_not(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": "glm-tiny", "max_tokens": 120, "tools": [WEATHER], "extra_body": {"temperature": 0}}
    whole = client.messages.create(messages=QUESTION, **fields)
    with client.messages.stream(messages=QUESTION, **fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert "thinking" in kinds
    assert "input_json" in kinds
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        call = message.content[-1]
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": whole.content[-1].id, "content": "18 degrees"}  # type: ignore[union-attr]
    history: Any = [*QUESTION, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=history, **fields)
    assert last.stop_reason == "end_turn"
    assert last.content[-1].type == "text"
    assert last.usage.cache_read_input_tokens == 128
    count = client.messages.count_tokens(model="glm-tiny", messages=history, tools=[WEATHER])
    assert count.input_tokens == last.usage.input_tokens + 128


def test_refused_requests_raise_the_sdks_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(model="glm-tiny", max_tokens=5, messages=QUESTION, stop_sequences=[""])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=QUESTION)
