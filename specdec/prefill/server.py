"""A prefill: computes prompts for decode groups and writes their KV into the groups' memory.

One thread runs the rounds and owns every transfer; one accepts lines, and each line has its own two. What a line brings
goes through one queue, so that nothing a peer sends is acted on inside of a round, and no message ends the process.
"""

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specdec.engine import Engine
from specdec.errors import ConfigError, TransferError
from specdec.handoff.facts import check_facts
from specdec.prefill.outgoing import Outgoing, OutgoingCounts
from specdec.transfer.line import HEARTBEAT_S, Line, parse_address
from specdec.transfer.messages import (
    PROTOCOL_VERSION,
    Abort,
    Ask,
    Hello,
    Message,
    Refused,
    Start,
    Welcome,
    clip,
)

_IDLE_WAIT_S = 0.2
_SENDING_WAIT_S = 0.001
_MAX_LINES = 1024
_MESSAGES_AT_ONCE = 256  # between two rounds, however fast they come
_HELLO_TIMEOUT_S = 10.0
_LAST_WRITES_TIMEOUT_S = 3.0
_ACCEPT_PAUSE_S = 0.05


class _Told(NamedTuple):
    """What a line brought; no message where it is over."""

    session: "_Session"
    message: Message | None


@dataclass(slots=True, eq=False)
class _Session:
    """The line of one decode group; knows its epoch once it has said hello."""

    opened_at: float
    line: Line | None = None
    epoch: str | None = None
    addresses: set[bytes] = field(default_factory=set)
    send: Callable[[Message], None] = lambda _message: None


