"""Where decode groups call a prefill: a listening socket, the lines that come of it, and what they bring.

One thread accepts lines, and each line has its own two. What a line brings waits in one queue for the thread that runs
the rounds, so that nothing a peer sends is acted on inside of a round.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.errors import ConfigError
from specdec.transfer.line import HEARTBEAT_S, Line, parse_address
from specdec.transfer.messages import Message

_MAX_LINES = 1024
_MESSAGES_AT_ONCE = 256  # between two rounds, however fast they come
_HELLO_TIMEOUT_S = 10.0
_ACCEPT_PAUSE_S = 0.05


@dataclass(slots=True, eq=False)
class Session:
    """The line of one decode group; knows its epoch once it has said hello.

    Attributes:
        opened_at: When it called, by `time.monotonic`.
        line: Its line.
        epoch: Of the group.
        addresses: Of the group's ranks, which prompts were written to.
        send: Tells the group something.
    """

    opened_at: float
    line: Line | None = None
    epoch: str | None = None
    addresses: set[bytes] = field(default_factory=set)
    send: Callable[[Message], None] = lambda _message: None


class Told(NamedTuple):
    """What a line brought; no message where it is over."""

    session: Session
    message: Message | None


class Door:
    """Listens from the beginning, and lets lines in from `open` on.

    Args:
        listen: "host:port"; port 0 takes a free one.

    Attributes:
        address: "host:port" where it listens.

    Raises:
        ConfigError: The address cannot be listened on.
    """

    def __init__(self, listen: str) -> None:
        host, port = parse_address(listen)
        try:
            self._socket = socket.create_server((host, port), backlog=64, family=_family(host))
        except OSError as error:
            raise ConfigError(f"cannot listen on {listen}: {error}; choose another address") from error
        name, bound = self._socket.getsockname()[:2]
        self.address = f"[{name}]:{bound}" if ":" in name else f"{name}:{bound}"
        self._inbox: queue.SimpleQueue[Told | None] = queue.SimpleQueue()
        self._on_news: Callable[[], None] = lambda: None
        self._sessions: set[Session] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._accept, name="specdec-accept", daemon=True)

    @property
    def sessions(self) -> list[Session]:
        """Those whose line is not over."""
        with self._lock:
            return list(self._sessions)

    def open(self, on_news: Callable[[], None]) -> None:
        """Let lines in.

        Args:
            on_news: Called by any thread when there is something to take.
        """
        self._on_news = on_news
        self._acceptor.start()

    def wake(self) -> None:
        """Let `take` return; may be called from a signal handler."""
        self._inbox.put(None)

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return not self._inbox.empty()

    def take(self, *, wait_s: float) -> list[Told]:
        """Give what lines have brought, in order, though not all of it at once; waits up to `wait_s` for the first."""
        taken: list[Told] = []
        with contextlib.suppress(queue.Empty):
            while len(taken) < _MESSAGES_AT_ONCE:
                told = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
                wait_s = 0.0
                taken += [] if told is None else [told]
        return taken

    def is_open(self, session: Session) -> bool:
        """Whether a line is not over."""
        return session in self._sessions

    def mute_sessions(self) -> list[Session]:
        """Those that have not said Hello in time."""
        now = time.monotonic()
        return [each for each in self.sessions if each.epoch is None and now - each.opened_at > _HELLO_TIMEOUT_S]

    def hang_up(self, session: Session) -> None:
        """End a line that is not over."""
        with self._lock:
            self._sessions.remove(session)
        assert session.line is not None
        threading.Thread(target=session.line.close, daemon=True).start()  # it may wait for the peer for a moment

    def close(self) -> None:
        """Listen no more and end all lines."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._acceptor.ident is not None:
            self._acceptor.join()
        closing = []
        for session in self.sessions:
            assert session.line is not None
            closing.append(threading.Thread(target=session.line.close, daemon=True))  # each may wait for its peer
            closing[-1].start()
        for thread in closing:
            thread.join()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
                if len(self._sessions) < _MAX_LINES:
                    self._let_in(connection)
                else:
                    connection.close()
            except Exception:  # closed, or this process has no file or thread left for another line
                time.sleep(_ACCEPT_PAUSE_S)

    def _let_in(self, connection: socket.socket) -> None:
        session = Session(time.monotonic())

        def take(message: Message) -> None:
            self._inbox.put(Told(session, message))
            self._on_news()

        def end(_why: str) -> None:
            self._inbox.put(Told(session, None))
            self._on_news()

        session.line = line = Line(connection, heartbeat_s=HEARTBEAT_S, on_message=take, on_end=end)
        session.send = line.send
        with self._lock:
            self._sessions.add(session)
        try:
            line.start()
        except BaseException:
            with self._lock:
                self._sessions.remove(session)
            connection.close()
            raise


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
