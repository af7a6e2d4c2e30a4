"""Every way in which a request can be wrong: the status, the field, and a shape that clients know."""

import threading
from typing import Any

import httpx
import pytest

from specdec.errors import DeadlineError, RankLostError, RequestError, TransferError
from tests.support.fake_engine import BROKEN_ROUND, FakeEngine
from tests.support.running_server import RunningServer, events, running_server, wait_until

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Check the shape of an error and give it."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    return error


WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"function": 1}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning_content": 1}]}, "messages[0].reasoning_content"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature"),
    ({"messages": HELLO, "temperature": -1}, "temperature"),
    ({"messages": HELLO, "temperature": True}, "temperature"),
    ({"messages": HELLO, "top_p": 2}, "top_p"),
    ({"messages": HELLO, "top_k": -2}, "top_k"),
    ({"messages": HELLO, "min_p": 2}, "min_p"),
    ({"messages": HELLO, "n": 0}, "n"),
    ({"messages": HELLO, "n": 1.5}, "n"),
    ({"messages": HELLO, "n": 129}, "n"),
    ({"messages": HELLO, "seed": 1 << 70}, "seed"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    ({"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens"),
    ({"messages": HELLO, "max_completion_tokens": 3, "max_tokens": 4}, "max_tokens"),
    ({"messages": HELLO, "presence_penalty": 3}, "presence_penalty"),
    ({"messages": HELLO, "frequency_penalty": -3}, "frequency_penalty"),
    ({"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": {"1": 101}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": {"9999999": 1}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": [1]}, "logit_bias"),
    ({"messages": HELLO, "stop": [""]}, "stop"),
    ({"messages": HELLO, "stop": 7}, "stop"),
    ({"messages": HELLO, "stop": ["x"] * 65}, "stop"),
    ({"messages": HELLO, "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 129}, "top_logprobs"),
    ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": HELLO, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    (
        {"messages": HELLO, "stream": True, "stream_options": {"continuous_usage_stats": "yes"}},
        "stream_options.continuous_usage_stats",
    ),
    ({"messages": HELLO, "stream": "yes"}, "stream"),
    ({"messages": HELLO, "timeout_s": 0}, "timeout_s"),
    ({"messages": HELLO, "timeout_s": -0.5}, "timeout_s"),
    ({"messages": HELLO, "timeout_s": 3600.5}, "timeout_s"),
    ({"messages": HELLO, "timeout_s": "1s"}, "timeout_s"),
    ({"messages": HELLO, "reasoning_effort": "huge"}, "reasoning_effort"),
    ({"messages": HELLO, "reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
    ({"messages": HELLO, "enable_thinking": True, "chat_template_kwargs": {"enable_thinking": 0}}, "enable_thinking"),
    ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": HELLO, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"messages": HELLO, "functions": [{"name": "f"}]}, "functions"),
    ({"messages": HELLO, "audio": {"voice": "x"}}, "audio"),
    ({"messages": HELLO, "modalities": ["text", "audio"]}, "modalities"),
    ({"messages": HELLO, "tools": [{"type": "custom"}]}, "tools"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a<b"}}]}, "tools"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a" * 257}}]}, "tools"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools"),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HELLO, "tool_choice": "maybe"}, "tool_choice"),
    ({"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"messages": HELLO, "tool_choice": {"type": "custom"}}, "tool_choice"),
    ({"messages": HELLO, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"messages": HELLO, "response_format": {}}, "response_format.type"),
    ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}},
        "response_format.json_schema.schema",
    ),
    (
        {
            "messages": HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        },
        "response_format.json_schema.schema",
    ),
]


def test_wrong_fields_of_a_chat_are_named(engine: FakeEngine, server: RunningServer) -> None:
    with server.client() as client:
        for body, param in WRONG_CHATS:
            error = error_of(client.post(CHAT, json=body), 400)
            assert error["param"] == param, (body, error)
            assert error["message"].startswith(param), (body, error)
            assert error["type"] == "invalid_request_error"
    assert engine.prepared == []
    assert server.service.admission.num_open == 0


