"""Counting of decisions that ranks did not share."""

import numpy as np
import pytest

from specdec.dcp.agreement import AgreedAcceptance
from specdec.ranks.decision_audit import DecisionAudit


def agreed(agrees: list[list[bool]]) -> AgreedAcceptance:
    agrees_NF = np.array(agrees)
    num_requests = agrees_NF.shape[1]
    return AgreedAcceptance(
        token_id_FK1=np.zeros((num_requests, 1), dtype=np.int64),
        num_accepted_F=np.zeros(num_requests, dtype=np.int64),
        drawable_F=np.ones(num_requests, dtype=np.bool_),
        agrees_NF=agrees_NF,
    )


def test_disagreements_are_counted_by_rank() -> None:
    audit = DecisionAudit(rate=1.0, num_ranks=3)
    audit.observe(agreed([[True, True], [True, False], [False, False]]))
    audit.observe(agreed([[True], [True], [False]]))
    assert audit.record() == {
        "rate": 1.0,
        "num_rounds": 2,
        "num_audited": 2,
        "num_decisions": 3,
        "disagreements_per_rank": [0, 1, 3],
    }
    assert audit.num_disagreements == 4


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.25, 0.7, 1.0])
def test_the_share_of_the_rounds_is_evenly_spread(rate: float) -> None:
    audit = DecisionAudit(rate=rate, num_ranks=2)
    for num_rounds in range(1, 201):
        audit.observe(agreed([[True], [False]]))
        assert audit.num_rounds == num_rounds
        assert abs(audit.num_audited - num_rounds * rate) < 1
    assert audit.disagreements_N.tolist() == [0, audit.num_audited]
