"""What may compute the model."""

from enum import StrEnum


class KernelSet(StrEnum):
    """What computes the model.

    TORCH: The definitions, on any device, in any format.
    HOPPER: This package's kernels for Hopper GPUs and GLM-5.2's sizes, on FP8 weights as they are stored.
    """

    TORCH = "torch"
    HOPPER = "hopper"
