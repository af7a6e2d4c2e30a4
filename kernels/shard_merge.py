"""Merge the attention of N shards in one launch, as `lse_merge` defines it.

    lse_TA  = log sum_N exp(lse_NTA)
    out_TAL = sum_N exp(lse_NTA - lse_TA) * out_NTAL      added from the row's first owner on, around the ranks

N = shards, T = query rows of B requests, A = heads, L = values of a head's output. LSE is float32, -inf for a row
without keys in a shard, whose output is then ignored whatever it holds; a row without keys anywhere gives zeros and
-inf. Every shard is read once, while a chain of pairwise merges reads and writes N - 1 times.
Source: the split-KV reduction of Flash-Decoding; the order is that of `dcp.exchange`.
"""

import functools
import math
from typing import Any

import torch

from specdec.kernels.lse_merge import AttentionState, merge_states
from specdec.kernels.tensor_check import check_tensor

_WARPS = 2  # of a program, which merges one head of one row: 16 bytes of bfloat16 a thread and shard


def merge_shards_ref(
    out_NTAL: torch.Tensor, lse_NTA: torch.Tensor, *, first_owner_B: torch.Tensor | None = None, base: float = math.e
) -> AttentionState:
    """Define `merge_shards`: turn each row's shards to begin with its first owner, then merge in float32."""
    num_shards, num_rows = lse_NTA.shape[:2]
    row_T = torch.arange(num_rows, device=lse_NTA.device)
    first_T = torch.zeros_like(row_T)
    if first_owner_B is not None and num_rows:
        first_T = first_owner_B.repeat_interleave(num_rows // len(first_owner_B))
    rank_NT = (first_T + torch.arange(num_shards, device=lse_NTA.device)[:, None]) % num_shards
    return merge_states(out_NTAL[rank_NT, row_T].float(), lse_NTA[rank_NT, row_T] * math.log(base))


def merge_shards(
    out_NTAL: torch.Tensor,
    lse_NTA: torch.Tensor,
    *,
    out_TAL: torch.Tensor,
    lse_TA: torch.Tensor,
    first_owner_B: torch.Tensor | None = None,
    base: float = math.e,
) -> AttentionState:
    """Merge on a GPU, on the current stream, without a word to the host.

    Args:
        out_NTAL: Outputs of the shards, float32 or bfloat16, any strides but 1 of the last axis: a view into a message
            will do.
        lse_NTA: Their LSEs, float32, any strides.
        out_TAL: Receives the merged outputs, float32 or bfloat16, contiguous.
        lse_TA: Receives their natural LSEs, float32, contiguous.
        first_owner_B: Shard that the sums of each request's rows begin with, i64 in 0..N - 1; requests have as many
            rows each. None begins with shard 0.
        base: Of the logarithm of `lse_NTA`.

    Returns:
        The two tensors that were written.

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    _check(out_NTAL, lse_NTA, out_TAL, lse_TA, first_owner_B)
    num_shards, num_rows, num_heads, num_values = out_NTAL.shape
    if num_rows:
        merge_shards_kernel()[(num_rows * num_heads,)](
            out_NTAL,
            lse_NTA,
            first_owner_B,
            out_TAL,
            lse_TA,
            num_heads,
            *out_NTAL.stride()[:3],
            *lse_NTA.stride(),
            1 if first_owner_B is None else num_rows // len(first_owner_B),
            SHARDS=num_shards,
            VALUES=num_values,
            BLOCK=1 << (num_values - 1).bit_length(),
            LN_BASE=math.log(base),
            STARTS_EARLY=out_TAL.is_cuda,
            num_warps=_WARPS,
            launch_pdl=out_TAL.is_cuda,
        )
    return AttentionState(out_TAL, lse_TA)


@functools.cache
def merge_shards_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        shard_out_ptr,  # [N, T, A, L]
        shard_lse_ptr,  # [N, T, A]
        first_owner_ptr,  # [B] i64, or None
        out_ptr,  # [T, A, L]
        lse_ptr,  # [T, A]
        num_heads,
        out_stride_n,
        out_stride_t,
        out_stride_a,
        lse_stride_n,
        lse_stride_t,
        lse_stride_a,
        rows_per_request,
        SHARDS: tl.constexpr,
        VALUES: tl.constexpr,
        BLOCK: tl.constexpr,
        LN_BASE: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        row = tl.program_id(0)
        token = (row // num_heads).to(tl.int64)
        head = (row % num_heads).to(tl.int64)  # heads may lie apart by all rows
        first = 0 if first_owner_ptr is None else tl.load(first_owner_ptr + token // rows_per_request).to(tl.int32)
        value = tl.arange(0, BLOCK)
        shard_lse_ptr += token * lse_stride_t + head * lse_stride_a
        shard_out_ptr += token * out_stride_t + head * out_stride_a

        outs = tl.tuple(())
        lses = tl.tuple(())
        for n in tl.static_range(SHARDS):
            place = ((first + n) % SHARDS).to(tl.int64) * out_stride_n + value
            out = tl.load(shard_out_ptr + place, value < VALUES, other=0.0, eviction_policy="evict_first")
            outs += (out,)
        tl.debug_barrier()  # no load moves past it, so all are under way before the first LSE is waited for
        top = -float("inf")
        for n in tl.static_range(SHARDS):
            place = ((first + n) % SHARDS).to(tl.int64) * lse_stride_n
            lses += (tl.load(shard_lse_ptr + place) * LN_BASE,)
            top = tl.maximum(top, lses[n], propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(top == -float("inf"), 0.0, top)  # -inf - -inf would be NaN
        total = 0.0
        merged = tl.zeros([BLOCK], tl.float32)
        for n in tl.static_range(SHARDS):
            share = tl.exp(lses[n] - base)
            total += share
            merged += tl.where(lses[n] == -float("inf"), 0.0, share * outs[n].to(tl.float32))
        total = tl.maximum(total, 1.0, propagate_nan=tl.PropagateNan.ALL)  # below 1 only where all shards are empty
        tl.store(out_ptr + row.to(tl.int64) * VALUES + value, merged / total, value < VALUES)
        tl.store(lse_ptr + row, top + tl.log(total))

    return kernel


def _check(
    out_NTAL: torch.Tensor,
    lse_NTA: torch.Tensor,
    out_TAL: torch.Tensor,
    lse_TA: torch.Tensor,
    first_owner_B: torch.Tensor | None,
) -> None:
    floats = (torch.float32, torch.bfloat16)
    if out_NTAL.dim() != 4 or out_NTAL.dtype not in floats or out_NTAL.stride(-1) != 1:
        raise ValueError(
            f"out_NTAL must be float32 or bfloat16 [N, T, A, L] with adjacent values, got {out_NTAL.dtype} "
            f"{tuple(out_NTAL.shape)} of strides {out_NTAL.stride()}"
        )
    for name, tensor, shape, dtypes in (
        ("lse_NTA", lse_NTA, out_NTAL.shape[:3], floats[:1]),
        ("out_TAL", out_TAL, out_NTAL.shape[1:], floats),
        ("lse_TA", lse_TA, out_NTAL.shape[1:3], floats[:1]),
    ):
        if (
            tensor.shape != shape
            or tensor.dtype not in dtypes
            or (tensor is not lse_NTA and not tensor.is_contiguous())
        ):
            raise ValueError(f"{name} must be {dtypes} {tuple(shape)}, got {tensor.dtype} {tuple(tensor.shape)}")
    if first_owner_B is not None:
        check_tensor("first_owner_B", first_owner_B, torch.int64, (len(first_owner_B),))
        if not len(first_owner_B) or len(lse_TA) % len(first_owner_B):
            raise ValueError(f"{len(lse_TA)} rows are not those of {len(first_owner_B)} requests with as many each")
