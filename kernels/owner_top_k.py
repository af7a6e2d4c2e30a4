"""Merge the best positions of several owners, each of which has chosen among the keys it holds.

    chosen_T = the K best (score, position) of the N lists, under the order of `top_positions`

N = owners, T = query rows, W = candidates of an owner, K = how many are kept. Exact: a position among the best K of all
is among the best K of its owner. Source: `specdec.dcp.global_top_k`, whose second stage this is.
"""

import torch
import torch.nn.functional as F

from specdec.kernels.cuda_program import Macros
from specdec.kernels.index_select import MAX_K, check_chosen, top_kernel, top_macros
from specdec.kernels.top_positions import NO_CANDIDATE, position_of, ranks_of

_THREADS = 512
_MAX_WIDTH = 2048
_MAX_OWNERS = 8
_MAX_OFFSET = 1 << 31


def owner_top_k_ref(score_NTW: torch.Tensor, position_NTW: torch.Tensor, k: int) -> torch.Tensor:
    """Define `owner_top_k`: sort all ranks of a row; i64 [T, k]."""
    position_NTW = position_NTW.long()
    rank_NTW = ranks_of(score_NTW, position_NTW).masked_fill(score_NTW == -torch.inf, NO_CANDIDATE)
    best_TK = rank_NTW.transpose(0, 1).flatten(1).sort(dim=1).values[:, :k]
    chosen_TK = torch.where(best_TK == NO_CANDIDATE, NO_CANDIDATE, position_of(best_TK)).sort(dim=1).values
    return F.pad(chosen_TK.masked_fill(chosen_TK == NO_CANDIDATE, -1), (0, k - chosen_TK.shape[1]), value=-1)


def owner_top_k(
    score_NTW: torch.Tensor,
    position_NTW: torch.Tensor,
    *,
    max_positions: int,
    out_position_TK: torch.Tensor,
    out_score_TK: torch.Tensor | None = None,
) -> None:
    """Merge, asynchronously on the current stream of a GPU.

    Args:
        score_NTW: float32 [N, T, W], N <= 8, W <= 2048; the last dim contiguous. -inf is padding, as
            `IndexSelect` writes it; NaN counts as +inf.
        position_NTW: i32 of the same shape and strides, different within a row; anything where the score is padding.
        max_positions: Positions lie below it; at most 2^20.
        out_position_TK: The chosen positions, ascending, -1 behind the last, i32 [T, K], contiguous.
        out_score_TK: Their scores, float32 of the same shape, -inf behind the last.

    Raises:
        ValueError: A tensor has another shape, dtype or stride.
    """
    num_owners, num_rows, width = score_NTW.shape
    if score_NTW.dtype != torch.float32 or position_NTW.dtype != torch.int32:
        raise ValueError(f"lists must be float32 and int32, got {score_NTW.dtype} and {position_NTW.dtype}")
    if position_NTW.shape != score_NTW.shape or position_NTW.stride() != score_NTW.stride() or score_NTW.stride(2) != 1:
        raise ValueError(
            f"scores and positions must lie alike, got {list(score_NTW.shape)} by {score_NTW.stride()} and "
            f"{list(position_NTW.shape)} by {position_NTW.stride()}"
        )
    if not 1 <= num_owners <= _MAX_OWNERS or width > _MAX_WIDTH:
        raise ValueError(f"there must be 1..{_MAX_OWNERS} lists of at most {_MAX_WIDTH}, got {num_owners} of {width}")
    if (num_owners - 1) * score_NTW.stride(0) + width > _MAX_OFFSET:  # the kernel counts from owner to owner in 32 bits
        raise ValueError(f"lists of a row must lie within {_MAX_OFFSET} values, got owners {score_NTW.stride(0)} apart")
    k = out_position_TK.shape[-1]
    check_chosen(out_position_TK, out_score_TK, (num_rows, k), device=score_NTW.device)
    if position_NTW.device != score_NTW.device:
        raise ValueError(f"positions must be on {score_NTW.device}, got {position_NTW.device}")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k must be 1..{MAX_K}, got {k}")
    if not num_rows:
        return
    top_kernel("merge_owners", merge_macros(max_positions, num_owners=num_owners))(
        (num_rows, 1, 1),
        _THREADS,
        score_NTW,
        position_NTW,
        out_position_TK,
        0 if out_score_TK is None else out_score_TK,
        score_NTW.stride(0),
        score_NTW.stride(1),
        width,
        k,
    )


def merge_macros(max_positions: int, *, num_owners: int) -> Macros:
    """Give what `merge_owners` is compiled with; positions as in `top_macros`."""
    return (*top_macros(max_positions), ("OWNERS", num_owners))