NO_SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}},
    "required": ["a"],
}
ENDLESS: Any = {"$ref": "#"}  # nothing is one; only the vocabulary tells
FALSE: Any = {"type": "object", "properties": {"x": False}, "required": ["x"]}


def schema_form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def function(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


WRONG_GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": schema_form(ENDLESS)}, "response_format.json_schema.schema"),
    ({"response_format": schema_form(FALSE)}, "response_format.json_schema.schema"),
    ({"response_format": schema_form(FALSE), "tools": [function({})]}, "response_format.json_schema.schema"),
    ({"response_format": schema_form({}), "tools": [function(NO_SCHEMA)]}, "tools"),
    ({"tools": [function(NO_SCHEMA)], "tool_choice": "required"}, "tools"),
    ({"response_format": schema_form({}), "tools": [function(NO_SCHEMA)], "tool_choice": "required"}, "tools"),
]


@pytest.mark.xdist_group("glm_tiny_server")
@pytest.mark.parametrize("is_streamed", [False, True])
def test_schema_that_the_engine_cannot_follow_is_named(tiny_server: RunningServer, is_streamed: bool) -> None:
    with tiny_server.client() as client:
        for body, param in WRONG_GRAMMARS:
            error = error_of(client.post(CHAT, json={"messages": HELLO, "stream": is_streamed, **body}), 400)
            assert error["param"] == param, (body, error)
            assert error["message"].startswith(f"{param}: "), (body, error)
        wishes = {"output_config": {"format": {"type": "json_schema", "schema": ENDLESS}}, "max_tokens": 5}
        refused = client.post(MESSAGES, json={"messages": HELLO, **wishes})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("output_config.format.schema: ")
    assert tiny_server.service.admission.num_open == 0


WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": [[1], "x"]}, "prompt"),
    ({"prompt": {"x": 1}}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [[1, "x"]]}, "prompt[0][1]"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "logprobs": 500}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "echo": True}, "echo"),
    ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "timeout_s": 4000}, "timeout_s"),
]


def test_wrong_fields_of_a_completion_are_named(engine: FakeEngine, server: RunningServer) -> None:
    with server.client() as client:
        for body, param in WRONG_COMPLETIONS:
            error = error_of(client.post(COMPLETION, json=body), 400)
            assert error["param"] == param, (body, error)
        for prompt in ("", [""], [[]], [10**9], [-1]):
            assert error_of(client.post(COMPLETION, json={"prompt": prompt}), 400)["param"] == "prompt"
    assert engine.running == []
    assert server.service.admission.num_open == 0


def test_wrong_fields_of_a_conversation_to_tokenise_are_named(server: RunningServer) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": [*HELLO, arguments_of("[1]")]}, "messages"),
    ]
    with server.client() as client:
        for body, param in wrong:
            error = error_of(client.post("/tokenize", json=body), 400)
            assert error["param"] == param, (body, error)


