"""A linear map to few outputs, summed in float32: the head weights of the indexer.

    y_TO = x_TI . w_OI

T = rows, O = outputs, I = inputs. One program sums a few rows for a few outputs, in an order that depends on I alone,
so that a row's bits are the same alone and among others; a matrix product would need more outputs to fill the GPU.
"""

import functools
from typing import Any

import torch

from specdec.kernels.tensor_check import check_tensor

_ROWS, _OUTPUTS, _STEP = 8, 2, 512


def narrow_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, *, out_TO: torch.Tensor) -> None:
    """Multiply on a GPU, on the current stream.

    Args:
        x_TI: bfloat16, contiguous.
        weight_OI: bfloat16, contiguous.
        out_TO: Written, float32, contiguous.

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    num_rows, num_in = x_TI.shape
    num_out = len(weight_OI)
    check_tensor("x", x_TI, torch.bfloat16, (num_rows, num_in))
    check_tensor("weight", weight_OI, torch.bfloat16, (num_out, num_in))
    check_tensor("out", out_TO, torch.float32, (num_rows, num_out))
    if num_rows:
        narrow_linear_kernel()[-(-num_rows // _ROWS), -(-num_out // _OUTPUTS)](
            x_TI, weight_OI, out_TO, num_rows, num_out, num_in, ROWS=_ROWS, OUTPUTS=_OUTPUTS, STEP=_STEP,
            STARTS_EARLY=x_TI.is_cuda, launch_pdl=x_TI.is_cuda, num_warps=8,
        )  # fmt: skip


@functools.cache
def narrow_linear_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        x_ptr,  # [num_rows, num_in] bf16
        weight_ptr,  # [num_out, num_in] bf16
        out_ptr,  # [num_rows, num_out] f32
        num_rows,
        num_out,
        num_in,
        ROWS: tl.constexpr,
        OUTPUTS: tl.constexpr,
        STEP: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # i64: x may have 2^31 values
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        term = tl.arange(0, STEP)
        total = tl.zeros((ROWS, OUTPUTS, STEP), dtype=tl.float32)
        for first in range(0, num_in, STEP):
            inside = first + term < num_in
            x_at = x_ptr + row[:, None] * num_in + first + term[None, :]
            x = tl.load(x_at, mask=(row < num_rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            weight_at = weight_ptr + output[:, None] * num_in + first + term[None, :]
            weight = tl.load(weight_at, mask=(output < num_out)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            total += x[:, None, :] * weight[None, :, :]
        out_at = out_ptr + row[:, None] * num_out + output[None, :]
        tl.store(out_at, tl.sum(total, axis=2), mask=(row < num_rows)[:, None] & (output < num_out)[None, :])

    return kernel
