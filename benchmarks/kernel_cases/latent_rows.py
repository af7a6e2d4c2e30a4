"""Sparse MLA decode over listed rows of bfloat16 and of plain FP8."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import graph_us, num_sets, relative_error
from benchmarks.kernel_cases.noise_pool import ROW_SCALE, noise_pool
from benchmarks.kernel_cases.peers import flashinfer_mla, is_right
from benchmarks.kernel_cases.rates import BF16_FLOPS_PER_US, memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.latent_attention import SparseAttention, sparse_attention_ref
from specdec.kernels.latent_rows import LATENT_DIM, PAGE_ROWS, ROPE_DIM, LatentFormat

_POOL_PAGES = 100_000  # 7.4 GB of bfloat16
_SLOTS, _SCALE = 2048, 1 / 16
_ROW_COUNTS = (6, 96, 192)
_CHECKED_ROWS = 3


def run() -> list[CaseResult]:
    """Time 8 heads, then 64, then 64 heads with the slots that one of 8 ranks owns, in both formats."""
    shapes = [(8, _SLOTS), (64, _SLOTS), (64, 256)]
    return [
        _measure(pool_PB, row_format, *shape, num_rows)
        for row_format in (LatentFormat.BFLOAT16, LatentFormat.FP8)
        for pool_PB in [noise_pool(row_format, _POOL_PAGES)]
        for shape in shapes
        for num_rows in _ROW_COUNTS
    ]


def _measure(
    pool_PB: torch.Tensor, row_format: LatentFormat, num_heads: int, num_keys: int, num_rows: int
) -> CaseResult:
    device, bf16 = pool_PB.device, torch.bfloat16
    attention = SparseAttention(
        row_format=row_format,
        max_rows=num_rows,
        num_heads=num_heads,
        num_slots=_SLOTS,
        device=device,
        out_dtype=bf16,
        index_dtype=torch.int32,
    )
    row_scale = 1.0 if row_format is LatentFormat.BFLOAT16 else ROW_SCALE
    key_bytes = num_rows * num_keys * row_format.row_bytes
    num_bytes = key_bytes + num_rows * (4 * num_keys + num_heads * (2 * (2 * LATENT_DIM + ROPE_DIM) + 4))
    num_flops = 2 * num_rows * num_heads * num_keys * (2 * LATENT_DIM + ROPE_DIM)
    ours: list[Callable[[], object]] = []
    peers: dict[str, list[Callable[[], object]]] = {}
    planned_us = 0.0
    error = 0.0
    for _ in range(num_sets(key_bytes, most=12)):
        query_TAX = torch.randn(num_rows, num_heads, LATENT_DIM + ROPE_DIM, device=device).to(bf16)
        index_TK = torch.randint(0, _POOL_PAGES * PAGE_ROWS, (num_rows, _SLOTS), device=device, dtype=torch.int32)
        index_TK[:, num_keys:] = -1
        count_T = torch.full((num_rows,), num_keys, dtype=torch.int32, device=device)
        call = partial(attention, query_TAX, pool_PB, index_TK, count_T, scale=_SCALE, row_scale=row_scale)
        state = call()
        checked = (query_TAX[:_CHECKED_ROWS], pool_PB, index_TK[:_CHECKED_ROWS], count_T[:_CHECKED_ROWS])
        expected = sparse_attention_ref(*checked, row_format=row_format, scale=_SCALE, row_scale=row_scale)
        error = max(error, relative_error(state.out_TAL[:_CHECKED_ROWS], expected.out_TAL))
        ours.append(partial(call, out_TAL=state.out_TAL, lse_TA=state.lse_TA))
        row_SB, listed_TK = pool_PB.view(-1, row_format.row_bytes), index_TK[:, :num_keys].contiguous()
        gathered = partial(_torch, query_TAX, row_SB, listed_TK, row_scale)
        if is_right("torch", gathered()[:_CHECKED_ROWS, 0], expected.out_TAL):
            peers.setdefault("torch", []).append(gathered)
        if peer := flashinfer_mla(
            query_TAX,
            pool_PB,
            index_TK,
            count_T,
            expected.out_TAL,
            row_format=row_format,
            page_rows=1,
            scale=_SCALE,
            row_scale=row_scale,
        ):
            peers.setdefault("FlashInfer", []).append(peer)
            planned_us = planned_us or peer.planned_us()
    return CaseResult(
        case=f"latent_rows_{row_format.name.lower()}",
        shape=f"T={num_rows}, {num_heads} heads, {num_keys} of {_SLOTS} slots",
        ours_us=graph_us(ours),
        floor_us=max(memory_us(num_bytes), num_flops / BF16_FLOPS_PER_US),
        error=error,
        peers_us={name: graph_us(calls) for name, calls in peers.items()},
        note="error of rounding to bfloat16 included; torch: rows gathered, then SDPA"
        + (f"; FlashInfer, plan on the host counted: {planned_us:.0f} us" if planned_us else ""),
    )


def _torch(query_TAX: torch.Tensor, row_SB: torch.Tensor, index_TK: torch.Tensor, row_scale: float) -> torch.Tensor:
    """Attend with the heads of a row as if they were queries of one head."""
    row_TKB = row_SB[index_TK]
    if row_TKB.shape[-1] == LatentFormat.BFLOAT16.row_bytes:
        kv_T1KX = row_TKB.view(torch.bfloat16)[:, None]
    else:
        kv_T1KX = (row_TKB.view(torch.float8_e4m3fn).to(torch.bfloat16) * row_scale)[:, None]
    return F.scaled_dot_product_attention(query_TAX[:, None], kv_T1KX, kv_T1KX[..., :LATENT_DIM], scale=_SCALE)
