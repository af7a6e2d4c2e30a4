"""Add a residual, normalise the sum, and quantise it for the next product if it wants FP8: one launch.

    sum_TH    = x_TH + delta_TH                                              rounded to bfloat16
    normed_TH = sum / sqrt(mean(sum^2) + eps), rounded to bfloat16, * weight  rounded to bfloat16
    scale_TG  = amax of the group / 448,   q_TH = e4m3(normed / scale)       group g = values 128 g .. 128 g + 127

T = rows, H = features, G = groups. Scales and special values follow `latent_formats`: what is too large saturates, NaN
stays where it is, and a group whose largest magnitude is below 448 * 2^-126 has scale 1.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", rounded as `rms_norm` rounds.
"""

import functools
from typing import Any, NamedTuple

import torch

from specdec.kernels.latent_formats import PACKED_GROUP_SIZE, encode_fp8_packed
from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.tensor_check import check_tensor

_BLOCK, _WARPS = 2048, 8  # values of a step, 16 bytes a thread; a row's steps are in flight together


class QuantisedRows(NamedTuple):
    """Rows in groups of 128 values that share a scale.

    Attributes:
        q_TH: The values divided by their group's scale, float8_e4m3fn [T, H].
        scale_TG: float32 [T, H / 128].
    """

    q_TH: torch.Tensor
    scale_TG: torch.Tensor


def add_rms_norm_ref(
    x_TH: torch.Tensor, delta_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor, QuantisedRows]:
    """Define `add_rms_norm`: the sum, the normed rows, and these quantised."""
    sum_TH = x_TH + delta_TH
    normed_TH = rms_norm(sum_TH, weight_H, eps=eps)
    num_features = x_TH.shape[1]
    rows = encode_fp8_packed(normed_TH, normed_TH[:, :0])
    q_TH = rows[:, :num_features].view(torch.float8_e4m3fn)
    return sum_TH, normed_TH, QuantisedRows(q_TH, rows[:, num_features:].contiguous().view(torch.float32))


