"""The leader's side of a pass, over a control channel that only pretends."""

from typing import Any

import pytest

from specdec.errors import RankLostError
from specdec.ranks.passes import Ranks


class LostChannel:
    """A channel that has noticed a loss."""

    def __init__(self) -> None:
        self.num_closed = 0

    def check(self) -> None:
        raise RankLostError("rank 2 is gone: it hung up; start the engine again")

    def close(self) -> None:
        self.num_closed += 1


def test_loss_noticed_between_passes_ends_the_ranks_that_are_left() -> None:
    channel: Any = LostChannel()
    worker: Any = None
    ends: list[str] = []
    ranks = Ranks(worker, channel, on_close=lambda: ends.append("processes"))
    for _ in range(2):
        with pytest.raises(RankLostError, match="rank 2 is gone: it hung up"):
            ranks.record_collectives(True)
    assert channel.num_closed == 1
    assert ends == ["processes"]
