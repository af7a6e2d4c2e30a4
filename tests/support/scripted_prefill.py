"""The far end of a hand-off's line, which says what a test wants and nothing else."""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import TypeVar

from specdec.transfer.address import ProcessRecord
from specdec.transfer.line import frame, read_frame
from specdec.transfer.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    Message,
    PoolFacts,
    Transfer,
    Welcome,
    decode,
    encode,
)

M = TypeVar("M")
FACTS = PoolFacts(target="layout", draft=None, page_size=4, kv_format="float32", model="weights", memory="cpu")
DECODE_EPOCH, PREFILL_EPOCH, NEXT_EPOCH = "d" * 32, "p" * 32, "q" * 32
WAIT_S = 20.0


class Wire:
    """Frames on a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(WAIT_S)

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.connection.sendall(frame(encode(message)))

    def beat(self) -> None:
        """Give a sign of life."""
        self.send(Heartbeat())

    def receive(self, kind: type[M]) -> M:
        """Give the next message that is no sign of life, which must be of this kind."""
        while True:
            message = self._next()
            if message is None:
                raise AssertionError(f"the peer hung up, a {kind.__name__} was expected")
            if not isinstance(message, Heartbeat):
                assert isinstance(message, kind), message
                return message

    def receive_end(self) -> None:
        """Wait until the peer hangs up."""
        while self._next() is not None:
            pass

    def close(self) -> None:
        self.connection.close()

    def _next(self) -> Message | None:
        with contextlib.suppress(ConnectionError, EOFError):
            return decode(read_frame(self._bytes))
        return None

    def _bytes(self, num_bytes: int) -> bytes:
        data = self.connection.recv(num_bytes, socket.MSG_WAITALL)
        if len(data) < num_bytes:
            raise EOFError
        return data


class ScriptedPrefill:
    """Listens as a prefill does."""

    def __init__(self, *, port: int = 0) -> None:
        self._door = socket.create_server(("127.0.0.1", port))
        self._door.settimeout(WAIT_S)
        self.port: int = self._door.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._wires: list[Wire] = []

    def accept(self) -> Wire:
        """Take a call, and hear who it is."""
        wire = Wire(self._door.accept()[0])
        self._wires.append(wire)
        wire.receive(Hello)
        return wire

    def welcome(self, *, epoch: str = PREFILL_EPOCH, processes: Sequence[ProcessRecord] = ()) -> Wire:
        """Take a call and welcome the group."""
        wire = self.accept()
        wire.send(Welcome(epoch=epoch, processes=list(processes)))
        return wire

    def close(self) -> None:
        """Hang up, and listen no more."""
        self._door.close()
        for wire in self._wires:
            wire.close()


@contextlib.contextmanager
def call(
    address: str,
    *,
    epoch: str = DECODE_EPOCH,
    facts: PoolFacts = FACTS,
    transport: str = "local",
    protocol: int = PROTOCOL_VERSION,
) -> Iterator[Wire]:
    """Call a prefill as a decode group does, and say hello."""
    host, port = address.rsplit(":", 1)
    wire = Wire(socket.create_connection((host, int(port)), timeout=WAIT_S))
    wire.send(Hello(protocol=protocol, epoch=epoch, transport=transport, facts=facts))
    try:
        yield wire
    finally:
        wire.close()


def names_of(message: Transfer) -> dict[str, object]:
    """What a message and its answer have in common."""
    return {
        "transfer_id": message.transfer_id,
        "decode_epoch": message.decode_epoch,
        "prefill_epoch": message.prefill_epoch,
    }
