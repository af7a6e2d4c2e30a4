"""Rows are cut into groups of one request at adjacent positions, in order."""

import numpy as np
import pytest

from specdec.models.glm.row_groups import group_rows


def test_a_group_holds_adjacent_rows_of_one_request() -> None:
    #                        a run of three    alone   not adjacent
    groups = group_rows(np.array([0, 0, 0, 2, 1, 1]), np.array([7, 8, 9, 10, 4, 6]), rows_per_group=2)
    assert groups.row_GQ.tolist() == [[0, 1], [2, -1], [3, -1], [4, -1], [5, -1]]
    assert groups.num_rows_G.tolist() == [2, 1, 1, 1, 1]
    assert groups.request_G.tolist() == [0, 0, 2, 1, 1]
    assert groups.start_G.tolist() == [7, 9, 10, 4, 6]


def test_no_rows_make_no_group() -> None:
    none = np.zeros(0, dtype=np.int64)
    groups = group_rows(none, none, rows_per_group=8)
    assert groups.row_GQ.shape == (0, 8)
    assert groups.request_G.shape == (0,)


@pytest.mark.parametrize("rows_per_group", [1, 3, 8])
def test_every_row_is_in_one_group_and_order_is_kept(rows_per_group: int) -> None:
    counts = np.random.default_rng(0).integers(1, 20, 9)
    request_index = np.repeat(np.arange(9), counts)
    position = 50 + np.arange(len(request_index))
    groups = group_rows(request_index, position, rows_per_group=rows_per_group)
    assert groups.row_GQ[groups.row_GQ >= 0].tolist() == list(range(len(request_index)))
    assert len(groups.row_GQ) == sum(-(-count // rows_per_group) for count in counts)
    assert groups.num_rows_G.tolist() == (groups.row_GQ >= 0).sum(axis=1).tolist()
    for row_Q, request, start in zip(groups.row_GQ, groups.request_G, groups.start_G, strict=True):
        assert set(request_index[row_Q[row_Q >= 0]]) == {request}
        assert position[row_Q[0]] == start
