"""Sparse MLA decode over packed FP8 rows, as a TP8 rank has it and as a DCP rank has it.

A call's index lists, counts and cached rows are older than the call in front, which writes nothing that it reads. So
copies of rows may start early, as in the layers of a pass that do not choose; behind a collective of a dcp group
nothing is read early. The other order stands in the note.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_timing import graph_us, num_sets, relative_error
from benchmarks.kernel_cases.noise_pool import ROW_SCALE, noise_pool
from benchmarks.kernel_cases.peers import FlashInferMla, flash_mla, flashinfer, flashinfer_mla, is_right
from benchmarks.kernel_cases.rates import memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.latent_attention import sparse_attention_ref
from specdec.kernels.latent_formats import decode_fp8_packed
from specdec.kernels.latent_rows import LATENT_DIM, PAGE_ROWS, ROPE_DIM, LatentFormat
from specdec.kernels.lse_merge import AttentionState
from specdec.kernels.packed_sparse_mla import (
    ROW_BYTES,
    PackedSparseMla,
    WrittenLast,
    packed_sparse_mla_ref,
)
from specdec.kernels.sparse_mla import sparse_mla

_POOL_PAGES = 100_000  # 4.2 GB
_SLOTS, _SCALE = 2048, 1 / 16
_ROW_COUNTS = (6, 96, 192)
_CHECKED_ROWS = 3
_FLASH_MLA_HEADS = 64  # it has kernels for 64 and 128


def run() -> list[CaseResult]:
    """Time 8 heads with all slots of a row, then 64 and 32 heads with the slots that one of 8 or 4 ranks owns."""
    pool_PB = noise_pool(LatentFormat.FP8_PACKED, _POOL_PAGES)
    other_formats = (LatentFormat.FP8, LatentFormat.BFLOAT16) if flashinfer() else ()
    other_pools = {row_format: noise_pool(row_format, _POOL_PAGES) for row_format in other_formats}
    shapes = [("sparse_mla_tp8", 8, _SLOTS), ("sparse_mla_dcp", 64, 256), ("sparse_mla_dcp", 32, 512)]
    return [
        _measure(pool_PB, *shape, num_rows, other_pools=other_pools if shape[2] == _SLOTS else {})
        for shape in shapes
        for num_rows in _ROW_COUNTS
    ]


def _measure(
    pool_PB: torch.Tensor,
    case: str,
    num_heads: int,
    num_keys: int,
    num_rows: int,
    *,
    other_pools: dict[LatentFormat, torch.Tensor],
) -> CaseResult:
    is_early = case == "sparse_mla_tp8"
    device, bf16 = pool_PB.device, torch.bfloat16
    kernel = PackedSparseMla(
        max_rows=num_rows, num_heads=num_heads, num_slots=_SLOTS, device=device, out_dtype=bf16, index_dtype=torch.int32
    )
    num_bytes = num_rows * (num_keys * (ROW_BYTES + 4) + num_heads * (2 * (2 * LATENT_DIM + ROPE_DIM) + 4))
    early: list[Callable[[], object]] = []
    late: list[Callable[[], object]] = []
    peers: dict[str, list[Callable[[], object]]] = {}
    planned_us: dict[str, float] = {}
    error = 0.0
    for _ in range(num_sets(num_rows * num_keys * ROW_BYTES, most=12)):
        query_TAX = torch.randn(num_rows, num_heads, LATENT_DIM + ROPE_DIM, device=device).to(bf16)
        index_TK = torch.randint(0, _POOL_PAGES * PAGE_ROWS, (num_rows, _SLOTS), device=device, dtype=torch.int32)
        index_TK[:, num_keys:] = -1
        count_T = torch.full((num_rows,), num_keys, dtype=torch.int32, device=device)
        call = partial(kernel, query_TAX, pool_PB, index_TK, count_T, scale=_SCALE)
        state = call()
        checked = (query_TAX[:_CHECKED_ROWS], pool_PB, index_TK[:_CHECKED_ROWS], count_T[:_CHECKED_ROWS])
        expected = packed_sparse_mla_ref(*checked, scale=_SCALE)
        error = max(error, relative_error(state.out_TAL[:_CHECKED_ROWS], expected.out_TAL))
        late.append(partial(call, out_TAL=state.out_TAL, lse_TA=state.lse_TA))
        early.append(partial(late[-1], written_last=WrittenLast.QUERIES))
        for name, peer in _peers(query_TAX, pool_PB, index_TK, num_keys, expected.out_TAL).items():
            peers.setdefault(name, []).append(peer)
        for name, planned in _flashinfer(query_TAX, other_pools, index_TK, count_T).items():
            peers.setdefault(name, []).append(planned)
            planned_us[name] = planned_us.get(name) or planned.planned_us()
    early_us, late_us = graph_us(early), graph_us(late)
    other = f"{late_us:.1f} us with nothing read early" if is_early else f"{early_us:.1f} us with rows copied early"
    return CaseResult(
        case=case,
        shape=f"T={num_rows}, {num_heads} heads, {num_keys} of {_SLOTS} slots",
        ours_us=early_us if is_early else late_us,
        floor_us=memory_us(num_bytes),
        error=error,
        peers_us={name: graph_us(calls) for name, calls in peers.items()},
        note=f"error of rounding to bfloat16 included; {other}"
        + "".join(f"; {name}, plan on the host counted: {us:.0f} us" for name, us in planned_us.items()),
    )


def _peers(
    query_TAX: torch.Tensor, pool_PB: torch.Tensor, index_TK: torch.Tensor, num_keys: int, expected_TAL: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """What reads packed rows, and is right in the first of the queries."""
    (num_rows, num_heads, _), num_expected = query_TAX.shape, len(expected_TAL)
    row_SB = pool_PB.view(-1, ROW_BYTES)
    peers: dict[str, Callable[[], object]] = {}
    if num_rows <= 6:  # its copies of the rows are large
        gathered = partial(_torch, query_TAX, row_SB, index_TK[:, :num_keys])
        if is_right("torch", gathered().out_TAL[:num_expected], expected_TAL):
            peers["torch"] = gathered
    interface = flash_mla()
    if interface:
        lists = {"FlashMLA": index_TK}
        if num_keys < index_TK.shape[1]:
            lists["FlashMLA, list cut"] = index_TK[:, :num_keys].contiguous()
        for name, list_TK in lists.items():
            peer = _flash_mla(interface, query_TAX, row_SB, list_TK)
            out_T1AL, _ = peer()
            if is_right(name, out_T1AL[:num_expected, 0, :num_heads], expected_TAL):
                peers[name] = peer
    return peers


def _flashinfer(
    query_TAX: torch.Tensor, pools: dict[LatentFormat, torch.Tensor], index_TK: torch.Tensor, count_T: torch.Tensor
) -> dict[str, FlashInferMla]:
    """FlashInfer over as many rows of the formats that it reads, of which packed rows are none."""
    peers: dict[str, FlashInferMla] = {}
    for row_format, pool_PB in pools.items():
        row_scale = ROW_SCALE if row_format is LatentFormat.FP8 else 1.0
        checked = (query_TAX[:_CHECKED_ROWS], pool_PB, index_TK[:_CHECKED_ROWS], count_T[:_CHECKED_ROWS])
        expected = sparse_attention_ref(*checked, row_format=row_format, scale=_SCALE, row_scale=row_scale)
        peer = flashinfer_mla(
            query_TAX,
            pool_PB,
            index_TK,
            count_T,
            expected.out_TAL,
            row_format=row_format,
            page_rows=1,
            scale=_SCALE,
            row_scale=row_scale,
        )
        if peer:
            peers[f"FlashInfer, {row_format.row_bytes}-byte rows"] = peer
    return peers


def _torch(query_TAX: torch.Tensor, row_SB: torch.Tensor, index_TK: torch.Tensor) -> AttentionState:
    kv_TKX = decode_fp8_packed(row_SB[index_TK.flatten()], LATENT_DIM, ROPE_DIM).view(*index_TK.shape, -1)
    return sparse_mla(query_TAX.float(), kv_TKX, index_TK >= 0, scale=_SCALE, latent_dim=LATENT_DIM)


def _flash_mla(
    interface: Any, query_TAX: torch.Tensor, row_SB: torch.Tensor, index_TK: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    num_rows, num_heads, width = query_TAX.shape
    query = query_TAX.new_zeros(num_rows, 1, _FLASH_MLA_HEADS, width)
    query[:, 0, :num_heads] = query_TAX
    schedule, _ = interface.get_mla_metadata()
    return partial(
        interface.flash_mla_with_kvcache,
        q=query,
        k_cache=row_SB.view(-1, PAGE_ROWS, 1, ROW_BYTES),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=LATENT_DIM,
        tile_scheduler_metadata=schedule,
        softmax_scale=_SCALE,
        is_fp8_kvcache=True,
        indices=index_TK[:, None],
    )
