"""What travels between the leading rank and the others, and how neither end waits for a peer that hangs.

Messages are pickled: the ranks are the processes of one deployment and have proved a key (`specdec.ranks.rendezvous`).
"""

import contextlib
import os
import pickle
import select
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from specdec.ranks.rendezvous import set_timeouts
from specdec.sampling.sampling_rows import SamplingBatch

HEARTBEAT = b""  # an empty message: the sender is alive
END_GRACE_S = 10.0  # for a follower to end in order


@dataclass(frozen=True, slots=True)
class Task:
    """What the followers do next, together with the leader.

    Attributes:
        method: Of `Worker`.
        argument: Its argument.
        reads_sampling: Whether `sampling` goes into the argument's field of that name, which travels empty.
        sampling: None takes the one of the last task that had one, since most rounds sample the same requests.
    """

    method: str
    argument: Any
    reads_sampling: bool = False
    sampling: SamplingBatch | None = None


class Loaded(NamedTuple):
    """The sender has loaded its share, or could not for this cause."""

    failure: str | None


class Failed(NamedTuple):
    """The sender leaves; `is_consequence` where it only noticed that others are gone."""

    cause: str
    is_consequence: bool


class End(NamedTuple):
    """The engine ends: after the tasks that were sent, or at once, out of whatever the receiver waits for."""

    is_at_once: bool


def encode(message: object) -> bytes:
    """Write a message. `Connection.send` would pass tensors as handles to memory of this host."""
    return pickle.dumps(message)


def receive(connection: Connection) -> object:
    """Read a message; None is a heartbeat.

    Raises:
        EOFError: The peer hung up.
        OSError: The connection broke, or a message began and did not end.
        Exception: Whatever unpickling raises.
    """
    data = connection.recv_bytes()
    return None if data == HEARTBEAT else pickle.loads(data)


def line_of(connection: Connection, timeout_s: float) -> socket.socket:
    """Give the socket of a connection, whose reads and writes fail from now on when they are stuck for the timeout."""
    line = socket.socket(fileno=os.dup(connection.fileno()))
    set_timeouts(line, timeout_s)
    return line


def send_if_room(connection: Connection, message: bytes) -> None:
    """Send a short message without waiting; a peer whose line is full has enough to read, or reads nothing any more."""
    line = select.poll()
    with contextlib.suppress(OSError):
        line.register(connection, select.POLLOUT)
        if line.poll(0):
            connection.send_bytes(message)


def heartbeat_interval(timeout_s: float) -> float:
    """Seconds between heartbeats: several may be late before their sender counts as stopped."""
    return min(1.0, timeout_s / 5)
