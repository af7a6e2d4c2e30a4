"""The life of one write, from the call to the last byte.

    RUNNING -- all landed --------------------------------------> DONE
    RUNNING -- a post failed, the peer is gone, cancelled ------> FAILED   nothing in flight any more
    RUNNING -- its time is over --------------------------------> FAILED   `may_land` until what was posted has ended

The sending thread may be stuck inside of a library when the time is over, so nobody waits for it: whoever asks for the
state also looks at the clock.
"""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec.transfer.transport import RegionCopies, WriteState

CANCELLED = "cancelled"


class GpuSource(NamedTuple):
    """Where bytes of a GPU come from.

    Attributes:
        device: The GPU.
        stored: Done once the bytes are there.
    """

    device: torch.device
    stored: torch.cuda.Event


class QueuedWrite:
    """A write and what became of it.

    Args:
        copies: What to copy.
        peer: The peer's name, for errors.
        timeout_s: Seconds from now after which it has failed.
        gpu_source: Where it reads memory of a GPU; None where it reads the host's alone.
    """

    def __init__(
        self,
        copies: Sequence[RegionCopies],
        *,
        peer: str,
        timeout_s: float,
        gpu_source: GpuSource | None = None,
    ) -> None:
        self.copies = tuple(copies)
        self.gpu_source = gpu_source
        self._peer = peer
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._news = threading.Condition()
        self._state = WriteState.RUNNING
        self._error: str | None = None
        self._is_cancelled = False
        self._is_in_flight = False
        self._end_is_unknown = False
        self._put_at = time.monotonic()
        self._begun_at: float | None = None
        self._ended_at: float | None = None

    @property
    def state(self) -> WriteState:
        """How far it is."""
        with self._news:
            self._look_at_clock()
            return self._state

    @property
    def error(self) -> str | None:
        """Why it failed."""
        with self._news:
            self._look_at_clock()
            return self._error

    @property
    def may_land(self) -> bool:
        """Whether bytes of it may still arrive."""
        with self._news:
            return self._is_in_flight or self._end_is_unknown

    @property
    def queued_s(self) -> float:
        """Seconds from the call until the sending thread came to it, or so far."""
        with self._news:
            return (self._begun_at or self._ended_at or time.monotonic()) - self._put_at

    @property
    def sending_s(self) -> float:
        """Seconds from then until it ended, or so far; 0 before."""
        with self._news:
            return 0.0 if self._begun_at is None else (self._ended_at or time.monotonic()) - self._begun_at

    def wait(self, timeout_s: float) -> WriteState:
        """Wait until it has ended, at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        with self._news:
            while True:
                self._look_at_clock()
                rest_s = min(until, self._deadline) - time.monotonic()
                if self._state is not WriteState.RUNNING or time.monotonic() >= until:
                    return self._state
                self._news.wait(max(rest_s, 0.0))

    def cancel(self) -> None:
        """Post nothing more."""
        with self._news:
            self._is_cancelled = True
            if self._begun_at is None:
                self._end(WriteState.FAILED, CANCELLED)

    # The sending thread's side.

    def begin(self) -> bool:
        """Take it from the queue; False where it has ended there."""
        with self._news:
            self._look_at_clock()
            if self._state is WriteState.RUNNING:
                self._begun_at = time.monotonic()
            return self._begun_at is not None

    def is_wanted(self) -> bool:
        """Tell whether it is still to be sent."""
        with self._news:
            self._look_at_clock()
            return self._state is WriteState.RUNNING and not self._is_cancelled

    def may_post(self) -> bool:
        """Tell whether more of it should be posted; where that is so, it counts as in flight from now on.

        One step: once a write was seen to have failed with nothing in flight, nothing of it is posted any more, however
        long the sending thread was held up in between.
        """
        with self._news:
            self._look_at_clock()
            goes_on = self._state is WriteState.RUNNING and not self._is_cancelled
            self._is_in_flight |= goes_on
            return goes_on

    def finish(self, error: str | None, *, end_is_unknown: bool = False) -> None:
        """The sending thread has nothing more to do with it.

        Args:
            error: Why it failed; None where all that was posted has landed.
            end_is_unknown: Whether bytes may arrive all the same.
        """
        with self._news:
            self._is_in_flight = False
            self._end_is_unknown = end_is_unknown
            self.copies = ()  # whoever keeps watching a write whose end is unknown needs no more of it
            if error is None and self._is_cancelled:
                error = CANCELLED
            self._end(WriteState.DONE if error is None else WriteState.FAILED, error)

    def give_up(self, error: str) -> None:
        """Fail it while the sending thread may still be busy with it; what is in flight stays in flight."""
        with self._news:
            self._end(WriteState.FAILED, error)

    def _look_at_clock(self) -> None:
        if time.monotonic() >= self._deadline:
            rest = "what was posted may still land" if self._is_in_flight else "nothing of it is in flight"
            self._end(WriteState.FAILED, f"{self._peer} took more than {self._timeout_s:g} s for a write; {rest}")

    def _end(self, state: WriteState, error: str | None) -> None:
        if self._state is WriteState.RUNNING:
            self._state, self._error, self._ended_at = state, error, time.monotonic()
            self._news.notify_all()
