"""Chunks of a stream tell the usage so far to those who ask for it, in chats and completions alike."""

from typing import Any

import pytest

from tests.support.fake_engine import END, FakeEngine
from tests.support.running_server import RunningServer, events

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": ["Hello", "Good morning"]},
}
parametrize_paths = pytest.mark.parametrize("path", BODIES)


def stream(server: RunningServer, path: str, **fields: Any) -> list[Any]:
    with server.client() as client:
        response = client.post(path, json={**BODIES[path], "stream": True, **fields})
    assert response.status_code == 200, response.text
    return events(response)[:-1]


@parametrize_paths
@pytest.mark.parametrize("include_usage", [False, True])
def test_each_chunk_counts_the_tokens_up_to_it(
    path: str, include_usage: bool, engine: FakeEngine, server: RunningServer
) -> None:
    engine.text = "They greet me.</think>Hello, world!" + END
    with server.client() as client:
        usage = client.post(path, json={**BODIES[path], "n": 2, "max_tokens": 100}).json()["usage"]
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    chunks = stream(server, path, n=2, max_tokens=100, return_token_ids=True, stream_options=options)
    assert (chunks[-1]["choices"] == []) == include_usage
    num_tokens = 0
    for chunk in chunks[: len(chunks) - include_usage]:
        num_tokens += len(chunk["choices"][0].get("token_ids", ()))
        assert chunk["usage"] == {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": num_tokens,
            "total_tokens": usage["prompt_tokens"] + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
    assert num_tokens == usage["completion_tokens"]
    if include_usage:
        assert chunks[-1]["usage"] == usage


@parametrize_paths
def test_nobody_else_gets_it(path: str, server: RunningServer) -> None:
    for options in (None, {}, {"continuous_usage_stats": False}, {"include_usage": None}):
        assert all("usage" not in chunk for chunk in stream(server, path, stream_options=options))


@parametrize_paths
def test_cached_tokens_are_told_from_the_first_chunk_on(path: str, tiny_server: RunningServer) -> None:
    text = "usage so far " * 100
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    fields = {**prompt, "max_tokens": 3, "temperature": 0, "cache_salt": path}
    first, again = (
        stream(tiny_server, path, **fields, stream_options={"continuous_usage_stats": True}) for _ in range(2)
    )
    assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in first} == {0}
    (num_cached,) = {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in again}
    assert num_cached > 0
