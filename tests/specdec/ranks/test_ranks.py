"""The leader's side: of a pass, over a control channel that only pretends; and of starting the followers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specdec
from specdec.errors import RankLostError
from specdec.ranks.passes import Ranks
from specdec.ranks.rank_group import FOLLOWER_COMMAND, RankGroup


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
    ends: list[str] = []
    worker: Any = SimpleNamespace(close=lambda: ends.append("worker"))
    ranks = Ranks(worker, channel, on_close=lambda: ends.append("processes"))
    for _ in range(2):
        with pytest.raises(RankLostError, match="rank 2 is gone: it hung up"):
            ranks.record_collectives(True)
    assert channel.num_closed == 1
    assert ends == ["worker", "processes"], "the groups, which end with these, wait for the worker's graphs"


def test_followers_import_the_specdec_of_the_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another one of the working directory, or of a module path that the leader's program has gone around."""
    others = (tmp_path / "here", tmp_path / "path")
    for other in others:
        (other / "specdec").mkdir(parents=True)
        (other / "specdec" / "__init__.py").write_text("")
    (others[1] / "more.py").write_text("")
    monkeypatch.chdir(others[0])
    monkeypatch.setenv("PYTHONPATH", str(others[1]))
    *python, _, _ = FOLLOWER_COMMAND
    program = f"import specdec, more; open({str(tmp_path / 'found')!r}, 'w').write(specdec.__file__)"
    with pytest.raises(RankLostError, match="rank 1 did not start"):
        RankGroup(
            num_ranks=2,
            dcp_size=1,
            cp_size=1,
            device="cpu",
            timeout_s=60,
            follower_command=(*python, "-c", program),
        )
    assert Path((tmp_path / "found").read_text()).samefile(specdec.__file__)
