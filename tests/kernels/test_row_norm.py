"""Norms of rows that lie apart are those of `rms_norm`."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.row_norm import row_norm
from tests.support.far_rows import far_rows
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

# The last row begins behind 2^31 values: in 32 bits its place would be outside of the memory.
FAR_ROWS_CHECK = """
import torch
from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.row_norm import row_norm

step = (1 << 30) + 8
x = torch.empty(2 * step + 64, dtype=torch.bfloat16).as_strided((3, 64), (step, 1))
x.copy_(torch.randn(3, 64))
weight, out = torch.randn(64).bfloat16(), torch.full((3, 64), torch.nan).bfloat16()
row_norm(x, weight, eps=1e-5, out_TH=out)
torch.testing.assert_close(out, rms_norm(x, weight, eps=1e-5), rtol=2**-6, atol=0)  # truncated where hardware rounds
"""


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*bf16", "*bf16", "*bf16", "i32", "fp32")
    sizes = {"FEATURES": 2048, "BLOCK": 2048, "STARTS_EARLY": True}
    assert ptx_for_hopper("row_norm.row_norm_kernel", tmp_path, types=types, constants=sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_TH": torch.zeros(2, 8)}, "x must be torch.bfloat16"),
        ({"x_TH": torch.zeros(2, 16).bfloat16()[:, ::2]}, "x must be .*rows that are contiguous"),
        ({"weight_H": torch.zeros(9).bfloat16()}, r"weight must be torch.bfloat16 \(8,\)"),
        ({"weight_H": torch.zeros(16).bfloat16()[::2]}, "weight must be .*contiguous"),
        ({"out_TH": torch.zeros(8, 2).bfloat16().T}, "out must be .*contiguous"),
    ],
)
def test_other_shapes_dtypes_and_layouts_are_refused(changes: dict[str, torch.Tensor], message: str) -> None:
    x_TH = torch.zeros(2, 8).bfloat16()
    with pytest.raises(ValueError, match=message):
        row_norm(**({"x_TH": x_TH, "weight_H": x_TH[0], "out_TH": x_TH} | changes), eps=1e-5)


def test_rows_may_lie_further_apart_than_32_bits_count(tmp_path: Path) -> None:
    run_interpreted(FAR_ROWS_CHECK, tmp_path)


@needs_gpu
def test_a_gpu_finds_rows_that_lie_further_apart_than_32_bits_count() -> None:
    x_TH = torch.randn(3, 2048, device="cuda").bfloat16()
    weight_H = torch.randn(2048, device="cuda").bfloat16()
    near_TH, far_TH = torch.full_like(x_TH, torch.nan), torch.full_like(x_TH, torch.nan)
    row_norm(x_TH, weight_H, eps=1e-5, out_TH=near_TH)
    row_norm(far_rows(x_TH), weight_H, eps=1e-5, out_TH=far_TH)
    assert bool(near_TH.isfinite().all())
    assert torch.equal(far_TH, near_TH)


@needs_gpu  # Triton's interpreter truncates to bfloat16
@pytest.mark.parametrize("shape", [(1, 2048), (6, 2048), (192, 2048), (3, 512), (2, 130)])
def test_a_gpu_gives_the_norm_of_the_definition(shape: tuple[int, int]) -> None:
    num_rows, num_features = shape
    wide = torch.randn(num_rows, num_features + 77, device="cuda").bfloat16()
    weight_H = torch.randn(num_features, device="cuda").bfloat16()
    out_TH = torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)
    row_norm(wide[:, 3 : num_features + 3], weight_H, eps=1e-5, out_TH=out_TH)
    expected_TH = rms_norm(wide[:, 3 : num_features + 3], weight_H, eps=1e-5)
    torch.testing.assert_close(out_TH, expected_TH, rtol=2**-6, atol=0)  # a rounding on the border, then another
    assert int((out_TH != expected_TH).sum()) <= 1e-3 * out_TH.numel()
