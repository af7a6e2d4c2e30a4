"""Chosen positions are found in their request's pages."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.pool_rows import pool_rows, pool_rows_ref
from tests.support.triton_process import ptx_for_hopper, run_interpreted

KERNEL_CHECK = """
import torch
from specdec.kernels.pool_rows import pool_rows, pool_rows_ref

for requests, rows, chosen, size in ((1, 1, 1, 64), (3, 6, 2048, 64), (2, 5, 1030, 4), (4, 1, 7, 1)):
    pages = torch.randperm(900)[: requests * 40].view(requests, 40)
    position = torch.randint(-1, 37 * size, (requests * rows, chosen), dtype=torch.int32)
    out = torch.full(position.shape, 77, dtype=torch.int64)
    pool_rows(position, pages[:, :37], page_size=size, out_TK=out)
    assert torch.equal(out, pool_rows_ref(position, pages[:, :37], page_size=size))
"""


def test_the_definition_looks_every_position_up() -> None:
    pages = torch.tensor([[5, 9], [2, 0]])
    position = torch.tensor([[0, 7, -1], [4, 3, 3], [1, -1, 6], [-1, -1, -1]])
    expected = [[20, 39, -1], [36, 23, 23], [9, -1, 2], [-1, -1, -1]]
    assert pool_rows_ref(position, pages, page_size=4).tolist() == expected


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*i32", "*i32", "*i64", "i32", "i32", "i32")
    sizes = {"PAGE_SIZE": 64, "BLOCK": 1024, "STARTS_EARLY": True}
    assert ptx_for_hopper("pool_rows.pool_rows_kernel", tmp_path, types=types, constants=sizes)


def test_rows_that_no_request_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \(5, 3\), \(5, 3\), 2 and 64"):
        pool_rows(torch.zeros(5, 3), torch.zeros(2, 1), page_size=64, out_TK=torch.zeros(5, 3))