class PrefillServer:
    """Serves decode groups with an engine that computes prompts only.

    Args:
        engine: With a transport (`EngineConfig.transport`); closed by its owner.
        listen: "host:port"; port 0 takes a free one.

    Attributes:
        address: "host:port" where it listens.

    Raises:
        ConfigError: The engine has no transport, or the address cannot be listened on.
    """

    def __init__(self, engine: Engine, *, listen: str = "127.0.0.1:0") -> None:
        self._epoch = secrets.token_hex(16)
        self._engine = engine
        transfer = engine.core.ranks.worker.transfer
        if transfer is None or engine.config.transport is None:
            raise ConfigError("a prefill needs a transport: set transport (--transport), as in local")
        self._transport = engine.config.transport.value
        self._facts = engine.pool_facts
        with torch.inference_mode():
            self._processes = engine.core.ranks.processes()
        host, port = parse_address(listen)
        try:
            self._door = socket.create_server((host, port), backlog=64, family=_family(host))
        except OSError as error:
            raise ConfigError(f"cannot listen on {listen}: {error}; choose another --listen") from error
        name, bound = self._door.getsockname()[:2]
        self.address = f"[{name}]:{bound}" if ":" in name else f"{name}:{bound}"
        self._outgoing = Outgoing(
            engine.core,
            side=transfer.side,
            facts=self._facts,
            epoch=self._epoch,
            vocab_size=engine.checkpoint.config.vocab_size,
            max_model_len=engine.max_model_len,
        )
        self._has_work = True
        self._inbox: queue.SimpleQueue[_Told | None] = queue.SimpleQueue()
        self._sessions: set[_Session] = set()
        self._lock = threading.Lock()
        self._is_closing = False
        self._acceptor = threading.Thread(target=self._accept, name="specdec-accept", daemon=True)

    @property
    def counts(self) -> OutgoingCounts:
        """What was sent so far."""
        return self._outgoing.counts

    def serve(self) -> None:
        """Serve until `stop`.

        Raises:
            RankLostError: A rank is gone; every line is hung up on.
        """
        self._acceptor.start()
        try:
            with torch.inference_mode():
                while not self._is_closing:
                    self._turn()
        finally:
            self._close()

    def stop(self) -> None:
        """Let `serve` return after the round that runs; may be called from any thread, and from a signal handler."""
        self._is_closing = True
        self._inbox.put(None)
        if not self._acceptor.is_alive():  # nobody serves, so that nobody else closes it
            self._door.close()

    def _turn(self) -> None:
        """Take in what lines brought, run a round, look after the writes."""
        wait_s = 0.0 if self._has_work else _SENDING_WAIT_S if self._outgoing.is_sending else _IDLE_WAIT_S
        with contextlib.suppress(queue.Empty):
            told = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            for _ in range(_MESSAGES_AT_ONCE):
                if told is None:
                    break
                self._handle(told)
                told = self._inbox.get_nowait()
        self._end_mute_sessions()
        self._has_work = self._engine.core.step()
        allocator = self._engine.core.scheduler.allocator
        num_free = allocator.num_free
        self._outgoing.step()
        self._has_work |= allocator.num_free > num_free  # a prompt may have waited for these pages
        if (lost := self._engine.core.ranks.lost) is not None:
            raise lost

    def _handle(self, told: _Told) -> None:
        session, message = told
        if message is None:
            self._end_session(session)
            return
        if session not in self._sessions:
            return  # its line was over before this was reached
        try:
            match message:
                case Hello():
                    self._greet(session, message)
                case Start() | Abort() | Ask() if session.epoch is None:
                    raise TransferError("a line begins with Hello")
                case Start() | Abort() | Ask() if message.decode_epoch != session.epoch:
                    raise TransferError("a message names another epoch than its line's Hello")
                case Start():
                    session.addresses.update(message.destination.addresses)
                    self._outgoing.start(message, session.send)
                case Abort():
                    self._outgoing.abort(message, session.send)
                case Ask():
                    self._outgoing.ask(message, session.send)
                case _:
                    raise TransferError(f"a decode group sends no {type(message).__name__} message")
        except Exception as error:  # this peer is no decode group of ours; all others are served on
            reason = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
            session.send(Refused(reason=clip(reason)))
            self._end_session(session)

    def _greet(self, session: _Session, hello: Hello) -> None:
        if session.epoch is not None:
            if session.epoch == hello.epoch:
                return  # said twice
            raise TransferError("a line has one Hello")
        if hello.protocol != PROTOCOL_VERSION:
            raise TransferError(
                f"the decode group speaks protocol {hello.protocol}, this prefill {PROTOCOL_VERSION}: run one version "
                "of specdec on both sides"
            )
        if hello.transport != self._transport:
            raise TransferError(
                f"the decode group receives through {hello.transport}, this prefill sends through {self._transport}: "
                "start both with one --transport"
            )
        check_facts(hello.facts, self._facts)
        for other in self._open_sessions():
            if other is not session and other.epoch == hello.epoch:  # it called again: what is left of the old line
                self._end_session(other)  # must not be heard after the new one
        session.epoch = hello.epoch
        session.send(Welcome(epoch=self._epoch, processes=self._processes))

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                connection, _ = self._door.accept()
                if len(self._sessions) < _MAX_LINES:
                    self._open_session(connection)
                else:
                    connection.close()
            except Exception:  # closed, or this process has no file or thread left for another line
                time.sleep(_ACCEPT_PAUSE_S)

    def _open_session(self, connection: socket.socket) -> None:
        session = _Session(time.monotonic())

        def take(message: Message) -> None:
            self._inbox.put(_Told(session, message))

        def end(_why: str) -> None:
            self._inbox.put(_Told(session, None))

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

    def _open_sessions(self) -> list[_Session]:
        with self._lock:
            return list(self._sessions)

    def _end_mute_sessions(self) -> None:
        """Hang up on whoever has not said Hello in time."""
        now = time.monotonic()
        for session in self._open_sessions():
            if session.epoch is None and now - session.opened_at > _HELLO_TIMEOUT_S:
                self._end_session(session)

    def _end_session(self, session: _Session) -> None:
        with self._lock:
            if session not in self._sessions:
                return
            self._sessions.remove(session)
        self._outgoing.drop(session.send)
        still_used = set().union(*(other.addresses for other in self._open_sessions()))
        self._outgoing.forget(sorted(session.addresses - still_used))
        assert session.line is not None
        threading.Thread(target=session.line.close, daemon=True).start()  # it may wait for the peer for a moment

    def _close(self) -> None:
        """Stop writing, tell the groups, hang up. Nobody is refused before, which would mean that no writer is left."""
        self._is_closing = True
        try:
            if self._engine.core.ranks.lost is None:
                self._end_writes()
        finally:
            self._hang_up()

    def _end_writes(self) -> None:
        self._outgoing.fail_all("it is being shut down")
        deadline = time.monotonic() + _LAST_WRITES_TIMEOUT_S
        with torch.inference_mode():
            while self._outgoing.is_sending and time.monotonic() < deadline:
                self._outgoing.step()
                time.sleep(_SENDING_WAIT_S)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._acceptor.join()
        closing = []
        for session in self._open_sessions():
            assert session.line is not None
            closing.append(threading.Thread(target=session.line.close, daemon=True))  # each may wait for its peer
            closing[-1].start()
        for thread in closing:
            thread.join()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
