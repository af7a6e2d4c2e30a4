"""A line carries whole messages in order, ends for whatever is none, and never holds up its owner.

Tags such as B53 are explained in `tests/INVARIANTS.md`.
"""

import queue
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from specdec.errors import ConfigError
from specdec.transfer.line import Line, dial, frame, parse_address
from specdec.transfer.messages import MAX_MESSAGE_BYTES, Heartbeat, Message, Refused, encode

WAIT_S = 20.0


class End:
    """One end of a connection with a line on it, and what the line brought."""

    def __init__(self, connection: socket.socket, *, heartbeat_s: float = 60.0) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.endings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.line = Line(connection, heartbeat_s=heartbeat_s, on_message=self.messages.put, on_end=self.endings.put)
        self.line.start()


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = dial(f"127.0.0.1:{door.getsockname()[1]}")
        far, _ = door.accept()
        yield near, far
        near.close()
        far.close()


def test_messages_arrive_whole_and_in_order_in_both_directions(sockets: tuple[socket.socket, socket.socket]) -> None:
    ends = [End(each) for each in sockets]
    sent: list[Message] = [Refused(reason="x" * size) for size in (0, 1, 4096, 3)]
    for end in ends:
        for message in sent:
            end.line.send(message)
    for end in ends:
        assert [end.messages.get(timeout=WAIT_S) for _ in sent] == sent
    for end in ends:
        end.line.close()


def test_a_message_may_arrive_byte_by_byte(sockets: tuple[socket.socket, socket.socket]) -> None:
    end = End(sockets[0])
    for byte in frame(encode(Refused(reason="slow"))):
        sockets[1].sendall(bytes([byte]))
    assert end.messages.get(timeout=WAIT_S) == Refused(reason="slow")
    end.line.close()


def test_signs_of_life_are_sent_and_are_not_messages(sockets: tuple[socket.socket, socket.socket]) -> None:
    end = End(sockets[0], heartbeat_s=0.01)
    sign = frame(encode(Heartbeat()))
    sockets[1].settimeout(WAIT_S)
    assert sockets[1].recv(len(sign), socket.MSG_WAITALL) == sign
    sockets[1].sendall(sign + frame(encode(Refused(reason="after"))))
    assert end.messages.get(timeout=WAIT_S) == Refused(reason="after")
    assert end.line.heard_at > time.monotonic() - WAIT_S
    end.line.close()


def test_the_owner_hears_once_that_the_peer_hung_up(sockets: tuple[socket.socket, socket.socket]) -> None:
    end = End(sockets[0])
    sockets[1].sendall(frame(encode(Refused(reason="last")))[:-1])
    sockets[1].close()
    assert end.endings.get(timeout=WAIT_S) == "the peer hung up"
    end.line.send(Refused(reason="into the void"))
    end.line.close()
    assert end.messages.empty()
    assert end.endings.empty()


