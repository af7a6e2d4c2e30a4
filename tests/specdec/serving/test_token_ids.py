"""Answers give the ids of their tokens to those who ask, streamed or not."""

from typing import Any

import pytest

from tests.support.fake_engine import END, FakeEngine
from tests.support.running_server import RunningServer, events

TEXT = "</think>Hello, world!" + END
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}


@pytest.mark.parametrize("path", BODIES)
def test_ids_are_those_of_all_tokens_in_order(path: str, engine: FakeEngine, server: RunningServer) -> None:
    assert engine.tokenizer is not None
    engine.text, engine.tokens_per_round = TEXT, 1
    expected = engine.tokenizer.encode(TEXT)
    asked = {**BODIES[path], "return_token_ids": True, "n": 2}
    with server.client() as client:
        whole = client.post(path, json=asked).json()
        streamed = events(client.post(path, json={**asked, "stream": True}))
    assert [choice["token_ids"] for choice in whole["choices"]] == [expected, expected]
    joined: list[list[int]] = [[], []]
    for chunk in streamed[:-1]:
        choice = chunk["choices"][0]
        joined[choice["index"]] += choice.get("token_ids", [])
    assert joined == [expected, expected]


@pytest.mark.parametrize("path", BODIES)
def test_nobody_else_gets_them(path: str, server: RunningServer) -> None:
    with server.client() as client:
        for given in ({}, {"return_token_ids": False}, {"stream": True}):
            assert "token_ids" not in client.post(path, json={**BODIES[path], **given}).text
