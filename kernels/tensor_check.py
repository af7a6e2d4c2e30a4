"""What launchers ask of a tensor before they give a kernel its address, behind which nothing is checked any more."""

from collections.abc import Sequence

import torch


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    *,
    device: torch.device | None = None,
) -> None:
    """Raise a ValueError that names the tensor unless it is contiguous and as wanted.

    Args:
        name: What the launcher calls it.
        tensor: The tensor.
        dtype: That it must have.
        shape: That it must have.
        device: On which it must be; None where the caller does not care.
    """
    if tensor.dtype != dtype or tensor.shape != tuple(shape) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be {dtype} {tuple(shape)} and contiguous, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
