"""The marks of tests that launch kernels on GPUs."""

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Mark a test that takes so many GPUs."""
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")
