"""A rank's list has the rows that it holds, in order, and no others."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.owned_rows import owned_rows, owned_rows_ref
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

CASES = """
import torch
from specdec.kernels.owned_rows import owned_rows, owned_rows_ref

def check(device):
    for requests, rows, chosen, size in ((1, 1, 1, 64), (3, 6, 2048, 64), (2, 5, 1030, 4), (4, 1, 7, 1)):
        pages = torch.randperm(40 * requests, device=device).int().view(requests, 40)
        pages[torch.rand(pages.shape, device=device) < 0.6] = -1
        if requests > 1:
            pages[0] = -1  # nothing is here
        position = torch.randint(-1, 40 * size, (requests * rows, chosen), dtype=torch.int32, device=device)
        out, count = torch.full_like(position, 77), torch.full((requests * rows,), 77, dtype=torch.int32, device=device)
        owned_rows(position, pages, page_size=size, out_TK=out, out_count_T=count)
        expected, expected_count = owned_rows_ref(position, pages, page_size=size)
        assert torch.equal(out.long(), expected) and torch.equal(count.long(), expected_count)
"""


def test_the_definition_keeps_what_is_here_in_order() -> None:
    pages = torch.tensor([[5, -1, 9], [-1, 2, -1]], dtype=torch.int32)
    position = torch.tensor(
        [[0, 4, 7, 8, -1], [11, 3, 5, -1, 1], [1, 4, 9, 6, -1], [0, 1, 2, 3, -1]], dtype=torch.int32
    )
    row_TK, count_T = owned_rows_ref(position, pages, page_size=4)
    assert count_T.tolist() == [2, 3, 2, 0]
    assert row_TK.tolist() == [[20, 36, -1, -1, -1], [39, 23, 21, -1, -1], [8, 10, -1, -1, -1], [-1] * 5]


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(CASES + "\ncheck('cpu')\n", tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*i32", "*i32", "*i32", "*i32", "i32", "i32", "i32")
    sizes = {"PAGE_SIZE": 64, "BLOCK": 2048, "STARTS_EARLY": True}
    options = {"num_warps": 8}
    kernel = "owned_rows.owned_rows_kernel"
    assert ptx_for_hopper(kernel, tmp_path, types=types, constants=sizes, options=options)


def test_rows_that_no_request_has_are_refused() -> None:
    none = torch.zeros(5, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="got 5 and 2, 64, 3"):
        owned_rows(none, none[:2], page_size=64, out_TK=none, out_count_T=none[:, 0])


@needs_gpu
def test_a_gpu_gives_what_the_definition_gives() -> None:
    scope: dict[str, object] = {}
    exec(CASES, scope)
    scope["check"]("cuda")  # type: ignore[operator]
