"""`/v1/chat/completions` over an engine that says what it is told to."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from specdec.sampling.sampling_params import SamplingParams
from tests.support.fake_engine import END, FakeEngine
from tests.support.running_server import RunningServer, events, running_server, wait_until

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)


def ask(server: RunningServer, **fields: Any) -> dict[str, Any]:
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: RunningServer, **fields: Any) -> list[Any]:
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert chunks[-1] == "[DONE]"
    return chunks[:-1]


def test_reasoning_and_content_are_told_apart(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = "They greet me.</think>Hello, world!" + END
    answer = ask(server)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello, world!",
        "refusal": None,
        "reasoning_content": "They greet me.",
    }
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None


def test_chunks_join_to_the_whole_answer(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = f"I need the weather: 你好 🙂.</think>I look it up.{CALL}{CALL}" + END
    for tokens_per_round in (1, 3, 100):
        engine.tokens_per_round = tokens_per_round
        whole = ask(server, tools=[WEATHER], n=2)
        chunks = stream(server, tools=[WEATHER], n=2, stream_options={"include_usage": True})
        assert chunks[-1]["usage"] == whole["usage"]
        assert chunks[-1]["choices"] == []
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert len({chunk["id"] for chunk in chunks}) == 1
        for choice in whole["choices"]:
            own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            joined = join(own)
            ids = [call.pop("id") for call in choice["message"]["tool_calls"]]
            assert len(set(ids)) == 2
            streamed_ids = [call.pop("id") for call in joined["tool_calls"]]
            assert len(set(streamed_ids)) == 2
            message = choice["message"]
            assert joined == {name: message[name] for name in ("content", "reasoning_content", "tool_calls")}
            assert [each["finish_reason"] for each in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1]["finish_reason"] == choice["finish_reason"] == "tool_calls"
            arguments = message["tool_calls"][0]["function"]["arguments"]
            assert json.loads(arguments) == {"city": "Rome", "days": 3}


def join(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the deltas of one choice together, as a client does."""
    joined: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        joined["content"] += delta.get("content") or ""
        joined["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(joined["tool_calls"])
                joined["tool_calls"].append(
                    {"id": call["id"], "type": call["type"], "function": {**call["function"], "arguments": ""}}
                )
            joined["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return joined


def test_usage_counts_reasoning_drafts_and_cached_tokens(engine: FakeEngine, server: RunningServer) -> None:
    assert engine.tokenizer is not None
    engine.text = "They greet me.</think>Hello!" + END
    usage = ask(server, n=2)["usage"]
    num_tokens = len(engine.tokenizer.encode(engine.text))
    num_reasoning = len(engine.tokenizer.encode("They greet me."))
    assert usage["completion_tokens"] == 2 * num_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 2 * num_reasoning,
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 2,
    }


def test_accepted_drafts_never_outnumber_the_tokens(engine: FakeEngine, server: RunningServer) -> None:
    usage = ask(server, max_tokens=1)["usage"]
    details = usage["completion_tokens_details"]
    assert usage["completion_tokens"] == 1
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (1, 2)


def test_fields_become_sampling_parameters(engine: FakeEngine, server: RunningServer) -> None:
    ask(
        server,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 1.5},
        seed=-3,
        stop="###",
        stop_token_ids=[7],
        min_tokens=1,
        max_completion_tokens=9,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=2,
    )
    assert engine.prepared[-1][1] == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={5: -100.0, 6: 1.5},
        seed=-3,
        stop=("###",),
        stop_token_ids=(7,),
        min_tokens=1,
        max_tokens=9,
        ignore_eos=True,
        logprobs=2,
        skip_special_tokens=False,
    )


def test_null_counts_as_not_given_and_defaults_are_the_checkpoints() -> None:
    engine = FakeEngine()
    engine.sampling_defaults = {"temperature": 0.7, "top_p": 0.8}
    with running_server(engine) as server:
        ask(server, temperature=None, top_p=0.5, stop=None, n=None, stream=None, tools=None, max_tokens=None)
    params = engine.prepared[-1][1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.7, 0.5, None)


