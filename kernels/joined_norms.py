"""What the MTP layer's first projection reads: two rows, each normed, side by side, in one launch.

    out_TX = concat( rms_norm(embedded_TH, embedded_weight_H), rms_norm(hidden_TH, hidden_weight_H) )

T = rows, H = hidden, X = 2H. Rounded as `rms_norm` rounds. Source: DeepSeek-V3, section 2.2.
"""

import functools
from typing import Any

import torch

from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.tensor_check import check_tensor


def joined_norms_ref(
    embedded_TH: torch.Tensor,
    embedded_weight_H: torch.Tensor,
    hidden_TH: torch.Tensor,
    hidden_weight_H: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """Define `joined_norms`: [T, X]."""
    embedded_TH = rms_norm(embedded_TH, embedded_weight_H, eps=eps)
    return torch.cat((embedded_TH, rms_norm(hidden_TH, hidden_weight_H, eps=eps)), dim=-1)


def joined_norms(
    embedded_TH: torch.Tensor,
    embedded_weight_H: torch.Tensor,
    hidden_TH: torch.Tensor,
    hidden_weight_H: torch.Tensor,
    *,
    eps: float,
    out_TX: torch.Tensor,
) -> None:
    """Normalise, on a GPU, on the current stream.

    Args:
        embedded_TH: Embeddings of the next tokens, bfloat16.
        embedded_weight_H: Scale of their norm, bfloat16.
        hidden_TH: Hidden states, bfloat16.
        hidden_weight_H: Scale of their norm, bfloat16.
        eps: Added to the mean square.
        out_TX: Written, bfloat16. All are contiguous.

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    num_rows, num_features = embedded_TH.shape
    for name, tensor, shape in (
        ("embedded_TH", embedded_TH, (num_rows, num_features)),
        ("embedded_weight_H", embedded_weight_H, (num_features,)),
        ("hidden_TH", hidden_TH, (num_rows, num_features)),
        ("hidden_weight_H", hidden_weight_H, (num_features,)),
        ("out_TX", out_TX, (num_rows, 2 * num_features)),
    ):
        check_tensor(name, tensor, torch.bfloat16, shape)
    if num_rows:
        joined_norms_kernel()[num_rows, 2](
            embedded_TH, embedded_weight_H, hidden_TH, hidden_weight_H, out_TX, eps,
            FEATURES=num_features, BLOCK=1 << (num_features - 1).bit_length(),
            STARTS_EARLY=out_TX.is_cuda, launch_pdl=out_TX.is_cuda, num_warps=8,
        )  # fmt: skip


@functools.cache
def joined_norms_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        embedded_ptr,  # [T, FEATURES] bf16
        embedded_weight_ptr,  # [FEATURES] bf16
        hidden_ptr,  # [T, FEATURES] bf16
        hidden_weight_ptr,  # [FEATURES] bf16
        out_ptr,  # [T, 2 * FEATURES] bf16
        eps,
        FEATURES: tl.constexpr,
        BLOCK: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        half = tl.program_id(1)
        if half == 0:
            x_ptr, weight_ptr = embedded_ptr, embedded_weight_ptr
        else:
            x_ptr, weight_ptr = hidden_ptr, hidden_weight_ptr
        feature = tl.arange(0, BLOCK)
        inside = feature < FEATURES
        weight = tl.load(weight_ptr + feature, inside, other=0.0).to(tl.float32)
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        x = tl.load(x_ptr + row * FEATURES + feature, inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x) / FEATURES + eps)
        normed = (x * factor).to(tl.bfloat16).to(tl.float32) * weight
        tl.store(out_ptr + (2 * row + half) * FEATURES + feature, normed.to(tl.bfloat16), inside)

    return kernel
