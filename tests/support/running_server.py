"""A server on a free loopback port, in a thread of the test process."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from specdec.prefill.server import PrefillServer
from specdec.serving.engine_gauges import EngineGauges
from specdec.serving.served_engine import ServedEngine
from specdec.serving.server import Server
from specdec.serving.service import Service
from specdec.serving.settings import ServerSettings


@dataclass
class RunningServer:
    """A server and ways to talk to it.

    Attributes:
        url: Where it is.
        service: What it serves.
        failure: What `serve` raised.
    """

    server: Server
    service: Service
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    failure: Exception | None = None

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **settings)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)

    def drain(self) -> None:
        self.loop.call_soon_threadsafe(self.server.drain)

    def run(self) -> None:
        try:
            self.loop.run_until_complete(self.server.serve())
        except Exception as error:
            self.failure = error
        finally:
            self.loop.close()


@contextmanager
def running_server(
    engine: ServedEngine,
    *,
    read_gauges: Callable[[], EngineGauges] = EngineGauges,
    max_running: int = 4,
    prefill: PrefillServer | None = None,
    answers_requests: bool = True,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Serve an engine for the length of the block, and decode groups with it where there is a `prefill`."""
    chosen = ServerSettings(**{"model_names": ("tiny",), "drain_timeout_s": 20.0, **settings})
    service = Service(engine, chosen, max_running=max_running, prefill=prefill, answers_requests=answers_requests)
    running = RunningServer(Server(service, read_gauges, host="127.0.0.1", port=0), service)
    thread = threading.Thread(target=running.run, name="test server")
    thread.start()
    try:
        yield running
    finally:
        if thread.is_alive() and not service.admission.is_draining:
            running.drain()
        thread.join(timeout=60)
        assert not thread.is_alive(), "the server does not end"


def wait_until(is_true: Callable[[], bool], what: str, *, timeout_s: float = 20.0) -> None:
    """Wait for something that happens soon in another thread."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[Any]:
    """Give the data of all server-sent events of an answer; the end mark as it is."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
