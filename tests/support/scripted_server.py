"""A tiny OpenAI-compatible server that answers by a script: delays, runs of tokens, errors, streams that break off.

`ScriptedTransport` puts it behind an httpx2 client without sockets, for exact times on a `VirtualTimeLoop`;
`serve_scripted` puts it behind a socket.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

MODEL = "scripted"


class Cut(Exception):  # noqa: N818
    """The connection breaks here."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """How one request is answered.

    Attributes:
        runs: Seconds to wait, and how many tokens come then, in one event.
        status: HTTP status; other than 200 an error with `message`.
        message: Of the error.
        cut_after: The connection breaks after this many runs.
        is_refused: There is no connection at all.
        error_after: The stream tells an error after this many runs.
        has_finish: Whether the stream has a finish_reason and an end mark.
        usage: More fields of the usage.
    """

    runs: Sequence[tuple[float, int]] = ((0.0, 1),)
    status: int = 200
    message: str = ""
    cut_after: int | None = None
    is_refused: bool = False
    error_after: int | None = None
    has_finish: bool = True
    usage: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ScriptedServer:
    """The server.

    Attributes:
        script: Gives the answer to a request, from its body.
        tells: What its streams tell of the tokens in a chunk: "token_ids", "usage" that runs along, or "".
        takes: Forms of prompts it takes: ids, text, chat.
        refuses: Fields of a request that it refuses.
        has_tokenize: Whether there is /tokenize, which counts words.
        has_usage: Whether streams end in a usage.
        max_model_len: What it says of itself.
        metrics: Texts of /metrics, one for each time it is read; the last stays.
        bodies: Requests in the order they came, without those for one token that come before all others: questions.
        is_down: Nothing connects.
    """

    script: Callable[[Mapping[str, Any]], Script]
    tells: str = "token_ids"
    takes: tuple[str, ...] = ("ids", "text", "chat")
    refuses: tuple[str, ...] = ()
    has_tokenize: bool = True
    has_usage: bool = True
    max_model_len: int | None = None
    metrics: list[str] = field(default_factory=list)
    bodies: list[Mapping[str, Any]] = field(default_factory=list)
    is_down: bool = False

    async def answer(self, path: str, body: Mapping[str, Any]) -> tuple[int, str, AsyncIterator[bytes]]:
        """Status, content type and body of the answer to a request."""
        if self.is_down:
            raise Cut
        if path == "/v1/models":
            return _json({"data": [{"id": MODEL, "max_model_len": self.max_model_len}]})
        if path == "/tokenize" and self.has_tokenize:
            words = body["prompt"].split()
            return _json({"tokens": [100 + place for place in range(len(words))]})
        if path == "/metrics" and self.metrics:
            text = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
            return 200, "text/plain", _once(text.encode())
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return _error(404, "no such path")
        form = "chat" if "messages" in body else "text" if isinstance(body["prompt"], str) else "ids"
        refused = [name for name in self.refuses if name in body]
        if form not in self.takes or refused:
            return _error(400, f"cannot take {refused or form}")
        is_question = body["max_tokens"] == 1 and not self.bodies
        if not is_question:
            self.bodies.append(body)
        script = Script() if is_question else self.script(body)
        if script.is_refused:
            raise Cut
        if script.status != 200:
            return _error(script.status, script.message)
        return 200, "text/event-stream; charset=utf-8", self._stream(script, is_chat=form == "chat", body=body)

    async def _stream(self, script: Script, *, is_chat: bool, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        num_sent = 0
        num_prompt = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 7
        if is_chat:  # the role comes first, without a token
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for place, (delay_s, num_tokens) in enumerate(script.runs):
            if place == script.cut_after:
                raise Cut
            if place == script.error_after:
                yield _event({"error": {"message": "out of luck"}})
                return
            await asyncio.sleep(delay_s)
            num_sent += num_tokens
            text = " word" * num_tokens
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": text}} if is_chat else {"text": text}
            if self.tells == "token_ids" and "return_token_ids" in body:
                choice["token_ids"] = list(range(num_sent - num_tokens, num_sent))
            chunk: dict[str, Any] = {"choices": [choice]}
            if self.tells == "usage":
                chunk["usage"] = {"prompt_tokens": num_prompt, "completion_tokens": num_sent}
            yield _event(chunk)
        if script.cut_after == len(script.runs):
            raise Cut
        if not script.has_finish:
            return
        last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        yield _event({"choices": [{"index": 0, "finish_reason": "length", **last}]})
        if self.has_usage:
            yield _event(
                {
                    "choices": [],
                    "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_sent, **script.usage},
                }
            )
        yield b"data: [DONE]\n\n"


class ScriptedTransport(httpx2.AsyncBaseTransport):
    """Carries the requests of a client to a server in the same event loop."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        content = await request.aread()
        try:
            status, kind, body = await self._server.answer(request.url.path, json.loads(content or b"{}"))
        except Cut as cut:
            raise httpx2.ConnectError("connection refused", request=request) from cut
        return httpx2.Response(status, headers={"content-type": kind}, stream=_Stream(body))


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._body:
                yield data
        except Cut as cut:
            raise httpx2.ReadError("connection reset") from cut


@contextmanager
def serve_scripted(server: ScriptedServer) -> Iterator[str]:
    """Serve on a free port of this machine, from a thread of its own; gives the root address."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def listen() -> None:
        stop = asyncio.Event()
        listener = await asyncio.start_server(lambda reader, writer: _converse(server, reader, writer), "127.0.0.1", 0)
        host, port = listener.sockets[0].getsockname()
        started.set_result((f"http://{host}:{port}", asyncio.get_running_loop(), stop))
        await stop.wait()
        listener.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()), name="scripted server")
    thread.start()
    address, loop, stop = started.result(timeout=60)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


async def _converse(server: ScriptedServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve the requests of one connection."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            content = await reader.readexactly(int(headers.get("content-length", 0)))
            status, kind, body = await server.answer(lines[0].split()[1], json.loads(content or b"{}"))
            writer.write(f"HTTP/1.1 {status} .\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            async for data in body:
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
    except (Cut, OSError, asyncio.IncompleteReadError):
        writer.transport.abort()
    finally:
        writer.close()


def _json(fields: Mapping[str, Any], status: int = 200) -> tuple[int, str, AsyncIterator[bytes]]:
    return status, "application/json", _once(json.dumps(fields).encode())


def _error(status: int, message: str) -> tuple[int, str, AsyncIterator[bytes]]:
    return _json({"error": {"message": message, "type": "scripted"}}, status)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _event(fields: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()
