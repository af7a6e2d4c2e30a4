"""Counts how often a rank's own decision was not the first rank's, before they agreed.

N = ranks, F = requests that drew a token.
"""

from typing import Any

import numpy as np

from specdec.dcp.agreement import AgreedAcceptance
from specdec.slot_table import Int64Array


class DecisionAudit:
    """Compares the decisions of a share of the rounds, evenly spread.

    Args:
        rate: Share of the rounds, in 0..1.
        num_ranks: N.

    Attributes:
        num_rounds: Rounds in which a token was drawn.
        num_audited: Those that were compared.
        num_decisions: Decisions compared, one for each request and round.
        disagreements_N: By rank: decisions that were not the first rank's, i64 [N].
    """

    def __init__(self, *, rate: float, num_ranks: int) -> None:
        self.rate = rate
        self.num_rounds = 0
        self.num_audited = 0
        self.num_decisions = 0
        self.disagreements_N: Int64Array = np.zeros(num_ranks, dtype=np.int64)

    def observe(self, acceptance: AgreedAcceptance) -> None:
        """Take in one round's decisions."""
        self.num_rounds += 1
        if int(self.num_rounds * self.rate) == self.num_audited:
            return
        self.num_audited += 1
        self.num_decisions += acceptance.agrees_NF.shape[1]
        self.disagreements_N += (~acceptance.agrees_NF).sum(axis=1)

    @property
    def num_disagreements(self) -> int:
        """Over all ranks."""
        return int(self.disagreements_N.sum())

    def record(self) -> dict[str, Any]:
        """Give the counts for a report."""
        return {
            "rate": self.rate,
            "num_rounds": self.num_rounds,
            "num_audited": self.num_audited,
            "num_decisions": self.num_decisions,
            "disagreements_per_rank": self.disagreements_N.tolist(),
        }
