"""A write that is said to land no more is posted no more."""

import pytest

from specdec.transfer.queued_write import QueuedWrite
from specdec.transfer.transport import WriteState

SOON_S = 1e-3
NEVER_S = 60.0


def late() -> QueuedWrite:
    write = QueuedWrite((), peer="the peer", timeout_s=SOON_S)
    assert write.begin()
    return write


def test_a_write_that_is_over_is_not_posted() -> None:
    """The sending thread was held up before it posted, and meanwhile somebody saw that nothing is in flight."""
    write = late()
    assert write.wait(NEVER_S) is WriteState.FAILED
    assert not write.may_land
    assert not write.may_post()
    assert not write.may_land


def test_a_write_may_land_from_the_moment_that_it_may_be_posted() -> None:
    """The sending thread was held up in the library."""
    write = QueuedWrite((), peer="the peer", timeout_s=0.05)
    assert write.begin()
    assert write.may_post()
    assert write.wait(NEVER_S) is WriteState.FAILED
    assert write.may_land
    assert write.error is not None
    assert "may still land" in write.error
    write.finish("it did not land")
    assert not write.may_land


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_cancelled_write_is_not_posted(has_begun: bool) -> None:
    write = QueuedWrite((), peer="the peer", timeout_s=NEVER_S)
    assert not has_begun or write.begin()
    write.cancel()
    assert not write.may_post()
    assert not write.may_land
    assert has_begun or not write.begin()
    write.finish(None)
    assert write.state is WriteState.FAILED
    assert write.error == "cancelled"
