"""Chosen positions are found in their request's pages."""

import torch

from specdec.kernels.pool_rows import pool_rows_ref


def test_every_position_is_looked_up_in_the_pages_of_its_request() -> None:
    pages = torch.tensor([[5, 9], [2, 0]])
    position = torch.tensor([[0, 7, -1], [4, 3, 3], [1, -1, 6], [-1, -1, -1]])
    expected = [[20, 39, -1], [36, 23, 23], [9, -1, 2], [-1, -1, -1]]
    assert pool_rows_ref(position, pages, page_size=4).tolist() == expected
