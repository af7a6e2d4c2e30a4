"""Padding to the row block."""

import torch

from specdec.kernels.row_padding import ROW_MULTIPLE, pad_rows, padded_rows


def test_padding_appends_zero_rows_up_to_the_next_block_and_copies_nothing_when_full() -> None:
    assert [padded_rows(n) for n in (0, 1, 8, 9, 16)] == [8, 8, 8, 16, 16]
    x = torch.ones(3, 5, 7)
    padded = pad_rows(x)
    assert padded.shape == (ROW_MULTIPLE, 5, 7)
    assert torch.equal(padded[:3], x)
    assert padded[3:].abs().sum() == 0
    assert pad_rows(padded) is padded
