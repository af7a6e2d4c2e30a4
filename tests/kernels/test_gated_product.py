"""A row's gate multiplies the values behind it."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.gated_product import gated_product, gated_product_ref
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

# The interpreter truncates to bfloat16 where hardware rounds, twice.
KERNEL_CHECK = """
import torch
from specdec.kernels.gated_product import gated_product, gated_product_ref

for rows, width in ((1, 1), (3, 1030)):
    gate_up = (5 * torch.randn(rows, 2 * width)).bfloat16()
    gate_up[0, 0] = 0
    out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16)
    gated_product(gate_up, out_TM=out)
    torch.testing.assert_close(out, gated_product_ref(gate_up), rtol=2**-6, atol=1e-30)
"""


def test_the_definition_takes_the_gate_from_the_front() -> None:
    gate_up_TX = torch.tensor([[0.0, 2, 30, -100, 7, 5, 3, 2]])
    expected_TM = torch.tensor([[0, 2 / (1 + torch.e**-2) * 5, 30 * 3, -200 * torch.e**-100]])
    torch.testing.assert_close(gated_product_ref(gate_up_TX), expected_TM)


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    sizes = {"BLOCK": 1024, "STARTS_EARLY": True}
    kernel = "gated_product.gated_product_kernel"
    assert ptx_for_hopper(kernel, tmp_path, types=("*bf16", "*bf16", "i32"), constants=sizes)


def test_other_shapes_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gate_up_TX must be torch.bfloat16 \(2, 8\)"):
        gated_product(torch.zeros(2, 6).bfloat16(), out_TM=torch.zeros(2, 4).bfloat16())
    with pytest.raises(ValueError, match=r"out_TM must be torch.bfloat16"):
        gated_product(torch.zeros(2, 8).bfloat16(), out_TM=torch.zeros(2, 4))


@needs_gpu
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1536), (6, 1536), (192, 1536), (3, 1030)])
def test_a_gpu_gives_what_the_definition_gives(num_rows: int, width: int) -> None:
    gate_up_TX = (4 * torch.randn(num_rows, 2 * width, device="cuda")).bfloat16()
    gate_up_TX[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0])
    out_TM = torch.full((num_rows, width), 7.0, dtype=torch.bfloat16, device="cuda")
    gated_product(gate_up_TX, out_TM=out_TM)
    expected_TM = gated_product_ref(gate_up_TX)
    # A gate on the border between two values may be rounded the other way.
    torch.testing.assert_close(out_TM, expected_TM, rtol=2**-6, atol=1e-30, equal_nan=True)
    assert int((out_TM != expected_TM)[expected_TM.isfinite()].sum()) <= 1 + 2e-3 * out_TM.numel()
