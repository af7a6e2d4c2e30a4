"""Kernels of others, to compare with.

FlashMLA and DeepGEMM come from the folder `vllm` of a vLLM wheel, of which `bench_kernels.py --peers` says where it
lies; FlashInfer must be installed.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

_FLASHINFER_WORKSPACE_BYTES = 128 << 20


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


def flashinfer_mla(
    query_TAX: torch.Tensor,
    latent_SL: torch.Tensor,
    rope_SR: torch.Tensor,
    index_TK: torch.Tensor,
    *,
    scale: float,
) -> Callable[[], object] | None:
    """FlashInfer's latent attention over listed rows, pages of one token; None where there is none, or it refuses.

    Args:
        query_TAX: Latent part, then rope part, of any dtype; given in that of the rows.
        latent_SL: Latents of all rows, bfloat16 or e4m3.
        rope_SR: Their rope parts.
        index_TK: Rows of each query, i32.
        scale: Factor on the scores.
    """
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-not-found]  # noqa: PLC0415
    except ImportError:
        return None
    (num_rows, num_heads, _), (_, num_keys), latent_dim = query_TAX.shape, index_TK.shape, latent_SL.shape[1]
    device, dtype = query_TAX.device, latent_SL.dtype
    each_T1 = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    try:
        workspace = torch.empty(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        wrapper.plan(
            each_T1,
            each_T1 * num_keys,
            index_TK.flatten(),
            torch.full((num_rows,), num_keys, dtype=torch.int32, device=device),
            num_heads,
            latent_dim,
            rope_SR.shape[1],
            1,
            False,
            scale,
            dtype,
            dtype,
        )
        query = query_TAX.to(dtype)
        arguments = (query[..., :latent_dim].contiguous(), query[..., latent_dim:].contiguous())
        caches = (latent_SL[:, None], rope_SR[:, None])

        def call() -> object:
            return wrapper.run(*arguments, *caches, return_lse=True)

        call()
    except Exception as error:  # what it takes differs from release to release
        print(f"FlashInfer does not run {dtype} rows with {num_heads} heads: {error}", file=sys.stderr)
        return None
    return call
