"""Norms of rows that lie apart are those of `rms_norm`."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.row_norm import row_norm
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*bf16", "*bf16", "*bf16", "i32", "fp32")
    sizes = {"FEATURES": 2048, "BLOCK": 2048, "STARTS_EARLY": True}
    assert ptx_for_hopper("row_norm.row_norm_kernel", tmp_path, types=types, constants=sizes)


def test_another_dtype_is_refused() -> None:
    x_TH = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"bfloat16 \[T, H\], got .*float32"):
        row_norm(x_TH, x_TH[0], eps=1e-5, out_TH=x_TH)


@needs_gpu  # Triton's interpreter truncates to bfloat16
@pytest.mark.parametrize("shape", [(1, 2048), (6, 2048), (192, 2048), (3, 512), (2, 130)])
def test_a_gpu_gives_the_norm_of_the_definition(shape: tuple[int, int]) -> None:
    num_rows, num_features = shape
    wide = torch.randn(num_rows, num_features + 77, device="cuda").bfloat16()
    weight_H = torch.randn(num_features, device="cuda").bfloat16()
    out_TH = torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)
    row_norm(wide[:, 3 : num_features + 3], weight_H, eps=1e-5, out_TH=out_TH)
    expected_TH = rms_norm(wide[:, 3 : num_features + 3], weight_H, eps=1e-5)
    torch.testing.assert_close(out_TH, expected_TH, rtol=2**-7, atol=0)  # a rounding on the border, twice
    assert float((out_TH != expected_TH).float().mean()) < 1e-2
