"""A row's bits do not depend on the rows beside it once rows come in padded blocks."""

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels.row_padding import ROW_MULTIPLE, pad_rows, padded_rows

SHAPES = [(96, 192), (448, 192), (192, 448), (3072, 192), (80, 192), (8, 192), (576, 1024), (64, 32), (192, 1536)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_a_linear_row_has_the_same_bits_at_any_padded_row_count(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    weight_OI = torch.randn(num_out, num_in, dtype=dtype)
    x_TI = torch.randn(256, num_in, dtype=dtype)
    alone = torch.cat([F.linear(pad_rows(x_TI[t : t + 1]), weight_OI)[:1] for t in range(24)])
    for num_rows in (24, 40, 64, 104, 128, 256):
        assert torch.equal(F.linear(x_TI[:num_rows], weight_OI)[:24], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batched_product_has_the_same_bits_at_any_batch_size(dtype: torch.dtype) -> None:
    for rows, inner, columns in [(8, 80, 256), (16, 256, 64), (64, 576, 256), (8, 32, 64), (8, 192, 224)]:
        a, b = torch.randn(33, rows, inner, dtype=dtype), torch.randn(33, inner, columns, dtype=dtype)
        whole = torch.bmm(a, b)
        for size in (1, 2, 3, 8, 17):
            assert torch.equal(torch.bmm(a[:size], b[:size]), whole[:size])


def test_padding_appends_zero_rows_up_to_the_next_block_and_copies_nothing_when_full() -> None:
    assert [padded_rows(n) for n in (0, 1, 8, 9, 16)] == [8, 8, 8, 16, 16]
    x = torch.ones(3, 5, 7)
    padded = pad_rows(x)
    assert padded.shape == (ROW_MULTIPLE, 5, 7)
    assert torch.equal(padded[:3], x)
    assert padded[3:].abs().sum() == 0
    assert pad_rows(padded) is padded
