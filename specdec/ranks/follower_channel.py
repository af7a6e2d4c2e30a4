"""A follower's end of the control channel: its tasks, and a way out of a collective when the leading rank is gone."""

import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

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

LEADER_LOST_EXIT_CODE = 17


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
        self._line = line_of(connection, timeout_s)
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
        self._send(Loaded(failure))

    def report_failure(self, cause: str, *, is_consequence: bool) -> None:
        """Tell the leader why this rank leaves."""
        self._send(Failed(cause, is_consequence))

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
            self._connection.send_bytes(encode(message))

    def _read(self) -> None:
        interval_s = heartbeat_interval(self._timeout_s)
        silence_s = 0.0  # counted in steps: time in which this process was itself stopped is no silence
        why = f"the leading rank gave no sign of life for {self._timeout_s:g} s"
        while silence_s < self._timeout_s:
            try:
                if not self._connection.poll(interval_s):
                    silence_s += interval_s
                    continue
                silence_s = 0.0
                message = receive(self._connection)
            except (EOFError, OSError):
                why = "the leading rank is gone"
                break
            except Exception as error:
                why = f"a task cannot be read: {type(error).__name__}: {error}"
                self.report_failure(why, is_consequence=False)
                break
            if isinstance(message, Task):
                self._tasks.put(message)
            elif isinstance(message, End):
                why = ""
                if not message.is_at_once:
                    self._tasks.put(None)
                    self._ended.wait(END_GRACE_S)  # nobody else would see that this process cannot end
                break
        if not self._ended.is_set():
            self._leave(why)

    def _beat(self) -> None:
        while not self._ended.wait(heartbeat_interval(self._timeout_s)):
            with self._send_lock:
                send_if_room(self._connection, HEARTBEAT)
