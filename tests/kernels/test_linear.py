"""Linear maps against float64, and the independence of a row from its neighbours, bit by bit."""

import pytest
import torch

from specdec.kernels.linear import head_linear, linear
from specdec.kernels.row_padding import pad_rows

SHAPES = [(96, 192), (448, 192), (192, 448), (3072, 192), (80, 192), (8, 192), (576, 1024), (64, 32), (192, 1536)]


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    weight_OI = torch.randn(num_out, num_in, dtype=dtype)
    x_TI = torch.randn(256, num_in, dtype=dtype)
    alone = torch.cat([linear(pad_rows(x_TI[t : t + 1]), weight_OI)[:1] for t in range(24)])
    for num_rows in (24, 40, 64, 104, 128, 256):
        assert torch.equal(linear(x_TI[:num_rows], weight_OI)[:24], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_heads_has_the_same_bits_among_any_number_of_rows(dtype: torch.dtype) -> None:
    for num_heads, num_in, num_out in [(8, 32, 64), (8, 64, 32), (4, 192, 512)]:
        weight_AIO = torch.randn(num_heads, num_in, num_out, dtype=dtype)
        x_TAI = torch.randn(64, num_heads, num_in, dtype=dtype)
        alone = torch.cat([head_linear(pad_rows(x_TAI[t : t + 1]), weight_AIO)[:1] for t in range(16)])
        for num_rows in (16, 24, 64):
            assert torch.equal(head_linear(x_TAI[:num_rows], weight_AIO)[:16], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batched_product_has_the_same_bits_at_any_batch_size(dtype: torch.dtype) -> None:
    """What the maps above, the index scores and the attention rest on."""
    for rows, inner, columns in [
        (8, 80, 256),
        (16, 256, 64),
        (64, 576, 256),
        (128, 32, 256),
        (1, 16, 256),
        (8, 192, 224),
    ]:
        a, b = torch.randn(33, rows, inner, dtype=dtype), torch.randn(33, inner, columns, dtype=dtype)
        whole = torch.bmm(a, b)
        for size in (1, 2, 3, 8, 17):
            assert torch.equal(torch.bmm(a[:size], b[:size]), whole[:size])


def test_the_maps_equal_the_formula() -> None:
    x_TI, weight_OI = torch.randn(24, 50), torch.randn(30, 50)
    torch.testing.assert_close(
        linear(x_TI, weight_OI).double(), x_TI.double() @ weight_OI.double().T, atol=1e-4, rtol=1e-4
    )
    x_TAI, weight_AIO = torch.randn(24, 3, 20), torch.randn(3, 20, 7)
    expected = torch.einsum("tai,aio->tao", x_TAI.double(), weight_AIO.double())
    torch.testing.assert_close(head_linear(x_TAI, weight_AIO).double(), expected, atol=1e-4, rtol=1e-4)