def arguments_of(arguments: str) -> dict[str, Any]:
    """A message that calls a function."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize", "/detokenize"])
def test_body_that_is_no_json_object_is_refused(server: RunningServer, path: str) -> None:
    bodies = [b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff", b'{"prompt": "\xff"}', b'{"a": NaN}', b"[" * 100_000]
    bodies += [b'{"prompt": "\\ud800"}', b'{"prompt": "\\ud800x"}', b'{"n": 1e999}', b"{" + b'"a":{' * 5000]
    with server.client(headers={"content-type": "application/json"}) as client:
        for body in bodies:
            error_of(client.post(path, content=body), 400)


def test_content_must_say_that_it_is_json(server: RunningServer) -> None:
    with server.client() as client:
        for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
            response = client.post(CHAT, content=b'{"messages": []}', headers={"content-type": content_type})
            error_of(response, 415)
        response = client.post(
            CHAT, json={"messages": HELLO}, headers={"content-type": "Application/JSON; charset=utf-8"}
        )
        assert response.status_code == 200


def test_unknown_model_path_and_method(server: RunningServer) -> None:
    with server.client() as client:
        for path, body in ((CHAT, {"messages": HELLO}), (COMPLETION, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            error = error_of(client.post(path, json={"model": "gpt-9", **body}), 404)
            assert (error["param"], error["code"]) == ("model", "model_not_found")
        error_of(client.get("/v1/models/gpt-9"), 404)
        error_of(client.get("/nothing"), 404)
        error_of(client.get(CHAT), 405)
        error_of(client.delete("/v1/models"), 405)


def test_prompt_that_is_too_long_is_refused_with_both_numbers(server: RunningServer) -> None:
    with server.client() as client:
        for path, body in (
            (COMPLETION, {"prompt": [5] * 3000}),
            (CHAT, {"messages": [{"role": "user", "content": "1" * 3000}]}),
        ):
            error = error_of(client.post(path, json=body), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
            assert "30" in error["message"]
            assert "2047" in error["message"]


def test_keys_are_asked_for_where_there_are_some(engine: FakeEngine) -> None:
    with running_server(engine, api_keys=("one", "two")) as server, server.client() as client:
        wrong: list[dict[str, str]] = [
            {},
            {"authorization": "Bearer three"},
            {"authorization": "Bearer"},
            {"authorization": "one"},
            {"authorization": "Basic one"},
            {"x-api-key": "on"},
            {"x-api-key": "oneé"},
        ]
        for headers in wrong:
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            for path in (CHAT, COMPLETION, "/tokenize", "/detokenize"):
                response = client.post(path, json={}, headers=encoded)
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(client.get("/v1/models", headers=encoded), 401)
            assert client.post(MESSAGES, json={}, headers=encoded).json()["error"]["type"] == "authentication_error"
        for headers in ({"authorization": "Bearer one"}, {"authorization": "bearer two"}, {"x-api-key": "two"}):
            assert client.post(CHAT, json={"messages": HELLO}, headers=headers).status_code == 200
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert client.get(path).status_code == 200


def test_body_that_is_too_large_is_refused(engine: FakeEngine) -> None:
    with running_server(engine, max_body_bytes=1000) as server, server.client() as client:
        content = b'{"messages": [{"role": "user", "content": "' + b"x" * 200_000 + b'"}]}'
        headers = {"content-type": "application/json"}
        error = error_of(client.post(CHAT, content=content, headers=headers), 413)
        assert str(len(content)) in error["message"]
        assert "1000" in error["message"]
        pieces = (content[at : at + 1000] for at in range(0, len(content), 1000))
        error_of(client.post(CHAT, content=pieces, headers=headers), 413)  # in chunks, of no announced length
        assert client.post(CHAT, json={"messages": HELLO}).status_code == 200


def test_full_queue_is_told_with_a_time_to_retry(engine: FakeEngine) -> None:
    engine.gate.clear()
    with running_server(engine, max_running=2, max_queued_requests=1) as server, server.client() as client:
        body = {"messages": HELLO, "n": 2, "stream": True}
        with client.stream("POST", CHAT, json=body | {"n": 4}) as response:
            response.read()
            assert error_of(response, 400)["code"] == "too_many_completions"
        clients = [server.client() for _ in range(2)]
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda c=c, n=n: answers.append(c.post(CHAT, json=body | {"n": n})))  # type: ignore[misc]
            for c, n in zip(clients, (2, 1), strict=True)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.service.admission.num_open == 3, "both requests are here")
        response = client.post(CHAT, json={"messages": HELLO})
        error = error_of(response, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        assert client.post(MESSAGES, json={"messages": HELLO, "max_tokens": 5}).json()["error"]["type"] == (
            "rate_limit_error"
        )
        engine.gate.set()
        for thread in threads:
            thread.join(timeout=60)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert client.post(CHAT, json={"messages": HELLO}).status_code == 200
        for each in clients:
            each.close()


def test_engine_that_is_lost_is_unhealthy_and_ends_the_server(engine: FakeEngine) -> None:
    with running_server(engine) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        engine.lost = RankLostError("rank 1 has died of a secret")
        response = client.post(CHAT, json={"messages": HELLO})
        error = error_of(response, 503)
        assert "secret" not in error["message"]
        assert "retry-after" in response.headers
        for path in ("/health", "/ready"):
            error_of(client.get(path), 503)
        wait_until(lambda: server.failure is not None, "the server ends")
    assert isinstance(server.failure, RankLostError)


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (BROKEN_ROUND, 500),
        (TransferError("no prefill is left"), 503),
        (DeadlineError("it took too long"), 504),
        (RequestError("its bans leave no token"), 400),
    ],
)
def test_generation_that_fails_is_told_whole_and_streamed(engine: FakeEngine, failure: Any, status: int) -> None:
    engine.failure = failure
    with running_server(engine) as server, server.client() as client:
        for path, body in ((CHAT, {"messages": HELLO, "n": 3}), (COMPLETION, {"prompt": ["x", "y"]})):
            for is_streamed in (False, True):  # nothing was sent yet: the status says it
                error = error_of(client.post(path, json={**body, "stream": is_streamed}), status)
                assert "secret" not in error["message"]
        wait_until(lambda: server.service.admission.num_open == 0, "all have left")
        engine.failure = None
        assert client.post(CHAT, json={"messages": HELLO}).status_code == 200


def test_stream_that_fails_in_the_middle_ends_with_an_error(engine: FakeEngine, server: RunningServer) -> None:
    engine.is_stepped = True
    for path, body in (
        (CHAT, {"messages": HELLO}),
        (COMPLETION, {"prompt": "x", "max_tokens": 500}),
        (MESSAGES, {"messages": HELLO, "max_tokens": 500}),
    ):
        with server.client() as client, client.stream("POST", path, json={**body, "stream": True}) as response:
            pieces = response.iter_raw()
            first = next(pieces)
            engine.failure = BROKEN_ROUND
            engine.gate.set()
            rest = b"".join(pieces)
        engine.failure = None
        engine.gate.set()
        assert response.status_code == 200
        ends = events(httpx.Response(200, content=first + rest))
        error = ends[-1]["error"] if path == MESSAGES else ends[-2]["error"]
        assert error["message"] == "the server failed to process the request"
        if path != MESSAGES:
            assert ends[-1] == "[DONE]"


def test_request_has_a_bounded_time(engine: FakeEngine) -> None:
    engine.gate.clear()
    with running_server(engine, request_timeout_s=0.2) as server, server.client() as client:
        error = error_of(client.post(CHAT, json={"messages": HELLO}), 504)
        assert error["code"] == "timeout"
        error_of(client.post(CHAT, json={"messages": HELLO, "stream": True}), 504)
        engine.gate.set()
        wait_until(lambda: not engine.running, "they have ended")


@pytest.mark.parametrize("path", [CHAT, COMPLETION, MESSAGES])
def test_request_may_ask_for_less_time_than_the_servers(engine: FakeEngine, path: str) -> None:
    body = {"prompt": "x"} if path == COMPLETION else {"messages": HELLO}
    engine.gate.clear()
    with running_server(engine, request_timeout_s=30) as server, server.client() as client:
        for is_streamed in (False, True):
            wishes = {"max_tokens": 9, "stream": is_streamed, "timeout_s": 0.2}
            assert client.post(path, json={**body, **wishes}).status_code == 504
        refused = client.post(path, json={**body, "max_tokens": 9, "timeout_s": 30.5})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("timeout_s must be positive and at most 30,")
        engine.gate.set()
        for given in (30, None):
            assert client.post(path, json={**body, "max_tokens": 9, "timeout_s": given}).status_code == 200
        wait_until(lambda: not engine.running, "they have ended")


def test_anthropic_errors_have_that_apis_shape(server: RunningServer) -> None:
    with server.client() as client:
        response = client.post(MESSAGES, json={"messages": HELLO})
        assert response.status_code == 400
        body = response.json()
        assert body == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "max_tokens is required"},
            "request_id": response.headers["x-request-id"],
        }
        response = client.post(MESSAGES, json={"model": "gpt-9", "max_tokens": 5, "messages": HELLO})
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
