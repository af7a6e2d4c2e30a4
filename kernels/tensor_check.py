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
    alignment: int = 1,
) -> None:
    """Raise a ValueError that names the tensor unless it is contiguous and as wanted.

    Args:
        name: What the launcher calls it.
        tensor: The tensor.
        dtype: That it must have.
        shape: That it must have.
        device: On which it must be; None where the caller does not care.
        alignment: Bytes of which its address must be a multiple: those that the kernel moves at once.
    """
    if tensor.dtype != dtype or tensor.shape != tuple(shape) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be {dtype} {tuple(shape)} and contiguous, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if tensor.data_ptr() % alignment:
        raise ValueError(f"{name} must begin at a multiple of {alignment} bytes, got address {tensor.data_ptr():#x}")


def check_rows(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> None:
    """Raise a ValueError that names the tensor unless each of its rows is contiguous and as wanted; they may lie apart.

    Args:
        name: What the launcher calls it.
        tensor: The tensor, of two axes or more; a row is what the first one counts.
        dtypes: Of which it must have one.
        shape: That it must have.
    """
    if tensor.dtype not in dtypes or tensor.shape != tuple(shape) or not tensor[:1].is_contiguous():
        raise ValueError(
            f"{name} must be {' or '.join(map(str, dtypes))} {tuple(shape)} with rows that are contiguous, got "
            f"{tensor.dtype} {tuple(tensor.shape)} of strides {tensor.stride()}"
        )