def test_logprobs_are_the_models_own_and_leave_out_the_end(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = "</think>Hi" + END
    for answers in (
        [ask(server, logprobs=True, top_logprobs=2)["choices"][0]],
        [choice for chunk in stream(server, logprobs=True, top_logprobs=2)[1:] for choice in chunk["choices"]],
    ):
        content = [token for answer in answers for token in answer["logprobs"]["content"]]
        assert "".join(token["token"] for token in content) == "</think>Hi"
        assert bytes(byte for token in content for byte in token["bytes"]) == b"</think>Hi"
        assert {token["logprob"] for token in content} == {-9999.0}  # minus infinity, which JSON lacks
        assert [each["logprob"] for each in content[0]["top_logprobs"]] == [-1.0, -2.0]


def test_unknown_fields_are_ignored_and_named(engine: FakeEngine, server: RunningServer) -> None:
    fields = {"messages": HELLO, "temprature": 0, "user": "someone", "sto p\r\nx: y": 1, "metadata": None}
    with server.client() as client:
        response = client.post("/v1/chat/completions", json=fields)
    assert response.status_code == 200
    assert response.headers["x-specdec-ignored-fields"] == "temprature, user, ?"
    assert "metadata" not in response.headers["x-specdec-ignored-fields"]
    with server.client() as client:
        assert "x-specdec-ignored-fields" not in client.post("/v1/chat/completions", json={"messages": HELLO}).headers


def test_developer_is_another_word_for_system(engine: FakeEngine, server: RunningServer) -> None:
    ask(server, messages=[{"role": "developer", "content": [{"type": "text", "text": "Be kind."}]}, *HELLO])
    ask(server, messages=[{"role": "system", "content": "Be kind."}, *HELLO])
    assert engine.prepared[-1][0] == engine.prepared[-2][0]


def test_history_with_calls_and_results_is_rendered(engine: FakeEngine, server: RunningServer) -> None:
    history = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I look.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"days": 3}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    ask(server, messages=history, tools=[WEATHER])
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.decode(engine.prepared[-1][0], skip_special_tokens=False)
    call = "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
    assert f"<think>I look.</think>{call}<|observation|><tool_response>sunny</tool_response>" in prompt


def test_tools_that_may_not_be_called_are_not_shown_and_calls_are_text(
    engine: FakeEngine, server: RunningServer
) -> None:
    engine.text = f"</think>{CALL}" + END
    message = ask(server, tools=[WEATHER], tool_choice="none")["choices"][0]["message"]
    assert message["content"] == CALL
    assert "tool_calls" not in message
    assert engine.tokenizer is not None
    assert "get_weather" not in engine.tokenizer.decode(engine.prepared[-1][0], skip_special_tokens=False)


def test_reply_ends_after_one_call_where_several_are_not_wanted(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = f"</think>{CALL}{CALL}" + END
    for tokens_per_round in (1, 100):
        engine.tokens_per_round = tokens_per_round
        (choice,) = ask(server, tools=[WEATHER], parallel_tool_calls=False)["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
        assert len(ask(server, tools=[WEATHER])["choices"][0]["message"]["tool_calls"]) == 2


def test_only_allowed_tools_are_shown(engine: FakeEngine, server: RunningServer) -> None:
    other = {"type": "function", "function": {"name": "get_time"}}
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    ask(server, tools=[WEATHER, other], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.decode(engine.prepared[-1][0], skip_special_tokens=False)
    assert "get_time" in prompt
    assert "get_weather" not in prompt


def test_call_that_the_limit_cuts_is_no_finished_call(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = f"</think>{CALL}" + END
    (choice,) = ask(server, tools=[WEATHER], max_tokens=6)["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_thinking_is_switched_as_the_template_can(engine: FakeEngine, server: RunningServer, is_streamed: bool) -> None:
    engine.text = "Plain." + END
    fields: list[dict[str, Any]] = [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ]
    for field in fields:
        if is_streamed:
            joined = join([choice for chunk in stream(server, **field) for choice in chunk["choices"]])
        else:
            joined = {"reasoning_content": "", **ask(server, **field)["choices"][0]["message"]}
        assert (joined["content"], joined["reasoning_content"]) == ("Plain.", "")
    assert {tuple(prompt) for prompt, _ in engine.prepared} == {tuple(engine.prepared[0][0])}


def test_published_tools_are_accepted(engine: FakeEngine, server: RunningServer) -> None:
    rows = (Path(__file__).parents[2] / "data" / "bfcl_tools.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        for choice in ("auto", "required"):
            ask(server, messages=row["messages"], tools=row["tools"], tool_choice=choice, max_tokens=1)
            grammar = engine.prepared[-1][1].grammar
            assert (grammar is not None) == (choice == "required")


def test_prompt_that_takes_long_to_prepare_holds_up_nobody() -> None:
    class SlowEngine(FakeEngine):
        """Takes its time for one prompt."""

        is_ready = threading.Event()

        def apply_chat_template(self, messages: Any, **fields: Any) -> list[int]:
            if "long" in messages[0]["content"]:
                assert self.is_ready.wait(timeout=30)
            return super().apply_chat_template(messages, **fields)

    engine = SlowEngine()
    with running_server(engine) as server:
        answers: list[dict[str, Any]] = []
        long_one = [{"role": "user", "content": "a long story"}]
        thread = threading.Thread(target=lambda: answers.append(ask(server, messages=long_one)))
        thread.start()
        wait_until(lambda: server.service.admission.num_open == 1, "it is let in")
        ask(server)
        with server.client() as client:
            assert client.get("/health").status_code == 200
        assert not answers
        engine.is_ready.set()
        thread.join(timeout=60)
    assert answers[0]["choices"][0]["message"]["content"] == "Hello, world!"
