"""A transport whose writes go wrong as a test wants it; everything else is the transport it wraps."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum

import torch

from specdec.transfer.transport import Peer, RegionCopies, Transport, Write, WriteState


class Fault(StrEnum):
    """What happens to one write."""

    DELAY = "delay"  # it is passed on after `delay_s`
    HOLD = "hold"  # it is passed on by `release`
    STUCK = "stuck"  # it is passed on by `release`, also where it was cancelled before: it is in flight
    SWAP = "swap"  # it is passed on after the write behind it
    FAIL_TO_POST = "fail to post"  # it fails, and none of its bytes move
    FAIL_AFTER_LANDING = "fail after landing"  # its bytes move, then it fails
    LAND_LATE = "land late"  # it fails at once and `may_land`; its bytes move by `release`


class FaultyTransport:
    """Wraps a transport.

    Args:
        inner: What really writes.
        delay_s: How long `Fault.DELAY` takes.

    Attributes:
        faults: What the next writes suffer, the first of them first; None and an empty queue are no fault.
        writes: All writes so far.
    """

    def __init__(self, inner: Transport, *, delay_s: float = 0.2) -> None:
        self.inner = inner
        self.name = inner.name
        self.faults: deque[Fault | None] = deque()
        self.writes: list[FaultyWrite] = []
        self._delay_s = delay_s
        self._held: list[FaultyWrite] = []
        self._swapped: list[FaultyWrite] = []
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
        return self.inner.allocate(nbytes, device)

    def register(self, regions: Mapping[str, torch.Tensor]) -> None:
        self.inner.register(regions)

    def address(self) -> bytes:
        return self.inner.address()

    def connect(self, address: bytes) -> Peer:
        return self.inner.connect(address)

    def disconnect(self, peer: Peer) -> None:
        self.inner.disconnect(peer)

    def close(self) -> None:
        self.inner.close()
        with self._lock:
            for write in (*self._held, *self._swapped):
                write.fail("the transport was closed", may_land=False)
            self._held.clear()
            self._swapped.clear()

    def write(self, peer: Peer, copies: Sequence[RegionCopies]) -> Write:
        with self._lock:
            fault = self.faults.popleft() if self.faults else None
            write = FaultyWrite(self.inner, peer, copies, fault)
            self.writes.append(write)
            match fault:
                case Fault.DELAY:
                    timer = threading.Timer(self._delay_s, write.pass_on)
                    timer.daemon = True
                    timer.start()
                case Fault.HOLD | Fault.STUCK:
                    self._held.append(write)
                case Fault.LAND_LATE:
                    self._held.append(write)
                    write.fail("failed, as the test wants it, and lands later", may_land=True)
                case Fault.SWAP:
                    self._swapped.append(write)
                case Fault.FAIL_TO_POST:
                    write.fail("not posted, as the test wants it", may_land=False)
                case _:
                    write.pass_on()
            if fault is not Fault.SWAP:
                while self._swapped:
                    self._swapped.pop().pass_on()
        return write

    def release(self) -> None:
        """Pass on what is held."""
        with self._lock:
            while self._held:
                self._held.pop(0).pass_on()


class FaultyWrite:
    """A write that may not have been passed on yet."""

    def __init__(self, transport: Transport, peer: Peer, copies: Sequence[RegionCopies], fault: Fault | None) -> None:
        self.fault = fault
        self._transport = transport
        self._peer = peer
        self._copies = copies
        self._news = threading.Condition()
        self._inner: Write | None = None
        self._failure: str | None = None
        self._lands_later = False

    def pass_on(self) -> None:
        """Let the wrapped transport write it, unless it was cancelled."""
        with self._news:
            if self._failure is None or self._lands_later:
                self._inner = self._transport.write(self._peer, self._copies)
                self._lands_later = False
            self._news.notify_all()

    def fail(self, error: str, *, may_land: bool) -> None:
        """Fail it before it is passed on."""
        with self._news:
            if self._failure is None:
                self._failure, self._lands_later = error, may_land
            self._lands_later &= may_land
            self._news.notify_all()

    @property
    def state(self) -> WriteState:
        if self._failure is not None:
            return WriteState.FAILED
        if self._inner is None:
            return WriteState.RUNNING
        state = self._inner.state
        return WriteState.FAILED if state is WriteState.DONE and self._fails_late else state

    @property
    def error(self) -> str | None:
        if self._failure is not None or self._inner is None:
            return self._failure
        if self._fails_late and self._inner.state is WriteState.DONE:
            return "failed after it had landed, as the test wants it"
        return self._inner.error

    @property
    def may_land(self) -> bool:
        return self._lands_later or (self._inner is not None and self._inner.may_land)

    @property
    def queued_s(self) -> float:
        return 0.0 if self._inner is None else self._inner.queued_s

    @property
    def sending_s(self) -> float:
        return 0.0 if self._inner is None else self._inner.sending_s

    def wait(self, timeout_s: float) -> WriteState:
        with self._news:
            self._news.wait_for(lambda: self._inner is not None or self._failure is not None, timeout_s)
        if self._inner is not None and self._failure is None:
            self._inner.wait(timeout_s)
        return self.state

    def cancel(self) -> None:
        if self.fault is Fault.STUCK:
            return
        if self._inner is None:
            self.fail("cancelled", may_land=self._lands_later)
        else:
            self._inner.cancel()

    @property
    def _fails_late(self) -> bool:
        return self.fault is Fault.FAIL_AFTER_LANDING
