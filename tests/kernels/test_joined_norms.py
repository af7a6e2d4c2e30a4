"""The two rows that the MTP layer reads are normed apart and stand side by side."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.joined_norms import joined_norms, joined_norms_ref
from specdec.kernels.rms_norm import rms_norm
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper


def test_the_definition_puts_the_embedding_first() -> None:
    embedded_TH, hidden_TH = torch.randn(3, 8), torch.randn(3, 8)
    weight_H = torch.rand(8)
    joined_TX = joined_norms_ref(embedded_TH, weight_H, hidden_TH, 2 * weight_H, eps=1e-5)
    assert torch.equal(joined_TX[:, :8], rms_norm(embedded_TH, weight_H, eps=1e-5))
    assert torch.equal(joined_TX[:, 8:], rms_norm(hidden_TH, 2 * weight_H, eps=1e-5))


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*bf16", "*bf16", "*bf16", "*bf16", "*bf16", "fp32")
    sizes = {"FEATURES": 6144, "BLOCK": 8192, "STARTS_EARLY": True}
    options = {"num_warps": 8}
    kernel = "joined_norms.joined_norms_kernel"
    assert ptx_for_hopper(kernel, tmp_path, types=types, constants=sizes, options=options)


def test_rows_of_another_length_are_refused() -> None:
    x_TH = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"out_TX must be torch.bfloat16 \(2, 16\)"):
        joined_norms(x_TH, x_TH[0], x_TH, x_TH[0], eps=1e-5, out_TX=x_TH)


@needs_gpu  # Triton's interpreter truncates to bfloat16
@pytest.mark.parametrize("shape", [(1, 6144), (192, 6144), (3, 130)])
def test_a_gpu_gives_the_norms_of_the_definition(shape: tuple[int, int]) -> None:
    embedded_TH, hidden_TH = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    weights = [torch.randn(shape[1], device="cuda").bfloat16() for _ in range(2)]
    out_TX = torch.full((shape[0], 2 * shape[1]), torch.nan, device="cuda", dtype=torch.bfloat16)
    joined_norms(embedded_TH, weights[0], hidden_TH, weights[1], eps=1e-5, out_TX=out_TX)
    expected_TX = joined_norms_ref(embedded_TH, weights[0], hidden_TH, weights[1], eps=1e-5)
    torch.testing.assert_close(out_TX, expected_TX, rtol=2**-6, atol=0)  # a rounding on the border, twice
    assert float((out_TX != expected_TX).float().mean()) < 1e-2
