"""How the leading rank tells the others what to do, and how each learns that another is gone.

One connection from each follower to the leader. Downward go the tasks of every pass, in order; both ways go heartbeats,
so that an idle group may stay idle for hours while a process that died or was stopped is noticed within the timeout.
Nothing here is a collective.

Messages are pickled: the ranks are the processes of one deployment, and a connection begins with a proof of the key
that the leader drew.
"""

import contextlib
import os
import pickle
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, NamedTuple

from specdec.errors import RankLostError
from specdec.sampling_rows import SamplingBatch

Address = tuple[str, int]


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


class _Heartbeat(NamedTuple):
    """The sender is alive."""


class _Failed(NamedTuple):
    """The sender leaves; `is_consequence` where it only noticed that others are gone."""

    cause: str
    is_consequence: bool


class _Closed(NamedTuple):
    """The engine ends as it should."""


@dataclass(frozen=True, slots=True)
class RankLoss:
    """Which rank was lost, and why."""

    rank: int
    cause: str
    is_consequence: bool = False


class LeaderChannel:
    """The leader's end.

    Args:
        connections: One to each follower, by rank.
        timeout_s: Silence after which a follower counts as stopped.
        describe_end: Says how the process of a rank ended, for the error; None where that is not known.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        *,
        timeout_s: float,
        describe_end: Callable[[int], str | None] = lambda _rank: None,
    ) -> None:
        self._connections = dict(connections)
        self._timeout_s = timeout_s
        self._describe_end = describe_end
        self._send_lock = threading.Lock()
        self._losses: list[RankLoss] = []
        self._lost = threading.Event()
        self._closing = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="specdec-control", daemon=True)
        self._monitor.start()

    @property
    def loss(self) -> RankLoss | None:
        """The rank that was lost first, a cause before its consequences; None while all live."""
        losses = sorted(self._losses, key=lambda loss: loss.is_consequence)
        return losses[0] if losses else None

    def broadcast(self, task: Task) -> None:
        """Send a task to every follower.

        Raises:
            RankLostError: A rank is gone.
        """
        self.check()
        try:
            self._send(task)
        except OSError:
            self._lost.wait(self._timeout_s)  # the monitor knows why
            self.check()
            raise

    def check(self) -> None:
        """Raise `RankLostError` when a rank is gone."""
        if (loss := self.loss) is not None:
            raise RankLostError(f"rank {loss.rank} is gone: {loss.cause}; start the engine again")

    def cause_of(self, error: BaseException) -> RankLostError:
        """Explain why a pass broke: waits for the loss that broke it, at most the timeout."""
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline and (self.loss is None or self.loss.is_consequence):
            self._lost.wait(0.02)
            time.sleep(0.02)
        try:
            self.check()
        except RankLostError as lost:
            return lost
        return RankLostError(f"the pass failed on rank 0: {type(error).__name__}: {error}; start the engine again")

    def close(self) -> None:
        """Let every follower end: at once where a rank was lost, since the others may wait for it in a collective."""
        self._closing.set()
        if self.loss is None:
            with contextlib.suppress(OSError):
                self._send(_Closed())
        if threading.current_thread() is not self._monitor:
            self._monitor.join()
        for connection in self._connections.values():
            connection.close()

    def _send(self, message: object) -> None:
        with self._send_lock:
            for connection in self._connections.values():
                _send(connection, message)

    def _watch(self) -> None:
        heard = dict.fromkeys(self._connections, time.monotonic())
        rank_of = {connection: rank for rank, connection in self._connections.items()}
        interval_s = _heartbeat_interval(self._timeout_s)
        beat_at = 0.0
        while not self._closing.is_set():
            for connection in wait(list(rank_of), timeout=interval_s / 2):
                assert isinstance(connection, Connection)
                rank = rank_of[connection]
                try:
                    message = _receive(connection)
                except (EOFError, OSError):
                    del rank_of[connection]
                    if not self._closing.is_set():
                        self.lose(rank, self._describe_end(rank) or "its process closed the control channel")
                    continue
                heard[rank] = time.monotonic()
                if isinstance(message, _Failed):
                    self.lose(rank, message.cause, is_consequence=message.is_consequence)
            now = time.monotonic()
            for rank in rank_of.values():
                if now - heard[rank] > self._timeout_s:
                    self.lose(rank, f"no sign of life for {self._timeout_s:g} s (stopped, or its machine is gone)")
            if now - beat_at >= interval_s:
                beat_at = now
                self._beat()

    def _beat(self) -> None:
        """Send heartbeats, unless a task is just being sent: that is a sign of life too, and may be stuck."""
        if self._send_lock.acquire(blocking=False):
            try:
                for connection in self._connections.values():
                    with contextlib.suppress(OSError):
                        _send(connection, _Heartbeat())
            finally:
                self._send_lock.release()

    def lose(self, rank: int, cause: str, *, is_consequence: bool = False) -> None:
        """Note that a rank is gone; the first cause of each rank counts."""
        if all(loss.rank != rank for loss in self._losses):
            self._losses.append(RankLoss(rank, cause, is_consequence))
            self._lost.set()
            # A process that stopped reads nothing more; hanging up frees the thread that may be sending to it.
            if (connection := self._connections.get(rank)) is not None:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)


class FollowerChannel:
    """A follower's end.

    A thread reads, so that a follower that waits in a collective still learns that the leader is gone: it then ends the
    process, since nothing else leads out of a collective.
    """

    def __init__(self, connection: Connection, *, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._send_lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        for target, name in ((self._read, "specdec-control"), (self._beat, "specdec-heartbeat")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def next_task(self) -> Task | None:
        """Wait for the next task, however long; None when the engine ended."""
        return self._tasks.get()

    def report_failure(self, cause: str, *, is_consequence: bool) -> None:
        """Tell the leader why this rank leaves."""
        with contextlib.suppress(OSError), self._send_lock:
            _send(self._connection, _Failed(cause, is_consequence))

    def close(self) -> None:
        """Stop the heartbeat and hang up."""
        self._ended.set()
        self._connection.close()

    def _read(self) -> None:
        while not self._ended.is_set():
            try:
                if not self._connection.poll(self._timeout_s):
                    break  # the leader is stopped, or its machine is gone
                message = _receive(self._connection)
            except (EOFError, OSError):
                break
            except Exception:  # a message of another version: this thread must not just end
                traceback.print_exc()
                break
            if isinstance(message, _Closed):
                self._ended.set()
                self._tasks.put(None)
                return
            if isinstance(message, Task):
                self._tasks.put(message)
        if not self._ended.is_set():
            os._exit(LEADER_LOST_EXIT_CODE)

    def _beat(self) -> None:
        while not self._ended.wait(_heartbeat_interval(self._timeout_s)):
            with contextlib.suppress(OSError), self._send_lock:
                _send(self._connection, _Heartbeat())


LEADER_LOST_EXIT_CODE = 17


def _send(connection: Connection, message: object) -> None:
    connection.send_bytes(pickle.dumps(message))  # `send` would pass tensors as handles to memory of this host


def _receive(connection: Connection) -> object:
    return pickle.loads(connection.recv_bytes())


def _heartbeat_interval(timeout_s: float) -> float:
    return min(1.0, timeout_s / 5)


def listen(host: str, key: bytes, *, num_followers: int) -> Listener:
    """Open the leader's door on a free port of `host`."""
    return Listener((host, 0), backlog=max(1, num_followers), authkey=key)


def connect(address: Address, key: bytes, *, rank: int) -> Connection:
    """Connect a follower to the leader and say which rank it is."""
    connection = Client(address, authkey=key)
    connection.send(rank)
    return connection
