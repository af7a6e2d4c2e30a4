"""Kernels of others, from the folder `vllm` of a vLLM wheel; `bench_kernels.py --peers` says where it lies."""

from typing import Any


def deep_gemm() -> Any:
    """DeepGEMM, or None where there is none."""
    try:
        from vllm.third_party import deep_gemm  # type: ignore[import-not-found]  # noqa: PLC0415
    except (ImportError, AssertionError):
        return None
    return deep_gemm


def flash_mla() -> Any:
    """FlashMLA, or None where there is none."""
    try:
        from vllm.third_party.flashmla import flash_mla_interface  # type: ignore[import-not-found]  # noqa: PLC0415
    except (ImportError, AssertionError):
        return None
    return flash_mla_interface
