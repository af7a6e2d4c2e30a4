"""The root-mean-square norm of rows that may lie apart: `rms_norm` in one launch on a GPU.

    out_TH = x_TH / sqrt(mean(x^2) + eps), rounded to bfloat16, * weight_H, rounded to bfloat16

T = rows, H = features.
"""

import functools
from typing import Any

import torch

from specdec.kernels.tensor_check import check_rows, check_tensor


def row_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, out_TH: torch.Tensor) -> None:
    """Normalise rows on a GPU, on the current stream; defined by `rms_norm`.

    Args:
        x_TH: bfloat16, adjacent values; rows may lie apart.
        weight_H: Scale, bfloat16, contiguous.
        eps: Added to the mean square.
        out_TH: Written, bfloat16, contiguous.

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    num_rows, num_features = x_TH.shape
    check_rows("x", x_TH, (torch.bfloat16,), (num_rows, num_features))
    check_tensor("weight", weight_H, torch.bfloat16, (num_features,))
    check_tensor("out", out_TH, torch.bfloat16, (num_rows, num_features))
    if num_rows:
        row_norm_kernel()[(num_rows,)](
            x_TH, weight_H, out_TH, x_TH.stride(0), eps, FEATURES=num_features,
            BLOCK=1 << (num_features - 1).bit_length(), STARTS_EARLY=x_TH.is_cuda, launch_pdl=x_TH.is_cuda, num_warps=8,
        )  # fmt: skip


@functools.cache
def row_norm_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        x_ptr,  # [T, FEATURES] bf16, rows `x_stride` apart
        weight_ptr,  # [FEATURES] bf16
        out_ptr,  # [T, FEATURES] bf16
        x_stride,
        eps,
        FEATURES: tl.constexpr,
        BLOCK: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        row = tl.program_id(0).to(tl.int64)  # rows that lie apart pass 2^31 values
        feature = tl.arange(0, BLOCK)
        inside = feature < FEATURES
        weight = tl.load(weight_ptr + feature, inside, other=0.0).to(tl.float32)
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        x = tl.load(x_ptr + row * x_stride + feature, inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x) / FEATURES + eps)
        normed = (x * factor).to(tl.bfloat16).to(tl.float32) * weight
        tl.store(out_ptr + row * FEATURES + feature, normed.to(tl.bfloat16), inside)

    return kernel
