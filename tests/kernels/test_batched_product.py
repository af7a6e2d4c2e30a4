"""A product has the same bits alone and among others, whatever the number of threads."""

import pytest
import torch

from specdec.kernels.batched_product import batched_product

SHAPES = [(8, 192, 448), (8, 448, 192), (8, 1536, 192), (8, 2048, 512), (1, 32, 64), (256, 128, 256), (3, 5, 7)]


@pytest.mark.parametrize("num_threads", [1, 2, 4], indirect=True)
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_a_pair_has_the_same_bits_among_any_number(rows: int, inner: int, columns: int, transposed: bool) -> None:
    x_BMK, y_BKN = torch.randn(9, rows, inner), torch.randn(9, inner, columns)
    if transposed:
        y_BKN = y_BKN.transpose(1, 2).contiguous().transpose(1, 2)
    expected_BMN = batched_product(x_BMK, y_BKN)
    torch.testing.assert_close(expected_BMN.double(), x_BMK.double() @ y_BKN.double(), atol=1e-3, rtol=0)
    for number in (1, 2, 3, 5, 8):
        assert torch.equal(batched_product(x_BMK[:number], y_BKN[:number]), expected_BMN[:number]), number
