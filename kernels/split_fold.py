"""Attention over the splits of each row's keys, folded into the attention over all of them.

    top_TA  = max_N top_NTA
    sum_TA  = sum_N 2^(top_NTA - top_TA) * sum_NTA
    out_TAL = factor * sum_N 2^(top_NTA - top_TA) * part_NTAL / sum_TA
    lse_TA  = ln 2 * (top_TA + log2 sum_TA)                     over the splits that begin before the row's length

N = splits, T = query rows, A = heads, L = 512 latent values. A split has seen `split_keys` keys of its row; it leaves
the largest of its scores in base 2 (`top`), the sum of their weights 2^(score - top) and the sum of the weighted
latents (`part`). Splits are added from the first to the last, whatever is done at once, and those behind a row's length
are not read: a row's bits depend on its own splits alone. A row of length 0 gives zeros and -inf.
Source: the split-KV reduction of Flash-Decoding.
"""

import functools
import math
from typing import Any

import torch

from specdec.kernels.lse_merge import AttentionState

_FEW_SPLITS = 8
_TOPS = 128  # read at once


def fold_splits_ref(
    part_NTAL: torch.Tensor,
    top_sum_NTA2: torch.Tensor,
    length_T: torch.Tensor,
    *,
    split_keys: int,
    factor: float = 1.0,
) -> AttentionState:
    """Define `fold_splits`: the formula, row by row, in float64."""
    outs, lses = [], []
    for row, length in enumerate(length_T.tolist()):
        live = -(-length // split_keys)
        top_NA, sum_NA = top_sum_NTA2[:live, row].double().unbind(-1)
        score_NA = top_NA * math.log(2) + sum_NA.log()  # a natural LSE of each split
        lse_A = torch.logsumexp(score_NA, dim=0)
        share_NA = torch.exp2(top_NA - lse_A / math.log(2))
        share_NA = share_NA.masked_fill(sum_NA == 0, 0.0)  # all splits empty: -inf - -inf
        outs.append(factor * (share_NA[..., None] * part_NTAL[:live, row].double()).sum(dim=0))
        lses.append(lse_A)
    return AttentionState(torch.stack(outs), torch.stack(lses))


def fold_splits(
    part_NTAL: torch.Tensor,
    top_sum_NTA2: torch.Tensor,
    length_T: torch.Tensor,
    state: AttentionState,
    *,
    split_keys: int,
    length_offset: int = 0,
    factor: float = 1.0,
) -> None:
    """Fold on a GPU, on the current stream.

    Args:
        part_NTAL: Weighted latents of the splits, float32, contiguous; what no split wrote may hold anything.
        top_sum_NTA2: Their largest scores and sums of weights, float32, contiguous.
        length_T: Keys of each row less `length_offset`, i32; at most N * `split_keys` in all.
        state: Written; out float32 or bfloat16, both contiguous.
        split_keys: Keys of a split.
        length_offset: 1 where `length_T` holds positions.
        factor: On the outputs.

    Raises:
        ValueError: Shapes do not go together.
    """
    num_splits, num_rows, num_heads, latent_dim = part_NTAL.shape
    shapes = (top_sum_NTA2.shape, length_T.shape, state.out_TAL.shape, state.lse_TA.shape)
    rows = part_NTAL.shape[1:3]
    if shapes != ((num_splits, *rows, 2), (num_rows,), (*rows, latent_dim), rows):
        raise ValueError(f"tops, lengths, out and lse must go with parts {tuple(part_NTAL.shape)}, got {shapes}")
    # Many splits of few rows: pieces of the latents share the work. Few splits: a program takes them all at once.
    is_few = num_splits <= _FEW_SPLITS
    at_once = 1 << (num_splits - 1).bit_length() if is_few else 16
    values = 512 if is_few else 128
    if num_rows:
        fold_splits_kernel()[num_rows * num_heads, -(-latent_dim // values)](
            part_NTAL, top_sum_NTA2, length_T, *state, num_rows * num_heads, num_heads, factor,
            SPLIT=split_keys, LENGTH_OFFSET=length_offset, LATENT=latent_dim, VALUES=values, AT_ONCE=at_once,
            TOPS=_TOPS, STARTS_EARLY=part_NTAL.is_cuda, launch_pdl=part_NTAL.is_cuda, num_warps=values // 128,
        )  # fmt: skip


@functools.cache
def fold_splits_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    # Compiled once whatever the number of rows: a pass must not wait for a compiler.
    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=["num_lines"], do_not_specialize_on_alignment=["length_ptr"]
    )
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        part_ptr,  # [splits, lines, LATENT] f32; a line is a head of a row
        top_sum_ptr,  # [splits, lines, 2] f32
        length_ptr,  # [rows] i32
        out_ptr,  # [lines, LATENT]
        lse_ptr,  # [lines] f32
        num_lines,
        num_heads,
        factor,
        SPLIT: tl.constexpr,
        LENGTH_OFFSET: tl.constexpr,
        LATENT: tl.constexpr,
        VALUES: tl.constexpr,  # of a program
        AT_ONCE: tl.constexpr,  # splits whose latents are under way together
        TOPS: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        line = tl.program_id(0)
        value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
        length = tl.load(length_ptr + line // num_heads) + LENGTH_OFFSET
        live = (length + SPLIT - 1) // SPLIT
        top = -float("inf")
        for first in range(0, live, TOPS):
            split = first + tl.arange(0, TOPS)
            tops = tl.load(top_sum_ptr + (split.to(tl.int64) * num_lines + line) * 2, split < live, other=-float("inf"))
            top = tl.maximum(top, tl.max(tops))
        base = tl.where(top == -float("inf"), 0.0, top)  # -inf - -inf would be NaN
        total = 0.0
        folded = tl.zeros([VALUES], tl.float32)
        for first in range(0, live, AT_ONCE):
            parts = tl.tuple(())
            shares = tl.tuple(())
            sums = tl.tuple(())
            for n in tl.static_range(AT_ONCE):
                is_live = first + n < live
                place = tl.cast(first + n, tl.int64) * num_lines + line
                parts += (tl.load(part_ptr + place * LATENT + value, (value < LATENT) & is_live, other=0.0),)
                shares += (tl.exp2(tl.load(top_sum_ptr + place * 2, is_live, other=-float("inf")) - base),)
                sums += (tl.load(top_sum_ptr + place * 2 + 1, is_live, other=0.0),)
            for n in tl.static_range(AT_ONCE):
                total += shares[n] * sums[n]
                folded += shares[n] * parts[n]
        is_empty = total == 0.0
        total = tl.where(is_empty, 1.0, total)
        out = tl.where(is_empty, 0.0, folded * factor / total)
        tl.store(out_ptr + line.to(tl.int64) * LATENT + value, out, value < LATENT)
        if tl.program_id(1) == 0:
            tl.store(lse_ptr + line, (top + tl.log2(total)) * 0.6931471805599453)

    return kernel
