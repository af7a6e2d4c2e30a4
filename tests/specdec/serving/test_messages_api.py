"""`/v1/messages` over an engine that says what it is told to."""

import json
from typing import Any

from tests.support.fake_engine import END, FakeEngine
from tests.support.running_server import RunningServer, events

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
CALL = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
NO_ARGUMENTS = "<tool_call>get_weather</tool_call>"


def ask(server: RunningServer, **fields: Any) -> dict[str, Any]:
    with server.client() as client:
        response = client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 500, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: RunningServer, **fields: Any) -> list[Any]:
    with server.client() as client:
        body = {"messages": HELLO, "max_tokens": 500, "stream": True, **fields}
        response = client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    names = [line.removeprefix("event: ") for line in response.text.split("\n") if line.startswith("event: ")]
    steps = events(response)
    assert [step["type"] for step in steps] == names
    return steps


def prompt_text(engine: FakeEngine) -> str:
    assert engine.tokenizer is not None
    return engine.tokenizer.decode(engine.prepared[-1][0], skip_special_tokens=False)


def join(steps: list[Any]) -> dict[str, Any]:
    """Put the events together, as a client does."""
    message: dict[str, Any] = {}
    is_open = False
    for step in steps:
        match step["type"]:
            case "message_start":
                message = step["message"]
            case "content_block_start":
                assert not is_open
                assert step["index"] == len(message["content"])
                message["content"].append({**step["content_block"], "json": ""})
                is_open = True
            case "content_block_delta":
                block, delta = message["content"][step["index"]], step["delta"]
                match delta["type"]:
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "input_json_delta":
                        block["json"] += delta["partial_json"]
            case "content_block_stop":
                assert is_open
                is_open = False
            case "message_delta":
                message |= step["delta"]
                message["usage"] |= step["usage"]
    for block in message["content"]:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return message


def test_events_join_to_the_whole_message(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = f"I need the weather.</think>I look it up.{CALL}{NO_ARGUMENTS}" + END
    for tokens_per_round in (1, 3, 100):
        engine.tokens_per_round = tokens_per_round
        whole, joined = ask(server, tools=[WEATHER]), join(stream(server, tools=[WEATHER]))
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        assert whole["content"][0] == {"type": "thinking", "thinking": "I need the weather.", "signature": ""}
        assert whole["content"][1] == {"type": "text", "text": "I look it up."}
        assert whole["content"][2]["input"] == {"city": "Rome", "days": 3}
        assert whole["content"][3]["input"] == {}
        assert whole["stop_reason"] == "tool_use"
        for message in (whole, joined):
            ids = [block.pop("id") for block in message["content"] if block["type"] == "tool_use"]
            assert len(set(ids)) == 2
            assert all(call_id.startswith("toolu_") for call_id in ids)
            message.pop("id")
        assert joined == whole


def test_end_says_why(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = "</think>One, two, three." + END
    cases: list[tuple[dict[str, Any], str, str | None]] = [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["two"]}, "stop_sequence", "two"),
    ]
    for fields, reason, sequence in cases:
        for message in (ask(server, **fields), join(stream(server, **fields))):
            assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_system_results_and_past_calls_are_rendered(engine: FakeEngine, server: RunningServer) -> None:
    history = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "x"},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2"},
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    ask(server, system=system, messages=history, tools=[WEATHER])
    prompt = prompt_text(engine)
    call = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
    assert "<|system|>Be brief." in prompt
    assert f"<|assistant|><think>I look.</think>One moment.{call}{NO_ARGUMENTS}<|observation|>" in prompt
    results = "<tool_response>sunny</tool_response><tool_response></tool_response>"
    assert f"<|observation|>{results}<|user|>And now?" in prompt
    assert '"description": "Weather of a city."' in prompt


def test_count_is_that_of_the_prompt(engine: FakeEngine, server: RunningServer) -> None:
    fields: dict[str, Any] = {"system": "Be brief.", "messages": HELLO, "tools": [WEATHER]}
    with server.client() as client:
        counted = client.post("/v1/messages/count_tokens", json=fields).json()
    usage = ask(server, **fields)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"]} == {"input_tokens": len(engine.prepared[-1][0])}
    assert usage["cache_read_input_tokens"] == 0


def test_thinking_is_switched_as_the_template_can(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = "Plain." + END
    message = ask(server, thinking={"type": "disabled"})
    assert message["content"] == [{"type": "text", "text": "Plain."}]
    assert prompt_text(engine).endswith("<think></think>")
    ask(server, thinking={"type": "enabled", "budget_tokens": 2000}, output_config={"effort": "high"})
    assert "Thinking effort: high" in prompt_text(engine)


def test_wrong_fields_are_named(server: RunningServer) -> None:
    user = {"role": "user"}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [user]}, "messages[0].content"),
        ({"messages": [{**user, "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{**user, "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{**user, "content": ["x"]}]}, "messages[0].content[0].type"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, *HELLO]},
            "messages[0].content[0].input",
        ),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": 5}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
    ]
    with server.client() as client:
        for fields, field in wrong:
            response = client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 5, **fields})
            assert response.status_code == 400, (fields, response.text)
            body = response.json()
            assert body["type"] == "error"
            assert body["error"]["type"] == "invalid_request_error"
            assert body["error"]["message"].startswith(field), (fields, body)
