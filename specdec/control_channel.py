"""How the leading rank tells the others what to do, and how each learns that another is gone.

One connection from each follower to the leader. Downward go the tasks of every pass, in order; both ways go heartbeats,
so that an idle group may stay idle for hours while a process that died or was stopped is noticed within the timeout.
Nothing here is a collective, and nothing waits for longer than the timeout on a peer that neither reads nor writes.

Messages are pickled: the ranks are the processes of one deployment and have proved a key (`specdec.rendezvous`).
"""

import contextlib
import os
import pickle
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from specdec.errors import RankError, RankLostError
from specdec.rendezvous import set_timeouts
from specdec.sampling_rows import SamplingBatch

LEADER_LOST_EXIT_CODE = 17
END_GRACE_S = 10.0  # for a follower to end in order
_LOST_GRACE_S = 2.0


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


class _Loaded(NamedTuple):
    """The sender has loaded its share, or could not for this cause."""

    failure: str | None


class _Failed(NamedTuple):
    """The sender leaves; `is_consequence` where it only noticed that others are gone."""

    cause: str
    is_consequence: bool


class _End(NamedTuple):
    """The engine ends: after the tasks that were sent, or at once, out of whatever the receiver waits for."""

    is_at_once: bool


_HEARTBEAT = b""  # an empty message: the sender is alive


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
        on_loss: Called when a rank was lost, from whatever thread noticed.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        *,
        timeout_s: float,
        describe_end: Callable[[int], str | None] = lambda _rank: None,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        self._connections = dict(connections)
        self._lines = {rank: _line_of(connection, timeout_s) for rank, connection in connections.items()}
        self._timeout_s = timeout_s
        self._describe_end = describe_end
        self._on_loss = on_loss
        self._send_lock = threading.Lock()
        self._news = threading.Condition(threading.RLock())
        self._losses: dict[int, RankLoss] = {}
        self._loaded: dict[int, str | None] = {}
        self._silence_s = dict.fromkeys(connections, 0.0)
        self._end_at: float | None = None  # when the monitor stops listening; set by `close`
        self._monitor = threading.Thread(target=self._watch, name="specdec-control", daemon=True)
        self._monitor.start()

    @property
    def loss(self) -> RankLoss | None:
        """The rank that was lost first, a cause before its consequences; None while all live."""
        losses = sorted(list(self._losses.values()), key=lambda loss: loss.is_consequence)
        return losses[0] if losses else None

    def broadcast(self, task: Task) -> None:
        """Send a task to every follower.

        Raises:
            RankError: The task cannot be sent; no follower got it.
            RankLostError: A rank is gone.
        """
        try:
            message = pickle.dumps(task)  # `Connection.send` would pass tensors as handles to memory of this host
        except Exception as error:
            raise RankError(f"tp rank 0 cannot run this pass: {type(error).__name__}: {error}") from error
        self.check()
        with self._send_lock:
            for rank, connection in self._connections.items():
                try:
                    connection.send_bytes(message)
                except OSError as error:
                    self._lose_connection(rank, error)
                    break
        self.check()

    def await_loaded(self) -> None:
        """Wait until every follower has loaded its share, however long that takes.

        Raises:
            RankError: A follower could not; it names the first one.
            RankLostError: A rank is gone.
        """
        with self._news:
            self._news.wait_for(lambda: self._losses or len(self._loaded) == len(self._connections))
        self.check()
        for rank, failure in sorted(self._loaded.items()):
            if failure is not None:
                raise RankError(f"rank {rank} could not load its share: {failure}")

    def check(self) -> None:
        """Raise `RankLostError` when a rank is gone."""
        if (loss := self.loss) is not None:
            raise RankLostError(f"rank {loss.rank} is gone: {loss.cause}; start the engine again")

    def cause_of(self, error: BaseException) -> RankLostError:
        """Explain why a pass broke: waits for the loss that broke it, at most the timeout."""
        now = time.monotonic()
        deadline, patience = now + self._timeout_s, now + 1 + 3 * self._interval_s
        with self._news:
            # A dead process shows at once. For a stopped one its silence must grow old.
            while (loss := self.loss) is None or loss.is_consequence:
                now, silence_s = time.monotonic(), max(self._silence_s.values())
                if now > deadline or (now > patience and silence_s < 2.5 * self._interval_s):
                    missing = sorted(set(self._connections) - set(self._losses)) or [0]
                    self.lose(missing[0], f"it did not leave a collective as the others did, nor say why; {error}")
                    break
                self._news.wait(self._interval_s / 2)
        try:
            self.check()
        except RankLostError as lost:
            return lost
        raise AssertionError("a loss was just noted")

    def lose(self, rank: int, cause: str, *, is_consequence: bool = False) -> None:
        """Note that a rank is gone; the first cause of each rank counts."""
        with self._news:
            if rank in self._losses:
                return
            self._losses[rank] = RankLoss(rank, cause, is_consequence)
            self._news.notify_all()
        if rank in self._lines:
            # A process that stopped reads nothing more; hanging up frees the thread that may be sending to it.
            with contextlib.suppress(OSError):
                self._lines[rank].shutdown(socket.SHUT_RDWR)
        self._on_loss()

    def close(self) -> None:
        """Let every follower end, and wait a while until they do.

        They end at once where a rank was lost, since they may wait for it in a collective, else after their last task.
        """
        is_lost = self.loss is not None
        self._end_at = time.monotonic() + (_LOST_GRACE_S if is_lost else END_GRACE_S)
        message = pickle.dumps(_End(is_at_once=is_lost))
        if self._send_lock.acquire(timeout=self._timeout_s):  # a thread that is stuck in sending has failed by then
            try:
                for connection in self._connections.values():
                    _send_if_room(connection, message)
            finally:
                self._send_lock.release()
        if threading.current_thread() is not self._monitor:
            self._monitor.join()  # until all have hung up: what they have not read is lost with the connection
        for connection in self._connections.values():
            connection.close()
        for line in self._lines.values():
            line.close()

    @property
    def _interval_s(self) -> float:
        return _heartbeat_interval(self._timeout_s)

    def _watch(self) -> None:
        rank_of = {connection: rank for rank, connection in self._connections.items()}
        looked_at = beat_at = time.monotonic()
        while rank_of and (self._end_at is None or time.monotonic() < self._end_at):
            for connection in wait(list(rank_of), timeout=self._interval_s / 2):
                assert isinstance(connection, Connection)
                rank = rank_of[connection]
                try:
                    self._take(rank, connection.recv_bytes())
                except Exception as error:  # it hung up, or sent what nobody can read: this thread must go on
                    del rank_of[connection]
                    if self._end_at is None:
                        self._lose_connection(rank, error)
            now = time.monotonic()
            # Where this process itself was stopped or starved meanwhile, the others have not been silent.
            elapsed_s = min(now - looked_at, self._interval_s)
            looked_at = now
            for rank in rank_of.values():
                self._silence_s[rank] += elapsed_s
                if self._end_at is None and self._silence_s[rank] > self._timeout_s:
                    self.lose(rank, f"no sign of life for {self._timeout_s:g} s (stopped, or its machine is gone)")
            if now - beat_at >= self._interval_s:
                beat_at = now
                self._beat()

    def _take(self, rank: int, data: bytes) -> None:
        """Hear a follower."""
        self._silence_s[rank] = 0.0
        message = None if data == _HEARTBEAT else pickle.loads(data)
        if isinstance(message, _Failed):
            self.lose(rank, message.cause, is_consequence=message.is_consequence)
        if isinstance(message, _Loaded):
            with self._news:
                self._loaded[rank] = message.failure
                self._news.notify_all()

    def _lose_connection(self, rank: int, error: Exception) -> None:
        if rank not in self._losses:
            why = "it hung up" if isinstance(error, EOFError) else f"{type(error).__name__}: {error}"
            self.lose(rank, self._describe_end(rank) or f"its control channel broke off ({why})")

    def _beat(self) -> None:
        """Send heartbeats, unless a task is just being sent: that is a sign of life too, and may be stuck."""
        if self._send_lock.acquire(blocking=False):
            try:
                for connection in self._connections.values():
                    _send_if_room(connection, _HEARTBEAT)
            finally:
                self._send_lock.release()


