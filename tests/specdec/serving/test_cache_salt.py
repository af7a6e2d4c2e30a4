"""A salt in a request keeps what is reused to those who give the same."""

from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.running_server import RunningServer

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 8},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_api_takes_a_salt_to_the_engine(path: str, engine: FakeEngine, server: RunningServer) -> None:
    with server.client() as client:
        for given in ({"cache_salt": "ours"}, {"cache_salt": None}, {}):
            assert client.post(path, json={**BODIES[path], **given}).status_code == 200
        refused = client.post(path, json={**BODIES[path], "cache_salt": 3})
    assert engine.salts == ["ours", None, None]
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("cache_salt: ")


def test_tokens_are_cached_for_those_with_the_same_salt(tiny_server: RunningServer) -> None:
    prompt = list(range(300, 440))
    hits = []
    with tiny_server.client() as client:
        for salt in ("one", "another", "one", None):
            asked = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "cache_salt": salt}
            usage = client.post("/v1/completions", json=asked).json()["usage"]
            hits.append(usage["prompt_tokens_details"]["cached_tokens"])
        refused = client.post("/v1/completions", json={"prompt": prompt, "cache_salt": ""})
    assert hits == [0, 0, 128, 0]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
