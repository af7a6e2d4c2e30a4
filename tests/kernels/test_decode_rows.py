"""Rows stand where their request's length says, and padding nowhere."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.decode_rows import DecodeRows, decode_rows, decode_rows_ref
from specdec.kernels.rotary import inverse_frequency
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

CASES = """
import torch
from specdec.kernels.decode_rows import DecodeRows, decode_rows, decode_rows_ref
from specdec.kernels.rotary import inverse_frequency

def check(device):
    frequency = inverse_frequency(theta=8e6, dim=64, device=torch.device(device))
    for requests, rows, first, size in ((1, 1, 0, 64), (5, 6, 0, 64), (4, 1, 3, 64), (3, 2, 1, 4)):
        pages = torch.randperm(7 * requests, device=device).int().view(requests, 7)
        start = torch.randint(0, 6 * size, (requests,), device=device)
        start[0], start[-1] = size - 1, 0  # at a border, and at the very beginning
        num_rows = torch.randint(0, rows + first + 1, (requests,), device=device)
        num_rows[-1] = -1 if requests > 2 else rows + first
        pages[num_rows < 0] = 1 << 30  # of a place without a request: not to be read
        out = DecodeRows.empty(requests * rows, num_pairs=32, device=torch.device(device))
        sizes = dict(first=first, page_size=size, most_keys=2 * size)
        if requests > 3:  # some pages are another rank's
            pages[torch.rand(pages.shape, device=device) < 0.5] = -1
            sizes["before_BP"] = ((pages >= 0).cumsum(dim=1) - (pages >= 0).long()).int()
        decode_rows(start, num_rows, pages, frequency, out=out, **sizes)
        expected = decode_rows_ref(start, num_rows, pages, frequency, rows_per_request=rows, **sizes)
        for name in ("position_T", "write_row_T", "count_T", "owned_T"):
            ours, theirs = getattr(out, name), getattr(expected, name)
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
        torch.testing.assert_close(out.rotation.cos_TP, expected.rotation.cos_TP, atol=1e-5, rtol=0)
        torch.testing.assert_close(out.rotation.sin_TP, expected.rotation.sin_TP, atol=1e-5, rtol=0)
"""


def test_the_definition_places_rows_and_leaves_padding_out() -> None:
    rows = decode_rows_ref(
        torch.tensor([3, 6]),
        torch.tensor([3, 1]),
        torch.tensor([[5, 9], [2, 0]]),
        inverse_frequency(theta=1e4, dim=4, device=torch.device("cpu")),
        rows_per_request=2,
        first=1,
        page_size=4,
        most_keys=5,
    )
    assert rows.position_T.tolist() == [4, 5, -1, -1]
    assert rows.write_row_T.tolist() == [36, 37, -1, -1]
    assert rows.count_T.tolist() == [5, 5, 0, 0]
    assert rows.owned_T.tolist() == [5, 6, 0, 0]
    assert rows.rotation.cos_TP[2:].tolist() == [[1, 1], [1, 1]]
    torch.testing.assert_close(rows.rotation.sin_TP[0], torch.tensor([4.0, 0.04]).sin())


def test_the_definition_counts_what_a_rank_holds() -> None:
    page_BP = torch.tensor([[-1, 9, -1, 4]], dtype=torch.int32)
    rows = decode_rows_ref(
        torch.tensor([3]),
        torch.tensor([12]),
        page_BP,
        inverse_frequency(theta=1e4, dim=4, device=torch.device("cpu")),
        rows_per_request=12,
        first=0,
        page_size=4,
        most_keys=100,
        before_BP=torch.tensor([[0, 0, 1, 1]], dtype=torch.int32),
    )
    assert rows.owned_T.tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4, 5, 6, 7]
    assert rows.write_row_T.tolist() == [-1, 36, 37, 38, 39, -1, -1, -1, -1, 16, 17, 18]


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(CASES + "\ncheck('cpu')\n", tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    ints = ("*i32", "*i64", "*i32", "*i32")
    types = ("*i64", "*i64", "*i32", "*i32", "*fp32", *ints, "*fp32", "*fp32", "i32", "i32", "i32")
    sizes = {"PAGE_SIZE": 64, "MOST_KEYS": 2048, "PAIRS": 32, "STARTS_EARLY": True}
    assert ptx_for_hopper("decode_rows.decode_rows_kernel", tmp_path, types=types, constants=sizes)


def test_rows_that_no_request_has_are_refused() -> None:
    start_B = torch.zeros(2, dtype=torch.int64)
    out = DecodeRows.empty(3, num_pairs=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"multiple of the requests.* got 3, 2, 2 and 64"):
        decode_rows(
            start_B, start_B, torch.zeros(2, 1, dtype=torch.int32), torch.ones(2), page_size=64, most_keys=1, out=out
        )


@needs_gpu
def test_a_gpu_gives_what_the_definition_gives() -> None:
    scope: dict[str, object] = {}
    exec(CASES, scope)
    scope["check"]("cuda")  # type: ignore[operator]
