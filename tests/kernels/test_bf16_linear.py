"""Products with bfloat16 weights are right, and each row as if it were alone."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.bf16_linear import MAX_ROWS, bf16_linear, bf16_linear_ref
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

# The interpreter multiplies bfloat16 wrongly: the kernel gets float32, and its sums are rounded at the end.
KERNEL_CHECK = """
import torch
from specdec.kernels.bf16_linear import bf16_linear_kernel

for rows, tiles, outputs, inputs in ((1, 1, 32, 128), (6, 1, 64, 384), (37, 4, 32, 256)):
    x, weight = torch.randn(rows, 2 * inputs)[:, inputs:], torch.randn(outputs, 3 * inputs)[:, inputs : 2 * inputs]
    out = torch.full((rows, outputs), torch.nan, dtype=torch.bfloat16)
    bf16_linear_kernel()[(outputs // 32,)](
        x, weight, out, rows, outputs, inputs, x.stride(0), weight.stride(0),
        TILES=tiles, ROWS=16, OUTPUTS=32, STEP=128, STARTS_EARLY=False,
    )
    torch.testing.assert_close(out.float(), x @ weight.T, atol=1e-3, rtol=2**-7)
"""


def test_the_kernel_equals_a_product(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


@pytest.mark.parametrize("tiles", [1, 12])
def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path, tiles: int) -> None:
    types = ("*bf16", "*bf16", "*bf16", *["i32"] * 5)
    sizes = {"TILES": tiles, "ROWS": 16, "OUTPUTS": 32, "STEP": 128, "STARTS_EARLY": True}
    ptx = ptx_for_hopper(
        "bf16_linear.bf16_linear_kernel", tmp_path, types=types, constants=sizes, aligned=(0, 1, 2, 4, 5, 6, 7),
        options={"num_warps": 4, "num_stages": 4},
    )  # fmt: skip
    assert "cp.async" in ptx


def test_what_the_kernel_does_not_take_is_refused() -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    with pytest.raises(ValueError, match=rf"at most {MAX_ROWS} rows.* got 193, 32 and 128"):
        bf16_linear(zeros(193, 128), zeros(32, 128), out_TO=zeros(193, 32))
    with pytest.raises(ValueError, match=r"rows of weight_OI must begin at multiples of 16 bytes.* \(130, 1\)"):
        bf16_linear(zeros(1, 128), zeros(32, 130)[:, :128], out_TO=zeros(1, 32))
    with pytest.raises(ValueError, match=r"weight_OI must be bfloat16 with 128 adjacent values"):
        bf16_linear(zeros(1, 128), torch.zeros(32, 128), out_TO=zeros(1, 32))


@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 6, 17, 96, 192])
@pytest.mark.parametrize("num_in", [1536, 12288])
def test_a_gpu_gives_rows_that_are_right_and_do_not_depend_on_others(num_rows: int, num_in: int) -> None:
    x_TI = torch.randn(num_rows, 12288, device="cuda").bfloat16()[:, -num_in:]
    weight_OI = torch.randn(6144, 12288, device="cuda").bfloat16()[:, -num_in:]
    out_TO = torch.full((num_rows, 6144), torch.nan, device="cuda", dtype=torch.bfloat16)
    bf16_linear(x_TI, weight_OI, out_TO=out_TO)
    expected_TO = bf16_linear_ref(x_TI, weight_OI)
    assert float((out_TO - expected_TO).norm() / expected_TO.norm()) < 2e-3
    alone = torch.empty_like(out_TO[-1:])
    bf16_linear(x_TI[-1:], weight_OI, out_TO=alone)
    assert torch.equal(alone, out_TO[-1:])
