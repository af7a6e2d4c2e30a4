"""What ends an engine of several ranks, and what only fails a pass."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.errors import CollectiveError, RankError, RankLostError
from specdec.ranks.leader_channel import RankLoss
from specdec.ranks.passes import Ranks
from tests.support.thread_engine import ThreadChannel
from tests.support.thread_ranks import ThreadGroups


class FailingWorker:
    """Fails each pass as it is told, once something has happened."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.before: Any = lambda: None
        self.is_closed = False

    def run(self, _method: str, _argument: Any, *, told: Any) -> Any:
        self.before()
        if self.error is not None:
            raise self.error
        return told

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def ranks() -> SimpleNamespace:
    channel: Any = ThreadChannel(ThreadGroups(tp_size=2, dcp_size=1), num_followers=1)
    worker: Any = FailingWorker()
    return SimpleNamespace(channel=channel, worker=worker, passes=Ranks(worker, channel))


def test_a_pass_that_all_ranks_dropped_leaves_the_engine_as_it_was(ranks: SimpleNamespace) -> None:
    ranks.worker.error = RankError("dropped")
    with pytest.raises(RankError, match="dropped"):
        ranks.passes.addresses()
    assert ranks.passes.lost is None
    assert not ranks.worker.is_closed
    ranks.worker.error = None
    assert ranks.passes.addresses() is None


@pytest.mark.parametrize("error", [RankError("their digests differ"), CollectiveError("broke off"), None])
def test_whatever_a_pass_gives_once_a_rank_is_lost_is_that_loss(
    ranks: SimpleNamespace, error: BaseException | None
) -> None:
    """Its kernels were led out of their wait: zeros where messages of the lost rank would be."""

    def lose() -> None:
        ranks.channel.loss = RankLoss(1, "killed")

    ranks.worker.before, ranks.worker.error = lose, error
    with pytest.raises(RankLostError, match="killed") as raised:
        ranks.passes.addresses()
    assert type(raised.value) is RankLostError
    assert ranks.worker.is_closed
    assert ranks.passes.lost is not None
