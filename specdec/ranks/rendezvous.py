"""How followers come to the leading rank: an invitation, a door, and a proof on both sides.

The leader opens a door and writes an invitation with its address and a key that it drew. Leader and follower prove the
key to each other before either believes anything the other says, since what follows is pickled. Followers that the
leader starts get the invitation through a pipe that nobody else can read; those of a launcher read it from the
launcher's store, which must be on a private network, as for everything of `torch.distributed`.
"""

import contextlib
import platform
import socket
import struct
import time
from collections.abc import Callable, Collection
from importlib import metadata
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec

from specdec.errors import ConfigError, RankLostError

_GREETING_TIMEOUT_S = 10.0
_MAX_HELLO_BYTES = 4096


class Invitation(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What a follower needs to come.

    Attributes:
        host: Where the leader's door is.
        port: Its port.
        key: To be proved on both sides.
        timeout_s: Silence after which either side counts as lost.
        group: Name under which the process groups of this engine meet in the store, different for every engine.
    """

    host: str
    port: int
    key: bytes
    timeout_s: float
    group: str


class Dismissal(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The leader needs no followers any more.

    Attributes:
        exit_code: How its process ends.
    """

    exit_code: int


def encode_summons(summons: Invitation | Dismissal) -> str:
    """Write what a follower is told, in one line."""
    return msgspec.json.encode(summons).decode()


def decode_summons(text: str | bytes) -> Invitation | Dismissal:
    """Read what `encode_summons` wrote.

    Raises:
        ConfigError: Another version wrote it.
    """
    try:
        return msgspec.json.decode(text, type=Invitation | Dismissal)
    except msgspec.DecodeError as error:
        raise ConfigError(f"cannot read the leading rank's invitation ({error}): {_ADVICE}") from None


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The first words of a follower.

    Attributes:
        rank: Which rank it is.
        versions: Of the programs that read each other's pickled messages; they must be the leader's.
    """

    rank: int
    versions: dict[str, str]


class Door:
    """Where followers come in; closed once all are here.

    Args:
        host: Address to listen on; "" is every address of this host.
    """

    def __init__(self, host: str) -> None:
        if not host and socket.has_dualstack_ipv6():
            self._server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        else:
            self._server = socket.create_server((host, 0), backlog=1024)
        self._server.settimeout(0.05)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._server.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def admit(
        self,
        ranks: Collection[int],
        *,
        key: bytes,
        start_timeout_s: float,
        watch: Callable[[Collection[int]], None],
    ) -> dict[int, Connection]:
        """Wait for the followers; gives their connections by rank. Whoever does not have the key is turned away.

        Args:
            ranks: The followers.
            key: What they must prove.
            start_timeout_s: How long to wait for all of them.
            watch: Called now and then with the ranks that are missing; raises where waiting is of no use.

        Raises:
            ConfigError: A follower runs other versions.
            RankLostError: Some did not come.
        """
        connections: dict[int, Connection] = {}
        deadline = time.monotonic() + start_timeout_s
        try:
            while missing := sorted(set(ranks) - set(connections)):
                if time.monotonic() > deadline:
                    raise RankLostError(f"ranks {missing} did not come within {start_timeout_s:g} s")
                watch(missing)
                with contextlib.suppress(TimeoutError):
                    line, _ = self._server.accept()
                    rank, connection = _greet(line, key)
                    if rank in missing:
                        connections[rank] = connection
                    else:
                        connection.close()
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        return connections


def answer(invitation: Invitation, *, rank: int) -> Connection:
    """Come to the leader as the follower `rank`.

    Raises:
        RankLostError: The leader is gone, or turned this rank away.
    """
    try:
        connection = _connection(socket.create_connection((invitation.host, invitation.port), _GREETING_TIMEOUT_S))
        answer_challenge(connection, invitation.key)
        deliver_challenge(connection, invitation.key)
        connection.send_bytes(msgspec.json.encode(Hello(rank=rank, versions=_versions())))
    except (OSError, EOFError, AuthenticationError) as error:
        raise RankLostError(
            f"rank {rank} found no leading rank at {invitation.host}:{invitation.port}: {error}"
        ) from error
    return connection


def _greet(line: socket.socket, key: bytes) -> tuple[int, Connection]:
    """Hear who comes; rank -1 is somebody else.

    Raises:
        ConfigError: A follower runs other versions.
    """
    connection = _connection(line)
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        data = connection.recv_bytes(_MAX_HELLO_BYTES)
    except (OSError, EOFError, AuthenticationError):
        return -1, connection
    try:
        hello = msgspec.json.decode(data, type=Hello)
        if hello.versions == _versions():
            return hello.rank, connection
        fault = f"rank {hello.rank} runs {_in_words(hello.versions)}"
    except msgspec.DecodeError as error:
        fault = f"a rank's first message cannot be read ({error})"
    connection.close()
    raise ConfigError(f"{fault}, rank 0 runs {_in_words(_versions())}: {_ADVICE}")


def _connection(line: socket.socket) -> Connection:
    """Make a connection of a socket; where the other side is silent its calls fail after a while."""
    set_timeouts(line, _GREETING_TIMEOUT_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a task must not wait until the last one is confirmed
    return Connection(line.detach())


def set_timeouts(line: socket.socket, timeout_s: float) -> None:
    """Let a read or write of a socket fail with `BlockingIOError` once it is stuck for `timeout_s`."""
    line.setblocking(True)
    seconds, fraction = divmod(timeout_s, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        line.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(fraction * 1e6)))


_ADVICE = "install the same versions on every host"


def _versions() -> dict[str, str]:
    """What must be the same on every rank."""
    return {
        "specdec": metadata.version("specdec"),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
    }


def _in_words(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
