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
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    out = torch.full((rows, outputs), torch.nan)
    narrow_linear(x, weight, out_TO=out)
    torch.testing.assert_close(out, x.float() @ weight.float().T, atol=1e-4, rtol=1e-4)
    alone = torch.full((1, outputs), torch.nan)
    narrow_linear(x[-1:], weight, out_TO=alone)
    assert torch.equal(alone, out[-1:])
"""


def test_the_kernel_equals_a_product(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*bf16", "*bf16", "*fp32", "i32", "i32")
    sizes = {"INPUTS": 6144, "ROWS": 4, "STEP": 1024, "STARTS_EARLY": True}
    ptx = ptx_for_hopper("narrow_linear.narrow_linear_kernel", tmp_path, types=types, constants=sizes)
    assert "mul.lo.s64" in ptx  # rows of x begin behind more than 2^31 values


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_TI": torch.zeros(2, 8)}, r"x must be torch.bfloat16 \(2, 8\)"),
        ({"x_TI": torch.zeros(8, 2, dtype=torch.bfloat16).T}, "x must be .*contiguous"),
        ({"weight_OI": torch.zeros(3, 9, dtype=torch.bfloat16)}, r"weight must be torch.bfloat16 \(3, 8\)"),
        ({"out_TO": torch.zeros(2, 3, dtype=torch.bfloat16)}, r"out must be torch.float32 \(2, 3\)"),
        ({"out_TO": torch.zeros(2, 6)[:, ::2]}, "out must be .*contiguous"),
    ],
)
def test_other_shapes_dtypes_and_layouts_are_refused(changes: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"x_TI": torch.zeros(2, 8).bfloat16(), "weight_OI": torch.zeros(3, 8).bfloat16()}
    with pytest.raises(ValueError, match=message):
        narrow_linear(**(arguments | {"out_TO": torch.zeros(2, 3)} | changes))


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


@needs_gpu
def test_a_gpu_finds_rows_behind_more_values_than_32_bits_count() -> None:
    num_rows = (1 << 31) // 6144 + 9
    x_TI = torch.zeros(num_rows, 6144, dtype=torch.bfloat16, device="cuda")
    x_TI[-3:] = torch.randn(3, 6144, device="cuda").bfloat16()
    weight_OI = torch.randn(32, 6144, device="cuda").bfloat16()
    out_TO = torch.full((num_rows, 32), torch.nan, device="cuda")
    alone_TO = torch.full((3, 32), torch.nan, device="cuda")
    narrow_linear(x_TI, weight_OI, out_TO=out_TO)
    narrow_linear(x_TI[-3:], weight_OI, out_TO=alone_TO)
    assert torch.equal(out_TO[-3:], alone_TO)
    assert bool((out_TO[:-3] == 0).all())
