"""The chosen set against a sort under the total order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.top_positions import (
    NO_CANDIDATE,
    choice_margin,
    leading_positions,
    position_of,
    ranks_of,
    top_positions,
)


def top_positions_by_sorting(scores_S: list[float], k: int) -> list[int]:
    candidates = [s for s, score in enumerate(scores_S) if score > float("-inf")]
    best = sorted(candidates, key=lambda s: (-scores_S[s], s))[:k]
    return sorted(best) + [-1] * (k - len(best))


@given(
    rows=st.integers(1, 40).flatmap(
        lambda width: st.lists(
            st.lists(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 1.0, float("-inf")]), min_size=width, max_size=width),
            min_size=1,
            max_size=4,
        )
    ),
    k=st.integers(1, 12),
)
def test_ties_go_to_the_earlier_position_and_excluded_ones_are_never_chosen(rows: list[list[float]], k: int) -> None:
    chosen_TK = top_positions(torch.tensor(rows), k)
    assert chosen_TK.tolist() == [top_positions_by_sorting(row, k) for row in rows]


@pytest.mark.parametrize("num_positions", [1, 7, 8, 9, 500])
def test_random_scores_give_the_k_largest(num_positions: int) -> None:
    scores_TS = torch.randn(6, num_positions)
    chosen_TK = top_positions(scores_TS, 8)
    assert chosen_TK.tolist() == [top_positions_by_sorting(row, 8) for row in scores_TS.tolist()]


def test_leading_positions_are_what_the_top_gives_while_all_fit() -> None:
    position_T = torch.tensor([0, 3, 7])
    scores_TS = torch.randn(3, 8).masked_fill_(torch.arange(8) > position_T[:, None], -torch.inf)
    assert torch.equal(leading_positions(position_T, 8), top_positions(scores_TS, 8))


@pytest.mark.parametrize("num_positions", [5, 8, 9, 40])
def test_nan_is_chosen_before_every_number(num_positions: int) -> None:
    scores_TS = torch.randn(4, num_positions)
    scores_TS[1, 3] = scores_TS[2, 4] = torch.nan
    scores_TS[2, 3] = -torch.inf
    as_infinite_TS = torch.where(scores_TS.isnan(), torch.inf, scores_TS)
    assert torch.equal(top_positions(scores_TS, 8), top_positions(as_infinite_TS, 8))


@given(
    scores=st.lists(
        st.one_of(st.sampled_from([-0.0, 0.0, float("inf"), float("nan")]), st.floats(width=32, allow_infinity=False)),
        min_size=1,
        max_size=30,
    ),
    first=st.sampled_from([0, 2**31 - 30]),
)
def test_ranks_sort_like_scores_then_positions_and_keep_the_position(scores: list[float], first: int) -> None:
    score_S, position_S = torch.tensor(scores), torch.arange(first, first + len(scores))
    rank_S = ranks_of(score_S, position_S)
    descending = (-torch.where(score_S.isnan(), torch.inf, score_S)).tolist()
    order = sorted(range(len(scores)), key=lambda s: (descending[s], s))
    assert rank_S.argsort().tolist() == order
    assert len(set(rank_S.tolist())) == len(scores)
    assert rank_S.max() < NO_CANDIDATE
    assert torch.equal(position_of(rank_S), position_S)


def test_the_margin_of_a_choice_is_between_the_last_chosen_and_the_next() -> None:
    inf = torch.inf
    scores_TS = torch.tensor(
        [[5.0, 1.0, 3.0, 2.5], [1.0, 1.0, 1.0, -inf], [4.0, 2.0, -inf, -inf], [-1.0, -4.0, -2.0, -9.0]]
    )
    assert choice_margin(scores_TS, 2).tolist() == [0.5, 0.0, inf, 2.0]
    assert choice_margin(scores_TS, 4).tolist() == [inf] * 4
