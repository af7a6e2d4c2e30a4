"""The gate of an MLP between its two products, in one launch on a GPU.

    out_TM = silu(gate) * up        gate = the first M values of a row, up = those behind them

T = rows, M = width, X = 2M. The gate is rounded to bfloat16 before it is multiplied, and so is the product.
Source: Shazeer, "GLU Variants Improve Transformer".
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F

from specdec.kernels.tensor_check import check_tensor

_BLOCK = 1024


def gated_product_ref(gate_up_TX: torch.Tensor) -> torch.Tensor:
    """Define `gated_product`: [T, M]."""
    gate_TM, up_TM = gate_up_TX.chunk(2, dim=-1)
    return F.silu(gate_TM) * up_TM


def gated_product(gate_up_TX: torch.Tensor, *, out_TM: torch.Tensor) -> None:
    """Multiply, on the current stream.

    Args:
        gate_up_TX: bfloat16, contiguous.
        out_TM: Written, bfloat16, contiguous.

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    num_rows, width = out_TM.shape
    check_tensor("gate_up_TX", gate_up_TX, torch.bfloat16, (num_rows, 2 * width))
    check_tensor("out_TM", out_TM, torch.bfloat16, (num_rows, width))
    if num_rows:
        gated_product_kernel()[num_rows, -(-width // _BLOCK)](
            gate_up_TX, out_TM, width, BLOCK=_BLOCK, STARTS_EARLY=out_TM.is_cuda, launch_pdl=out_TM.is_cuda
        )


@functools.cache
def gated_product_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]
        gate_up_ptr,  # [T, 2 * width] bf16
        out_ptr,  # [T, width] bf16
        width,
        BLOCK: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        gate = tl.load(gate_up_ptr + 2 * row * width + value, mask=value < width, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + (2 * row + 1) * width + value, mask=value < width, other=0.0).to(tl.float32)
        rounded = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(tl.bfloat16).to(tl.float32)
        tl.store(out_ptr + row * width + value, (rounded * up).to(tl.bfloat16), mask=value < width)

    return kernel
