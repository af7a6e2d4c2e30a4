"""A request's priority and its time go to the engine, which sees to both."""

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
def test_every_api_takes_a_priority_to_the_engine(path: str, engine: FakeEngine, server: RunningServer) -> None:
    with server.client() as client:
        for given in ({"priority": -3}, {"priority": None}, {}):
            assert client.post(path, json={**BODIES[path], **given}).status_code == 200
        refused = client.post(path, json={**BODIES[path], "priority": "high"})
    assert engine.priorities == [-3, 0, 0]
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("priority: ")


def test_priority_out_of_range_is_refused_by_name(tiny_server: RunningServer) -> None:
    with tiny_server.client() as client:
        refused = client.post("/v1/completions", json={"prompt": "x", "priority": 10**7})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