def add_rms_norm(
    x_TH: torch.Tensor,
    delta_TH: torch.Tensor,
    weight_H: torch.Tensor,
    *,
    eps: float,
    normed_TH: torch.Tensor | None = None,
    quantised: QuantisedRows | None = None,
) -> None:
    """Add `delta_TH` to `x_TH` in place and write the norm of the sum, on a GPU, on the current stream.

    Args:
        x_TH: Residual stream, bfloat16 [T, H], contiguous, H a multiple of 128; becomes the sum.
        delta_TH: What a layer adds to it, like `x_TH`.
        weight_H: Scale of the norm, bfloat16 [H].
        eps: Added to the mean square.
        normed_TH: Receives the norm, like `x_TH`; None where only its quantised form is wanted.
        quantised: Receives the quantised norm; None where only its plain form is wanted.

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    num_rows, num_features = x_TH.shape
    _check(x_TH, delta_TH, weight_H, normed_TH, quantised)
    if num_rows:
        q_TH, scale_TG = quantised or (None, None)
        add_rms_norm_kernel()[(num_rows,)](
            x_TH,
            delta_TH,
            weight_H,
            normed_TH,
            q_TH,
            scale_TG,
            eps,
            FEATURES=num_features,
            BLOCK=min(_BLOCK, 1 << (num_features - 1).bit_length()),
            GROUP=PACKED_GROUP_SIZE,
            num_warps=_WARPS,
            STARTS_EARLY=x_TH.is_cuda,
            launch_pdl=x_TH.is_cuda,
            enable_fp_fusion=False,  # a sum rounds as in the definition
        )


@functools.cache
def add_rms_norm_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        x_ptr,  # [T, H] bf16, becomes the sum
        delta_ptr,  # [T, H] bf16
        weight_ptr,  # [H] bf16
        normed_ptr,  # [T, H] bf16, or None
        q_ptr,  # [T, H] e4m3, or None
        scale_ptr,  # [T, H / GROUP] f32, or None
        eps,
        FEATURES: tl.constexpr,
        BLOCK: tl.constexpr,
        GROUP: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        STEPS: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
        row = tl.program_id(0).to(tl.int64)
        feature = tl.arange(0, BLOCK)
        weights = tl.tuple(())
        for step in tl.static_range(STEPS):
            inside = step * BLOCK + feature < FEATURES
            weights += (tl.load(weight_ptr + step * BLOCK + feature, inside, other=0.0),)
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        xs = tl.tuple(())  # every load first: behind a store they would wait for it
        deltas = tl.tuple(())
        for step in tl.static_range(STEPS):
            inside = step * BLOCK + feature < FEATURES
            place = row * FEATURES + step * BLOCK + feature
            xs += (tl.load(x_ptr + place, inside, other=0.0),)
            deltas += (tl.load(delta_ptr + place, inside, other=0.0),)
        sums = tl.tuple(())
        square = tl.zeros([BLOCK], tl.float32)
        for step in tl.static_range(STEPS):
            inside = step * BLOCK + feature < FEATURES
            total = (xs[step].to(tl.float32) + deltas[step].to(tl.float32)).to(tl.bfloat16)
            tl.store(x_ptr + row * FEATURES + step * BLOCK + feature, total, inside)
            sums += (total.to(tl.float32),)
            square += sums[step] * sums[step]
        factor = tl.rsqrt(tl.sum(square) / FEATURES + eps)
        for step in tl.static_range(STEPS):
            inside = step * BLOCK + feature < FEATURES
            place = row * FEATURES + step * BLOCK + feature
            rounded = (sums[step] * factor).to(tl.bfloat16).to(tl.float32)
            normed = (rounded * weights[step].to(tl.float32)).to(tl.bfloat16)
            if normed_ptr is not None:
                tl.store(normed_ptr + place, normed, inside)
            if q_ptr is not None:
                grouped = normed.to(tl.float32).reshape(BLOCK // GROUP, GROUP)
                # NaN is left out of the maximum, an infinity enters it as the largest float.
                magnitude = tl.minimum(tl.maximum(tl.abs(grouped), 0.0), 3.4028234663852886e38)
                amax = tl.max(magnitude, axis=1)
                scale = tl.where(amax < 448.0 * 2.0**-126, 1.0, tl.div_rn(amax, 448.0))
                # The exact quotient from one division a group: a product, set right by what it leaves (Markstein).
                divisor = tl.broadcast_to(scale[:, None], grouped.shape)
                inverse = tl.broadcast_to(tl.div_rn(1.0, scale)[:, None], grouped.shape)
                near = grouped * inverse
                scaled = tl.fma(tl.fma(-near, divisor, grouped), inverse, near)
                scaled = tl.where(tl.abs(near) == float("inf"), near, scaled)
                q = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
                tl.store(q_ptr + place, q.reshape(BLOCK), inside)
                group = step * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                tl.store(scale_ptr + row * (FEATURES // GROUP) + group, scale, group < FEATURES // GROUP)

    return kernel


def _check(
    x_TH: torch.Tensor,
    delta_TH: torch.Tensor,
    weight_H: torch.Tensor,
    normed_TH: torch.Tensor | None,
    quantised: QuantisedRows | None,
) -> None:
    num_rows, num_features = x_TH.shape
    if num_features % PACKED_GROUP_SIZE:
        raise ValueError(f"H must be a multiple of {PACKED_GROUP_SIZE}, got {num_features}")
    q_TH, scale_TG = quantised or (None, None)
    for name, tensor, shape, dtype in (
        ("x_TH", x_TH, (num_rows, num_features), torch.bfloat16),
        ("delta_TH", delta_TH, (num_rows, num_features), torch.bfloat16),
        ("weight_H", weight_H, (num_features,), torch.bfloat16),
        ("normed_TH", normed_TH, (num_rows, num_features), torch.bfloat16),
        ("q_TH", q_TH, (num_rows, num_features), torch.float8_e4m3fn),
        ("scale_TG", scale_TG, (num_rows, num_features // PACKED_GROUP_SIZE), torch.float32),
    ):
        if tensor is not None:
            check_tensor(name, tensor, dtype, shape)
