"""Tensors where kernels that move many bytes at once do not take them."""

import torch


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor one element behind the begin of its memory, where 16 bytes at once cannot be moved."""
    copy = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    copy.view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))  # as bytes: not every device copies FP8
    return copy
