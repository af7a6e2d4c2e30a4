"""Answers against the published schemas of the OpenAI API, and whatever those schemas allow as a request."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from specdec.serving.openai_api.chat_request import UNSUPPORTED
from tests.support.fake_engine import END, FakeEngine
from tests.support.running_server import RunningServer, events, running_server

DOCUMENT = json.loads((Path(__file__).parents[2] / "data" / "openai_openapi_subset.json").read_text())
HELLO = [{"role": "user", "content": "Hello"}]
CALL = "<tool_call>get_time<arg_key>zone</arg_key><arg_value>UTC</arg_value></tool_call>"
TOOL = {"type": "function", "function": {"name": "get_time"}}


def validator(name: str) -> jsonschema_rs.Validator:
    """Check against one schema of the document; `nullable` is the older way to allow null."""
    components = _with_null(DOCUMENT["components"])
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": components})


def _with_null(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copied = {key: _with_null(value) for key, value in schema.items()}
    return {"anyOf": [copied, {"type": "null"}]} if copied.pop("nullable", False) is True else copied


ANSWERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "cut": {"max_tokens": 3},
    "call": {"tools": [TOOL]},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_a_chat_are_as_published(engine: FakeEngine, server: RunningServer, name: str) -> None:
    engine.text = "They greet me.</think>Hello!" + (CALL if name == "call" else "") + END
    body = {"messages": HELLO, **ANSWERS[name]}
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=body).json()
        validator("CreateChatCompletionResponse").validate(answer)
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        chunks = events(client.post("/v1/chat/completions", json=streamed))[:-1]
    for chunk in chunks:
        validator("CreateChatCompletionStreamResponse").validate(chunk)


def test_other_answers_are_as_published(server: RunningServer) -> None:
    with server.client() as client:
        body: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "logprobs": 1}
        validator("CreateCompletionResponse").validate(client.post("/v1/completions", json=body).json())
        validator("ListModelsResponse").validate(client.get("/v1/models").json())
        validator("Model").validate(client.get("/v1/models/tiny").json())
        for response in (client.post("/v1/completions", json={}), client.get("/v1/models/x"), client.get("/x")):
            validator("ErrorResponse").validate(response.json())


@pytest.fixture(scope="module")
def fuzzed_server() -> Any:
    engine = FakeEngine()
    with running_server(engine, max_running=64, max_queued_requests=1024) as server:
        yield server


api = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {operation.label: operation for operation in (each.ok() for each in api.get_all_operations())}
CHAT, COMPLETION = "/chat/completions", "/completions"
# Schemas of a chunk; that of completions says nothing of chunks, which have a reason and maybe usage at the end only.
CHUNKS = {CHAT: "CreateChatCompletionStreamResponse", COMPLETION: "CreateCompletionResponse"}


def check_answer(case: Any, response: Any) -> None:
    """Hold an answer, or each chunk of it, to the schema of its path."""
    kind = response.headers["content-type"][0]
    if not kind.startswith("text/event-stream"):
        checks = [response_schema_conformance] if kind == "application/json" else []
        case.validate_response(response, checks=[not_a_server_error, *checks])
        return
    case.validate_response(response, checks=[not_a_server_error])
    *given_chunks, end = events(httpx.Response(200, content=response.content))
    assert end == "[DONE]"
    for given_chunk in given_chunks:
        chunk = {name: value for name, value in given_chunk.items() if (name, value) != ("usage", None)}
        if case.path == COMPLETION:
            chunk["choices"] = [each | {"finish_reason": each["finish_reason"] or "stop"} for each in chunk["choices"]]
        validator(CHUNKS[case.path]).validate(chunk)


@api.parametrize()
@settings(max_examples=40, suppress_health_check=list(HealthCheck), derandomize=True)
def test_whatever_the_schema_allows_is_no_server_error(case: Any, fuzzed_server: RunningServer) -> None:
    if isinstance(case.body, dict):  # so that what follows the first checks is reached, too
        case.body = {name: value for name, value in case.body.items() if name not in UNSUPPORTED} | {"model": "tiny"}
    check_answer(case, case.call(base_url=f"{fuzzed_server.url}/v1"))


def make_servable(case: Any, *, model: str, is_streamed: bool) -> None:
    """Take out of a request what the schema allows and a text model of few tokens, or this server, does not."""
    case.path_parameters = dict.fromkeys(case.path_parameters or (), model)
    if not isinstance(case.body, dict):
        return
    body = {name: value for name, value in case.body.items() if name not in (*UNSUPPORTED, *NOT_SERVED)}
    body |= {name: int(body[name]) for name in ("n", "top_logprobs", "logprobs") if type(body.get(name)) is float}
    body |= {"model": model, "stream": is_streamed, "logit_bias": {"5": 1}, "max_tokens": 3}
    if not is_streamed:
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if body.get("n") is not None:
        body["n"] = 1 + body["n"] % 2
    if case.path == COMPLETION:
        body["prompt"] = _some_prompt(body.get("prompt"))
    else:
        body["messages"] = [_some_message(message) for message in body["messages"]]
    case.body = body


# What is refused with 400 by a rule that the schema does not have; `test_refusals.py` has these rules.
NOT_SERVED = {
    *("best_of", "echo", "suffix", "modalities", "tool_choice", "tools", "response_format", "stop", "seed"),
    "max_completion_tokens",
}


def _some_prompt(given: Any) -> Any:
    """Give a prompt of the same kind that is not empty, with ids that exist."""
    match given:
        case [int(), *_]:
            return [token_id % 3000 for token_id in given]
        case [list(), *_]:
            return [[token_id % 3000 for token_id in ids] for ids in given[:4]]
        case [str(), *_]:
            return [text or "x" for text in given[:4]]
        case _:
            return given or "x"


def _some_message(given: Any) -> Any:
    """Give a message of the same role that says something in text."""
    role = "user" if given["role"] == "function" else given["role"]
    message: dict[str, Any] = {"role": role, "content": "Hello"}
    content = given.get("content")
    if isinstance(content, str):
        message["content"] = content
    elif isinstance(content, list):
        message["content"] = [part for part in content if part["type"] == "text"]
    return message | {name: given[name] for name in ("name", "tool_call_id") if name in given}


def share_of_answers(label: str, server: RunningServer, *, model: str, num_requests: int) -> float:
    """Send requests that the schema allows and the server can serve; gives how many were answered, of all."""
    statuses: Counter[int] = Counter()
    kinds: Counter[str] = Counter()

    @settings(max_examples=num_requests, suppress_health_check=list(HealthCheck), derandomize=True, deadline=None)
    @given(case=OPERATIONS[label].as_strategy(), is_streamed=st.booleans())
    def send(case: Any, is_streamed: bool) -> None:
        make_servable(case, model=model, is_streamed=is_streamed)
        response = case.call(base_url=f"{server.url}/v1")
        check_answer(case, response)
        statuses[response.status_code] += 1
        kinds[response.headers["content-type"][0].partition(";")[0]] += 1

    send()
    assert len(kinds) == (2 if label.startswith("POST") else 1), "answers are whole and streamed"
    return statuses[200] / statuses.total()


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_can_be_served_is_answered_as_published(label: str, fuzzed_server: RunningServer) -> None:
    assert share_of_answers(label, fuzzed_server, model="tiny", num_requests=40) >= 0.9


@pytest.mark.xdist_group("glm_tiny_server")
@pytest.mark.parametrize("label", OPERATIONS)
def test_an_engine_with_a_model_answers_as_published(label: str, tiny_server: RunningServer) -> None:
    assert share_of_answers(label, tiny_server, model="glm-tiny", num_requests=8) >= 0.8
