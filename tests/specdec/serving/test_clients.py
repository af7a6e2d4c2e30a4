"""Clients that are slow, broken, half-closed, greedy or gone: nobody else suffers, and nothing stays behind."""

import contextlib
import json
import socket
import struct
import threading
import time
from typing import Any

import pytest

from specdec.serving.web import event_stream
from specdec.serving.web.connection import listen
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import RunningServer, running_server, wait_until

HELLO = [{"role": "user", "content": "Hello"}]
# How a stream begins that has nothing to say, what it says after a while, and how it ends.
SILENT_STREAMS = {
    "/v1/chat/completions": ('"role":"assistant"', ": keep-alive\n\n", "data: [DONE]\n\n"),
    "/v1/completions": ("", ": keep-alive\n\n", "data: [DONE]\n\n"),
    "/v1/messages": (
        "event: message_start",
        'event: ping\ndata: {"type":"ping"}\n\n',
        'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ),
}


def request_of(body: Any, *, path: str = "/v1/chat/completions", headers: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def read_answer(connection: socket.socket) -> bytes:
    """Read one answer in JSON from a connection that stays open."""
    data = b""
    while not data.endswith(b"}"):
        data += connection.recv(65536)
    return data


def assert_serves(server: RunningServer) -> None:
    with server.client() as client:
        assert client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 4}).status_code == 200


def is_idle(server: RunningServer, engine: FakeEngine) -> bool:
    return server.service.admission.num_open == 0 and not engine.running


@pytest.mark.parametrize("path", SILENT_STREAMS)
def test_streams_are_kept_alive_while_nothing_comes(
    path: str, engine: FakeEngine, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.01)
    opening, silence, end = SILENT_STREAMS[path]
    engine.gate.clear()
    prompt = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": HELLO}
    body = {**prompt, "max_tokens": 8, "stream": True}
    with server.client() as client, client.stream("POST", path, json=body) as response:
        pieces, text = response.iter_text(), ""
        while text.count(silence) < 3:
            text += next(pieces)
        engine.gate.set()
        text += "".join(pieces)
    before, _, behind = text.partition(silence)
    assert before.count("data: ") == bool(opening)
    assert opening in before
    assert not opening or opening not in behind
    assert text.endswith(end)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
def test_client_that_leaves_is_cancelled_within_one_round(is_streamed: bool, is_reset: bool) -> None:
    engine = FakeEngine("x" * 50)
    engine.is_stepped = True
    with running_server(engine) as server, server.connect() as connection:
        connection.sendall(request_of({"messages": HELLO, "stream": is_streamed}))
        wait_until(lambda: engine.num_steps > 0 and bool(engine.running), "it runs")
        if is_streamed:
            assert connection.recv(10).startswith(b"HTTP/1.1")
        if is_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        wait_until(lambda: server.service.admission.num_open == 0, "it is let go")
        engine.gate.set()  # the one round that may have begun
        wait_until(lambda: engine.num_cancelled == 1, "it is cancelled")
        num_steps = engine.num_steps
        wait_until(lambda: is_idle(server, engine), "nothing runs")
        assert engine.num_steps <= num_steps + 1
        engine.is_stepped = False
        engine.gate.set()
        assert_serves(server)


def test_half_closed_client_counts_as_gone(engine: FakeEngine, server: RunningServer) -> None:
    engine.gate.clear()
    with server.connect() as connection:
        connection.sendall(request_of({"messages": HELLO, "stream": True}))
        wait_until(lambda: server.service.admission.num_open == 1, "it runs")
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: server.service.admission.num_open == 0, "it is let go")
        engine.gate.set()
        assert read_all(connection) == b""
    assert_serves(server)


def test_client_that_takes_nothing_holds_up_nobody_and_is_dropped() -> None:
    engine = FakeEngine("word ", max_model_len=25_000)
    engine.tokens_per_round = 100
    with running_server(engine, client_timeout_s=0.5) as server, server.connect() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(request_of({"messages": HELLO, "stream": True, "logprobs": True, "top_logprobs": 5}))
        wait_until(lambda: bool(engine.running), "it runs")
        assert_serves(server)  # while the other's output waits to be taken
        wait_until(lambda: is_idle(server, engine), "it is dropped")
        with pytest.raises(ConnectionResetError):
            read_all(slow)
        assert_serves(server)


def test_request_that_never_ends_is_given_up() -> None:
    engine = FakeEngine()
    with running_server(engine, client_timeout_s=0.5) as server:
        half_head, half_body, idle, trickle = (server.connect() for _ in range(4))
        half_head.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")
        half_body.sendall(request_of({"messages": HELLO})[:-5])
        stop = threading.Event()

        def send_slowly() -> None:
            try:
                for byte in b"POST /v1/models HTTP/1.1\r\n" + b"x-header: y\r\n" * 100:
                    trickle.sendall(bytes([byte]))
                    if stop.wait(0.05):
                        return
            except OSError:
                pass

        thread = threading.Thread(target=send_slowly)
        thread.start()
        try:
            for connection in (half_head, idle, trickle):
                with contextlib.suppress(ConnectionResetError):
                    assert read_all(connection) == b""
            assert b"408" in read_all(half_body).split(b"\r\n")[0]
        finally:
            stop.set()
            thread.join()
        assert_serves(server)
        for connection in (half_head, half_body, idle, trickle):
            connection.close()


def test_second_request_on_a_connection_has_its_own_time() -> None:
    engine = FakeEngine()
    with running_server(engine, client_timeout_s=0.5) as server, server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in read_answer(connection)
        time.sleep(0.7)  # idle connections are kept longer than that
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in read_answer(connection)
        connection.sendall(b"GET /health HT")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(65536) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_forgotten(server: RunningServer, data: bytes) -> None:
    with server.connect() as connection:
        connection.settimeout(10)
        try:
            connection.sendall(data)
            assert connection.recv(65536).split(b" ")[1].startswith(b"4")
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert_serves(server)


def test_client_that_asks_before_it_sends_is_told_at_once(engine: FakeEngine) -> None:
    with running_server(engine, max_body_bytes=1000) as server, server.connect() as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}expect: 100-continue\r\ncontent-length: 5000\r\n\r\n".encode())
        assert b" 413 " in connection.recv(65536).split(b"\r\n")[0]


def test_requests_in_a_row_on_one_connection_are_answered_in_order(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(
            request_of({"prompt": "x", "max_tokens": 1}, path="/v1/completions")
            + b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert answers.index(b"text_completion") < answers.index(b'"version"')


def test_connections_do_not_delay_small_pieces() -> None:
    with listen("127.0.0.1", 0) as door, socket.create_connection(door.getsockname()) as client:
        accepted, _ = door.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert client.getpeername() == accepted.getsockname()
