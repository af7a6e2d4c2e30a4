"""Rotary position embedding over interleaved pairs.

    (x[2i], x[2i+1])  ->  rotated by the angle  position * theta^(-2i/R)

T = rows, R = rotated features. GLM rotates pairs (2i, 2i+1) in attention and in the indexer alike; the rotated pair
stays where it was (transformers writes all firsts, then all seconds: the same dot products, another cached order).
Source: Su et al., "RoFormer"; `GlmMoeDsaForCausalLM` in transformers for the pairing.
"""

from dataclasses import dataclass

import torch

from specdec.kernels.tensor_check import check_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """Cosines and sines for T rows.

    Attributes:
        cos_TP: float32 [T, R / 2].
        sin_TP: float32 [T, R / 2].
    """

    cos_TP: torch.Tensor
    sin_TP: torch.Tensor


def rotation_at(position_T: torch.Tensor, inverse_frequency_P: torch.Tensor) -> Rotation:
    """Compute the rotation of each row; angles are float32, as in the reference.

    Args:
        position_T: Positions, i64 [T]; padding rows may hold any value.
        inverse_frequency_P: theta^(-2i/R), float32 [R / 2].
    """
    angle_TP = position_T.float()[:, None] * inverse_frequency_P
    return Rotation(cos_TP=angle_TP.cos(), sin_TP=angle_TP.sin())


def inverse_frequency(*, theta: float, dim: int, device: torch.device) -> torch.Tensor:
    """Return theta^(-2i/dim) for i in 0..dim/2-1, float32 [dim / 2]."""
    exponent_P = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / (theta**exponent_P)


def check_rotation(rotation: Rotation, num_rows: int) -> None:
    """Raise a ValueError unless a kernel can read the rotation of T rows: float32 [T, 2^n], contiguous."""
    num_pairs = rotation.cos_TP.shape[1]
    if num_pairs & (num_pairs - 1) or not num_pairs:
        raise ValueError(f"R / 2 must be a power of two, got {num_pairs}")
    check_tensor("cos_TP", rotation.cos_TP, torch.float32, (num_rows, num_pairs))
    check_tensor("sin_TP", rotation.sin_TP, torch.float32, (num_rows, num_pairs))


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the last dim of `x`, [T, R] or [T, heads, R], in float32; returns the dtype of `x`."""
    cos, sin = rotation.cos_TP, rotation.sin_TP
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)
