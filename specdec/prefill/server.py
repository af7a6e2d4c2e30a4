"""A prefill: computes prompts for decode groups and writes their KV into the groups' memory.

One thread runs the rounds and owns every transfer: `PrefillServer.serve` is such a thread, and a server that answers
requests besides has its own, which calls `PrefillServer.turn`. What decode groups say is acted on between two rounds.
No message ends the process.
"""

import secrets
import time
from collections.abc import Callable, Sequence

import torch

from specdec.engine import Engine
from specdec.errors import ConfigError, TransferError
from specdec.handoff.facts import check_facts
from specdec.prefill.door import Door, Session, Told
from specdec.prefill.outgoing import Outgoing, OutgoingCounts
from specdec.transfer.messages import (
    PROTOCOL_VERSION,
    Abort,
    Ask,
    Hello,
    Refused,
    Start,
    Welcome,
    clip,
)

_IDLE_WAIT_S = 0.2
_SENDING_WAIT_S = 0.001
_LAST_WRITES_TIMEOUT_S = 3.0


class PrefillServer:
    """Serves decode groups with an engine, which may serve requests of its own besides.

    Args:
        engine: With a transport (`EngineConfig.transport`) and without prefills; closed by its owner.
        listen: "host:port"; port 0 takes a free one.

    Attributes:
        address: "host:port" where it listens.

    Raises:
        ConfigError: The engine has no transport or computes no prompts, or the address cannot be listened on.
    """

    def __init__(self, engine: Engine, *, listen: str = "127.0.0.1:0") -> None:
        self._epoch = secrets.token_hex(16)
        self._engine = engine
        transfer = engine.core.ranks.worker.transfer
        if transfer is None or engine.config.transport is None:
            raise ConfigError("a prefill needs a transport: set transport (--transport), as in local")
        if engine.config.prefill:
            raise ConfigError(
                f"a prefill computes prompts itself, got prefill {', '.join(engine.config.prefill)} (--prefill): "
                "leave it out"
            )
        self._transport = engine.config.transport.value
        self._facts = engine.pool_facts
        with torch.inference_mode():
            self._processes = engine.core.ranks.processes()
        self._door = Door(listen)
        self.address = self._door.address
        self._outgoing = Outgoing(
            engine.core,
            side=transfer.side,
            facts=self._facts,
            epoch=self._epoch,
            vocab_size=engine.checkpoint.config.vocab_size,
            max_model_len=engine.max_model_len,
            request_ids=engine.request_ids,
        )
        self._has_work = True
        self._is_stopping = False
        self._is_open = False

    @property
    def counts(self) -> OutgoingCounts:
        """What was sent so far."""
        return self._outgoing.counts

    @property
    def num_groups(self) -> int:
        """Decode groups whose line is up."""
        return sum(session.epoch is not None for session in self._door.sessions)

    @property
    def num_running(self) -> int:
        """Transfers that are neither complete nor failed; may be read by any thread."""
        return self._outgoing.num_running

    def serve(self) -> None:
        """Serve until `stop`.

        Raises:
            RankLostError: A rank is gone; every line is hung up on.
        """
        self.open()
        wait_s = 0.0
        try:
            while not self._is_stopping:
                wait_s = self.turn(wait_s=wait_s)
        finally:
            self.close()

    def stop(self) -> None:
        """Let `serve` return after the round that runs; may be called from any thread, and from a signal handler."""
        self._is_stopping = True
        self._door.wake()
        if not self._is_open:  # nobody serves, so that nobody else closes it
            self._door.close()

    def open(self, *, on_news: Callable[[], None] = lambda: None) -> None:
        """Let decode groups call.

        Args:
            on_news: Called by any thread when there is something to do in a turn.
        """
        self._is_open = True
        self._door.open(on_news)

    def turn(self, *, wait_s: float = 0.0) -> float:
        """Take in what decode groups say, run a round, look after the writes.

        Args:
            wait_s: Seconds to wait for the first word of a group.

        Returns:
            Seconds that may pass until the next turn, unless something is said before.

        Raises:
            RankLostError: A rank is gone.
        """
        told = self._door.take(wait_s=wait_s)
        self._engine.between_rounds(lambda: self._turn(told))
        if self._has_work or self._door.has_news:
            return 0.0
        return _SENDING_WAIT_S if self._outgoing.is_sending else _IDLE_WAIT_S

    def drain(self) -> None:
        """Take no more prompts, so that groups go elsewhere; those that are here go on. From any thread."""
        self._outgoing.is_draining = True

    def close(self) -> None:
        """Stop writing, tell the groups, hang up. Nobody is refused before, which would mean that no writer is left."""
        try:
            if self._engine.core.ranks.lost is None:
                self._engine.between_rounds(self._end_writes)
        finally:
            self._door.close()

    def _turn(self, told: Sequence[Told]) -> None:
        for each in told:
            self._handle(each)
        for session in self._door.mute_sessions():
            self._end_session(session)
        self._has_work = self._engine.core.step()
        allocator = self._engine.core.scheduler.allocator
        num_free = allocator.num_free
        self._outgoing.step()
        self._has_work |= allocator.num_free > num_free  # a prompt may have waited for these pages
        if (lost := self._engine.core.ranks.lost) is not None:
            raise lost

    def _handle(self, told: Told) -> None:
        session, message = told
        if not self._door.is_open(session):
            return  # its line was over before this was reached
        if message is None:
            self._end_session(session)
            return
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

    def _greet(self, session: Session, hello: Hello) -> None:
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
        others = [other for other in self._door.sessions if other is not session and other.epoch == hello.epoch]
        if any(other.opened_at > session.opened_at for other in others):
            raise TransferError("the decode group has called again since")
        for other in others:  # what is left of the old line must not be heard after the new one
            self._end_session(other)
        session.epoch = hello.epoch
        session.send(Welcome(epoch=self._epoch, processes=self._processes))

    def _end_session(self, session: Session) -> None:
        if not self._door.is_open(session):
            return
        self._outgoing.drop(session.send)
        still_used = set().union(*(other.addresses for other in self._door.sessions if other is not session))
        self._outgoing.forget(sorted(session.addresses - still_used))
        self._door.hang_up(session)

    def _end_writes(self) -> None:
        self._outgoing.fail_all("it is being shut down")
        deadline = time.monotonic() + _LAST_WRITES_TIMEOUT_S
        while self._outgoing.is_sending and time.monotonic() < deadline:
            self._outgoing.step()
            time.sleep(_SENDING_WAIT_S)
