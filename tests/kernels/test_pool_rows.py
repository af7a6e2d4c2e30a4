"""Chosen positions are found in their request's pages."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.kernels.pool_rows import pool_rows, pool_rows_ref
from tests.support.gpu import needs_gpu
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

# The pages of the last request begin behind 2^31 others.
FAR_ROWS_CHECK = """
import torch
from specdec.kernels.pool_rows import pool_rows, pool_rows_ref

step = (1 << 30) + 8
pages = torch.empty(2 * step + 5, dtype=torch.int32).as_strided((3, 5), (step, 1)).copy_(torch.randperm(15).view(3, 5))
position = torch.randint(-1, 5 * 64, (6, 9), dtype=torch.int32)
out = torch.full(position.shape, 77, dtype=torch.int64)
pool_rows(position, pages, page_size=64, out_TK=out)
assert torch.equal(out, pool_rows_ref(position, pages, page_size=64))

# A row of the pool that 32 bits do not hold, of a page that they do.
pages = torch.tensor([[1 << 26]], dtype=torch.int32)
row = torch.zeros(1, 1, dtype=torch.int64)
pool_rows(torch.tensor([[3]], dtype=torch.int32), pages, page_size=64, out_TK=row)
assert row.item() == (1 << 32) + 3
"""


def test_pages_and_rows_may_be_more_than_32_bits_count(tmp_path: Path) -> None:
    run_interpreted(FAR_ROWS_CHECK, tmp_path)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_RP": torch.zeros(4, 1).int()}, "multiple of the requests, got 6 and 4"),
        ({"page_RP": torch.zeros(0, 1).int()}, "multiple of the requests, got 6 and 0"),
        ({"page_size": 48}, "power of two, got 48"),
        ({"page_size": 0}, "power of two, got 0"),
        ({"position_TK": torch.zeros(6, 3)}, "positions must be int32 or int64, got torch.float32"),
        ({"position_TK": torch.zeros(6, 6).int()[:, ::2]}, "positions must be .*contiguous"),
        ({"out_TK": torch.zeros(6, 3, dtype=torch.int16)}, "out must be int32 or int64"),
        ({"out_TK": torch.zeros(5, 3).int()}, r"out must be torch.int32 \(6, 3\)"),
        ({"page_RP": torch.zeros(2, 4).int()[:, ::2]}, "pages must be .*rows that are contiguous"),
    ],
)
def test_other_shapes_dtypes_and_layouts_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "position_TK": torch.zeros(6, 3).int(),
        "page_RP": torch.zeros(2, 1).int(),
        "page_size": 64,
        "out_TK": torch.zeros(6, 3).int(),
    }
    with pytest.raises(ValueError, match=message):
        pool_rows(**(arguments | changes))


@needs_gpu
@pytest.mark.parametrize(
    ("num_requests", "rows_each", "num_chosen"), [(1, 1, 1), (1, 6, 2048), (32, 6, 2048), (3, 2, 1030)]
)
def test_a_gpu_locates_the_same_rows(num_requests: int, rows_each: int, num_chosen: int) -> None:
    page_RP = torch.randperm(num_requests * 40, device="cuda").int().view(num_requests, 40)[:, :37]
    shape = (num_requests * rows_each, num_chosen)
    position_TK = torch.randint(-1, 37 * 64, shape, dtype=torch.int32, device="cuda")
    for dtype in (torch.int32, torch.int64):
        out_TK = torch.full(shape, -7, dtype=dtype, device="cuda")
        pool_rows(position_TK, page_RP, page_size=64, out_TK=out_TK)
        assert torch.equal(out_TK.long(), pool_rows_ref(position_TK, page_RP, page_size=64).long())
    nobody_TK = torch.full_like(position_TK, -1)
    pool_rows(nobody_TK, torch.full_like(page_RP, -1), page_size=64, out_TK=out_TK)
    assert bool((out_TK == -1).all())


@needs_gpu
def test_a_gpu_finds_positions_behind_more_than_32_bits_count() -> None:
    num_rows = (1 << 31) // 2048 + 3
    position_TK = torch.full((num_rows, 2048), -1, dtype=torch.int32, device="cuda")
    position_TK[-1] = torch.arange(2048, device="cuda")
    page_RP = torch.arange(32, dtype=torch.int32, device="cuda").view(1, 32) + 7
    pool_rows(position_TK, page_RP, page_size=64, out_TK=position_TK)  # each reads its own before it writes it
    assert torch.equal(position_TK[-1].cpu(), torch.arange(2048, dtype=torch.int32) + 7 * 64)
    assert bool((position_TK[:-1] == -1).all())
