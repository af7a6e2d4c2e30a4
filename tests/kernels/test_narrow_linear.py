"""Few outputs are summed right, and each row as if it were alone."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.narrow_linear import narrow_linear
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

KERNEL_CHECK = """
import torch
from specdec.kernels.narrow_linear import narrow_linear

for rows, outputs, inputs in ((1, 1, 1), (6, 32, 640), (17, 5, 1000)):
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    out = torch.full((rows, outputs), torch.nan)
    narrow_linear(x, weight, out_TO=out)
    torch.testing.assert_close(out, x @ weight.T, atol=1e-4, rtol=1e-4)
    alone = torch.full((1, outputs), torch.nan)
    narrow_linear(x[-1:], weight, out_TO=alone)
    assert torch.equal(alone, out[-1:])
"""


def test_the_kernel_equals_a_product(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*bf16", "*bf16", "*fp32", "i32", "i32", "i32")
    sizes = {"ROWS": 8, "OUTPUTS": 2, "STEP": 512, "STARTS_EARLY": True}
    assert ptx_for_hopper("narrow_linear.narrow_linear_kernel", tmp_path, types=types, constants=sizes)


def test_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \(2, 8\), \(3, 9\) and torch.float32 \(2, 3\)"):
        narrow_linear(torch.zeros(2, 8), torch.zeros(3, 9), out_TO=torch.zeros(2, 3))


@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 6, 192])
def test_a_gpu_gives_rows_that_are_right_and_do_not_depend_on_others(num_rows: int) -> None:
    x_TI = torch.randn(num_rows, 6144, device="cuda").bfloat16()
    weight_OI = torch.randn(32, 6144, device="cuda").bfloat16()
    out_TO = torch.full((num_rows, 32), torch.nan, device="cuda")
    narrow_linear(x_TI, weight_OI, out_TO=out_TO)
    expected_TO = x_TI.double() @ weight_OI.double().T
    assert float((out_TO - expected_TO).norm() / expected_TO.norm()) < 1e-6
    alone = torch.full((1, 32), torch.nan, device="cuda")
    narrow_linear(x_TI[-1:], weight_OI, out_TO=alone)
    assert torch.equal(alone, out_TO[-1:])
