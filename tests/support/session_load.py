"""Clients that play sessions of agents against a server, and leave now and then before they have their answer."""

import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.support.agent_sessions import SessionRequest

_TIMEOUT_S = 120.0


@dataclass
class SessionLoad:
    """Plays sessions side by side, the requests of each in order.

    Attributes:
        url: Of the server.
        cancel_every: Every so many requests one is given up: before its answer begins, or in the middle of it.
        events: What is done when so many requests were sent, by the client that sends the next.
        replies: What was answered, with what was asked; without those that were given up.
        num_sent: Requests so far.
        num_cancelled: Of these, given up.
    """

    url: str
    cancel_every: int
    events: Mapping[int, Callable[[], None]] = field(default_factory=dict)
    replies: list[tuple[SessionRequest, tuple[int, ...]]] = field(default_factory=list)
    num_sent: int = 0
    num_cancelled: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def play(self, sessions: Sequence[Sequence[SessionRequest]], *, num_clients: int) -> None:
        """Play all sessions; raises where a request was refused or failed."""
        with ThreadPoolExecutor(num_clients) as pool:
            for played in [pool.submit(self._play, session) for session in sessions]:
                played.result()

    def _play(self, session: Sequence[SessionRequest]) -> None:
        with httpx.Client(base_url=self.url, timeout=_TIMEOUT_S) as client:
            for request in session:
                self._send(client, request)

    def _send(self, client: httpx.Client, request: SessionRequest) -> None:
        with self._lock:
            self.num_sent += 1
            number = self.num_sent
        if number in self.events:
            self.events[number]()
        body = {
            "prompt": list(request.prompt),
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        is_cancelled = number % self.cancel_every == 0
        if is_cancelled:
            with self._lock:
                self.num_cancelled += 1
            if number // self.cancel_every % 2:
                self._send_and_leave(body)
                return
        token_ids: list[int] = []
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for chunk in _chunks(response):
                assert "error" not in chunk, chunk
                token_ids += chunk["choices"][0]["token_ids"]
                if is_cancelled:
                    return  # which closes the connection
        self.replies.append((request, tuple(token_ids)))

    def _send_and_leave(self, body: Mapping[str, Any]) -> None:
        address = urlsplit(self.url)
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        with socket.create_connection((address.hostname, address.port), timeout=_TIMEOUT_S) as connection:
            connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)


def _chunks(response: httpx.Response) -> Any:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
