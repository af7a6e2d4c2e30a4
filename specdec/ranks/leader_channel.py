"""How the leading rank tells the others what to do, and how it learns that one of them is gone.

One connection from each follower to the leader. Downward go the tasks of every pass, in order; both ways go heartbeats,
so that an idle group may stay idle for hours while a process that died or was stopped is noticed within the timeout.
Nothing here is a collective, and nothing waits for longer than the timeout on a peer that neither reads nor writes.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from specdec.errors import RankError, RankLostError
from specdec.ranks.control_messages import (
    END_GRACE_S,
    HEARTBEAT,
    End,
    Failed,
    Loaded,
    Task,
    encode,
    heartbeat_interval,
    line_of,
    receive,
    send_if_room,
)

PASS_TIMEOUTS = 2  # of silence, for a pass on GPUs and for a collective of NCCL: silence must be noticed first
_LOST_GRACE_S = 2.0


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
        self._lines = {rank: line_of(connection, timeout_s) for rank, connection in connections.items()}
        self._timeout_s = timeout_s
        self._describe_end = describe_end
        self._on_loss = on_loss
        self._send_lock = threading.Lock()
        self._news = threading.Condition(threading.RLock())
        self._losses: dict[int, RankLoss] = {}
        self._loaded: dict[int, str | None] = {}
        self._silence_s = dict.fromkeys(connections, 0.0)
        self._end_at: float | None = None  # when the monitor stops listening; set by `close`
        self._due_at: float | None = None  # when a pass must have ended; None while none is bounded
        self._monitor = threading.Thread(target=self._watch, name="specdec-control", daemon=True)
        self._monitor.start()

    @property
    def loss(self) -> RankLoss | None:
        """The rank that was lost first, a cause before its consequences; None while all live."""
        losses = sorted(self._losses.values(), key=lambda loss: loss.is_consequence)
        return losses[0] if losses else None

    def broadcast(self, task: Task) -> None:
        """Send a task to every follower.

        Raises:
            RankError: The task cannot be sent; no follower got it.
            RankLostError: A rank is gone.
        """
        try:
            message = encode(task)
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

    @contextlib.contextmanager
    def ending_soon(self) -> Iterator[None]:
        """Count a rank as lost where what is done in this block takes longer than a collective may: one at a time."""
        self._due_at = time.monotonic() + PASS_TIMEOUTS * self._timeout_s
        try:
            yield
        finally:
            self._due_at = None

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
        message = encode(End(is_at_once=is_lost))
        if self._send_lock.acquire(timeout=self._timeout_s):  # a thread that is stuck in sending has failed by then
            try:
                for connection in self._connections.values():
                    send_if_room(connection, message)
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
        return heartbeat_interval(self._timeout_s)

    def _watch(self) -> None:
        rank_of = {connection: rank for rank, connection in self._connections.items()}
        looked_at = beat_at = time.monotonic()
        while rank_of and (self._end_at is None or time.monotonic() < self._end_at):
            for connection in wait(list(rank_of), timeout=self._interval_s / 2):
                assert isinstance(connection, Connection)
                rank = rank_of[connection]
                try:
                    self._take(rank, receive(connection))
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
            if (due_at := self._due_at) is not None and now > due_at and self.loss is None:
                self.lose(min(self._connections), f"it did not end a pass in {PASS_TIMEOUTS * self._timeout_s:g} s")
            if now - beat_at >= self._interval_s:
                beat_at = now
                self._beat()

    def _take(self, rank: int, message: object) -> None:
        """Hear a follower."""
        self._silence_s[rank] = 0.0
        if isinstance(message, Failed):
            self.lose(rank, message.cause, is_consequence=message.is_consequence)
        if isinstance(message, Loaded):
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
                    send_if_room(connection, HEARTBEAT)
            finally:
                self._send_lock.release()
