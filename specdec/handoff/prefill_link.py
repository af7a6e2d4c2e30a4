"""A decode group's line to one prefill: kept up by a thread, which also says what of a transfer is certain.

The memory that a transfer was given to write is not free when the transfer ends for the group: bytes may still be on
their way. It is free when one of these is known:

    the prefill said so            `Drained`, or it never began (`Unknown`), or it is complete (`Done`)
    the prefill is gone            another epoch answers at its address, or nobody listens there any more, and none
                                   of its ranks that ran on this host is left

A broken line proves nothing, nor does silence. A process that ended has handed its last bytes to the kernel, whose
buffers may reach this host a moment later: hence a grace time after it is gone. Ranks on other hosts cannot be seen;
they end by themselves within that time once their leader is gone, unless they are stopped at that moment.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from specdec.errors import TransferError
from specdec.transfer.address import ProcessRecord
from specdec.transfer.line import HEARTBEAT_S, Line, dial, parse_address
from specdec.transfer.messages import (
    PROTOCOL_VERSION,
    Abort,
    Ask,
    Destination,
    Done,
    Drained,
    Failed,
    Hello,
    Message,
    PoolFacts,
    Progress,
    Refused,
    Start,
    Transfer,
    Unknown,
    Welcome,
)

DEAD_WRITER_GRACE_S = 5.0
_TOKEN_BYTES = 4
_TICK_S = 0.1
_RESEND_S = 1.0
_REDIAL_S = 0.5
_GREETING_TIMEOUT_S = 10.0


class LinkState(StrEnum):
    """Whether a prefill can be given prompts."""

    CONNECTING = "connecting"
    READY = "ready"
    SILENT = "silent"
    REFUSED = "refused"
    DOWN = "down"


class Arrived(NamedTuple):
    """All KV of a transfer is there, and nothing more will be written."""

    transfer_id: int
    done: Done


class Ended(NamedTuple):
    """A transfer has failed; its memory is not free before `Freed`."""

    transfer_id: int
    reason: str
    is_retryable: bool


class Freed(NamedTuple):
    """Nothing of a transfer that ended can be written any more."""

    transfer_id: int


LinkEvent = Arrived | Ended | Freed


@dataclass(slots=True, kw_only=True)
class _Open:
    """A transfer whose memory is not free.

    Attributes:
        token_ids: The prompt, as in `Start`.
        num_cached: As in `Start`.
        num_computed: Leading tokens that the prefill is thought to have computed.
        cache_salt: As in `Start`.
        priority: As in `Start`.
        destination: As in `Start`.
        deadline: When it is given up.
        prefill_epoch: Of the process it was given to; None while it was given to nobody.
        writers: All processes of that epoch.
        is_ended: Whether the group has given it up.
        asked_at: When the prefill was last told or asked about it.
        gone_at: When its prefill was found to be gone.
    """

    token_ids: bytes
    num_cached: int
    num_computed: int
    cache_salt: bytes
    priority: int
    destination: Destination
    deadline: float
    prefill_epoch: str | None = None
    writers: tuple[ProcessRecord, ...] = ()
    is_ended: bool = False
    asked_at: float = 0.0
    gone_at: float | None = None

    @property
    def num_tokens_left(self) -> int:
        """Prompt tokens that the prefill has to compute, whatever of them the group has; for balance."""
        return max(0, len(self.token_ids) // _TOKEN_BYTES - self.num_computed)


@dataclass(slots=True)
class LinkCounts:
    """What has been seen of a prefill.

    Attributes:
        num_started: Transfers it was given.
        num_arrived: Of these, complete ones.
        num_failed: Of these, failed ones.
        num_stale: Messages of another epoch or of a transfer that was over.
        num_connections: Times that it answered.
        num_prompt_tokens: Tokens of the complete ones.
        num_cached_tokens: Of these, tokens whose KV the prefill had.
    """

    num_started: int = 0
    num_arrived: int = 0
    num_failed: int = 0
    num_stale: int = 0
    num_connections: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class PrefillLink:
    """One prefill, as a decode group sees it. Methods may be called from any thread.

    Args:
        address: "host:port".
        epoch: Of the decode group.
        transport: What the group receives through.
        facts: Of its pools.
        peer_timeout_s: Silence after which the prefill counts as stopped.
        on_event: Called from the link's threads; must not block.
    """

    def __init__(
        self,
        address: str,
        *,
        epoch: str,
        transport: str,
        facts: PoolFacts,
        peer_timeout_s: float,
        on_event: Callable[[LinkEvent], None],
    ) -> None:
        parse_address(address)
        self.address = address
        self.counts = LinkCounts()
        self._epoch = epoch
        self._hello = Hello(protocol=PROTOCOL_VERSION, epoch=epoch, transport=transport, facts=facts)
        self._peer_timeout_s = peer_timeout_s
        self._on_event = on_event
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._open: dict[int, _Open] = {}
        self._line: Line | None = None
        self._prefill_epoch: str | None = None
        self._writers: tuple[ProcessRecord, ...] = ()
        self._silence_s = 0.0  # counted in steps: time in which this process was itself stopped is no silence
        self._heard_at = self._looked_at = time.monotonic()
        self._state, self._why = LinkState.CONNECTING, "not connected yet"
        self._greeting: Welcome | Refused | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._keep_up, name=f"specdec-link {address}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> LinkState:
        """Whether it can be given prompts now."""
        with self._lock:
            if self._state is LinkState.READY and self._line is not None:
                was_heard = self._line.heard_at != self._heard_at  # since it was last looked at
                return LinkState.SILENT if not was_heard and self._silence_s > self._peer_timeout_s else self._state
            return self._state

    @property
    def why(self) -> str:
        """Why it cannot, in words."""
        with self._lock:
            return f"no sign of life for {self._peer_timeout_s:g} s" if self.state is LinkState.SILENT else self._why

    @property
    def prefill_epoch(self) -> str | None:
        """Of the process that answered last; None before any has."""
        with self._lock:
            return self._prefill_epoch

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that it was given and has not computed, as far as is known."""
        with self._lock:
            return sum(each.num_tokens_left for each in self._open.values() if not each.is_ended)

    @property
    def num_held(self) -> int:
        """Transfers that ended and whose memory is not free yet."""
        with self._lock:
            return sum(each.is_ended for each in self._open.values())

    def await_first_answer(self, timeout_s: float) -> None:
        """Wait until the prefill has answered, refused, or could not be reached."""
        with self._news:
            self._news.wait_for(lambda: self._state is not LinkState.CONNECTING, timeout_s)

    def start(
        self,
        transfer_id: int,
        *,
        token_ids: bytes,
        num_cached: int,
        num_computed: int,
        cache_salt: bytes,
        priority: int,
        destination: Destination,
        deadline_s: float,
    ) -> None:
        """Give it a prompt; `Arrived` or `Ended` and, after the latter, `Freed` follow.

        Args:
            transfer_id: Its name.
            token_ids: As in `Start`, like the others but for `num_computed`.
            num_cached: Leading tokens whose KV is here.
            num_computed: Leading tokens that the prefill is thought to have computed; for balance.
            cache_salt: Of its tenant.
            priority: Of its request.
            destination: Where it goes.
            deadline_s: Seconds until it is given up.
        """
        with self._lock:
            self.counts.num_started += 1
            self._open[transfer_id] = opened = _Open(
                token_ids=token_ids,
                num_cached=num_cached,
                num_computed=num_computed,
                cache_salt=cache_salt,
                priority=priority,
                destination=destination,
                deadline=time.monotonic() + deadline_s,
            )
            if self.state is not LinkState.READY:
                self._end(transfer_id, f"prefill {self.address} is {self.state}: {self.why}", is_retryable=True)
                return
            opened.prefill_epoch, opened.writers = self._prefill_epoch, self._writers
            try:
                self._send_start(transfer_id, opened)
            except TransferError as error:
                opened.prefill_epoch = None
                self._end(transfer_id, str(error), is_retryable=False)

    def abort(self, transfer_id: int) -> None:
        """Give a transfer up; only `Freed` follows. Nothing where it is over."""
        with self._lock:
            opened = self._open.get(transfer_id)
            if opened is not None and not opened.is_ended:
                opened.is_ended = True
                self._send_abort(transfer_id, opened)

    def close(self) -> None:
        """Hang up and end the thread; transfers that are open are told to stop."""
        with self._news:
            for transfer_id in self._open:
                self.abort(transfer_id)
            self._is_closed = True
            line = self._line
            self._news.notify_all()
        self._thread.join()
        if line is not None:
            line.close()

    def _keep_up(self) -> None:
        next_dial = 0.0
        while True:
            with self._news:
                if self._is_closed:
                    return
                now = time.monotonic()
                self._count_silence(now)
                is_dialling = self._line is None and now >= next_dial
                if not is_dialling:
                    self._look_after(now)
                    self._news.wait(_TICK_S)
                    continue
            next_dial = time.monotonic() + _REDIAL_S
            try:
                self._dial()
            except Exception as error:  # whatever it was: deadlines are kept, and it is dialled again
                self._set_down(f"{type(error).__name__}: {error}")

    def _count_silence(self, now: float) -> None:
        elapsed_s, self._looked_at = min(now - self._looked_at, 2 * _TICK_S), now
        heard_at = self._heard_at if self._line is None else self._line.heard_at
        self._silence_s = 0.0 if heard_at != self._heard_at else self._silence_s + elapsed_s
        self._heard_at = heard_at

    def _dial(self) -> None:
        try:
            connection = dial(self.address)
        except OSError as error:
            self._set_down(f"cannot be reached ({error})")
            if isinstance(error, ConnectionRefusedError):  # its host answers, and nobody listens there
                self._note_gone(None)
            return
        line = Line(
            connection,
            heartbeat_s=HEARTBEAT_S,
            on_message=lambda message: self._take(line, message),
            on_end=lambda why: self._lose(line, why),
        )
        greeting = self._greet(line)
        if isinstance(greeting, Welcome):
            self._note_gone(greeting.epoch)
            with self._news:
                if self._line is line:
                    self.counts.num_connections += 1
                    self._prefill_epoch, self._writers = greeting.epoch, tuple(greeting.processes)
                    self._silence_s = 0.0
                    self._state, self._why = LinkState.READY, ""
                    for transfer_id, opened in self._open.items():
                        if opened.is_ended and opened.prefill_epoch == greeting.epoch:
                            self._send_abort(transfer_id, opened)
                self._news.notify_all()
            return
        with self._lock:
            if self._line is line and greeting is None:
                self._set_down("it did not answer a greeting")
            self._line = None
        line.close()

    def _greet(self, line: Line) -> Welcome | Refused | None:
        """Say who this is; gives the answer, or None where none came."""
        with self._news:
            self._line, self._greeting = line, None
            line.start()
            line.send(self._hello)
            self._news.wait_for(
                lambda: self._greeting is not None or self._line is not line or self._is_closed, _GREETING_TIMEOUT_S
            )
            return self._greeting

    def _set_down(self, why: str, state: LinkState = LinkState.DOWN) -> None:
        with self._news:
            self._state, self._why = state, why
            self._news.notify_all()

    def _note_gone(self, epoch: str | None) -> None:
        """Note that only the process of this epoch, or none, is left at the address."""
        with self._lock:
            for opened in self._open.values():
                if opened.prefill_epoch == epoch:
                    opened.gone_at = None  # it answers again, whoever refused calls for it in between
                elif opened.gone_at is None:
                    opened.gone_at = time.monotonic()

    def _look_after(self, now: float) -> None:
        """End what is late, repeat what may have been lost, free what its writer's end has freed."""
        is_silent = self.state is LinkState.SILENT
        for transfer_id, opened in list(self._open.items()):
            if opened.gone_at is not None:
                if any(writer.is_on_this_host and not writer.is_gone for writer in opened.writers):
                    opened.gone_at = now  # a rank that was stopped outlives its leader until it goes on
                elif opened.is_ended and now - opened.gone_at >= DEAD_WRITER_GRACE_S:
                    self._free(transfer_id)
                continue
            if not opened.is_ended and now >= opened.deadline:
                self._end(transfer_id, f"prefill {self.address} did not deliver in time", is_retryable=False)
            elif not opened.is_ended and is_silent:
                self._end(transfer_id, f"prefill {self.address}: {self.why}", is_retryable=True)
            elif now - opened.asked_at >= _RESEND_S and opened.prefill_epoch == self._prefill_epoch and self._line:
                if opened.is_ended:
                    self._send_abort(transfer_id, opened)
                else:
                    opened.asked_at = now
                    self._line.send(Ask(**self._names(transfer_id, opened)))

    def _take(self, line: Line, message: Message) -> None:
        with self._news:
            if isinstance(message, Welcome | Refused):
                if line is self._line:
                    self._greeting = message
                    if isinstance(message, Refused):
                        self._set_down(message.reason, LinkState.REFUSED)
                    self._news.notify_all()
                return
            if not isinstance(message, Transfer):
                raise TransferError(f"a prefill sends no {type(message).__name__} message")
            opened = self._open.get(message.transfer_id)
            if (
                opened is None
                or message.decode_epoch != self._epoch
                or message.prefill_epoch != opened.prefill_epoch
                or message.prefill_epoch != self._prefill_epoch  # of another process nobody here can say anything
                or line is not self._line
            ):
                self.counts.num_stale += 1
                return
            match message:
                case Progress():
                    opened.asked_at = time.monotonic()
                    opened.num_computed = max(opened.num_computed, message.num_computed)
                case Done() if opened.is_ended:  # given up: it may be complete, but nobody waits for it
                    self._free(message.transfer_id)
                case Done():
                    self.counts.num_arrived += 1
                    self.counts.num_prompt_tokens += len(opened.token_ids) // _TOKEN_BYTES
                    self.counts.num_cached_tokens += message.num_cached
                    del self._open[message.transfer_id]
                    self._on_event(Arrived(message.transfer_id, message))
                case Failed():
                    if not opened.is_ended:
                        why = f"prefill {self.address}: {message.reason}"
                        self._end(message.transfer_id, why, is_retryable=message.is_retryable)
                case Drained():
                    if not opened.is_ended:
                        self._end(message.transfer_id, f"prefill {self.address} dropped it", is_retryable=True)
                    self._free(message.transfer_id)
                case Unknown() if opened.is_ended:
                    self._free(message.transfer_id)
                case Unknown():
                    self._send_start(message.transfer_id, opened)
                case _:
                    raise TransferError(f"a prefill sends no {type(message).__name__} message")

    def _lose(self, line: Line, why: str) -> None:
        with self._news:
            if self._line is not line:
                return
            self._line = None
            if isinstance(self._greeting, Refused):  # it has said why, also where it had welcomed the group before
                why = self._greeting.reason
            else:
                self._set_down(f"the line broke off: {why}")
            for transfer_id, opened in list(self._open.items()):
                if not opened.is_ended:
                    self._end(transfer_id, f"prefill {self.address} was lost: {why}", is_retryable=True)
        threading.Thread(target=line.close, daemon=True).start()  # a line's own threads cannot

    def _end(self, transfer_id: int, reason: str, *, is_retryable: bool) -> None:
        opened = self._open[transfer_id]
        opened.is_ended = True
        self.counts.num_failed += 1
        self._on_event(Ended(transfer_id, reason, is_retryable))
        if opened.prefill_epoch is None:
            self._free(transfer_id)  # nobody was told of it
        else:
            self._send_abort(transfer_id, opened)

    def _free(self, transfer_id: int) -> None:
        del self._open[transfer_id]
        self._on_event(Freed(transfer_id))

    def _send_start(self, transfer_id: int, opened: _Open) -> None:
        opened.asked_at = now = time.monotonic()
        if self._line is not None:
            self._line.send(
                Start(
                    **self._names(transfer_id, opened),
                    token_ids=opened.token_ids,
                    num_cached=opened.num_cached,
                    cache_salt=opened.cache_salt,
                    priority=opened.priority,
                    destination=opened.destination,
                    deadline_s=max(opened.deadline - now, 0.001),
                )
            )

    def _send_abort(self, transfer_id: int, opened: _Open) -> None:
        opened.asked_at = time.monotonic()
        if self._line is not None and opened.prefill_epoch == self._prefill_epoch:
            self._line.send(Abort(**self._names(transfer_id, opened)))

    def _names(self, transfer_id: int, opened: _Open) -> dict[str, Any]:
        return {
            "transfer_id": transfer_id,
            "decode_epoch": self._epoch,
            "prefill_epoch": opened.prefill_epoch,
        }
