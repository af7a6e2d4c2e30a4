"""Nothing stays behind: after hundreds of requests of every kind a server holds what it held before them."""

import asyncio
import gc
import os
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from specdec.engine import Engine
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import RunningServer, running_server, wait_until

CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
# Greedy: the same replies again and again, so that the kept prefixes are the same after the first of each.
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
    "max_tokens": 6,
    "ignore_eos": True,
}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": PARAMETERS}
JSON = {"type": "json_object"}
NUM_CLIENTS = 6
MAX_GROWTH_BYTES = 400_000  # less than what the requests that are kept by mistake would take


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert b"data: " in response.read()


def answer(client: httpx.Client, path: str, body: dict[str, Any], *, status: int = 200) -> None:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text


def leave_stream(client: httpx.Client) -> None:
    with client.stream("POST", CHAT, json={**HELLO, "max_tokens": 500, "n": 2, "stream": True}) as response:
        next(response.iter_raw())


def leave_answer(client: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json={**HELLO, "max_tokens": 2000}, timeout=0.1)


def break_off(client: httpx.Client) -> None:
    def half_a_body() -> Any:
        yield b'{"messages": '
        raise ConnectionError

    headers = {"content-type": "application/json"}
    with pytest.raises(ConnectionError):
        client.post(CHAT, content=half_a_body(), headers=headers)


KINDS: tuple[Callable[[httpx.Client], None], ...] = (
    lambda client: stream(client, CHAT, {**HELLO, "logprobs": True, "stream_options": {"include_usage": True}}),
    leave_stream,
    lambda client: answer(client, CHAT, {**HELLO, "n": 3}),
    lambda client: answer(client, CHAT, {"messages": []}, status=400),
    lambda client: stream(client, CHAT, {**HELLO, "tools": [TOOL]}),
    lambda client: answer(client, COMPLETION, {**HELLO, "messages": None, "prompt": ["a b", "c d"], "n": 2}),
    leave_answer,
    lambda client: answer(client, CHAT, {**HELLO, "max_tokens": 24, "tools": [TOOL], "tool_choice": "required"}),
    lambda client: answer(client, COMPLETION, {"prompt": [5] * 100_000}, status=400),
    lambda client: stream(client, MESSAGES, {**HELLO, "tools": [ANTHROPIC_TOOL]}),
    lambda client: stream(client, CHAT, {**HELLO, "response_format": JSON}),
    lambda client: answer(client, CHAT, {**HELLO, "model": "another"}, status=404),
    break_off,
    lambda client: stream(client, COMPLETION, {**HELLO, "messages": None, "prompt": "Once", "stop": ["\n\n"]}),
)


def send(server: RunningServer, num_requests: int) -> None:
    """Send requests of all kinds, some at the same time, and wait until the server is done with them."""
    with server.client() as client, ThreadPoolExecutor(NUM_CLIENTS) as clients:
        for _ in clients.map(lambda index: KINDS[index % len(KINDS)](client), range(num_requests)):
            pass
    wait_until(lambda: server.service.num_open == 0, "all are let go")


def held(server: RunningServer, engine: Engine) -> dict[str, Any]:
    """What a server holds while nobody asks anything."""

    async def count_tasks() -> int:
        return len(asyncio.all_tasks())

    workers = "specdec-requests"  # at most as many as the pool may have, which fills as it needs them
    num_free, num_pages = engine.kv_pages()
    gc.collect()
    return {
        "tasks": asyncio.run_coroutine_threadsafe(count_tasks(), server.loop).result(10),
        "threads": Counter(each.name for each in threading.enumerate() if not each.name.startswith(workers)),
        "files": len(os.listdir("/proc/self/fd")),
        "pages": num_pages - num_free,
        "slots": engine.core.slots.num_active,
        "objects": Counter(
            type(each).__qualname__ for each in gc.get_objects() if str(type(each).__module__).startswith("specdec.")
        ),
    }
