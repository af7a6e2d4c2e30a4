"""Dense MLA decode through page tables, over rows of each format."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import graph_us, num_sets, relative_error
from benchmarks.kernel_cases.noise_pool import ROW_SCALE, noise_pool
from benchmarks.kernel_cases.peers import flash_mla, flashinfer_mla, is_right
from benchmarks.kernel_cases.rates import BF16_FLOPS_PER_US, memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.latent_attention import DenseAttention, dense_attention_ref
from specdec.kernels.latent_rows import LATENT_DIM, PAGE_ROWS, ROPE_DIM, LatentFormat

_SCALE = 1 / 16


class _Shape(NamedTuple):
    """B requests of Q rows each, the last of which sees `length` positions."""

    num_requests: int
    rows_per_request: int
    num_heads: int
    length: int


_SHAPES = (
    _Shape(32, 1, 64, 4096),
    _Shape(1, 1, 64, 131_072),
    _Shape(32, 1, 8, 4096),
    _Shape(1, 6, 8, 2048),  # a rank of eight, while no request is longer than what the indexer chooses
    _Shape(32, 6, 8, 2048),
    _Shape(32, 6, 64, 2048),
)


def run() -> list[CaseResult]:
    """Time what FlashMLA and FlashInfer are measured on, and decoding rounds of six rows."""
    return [_measure(row_format, shape) for row_format in LatentFormat for shape in _SHAPES]


def _measure(row_format: LatentFormat, shape: _Shape) -> CaseResult:
    device, bf16 = torch.device("cuda"), torch.bfloat16
    num_requests, rows_per_request, num_heads, length = shape
    num_rows, num_pages = num_requests * rows_per_request, length // PAGE_ROWS
    attention = DenseAttention(
        row_format=row_format,
        max_rows=num_rows,
        max_positions=length,
        num_heads=num_heads,
        device=device,
        out_dtype=bf16,
    )
    row_scale = ROW_SCALE if row_format is LatentFormat.FP8 else 1.0
    key_bytes = num_requests * length * row_format.row_bytes
    num_bytes = key_bytes + num_rows * num_heads * (2 * (2 * LATENT_DIM + ROPE_DIM) + 4)
    num_flops = 2 * num_rows * num_heads * length * (2 * LATENT_DIM + ROPE_DIM)
    ours: list[Callable[[], object]] = []
    peers: dict[str, list[Callable[[], object]]] = {}
    error = 0.0
    sets = num_sets(key_bytes)
    pool_PB = noise_pool(row_format, sets * num_requests * num_pages)
    page_NRP = torch.randperm(len(pool_PB), device=device).int().view(sets, num_requests, num_pages)
    first = length - rows_per_request
    position_T = torch.arange(first, length, dtype=torch.int32, device=device).repeat(num_requests)
    length_R = torch.full((num_requests,), length, dtype=torch.int32, device=device)
    planned_us = 0.0
    for page_RP in page_NRP:
        query_TAX = torch.randn(num_rows, num_heads, LATENT_DIM + ROPE_DIM, device=device).to(bf16)
        call = partial(attention, query_TAX, pool_PB, page_RP, position_T, scale=_SCALE, row_scale=row_scale)
        state = call()
        rows = slice(0, rows_per_request)
        checked = (query_TAX[rows], pool_PB, page_RP[:1], position_T[rows])
        expected = dense_attention_ref(*checked, row_format=row_format, scale=_SCALE, row_scale=row_scale)
        error = max(error, relative_error(state.out_TAL[rows], expected.out_TAL))
        ours.append(partial(call, out_TAL=state.out_TAL, lse_TA=state.lse_TA))
        if row_format is LatentFormat.BFLOAT16:
            for name, peer in _peers(query_TAX, pool_PB, page_RP, shape, expected.out_TAL).items():
                peers.setdefault(name, []).append(peer)
        if flashinfer := flashinfer_mla(
            query_TAX,
            pool_PB,
            page_RP,
            length_R,
            expected.out_TAL,
            row_format=row_format,
            page_rows=PAGE_ROWS,
            scale=_SCALE,
            row_scale=row_scale,
        ):
            peers.setdefault("FlashInfer", []).append(flashinfer)
            planned_us = planned_us or flashinfer.planned_us()
    return CaseResult(
        case=f"dense_mla_{row_format.name.lower()}",
        shape=f"B={num_requests} Q={rows_per_request}, {num_heads} heads, {length} positions",
        ours_us=graph_us(ours),
        floor_us=max(memory_us(num_bytes), num_flops / BF16_FLOPS_PER_US),
        error=error,
        peers_us={name: graph_us(calls) for name, calls in peers.items()},
        note="error of rounding to bfloat16 included"
        + (f"; FlashInfer, plan on the host counted: {planned_us:.0f} us" if planned_us else ""),
    )


def _peers(
    query_TAX: torch.Tensor, pool_PB: torch.Tensor, page_RP: torch.Tensor, shape: _Shape, expected_TAL: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """What reads bfloat16 rows, and is right in those of the first request."""
    kv_PSX = pool_PB.view(torch.bfloat16).view(len(pool_PB), PAGE_ROWS, LATENT_DIM + ROPE_DIM)
    query_RQAX = query_TAX.unflatten(0, (shape.num_requests, shape.rows_per_request))
    peers: dict[str, Callable[[], object]] = {}
    peer: Callable[[], Any]
    if shape.rows_per_request == 1:  # of several rows each would need a mask
        peer = partial(_torch, query_RQAX, kv_PSX, page_RP)
        if is_right("torch", peer()[0], expected_TAL):
            peers["torch"] = peer
    interface = flash_mla()
    if interface:
        peer = _flash_mla(interface, query_RQAX, kv_PSX, page_RP, shape.length)
        try:
            out_RQAL, _ = peer()
        except RuntimeError as error:
            print(f"FlashMLA cannot run {shape}: {error}", file=sys.stderr)
        else:
            if is_right("FlashMLA", out_RQAL[0], expected_TAL):
                peers["FlashMLA"] = peer
    return peers


def _torch(query_RQAX: torch.Tensor, kv_PSX: torch.Tensor, page_RP: torch.Tensor) -> torch.Tensor:
    """Attend with the heads of a row as if they were queries of one head."""
    kv_R1KX = kv_PSX[page_RP].flatten(1, 2)[:, None]
    return F.scaled_dot_product_attention(query_RQAX, kv_R1KX, kv_R1KX[..., :LATENT_DIM], scale=_SCALE)


def _flash_mla(
    interface: Any, query_RQAX: torch.Tensor, kv_PSX: torch.Tensor, page_RP: torch.Tensor, length: int
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    schedule, _ = interface.get_mla_metadata()
    return partial(
        interface.flash_mla_with_kvcache,
        q=query_RQAX,
        k_cache=kv_PSX[:, :, None],
        block_table=page_RP,
        cache_seqlens=torch.full((len(page_RP),), length, dtype=torch.int32, device=page_RP.device),
        head_dim_v=LATENT_DIM,
        tile_scheduler_metadata=schedule,
        softmax_scale=_SCALE,
        causal=query_RQAX.shape[1] > 1,
    )