def leave_process(why: str) -> None:
    """End this process wherever its other threads are: nothing else leads out of a collective."""
    try:
        if why:
            print(f"specdec: {why}; this rank ends", file=sys.stderr, flush=True)
    finally:
        os._exit(LEADER_LOST_EXIT_CODE)


class FollowerChannel:
    """A follower's end.

    A thread reads, so that a follower that waits in a collective still learns that the leader is gone.

    Args:
        connection: To the leader.
        timeout_s: Silence after which the leader counts as stopped.
        leave: Called on that thread when the engine ends at once or the leader is gone, with the reason or "".
    """

    def __init__(
        self, connection: Connection, *, timeout_s: float, leave: Callable[[str], None] = leave_process
    ) -> None:
        self._connection = connection
        self._line = _line_of(connection, timeout_s)
        self._timeout_s = timeout_s
        self._leave = leave
        self._send_lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._read, "specdec-control"), (self._beat, "specdec-heartbeat"))
        ]
        for thread in self._threads:
            thread.start()

    def next_task(self) -> Task | None:
        """Wait for the next task, however long; None when the engine ended."""
        return self._tasks.get()

    def report_loaded(self, failure: str | None) -> None:
        """Tell the leader that this rank has its share, or why not."""
        self._send(_Loaded(failure))

    def report_failure(self, cause: str, *, is_consequence: bool) -> None:
        """Tell the leader why this rank leaves."""
        self._send(_Failed(cause, is_consequence))

    def close(self) -> None:
        """Stop the heartbeat and hang up."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._connection.close()
        self._line.close()

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError), self._send_lock:
            self._connection.send_bytes(pickle.dumps(message))

    def _read(self) -> None:
        interval_s = _heartbeat_interval(self._timeout_s)
        silence_s = 0.0  # counted in steps: time in which this process was itself stopped is no silence
        why = f"the leading rank gave no sign of life for {self._timeout_s:g} s"
        while silence_s < self._timeout_s:
            try:
                if not self._connection.poll(interval_s):
                    silence_s += interval_s
                    continue
                silence_s = 0.0
                data = self._connection.recv_bytes()
                message = None if data == _HEARTBEAT else pickle.loads(data)
            except (EOFError, OSError):
                why = "the leading rank is gone"
                break
            except Exception as error:
                why = f"a task cannot be read: {type(error).__name__}: {error}"
                self.report_failure(why, is_consequence=False)
                break
            if isinstance(message, Task):
                self._tasks.put(message)
            elif isinstance(message, _End):
                if not message.is_at_once:
                    self._tasks.put(None)
                    return
                why = ""
                break
        if not self._ended.is_set():
            self._leave(why)

    def _beat(self) -> None:
        while not self._ended.wait(_heartbeat_interval(self._timeout_s)):
            with self._send_lock:
                _send_if_room(self._connection, _HEARTBEAT)


def _line_of(connection: Connection, timeout_s: float) -> socket.socket:
    """Give the socket of a connection, whose reads and writes fail from now on when they are stuck for the timeout."""
    line = socket.socket(fileno=os.dup(connection.fileno()))
    set_timeouts(line, timeout_s)
    return line


def _send_if_room(connection: Connection, message: bytes) -> None:
    """Send a short message without waiting; a peer whose line is full has enough to read, or reads nothing any more."""
    line = select.poll()
    with contextlib.suppress(OSError):
        line.register(connection, select.POLLOUT)
        if line.poll(0):
            connection.send_bytes(message)


def _heartbeat_interval(timeout_s: float) -> float:
    return min(1.0, timeout_s / 5)
