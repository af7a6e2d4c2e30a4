"""Rows are cut into groups of one request each, in order."""

import numpy as np
import pytest

from specdec.models.glm.row_groups import group_rows


def test_a_group_holds_rows_of_one_request() -> None:
    row_GQ, request_G = group_rows(np.array([0, 0, 0, 2, 1, 1]), rows_per_group=2)
    assert row_GQ.tolist() == [[0, 1], [2, -1], [3, -1], [4, 5]]
    assert request_G.tolist() == [0, 0, 2, 1]


def test_no_rows_make_no_group() -> None:
    row_GQ, request_G = group_rows(np.zeros(0, dtype=np.int64), rows_per_group=8)
    assert row_GQ.shape == (0, 8)
    assert request_G.shape == (0,)


@pytest.mark.parametrize("rows_per_group", [1, 3, 8])
def test_every_row_is_in_one_group_and_order_is_kept(rows_per_group: int) -> None:
    counts = np.random.default_rng(0).integers(1, 20, 9)
    request_index = np.repeat(np.arange(9), counts)
    row_GQ, request_G = group_rows(request_index, rows_per_group=rows_per_group)
    rows = row_GQ[row_GQ >= 0]
    assert rows.tolist() == list(range(len(request_index)))
    assert len(row_GQ) == sum(-(-count // rows_per_group) for count in counts)
    for group, request in zip(row_GQ, request_G, strict=True):
        assert set(request_index[group[group >= 0]]) == {request}