def test_whoever_hangs_up_is_not_told_of_it(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = (End(each) for each in sockets)
    near.line.send(Refused(reason="goodbye"))
    near.line.close()
    assert far.messages.get(timeout=WAIT_S) == Refused(reason="goodbye")
    assert far.endings.get(timeout=WAIT_S) == "the peer hung up"
    assert near.endings.empty()
    far.line.close()


def test_a_length_no_message_has_ends_the_line(sockets: tuple[socket.socket, socket.socket]) -> None:
    """B53: nothing of that size is waited for, and no memory is taken for it."""
    end = End(sockets[0])
    sockets[1].sendall(frame(bytes(MAX_MESSAGE_BYTES + 1))[:100])
    assert "was announced" in end.endings.get(timeout=WAIT_S)
    end.line.close()


def test_whoever_says_what_cannot_be_read_is_told_so(sockets: tuple[socket.socket, socket.socket]) -> None:
    """B53, B54: a peer of another version may say hello in other words."""
    near, far = (End(each) for each in sockets)
    near.line.send(_OfAnotherVersion(reason=""))
    assert "cannot be read" in far.endings.get(timeout=WAIT_S)
    told = near.messages.get(timeout=WAIT_S)
    assert isinstance(told, Refused)
    assert "both sides must run the same version of specdec" in told.reason
    near.line.close()
    far.line.close()


class _OfAnotherVersion(Refused, frozen=True, kw_only=True, tag="Refused"):
    advice: str = ""


@pytest.mark.parametrize("seed", range(20))
def test_no_damage_gives_anything_but_messages_and_an_end(
    seed: int, sockets: tuple[socket.socket, socket.socket]
) -> None:
    """B53: what was said before comes as it was said, then the owner hears that the line is over."""
    generator = np.random.default_rng(seed)
    end = End(sockets[0])
    said = [Refused(reason="x" * size) for size in (3, 50, 0, 700)]
    data = bytearray(b"".join(frame(encode(message)) for message in said))
    match seed % 4:
        case 0:
            data = bytearray(generator.bytes(400))
        case 1:
            data = data[: generator.integers(1, len(data))]
        case 2:
            data[generator.integers(len(data))] ^= 1 << int(generator.integers(8))
        case 3:
            del data[int(generator.integers(len(data)))]
    sockets[1].sendall(data)
    sockets[1].shutdown(socket.SHUT_WR)
    assert end.endings.get(timeout=WAIT_S)
    end.line.close()
    heard = [end.messages.get() for _ in range(end.messages.qsize())]
    assert heard == said[: len(heard)]
    assert len(heard) < len(said)


def test_an_owner_that_fails_on_a_message_still_hears_the_end(sockets: tuple[socket.socket, socket.socket]) -> None:
    endings: queue.SimpleQueue[str] = queue.SimpleQueue()

    def fail(_message: Message) -> None:
        raise ZeroDivisionError("of the owner")

    line = Line(sockets[0], heartbeat_s=60.0, on_message=fail, on_end=endings.put)
    line.start()
    sockets[1].sendall(frame(encode(Refused(reason=""))))
    assert endings.get(timeout=WAIT_S) == "ZeroDivisionError: of the owner"
    line.close()


def test_a_peer_that_never_reads_holds_up_nobody(sockets: tuple[socket.socket, socket.socket]) -> None:
    """A53: far more is sent than the kernel takes; `send` and `close` return."""
    end = End(sockets[0])
    for _ in range(3000):
        end.line.send(Refused(reason="x" * 4096))
    end.line.close()
    assert end.endings.empty()


def test_a_peer_that_never_reads_is_given_up_before_memory_is(sockets: tuple[socket.socket, socket.socket]) -> None:
    end = End(sockets[0])
    message = Refused(reason="x" * 4096)
    while end.endings.empty():
        end.line.send(message)
    assert "does not read" in end.endings.get()
    end.line.close()


def test_closing_twice_and_from_several_threads_ends(sockets: tuple[socket.socket, socket.socket]) -> None:
    end = End(sockets[0])
    closing = [threading.Thread(target=end.line.close) for _ in range(3)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_nobody_listens_only_where_every_address_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody listens to any more is held for dead: one address of a host that refuses proves nothing."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        dial(f"127.0.0.1:{port}")
    refusing = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
    unreachable = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("255.255.255.255", port))
    for found in ([refusing, unreachable], [unreachable, refusing]):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, found=found, **_kwargs: found)
        with pytest.raises(OSError, match=r".") as caught:
            dial(f"two-addresses:{port}")
        assert not isinstance(caught.value, ConnectionRefusedError)


@pytest.mark.parametrize("host", ["..", "a" * 70, "no-such-host.invalid"])
def test_a_host_that_cannot_be_found_is_an_error_of_the_network(host: str) -> None:
    with pytest.raises(OSError, match=r"."):
        dial(f"{host}:1")


def test_an_address_is_a_host_and_a_port() -> None:
    assert parse_address("127.0.0.1:7100") == ("127.0.0.1", 7100)
    assert parse_address("[::1]:0") == ("::1", 0)
    for wrong in ("", ":1", "host", "host:", "host:x", "host:-1", "host:65536", "host:1.5", None, 7, b"host:1"):
        with pytest.raises(ConfigError, match="host:port"):
            parse_address(wrong)
