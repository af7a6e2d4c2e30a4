"""Writes from a GPU wait for their bytes, and are in the peer's gate exactly while something is in flight."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specdec.errors import TransferError
from specdec.transfer import sending_thread
from specdec.transfer.descriptors import Descriptors
from specdec.transfer.queued_write import GpuSource, QueuedWrite
from specdec.transfer.sending_thread import Batch, EndCause, Link, SendingThread
from specdec.transfer.transport import RegionCopies, WriteState

WAIT_S = 20.0


class FakeEvent:
    """Done when it is told."""

    is_done = False

    def query(self) -> bool:
        return self.is_done


class FakeGate:
    """Notes who is in."""

    is_shut = is_in = is_closed = False

    def enter(self) -> None:
        if self.is_shut:
            raise TransferError("the peer's transport was closed")
        self.is_in = True

    def leave(self) -> None:
        self.is_in = False

    def close(self) -> None:
        self.is_closed = True


class FakeLink(Link):
    """Posts into a list; everything lands at once when it is told."""

    descriptor_bytes = batch_bytes = 1 << 20
    batch_descriptors = 100
    batches_in_flight = 2

    def __init__(self) -> None:
        self.posted: list[Batch] = []
        self.abandoned = 0
        self.lands = False

    def post(self, batch: Batch) -> int:
        self.posted.append(batch)
        return len(self.posted)

    def has_landed(self, ticket: int) -> bool:
        return self.lands

    def abandon(self, ticket: int) -> None:
        self.abandoned += 1

    def cause_of_end(self) -> EndCause | None:
        return None

    def close(self) -> None:
        pass


class Rig:
    """A thread between a fake source and a fake peer."""

    def __init__(self) -> None:
        self.link, self.gate, self.event = FakeLink(), FakeGate(), FakeEvent()
        gate: Any = self.gate
        self.thread = SendingThread(self.link, name="test", gate=gate)

    def write(self, *, timeout_s: float = WAIT_S) -> QueuedWrite:
        event: Any = self.event
        zero = np.zeros(1, np.int64)
        copies = [RegionCopies("a", "b", Descriptors(zero, zero, zero + 8))]
        write = QueuedWrite(
            copies, peer="the peer", timeout_s=timeout_s, gpu_source=GpuSource(torch.device("cpu"), event)
        )
        self.thread.put(write)
        return write


@pytest.fixture
def rig() -> Rig:
    return Rig()


def await_true(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return condition()


def test_nothing_is_posted_before_the_bytes_are_there(rig: Rig) -> None:
    write = rig.write()
    assert await_true(lambda: write.sending_s > 0.05)
    assert (rig.link.posted, write.may_land, rig.gate.is_in) == ([], False, False)
    rig.event.is_done = True
    assert await_true(lambda: bool(rig.link.posted))
    assert (write.may_land, rig.gate.is_in) == (True, True)
    rig.link.lands = True
    assert write.wait(WAIT_S) is WriteState.DONE
    assert await_true(lambda: not rig.gate.is_in)
    rig.thread.close()
    assert rig.gate.is_closed


def test_a_write_that_is_cancelled_while_its_bytes_are_waited_for_posts_nothing(rig: Rig) -> None:
    write = rig.write()
    assert await_true(lambda: write.sending_s > 0.01)
    write.cancel()
    assert write.wait(WAIT_S) is WriteState.FAILED
    assert (write.error, write.may_land, rig.link.posted) == ("cancelled", False, [])
    rig.thread.close()


def test_bytes_that_do_not_come_in_time_fail_the_write(rig: Rig) -> None:
    write = rig.write(timeout_s=0.05)
    assert write.wait(WAIT_S) is WriteState.FAILED
    assert "took more than 0.05 s" in str(write.error)
    rig.event.is_done = rig.link.lands = True
    assert rig.write().wait(WAIT_S) is WriteState.DONE
    assert len(rig.link.posted) == 1
    rig.thread.close()


def test_a_gate_that_was_shut_fails_the_write_with_nothing_posted(rig: Rig) -> None:
    rig.event.is_done = rig.gate.is_shut = True
    write = rig.write()
    assert write.wait(WAIT_S) is WriteState.FAILED
    assert "was closed" in str(write.error)
    assert (write.may_land, rig.link.posted) == (False, [])
    rig.thread.close()


def test_an_event_that_cannot_be_asked_fails_its_write_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def query() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(rig.event, "query", query, raising=False)
        write = rig.write()
        assert write.wait(WAIT_S) is WriteState.FAILED
        assert "illegal memory access" in str(write.error)
    rig.event.is_done = rig.link.lands = True
    assert rig.write().wait(WAIT_S) is WriteState.DONE
    rig.thread.close()


def test_a_gate_stays_entered_for_what_nobody_watches_any_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_thread, "_LANDING_GRACE_S", 0.05)
    monkeypatch.setattr(sending_thread, "_left_open", [])
    rig.event.is_done = True
    write = rig.write()
    assert await_true(lambda: bool(rig.link.posted))
    rig.thread.close()
    assert (write.state, write.may_land) == (WriteState.FAILED, True)
    assert rig.link.abandoned == 1
    assert (rig.gate.is_in, rig.gate.is_closed) == (True, False)


def test_a_gate_stays_entered_for_what_may_land_after_a_failure(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_landed(_ticket: int) -> bool:
        raise TransferError("the library lost the write")

    monkeypatch.setattr(sending_thread, "_left_open", [])
    rig.event.is_done = True
    with monkeypatch.context() as patch:
        patch.setattr(rig.link, "has_landed", has_landed)
        write = rig.write()
        assert write.wait(WAIT_S) is WriteState.FAILED
    assert (write.may_land, rig.gate.is_in) == (True, True)
    rig.link.lands = True
    assert rig.write().wait(WAIT_S) is WriteState.DONE
    rig.thread.close()
    assert (rig.gate.is_in, rig.gate.is_closed) == (True, False)
