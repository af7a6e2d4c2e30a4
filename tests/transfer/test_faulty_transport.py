"""The transport that later tests break things with breaks exactly what it is told to."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from specdec.transfer.descriptors import Descriptors
from specdec.transfer.local import LocalTransport
from specdec.transfer.transport import RegionCopies, Write, WriteState
from tests.support.faulty_transport import Fault, FaultyTransport

_WAIT_S = 10.0


class Rig:
    def __init__(self) -> None:
        self.transport = FaultyTransport(LocalTransport())
        self.memory = self.transport.allocate(8)
        self.transport.register({"target": self.memory, "source": torch.arange(1, 9, dtype=torch.uint8)})
        self.peer = self.transport.connect(self.transport.address())

    def write(self, value: int, fault: Fault | None = None) -> Write:
        """Write `value` to the first byte."""
        self.transport.faults.append(fault)
        arrays = (np.array([number]) for number in (value - 1, 0, 1))
        return self.transport.write(self.peer, [RegionCopies("source", "target", Descriptors(*arrays))])


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.transport.close()


def test_without_a_fault_it_writes(rig: Rig) -> None:
    assert rig.write(5).wait(_WAIT_S) is WriteState.DONE
    assert rig.memory[0] == 5


def test_a_delayed_write_arrives(rig: Rig) -> None:
    write = rig.write(5, Fault.DELAY)
    assert write.state is WriteState.RUNNING
    assert write.wait(_WAIT_S) is WriteState.DONE
    assert rig.memory[0] == 5


def test_a_held_write_arrives_when_it_is_released_or_never_once_cancelled(rig: Rig) -> None:
    held, cancelled = rig.write(5, Fault.HOLD), rig.write(6, Fault.HOLD)
    cancelled.cancel()
    assert held.wait(0.01) is WriteState.RUNNING
    rig.transport.release()
    assert held.wait(_WAIT_S) is WriteState.DONE
    assert (cancelled.state, cancelled.error, cancelled.may_land) == (WriteState.FAILED, "cancelled", False)
    assert rig.memory[0] == 5


def test_a_swapped_write_arrives_after_the_next(rig: Rig) -> None:
    first, second = rig.write(5, Fault.SWAP), rig.write(6)
    assert (first.wait(_WAIT_S), second.wait(_WAIT_S)) == (WriteState.DONE, WriteState.DONE)
    assert rig.memory[0] == 5


def test_what_is_not_posted_does_not_arrive(rig: Rig) -> None:
    write = rig.write(5, Fault.FAIL_TO_POST)
    assert (write.state, write.may_land) == (WriteState.FAILED, False)
    assert rig.memory[0] == 0


def test_a_write_can_fail_after_it_has_landed(rig: Rig) -> None:
    write = rig.write(5, Fault.FAIL_AFTER_LANDING)
    assert write.wait(_WAIT_S) is WriteState.FAILED
    assert "after it had landed" in str(write.error)
    assert not write.may_land
    assert rig.memory[0] == 5


def test_a_failed_write_can_land_late(rig: Rig) -> None:
    write = rig.write(5, Fault.LAND_LATE)
    assert (write.wait(_WAIT_S), write.may_land) == (WriteState.FAILED, True)
    assert rig.memory[0] == 0
    write.cancel()
    rig.transport.release()
    while write.may_land or rig.memory[0] == 0:
        pass
    assert rig.memory[0] == 5
    assert write.state is WriteState.FAILED
