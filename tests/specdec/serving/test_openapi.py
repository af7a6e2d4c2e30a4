"""Answers against the published schemas of the OpenAI API, and whatever those schemas allow as a request."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
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


@api.parametrize()
@settings(max_examples=40, suppress_health_check=list(HealthCheck), derandomize=True)
def test_whatever_the_schema_allows_is_no_server_error(case: Any, fuzzed_server: RunningServer) -> None:
    if isinstance(case.body, dict):  # so that what follows the first checks is reached, too
        case.body = {name: value for name, value in case.body.items() if name not in UNSUPPORTED} | {"model": "tiny"}
    response = case.call(base_url=f"{fuzzed_server.url}/v1")
    is_json = response.headers["content-type"][0] == "application/json"
    case.validate_response(response, checks=[not_a_server_error, *([response_schema_conformance] if is_json else [])])
