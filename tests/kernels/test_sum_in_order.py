"""The order of a sum is that of its parts."""

import pytest
import torch

from specdec.kernels.sum_in_order import sum_in_order


@pytest.mark.parametrize(("parts", "total"), [((1e8, -1e8, 1.0), 1.0), ((1.0, 1e8, -1e8), 0.0), ((2.5,), 2.5)])
def test_parts_are_added_from_first_to_last(parts: tuple[float, ...], total: float) -> None:
    rows_NT = torch.tensor([[part] * 3 for part in parts])
    assert sum_in_order(rows_NT).tolist() == [total] * 3
    assert sum_in_order(iter(rows_NT)).tolist() == [total] * 3


def test_the_parts_stay_as_they_are() -> None:
    rows_NT = torch.ones((3, 2), dtype=torch.bfloat16)
    assert sum_in_order(rows_NT).dtype is torch.bfloat16
    assert (rows_NT == 1).all()
