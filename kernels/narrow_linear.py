"""A linear map to few outputs, summed in float32: the head weights of the indexer.

    y_TO = x_TI . w_OI

T = rows, O = outputs, I = inputs. One program sums a few rows for one output, in an order that depends on I alone,
so that a row's bits are the same alone and among others; a matrix product would need more outputs to fill the GPU. All
of it but the last store runs beside the kernel in front, of which it is independent.
"""

import functools
from typing import Any

import torch

from specdec.kernels.tensor_check import check_tensor

_ROWS, _STEP = 4, 1024


def narrow_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, *, out_TO: torch.Tensor) -> None:
    """Multiply on a GPU, on the current stream.

    Neighbours on the stream: the kernel in front must not write x, and must itself wait for those before it when it
    lets this one start early; the kernel behind must read nothing but weights before this one has ended.

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
        narrow_linear_kernel()[-(-num_rows // _ROWS), num_out](
            x_TI, weight_OI, out_TO, num_rows, num_out, INPUTS=num_in, ROWS=_ROWS, STEP=_STEP,
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
        x_ptr,  # [num_rows, INPUTS] bf16
        weight_ptr,  # [num_out, INPUTS] bf16
        out_ptr,  # [num_rows, num_out] f32
        num_rows,
        num_out,
        INPUTS: tl.constexpr,
        ROWS: tl.constexpr,
        STEP: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # i64: x may have 2^31 values
        output = tl.program_id(1)
        term = tl.arange(0, STEP)[None, :] + tl.zeros((ROWS, 1), dtype=tl.int32)  # a weight beside each term
        if STARTS_EARLY:
            gdc_launch_dependents()
        weights, terms = tl.tuple(()), tl.tuple(())  # all loads before the first sum
        for first in tl.static_range(0, INPUTS, STEP):
            weight = tl.load(weight_ptr + output * INPUTS + first + term, mask=first + term < INPUTS, other=0.0)
            is_term = (row < num_rows)[:, None] & (first + term < INPUTS)
            x = tl.load(x_ptr + row[:, None] * INPUTS + first + term, mask=is_term, other=0.0)
            weights += (weight,)
            terms += (x,)
        total = tl.zeros((ROWS, STEP), dtype=tl.float32)
        for part in tl.static_range(len(terms)):
            total += terms[part].to(tl.float32) * weights[part].to(tl.float32)
        y = tl.sum(total, axis=1)
        if STARTS_EARLY:
            gdc_wait()
        tl.store(out_ptr + row * num_out + output, y, mask=row < num_rows)

    return kernel
