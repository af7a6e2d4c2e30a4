"""Index scores against their definition in float64, and their independence of the batch around them."""

import pytest
import torch

from specdec.kernels.index_scores import index_scores, index_scores_ref


def make_inputs(
    counts: list[int], num_positions: int, *, num_heads: int = 16, dim: int = 32
) -> dict[str, torch.Tensor]:
    request_index_T = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    num_rows = request_index_T.numel()
    return {
        "query_TJD": torch.randn(num_rows, num_heads, dim),
        "weight_TJ": torch.randn(num_rows, num_heads),
        "key_RSD": torch.randn(len(counts), num_positions, dim),
        "request_index_T": request_index_T,
        "position_T": torch.randint(0, num_positions, (num_rows,)),
    }


@pytest.mark.parametrize("counts", [[1], [8], [9], [1, 1, 1], [3, 17, 1, 8]])
@pytest.mark.parametrize("num_positions", [1, 63, 64, 65, 300])
def test_scores_equal_the_formula(counts: list[int], num_positions: int) -> None:
    inputs = make_inputs(counts, num_positions)
    expected = index_scores_ref(**{k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})
    torch.testing.assert_close(index_scores(**inputs).double(), expected, rtol=1e-5, atol=1e-5)


def test_later_positions_are_excluded_and_negative_scores_are_not() -> None:
    inputs = make_inputs([2], 40)
    inputs["weight_TJ"] = -inputs["weight_TJ"].abs()
    inputs["position_T"] = torch.tensor([0, 25])
    scores_TS = index_scores(**inputs)
    assert (scores_TS[0, 1:] == -torch.inf).all()
    assert (scores_TS[1, 26:] == -torch.inf).all()
    assert torch.isfinite(scores_TS[1, :26]).all()


def test_a_score_has_the_same_bits_whatever_rows_and_keys_stand_beside_it() -> None:
    inputs = make_inputs([1, 12, 5], 700)
    whole_TS = index_scores(**inputs)
    for row in range(18):
        request = int(inputs["request_index_T"][row])
        length = int(inputs["position_T"][row]) + 1
        alone_TS = index_scores(
            inputs["query_TJD"][row : row + 1],
            inputs["weight_TJ"][row : row + 1],
            inputs["key_RSD"][request : request + 1, :length],
            request_index_T=torch.zeros(1, dtype=torch.int64),
            position_T=inputs["position_T"][row : row + 1],
        )
        assert torch.equal(alone_TS[0], whole_TS[row, :length])


def test_a_score_has_the_same_bits_wherever_its_key_stands() -> None:
    inputs = make_inputs([1, 12, 5], 700)
    inputs["position_T"].fill_(699)
    whole_TS = index_scores(**inputs)
    for order_S in (torch.randperm(700), torch.arange(1, 700), torch.arange(3, 700, 7), torch.tensor([699])):
        moved = {**inputs, "key_RSD": inputs["key_RSD"][:, order_S]}
        assert torch.equal(index_scores(**moved), whole_TS[:, order_S])


def test_a_row_that_may_see_no_key_has_no_score() -> None:
    inputs = make_inputs([2], 40)
    inputs["position_T"] = torch.tensor([-1, 39])
    scores_TS = index_scores(**inputs)
    assert (scores_TS[0] == -torch.inf).all()
    assert torch.isfinite(scores_TS[1]).all()
