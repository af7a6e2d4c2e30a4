"""Nothing stays behind: after hundreds of requests of every kind a server holds what it held before them."""

import asyncio
import contextlib
import gc
import os
import socket
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from specdec.engine import Engine
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import RunningServer, running_server, wait_until

CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
WISHES: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], **WISHES}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": PARAMETERS}
NUM_CLIENTS = 6
# What may grow, up to a limit: the pool of workers that read requests, kept prefixes, shapes of rounds.
LIMITED = ("thread specdec-requests", "specdec.dcp.prefix_tree.", "specdec.round_rows.")
MAX_GROWTH_BYTES = 500_000  # of memory that Python manages; a request that is kept takes several thousand


def answered(client: httpx.Client, *, path: str = CHAT, body: dict[str, Any], status: int = 200) -> None:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text


def streamed(client: httpx.Client, *, path: str = CHAT, body: dict[str, Any]) -> None:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert b"data: " in response.read()


def cancelled_stream(client: httpx.Client) -> None:
    with client.stream("POST", CHAT, json={**HELLO, "max_tokens": 500, "n": 2, "stream": True}) as response:
        next(response.iter_raw())


def cancelled_answer(client: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json={**HELLO, "max_tokens": 2000}, timeout=httpx.Timeout(60, read=0.05))


def broken_off(client: httpx.Client) -> None:
    def half_a_body() -> Iterator[bytes]:
        yield b'{"messages": '
        raise ConnectionError

    with pytest.raises(ConnectionError):
        client.post(CHAT, content=half_a_body(), headers={"content-type": "application/json"})


def silent(client: httpx.Client) -> None:
    assert client.base_url.port is not None
    socket.create_connection((client.base_url.host, client.base_url.port)).close()


KINDS: tuple[Callable[[httpx.Client], None], ...] = (
    partial(streamed, body={**HELLO, "logprobs": True, "stream_options": {"include_usage": True}}),
    cancelled_stream,
    partial(answered, body={**HELLO, "n": 2}),
    partial(answered, body={"messages": []}, status=400),
    partial(streamed, body={**HELLO, "tools": [TOOL]}),
    partial(answered, path=COMPLETION, body={**WISHES, "prompt": ["a b", "c d"]}),
    cancelled_answer,
    partial(answered, body={**HELLO, "tools": [TOOL], "tool_choice": "required"}),
    partial(answered, path=COMPLETION, body={"prompt": [5] * 20_000}, status=400),
    partial(streamed, path=MESSAGES, body={**HELLO, "tools": [ANTHROPIC_TOOL]}),
    partial(streamed, body={**HELLO, "response_format": {"type": "json_object"}}),
    partial(answered, body={**HELLO, "model": "another"}, status=404),
    broken_off,
    silent,
    partial(streamed, path=COMPLETION, body={**WISHES, "prompt": "Once", "stop": ["\n\n"]}),
)


def send(server: RunningServer, num_requests: int) -> None:
    """Send requests of all kinds, several at the same time, and wait until the server is done with them.

    The last one is alone and always the same: the engine keeps how the requests of its last round are drawn.
    """
    with server.client() as client, ThreadPoolExecutor(NUM_CLIENTS) as clients:
        for _ in clients.map(lambda index: KINDS[index % len(KINDS)](client), range(num_requests)):
            pass
    wait_until(lambda: server.service.num_open == 0, "all are let go")
    with server.client() as client:
        answered(client, body=HELLO)


def held_by_process() -> Counter[str]:
    """Count threads and open files."""
    threads = Counter(f"thread {each.name}" for each in threading.enumerate())
    return threads + Counter({"open files": len(os.listdir("/proc/self/fd"))})


def held_by_server(server: RunningServer, engine: Engine) -> Counter[str]:
    """Count what a process holds with a server that nobody asks anything: objects of the package, too."""

    async def count_tasks() -> int:
        return len(asyncio.all_tasks())

    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    objects = {f"{kind.__module__}.{kind.__qualname__}": count for kind, count in kinds.items()}
    held = held_by_process() + Counter({name: count for name, count in objects.items() if name.startswith("specdec.")})
    num_free, num_pages = engine.kv_pages()
    held["pages"] = num_pages - num_free
    held["slots"] = engine.core.slots.num_active
    held["tasks"] = asyncio.run_coroutine_threadsafe(count_tasks(), server.loop).result(10)
    return Counter({name: count for name, count in held.items() if not name.startswith(LIMITED)})


@pytest.mark.parametrize("num_requests", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_requests_leave_nothing(glm_tiny: Engine, tiny_server: RunningServer, num_requests: int) -> None:
    send(tiny_server, 2 * len(KINDS))
    before = held_by_server(tiny_server, glm_tiny)
    tracemalloc.start()
    try:
        send(tiny_server, num_requests)
        with contextlib.suppress(AssertionError):  # the last connection lives a moment longer than its client
            wait_until(lambda: held_by_server(tiny_server, glm_tiny) <= before, "nothing is left", timeout_s=5)
        assert held_by_server(tiny_server, glm_tiny) - before == Counter()
        assert tracemalloc.get_traced_memory()[0] < MAX_GROWTH_BYTES
    finally:
        tracemalloc.stop()


def test_servers_leave_nothing(engine: FakeEngine) -> None:
    def serve() -> None:
        with running_server(engine) as server, server.client() as client:
            streamed(client, body=HELLO)
            cancelled_stream(client)

    serve()
    before = held_by_process()
    for _ in range(3):
        serve()
    assert held_by_process() - before == Counter()
