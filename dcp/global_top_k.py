"""The best positions over all ranks, where each rank has scored the index keys it owns.

Exact in two stages. A position among the best k of all is among the best k of its owner, so each rank sends its own
best k and every rank takes the best k of what all sent, under one total order: higher score, then earlier position.
Scores are the same bits as on one rank, hence so is the set.

    message of a row, int32:  count | scores, W float32 as bits | positions, W

What stands behind `count` is padding. It is dropped by the count alone: scores may be negative.

T = query rows, S = columns of the owned keys, N = ranks, W = candidates of a rank, M = N * W, K = how many are kept.
"""

import torch
import torch.nn.functional as F

from specdec.dcp.communicator import Communicator
from specdec.dcp.metadata import BatchMetadata
from specdec.kernels.top_positions import NO_CANDIDATE, position_of, ranks_of, top_positions

_INT32_BYTES = 4


def global_top_positions(score_TS: torch.Tensor, k: int, *, metadata: BatchMetadata, dcp: Communicator) -> torch.Tensor:
    """Keep the `k` best positions of each row over all ranks. One collective of the dcp group.

    Args:
        score_TS: Scores of the keys this rank owns, float32 [T, S], -inf where a row may not choose. S is the same on
            every rank, as `KvPool.gather_index_keys` gives it.
        k: Most positions kept in a row.
        metadata: Of this rank; tells the positions of the columns.
        dcp: The group.

    Returns:
        i64 [T, k], ascending, padded with -1; the same on every rank, and what `top_positions` gives on one rank.
    """
    column_TW = top_positions(score_TS, min(k, score_TS.shape[1]))
    message_TY = _packed(score_TS, column_TW, metadata.owned_positions(column_TW))
    count_NT1, score_NTW, position_NTW = _unpacked(dcp.all_gather(message_TY))
    is_padding_NTW = torch.arange(column_TW.shape[1], device=score_TS.device) >= count_NT1
    rank_NTW = ranks_of(score_NTW, position_NTW).masked_fill_(is_padding_NTW, NO_CANDIDATE)
    rank_TM = rank_NTW.transpose(0, 1).flatten(1)
    num_kept = min(k, rank_TM.shape[1])
    best_TK = torch.topk(rank_TM, num_kept, dim=1, largest=False, sorted=False).values
    chosen_TK = torch.where(best_TK == NO_CANDIDATE, NO_CANDIDATE, position_of(best_TK)).sort(dim=1).values
    return F.pad(chosen_TK.masked_fill_(chosen_TK == NO_CANDIDATE, -1), (0, k - num_kept), value=-1)


def candidate_bytes(*, dcp_size: int, num_candidates: int) -> int:
    """Bytes that a rank sends to choose one token's positions in one full layer.

    Args:
        dcp_size: N.
        num_candidates: W: k, or the positions of a rank's most pages of one request where those are fewer.
    """
    return (dcp_size - 1) * (1 + 2 * num_candidates) * _INT32_BYTES


def _packed(score_TS: torch.Tensor, column_TW: torch.Tensor, position_TW: torch.Tensor) -> torch.Tensor:
    count_T1 = (column_TW >= 0).sum(dim=1, keepdim=True)
    score_TW = score_TS.gather(1, column_TW.clamp(min=0))
    return torch.cat((count_T1.int(), score_TW.view(torch.int32), position_TW.int()), dim=1)


def _unpacked(message_NTY: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_candidates = message_NTY.shape[-1] // 2
    count_NT1, score_NTW, position_NTW = message_NTY.split_with_sizes((1, num_candidates, num_candidates), dim=-1)
    return count_NT1, score_NTW.contiguous().view(torch.float32), position_NTW.long()
