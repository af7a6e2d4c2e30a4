"""Scores of the DSA indexer.

    score(t, s) = J^-0.5 * D^-0.5 * sum_J weight_TJ * relu(query_TJD . key_SD)      for s <= t, else -inf

T = query rows, J = index heads, D = index head dim, R = requests, S = positions of a request, B = blocks of M query
rows of one request, N = tiles of K positions.
Weights may be negative, and so may scores. Everything is float32.
Source: DeepSeek-V3.2, "DeepSeek Sparse Attention"; `GlmMoeDsaForCausalLM` in transformers.
"""

import math

import torch
import torch.nn.functional as F

from specdec.kernels.batched_product import batched_product
from specdec.kernels.row_padding import ROW_MULTIPLE

POSITION_MULTIPLE = 256  # keys of one product: a fixed shape keeps a score's bits independent of how many keys follow
_BLOCK_VALUES = 1 << 22  # head scores held at once


def index_scores(
    query_TJD: torch.Tensor,
    weight_TJ: torch.Tensor,
    key_RSD: torch.Tensor,
    *,
    request_index_T: torch.Tensor,
    position_T: torch.Tensor,
) -> torch.Tensor:
    """Score every cached position for every query row.

    Args:
        query_TJD: Rotated index queries, float32 [T, J, D]; rows of one request stand together.
        weight_TJ: Head weights, float32 [T, J].
        key_RSD: Index keys by request, ascending by position, float32 [R, S, D]: all of them, or those a rank owns.
            Keys behind a row's own position may hold anything.
        request_index_T: Row of `key_RSD` for each query row, i64 [T], not decreasing.
        position_T: Place in `key_RSD` of the last key that each query row may see, i64 [T]; -1 where there is none.

    Returns:
        float32 [T, S]; -inf behind the row's last key.
    """
    num_rows, num_heads, dim = query_TJD.shape
    num_positions = key_RSD.shape[1]
    key_RSD = F.pad(key_RSD, (0, 0, 0, -num_positions % POSITION_MULTIPLE))
    key_RNKD = key_RSD.view(len(key_RSD), -1, POSITION_MULTIPLE, dim)
    num_tiles = key_RNKD.shape[1]
    row_BM, live_BM = _rows_of_blocks(request_index_T)
    scores_TS = query_TJD.new_empty((num_rows, key_RSD.shape[1]))
    blocks_at_once = max(1, _BLOCK_VALUES // (ROW_MULTIPLE * num_heads * key_RSD.shape[1]))
    for start in range(0, row_BM.shape[0], blocks_at_once):
        rows_BM, live = row_BM[start : start + blocks_at_once], live_BM[start : start + blocks_at_once]
        num_blocks = len(rows_BM)
        query_BXD = query_TJD[rows_BM].view(num_blocks, 1, ROW_MULTIPLE * num_heads, dim)
        query_BNXD = query_BXD.expand(-1, num_tiles, -1, -1).reshape(-1, ROW_MULTIPLE * num_heads, dim)
        key_BNKD = key_RNKD[request_index_T[rows_BM[:, 0]]].view(-1, POSITION_MULTIPLE, dim)
        head_score_BNXK = batched_product(query_BNXD, key_BNKD.transpose(1, 2)).relu_()
        head_score_XK = head_score_BNXK.view(-1, num_heads, POSITION_MULTIPLE)
        weight_BMJ = weight_TJ[rows_BM].view(num_blocks, 1, ROW_MULTIPLE, num_heads).expand(-1, num_tiles, -1, -1)
        score_BNMK = batched_product(weight_BMJ.reshape(-1, 1, num_heads), head_score_XK)
        score_BMNK = score_BNMK.view(num_blocks, num_tiles, ROW_MULTIPLE, -1).transpose(1, 2)
        scores_TS[rows_BM[live]] = score_BMNK.flatten(2)[live]
    scores_TS = scores_TS[:, :num_positions] / math.sqrt(num_heads * dim)
    column_S = torch.arange(num_positions, device=scores_TS.device)
    return scores_TS.masked_fill(column_S > position_T[:, None], -torch.inf)


def index_scores_ref(
    query_TJD: torch.Tensor,
    weight_TJ: torch.Tensor,
    key_RSD: torch.Tensor,
    *,
    request_index_T: torch.Tensor,
    position_T: torch.Tensor,
) -> torch.Tensor:
    """Define `index_scores`: the formula, one key tensor a row, in the dtype of the inputs."""
    num_heads, dim = query_TJD.shape[1:]
    head_score_TJS = torch.einsum("tjd,tsd->tjs", query_TJD, key_RSD[request_index_T]).relu()
    score_TS = torch.einsum("tj,tjs->ts", weight_TJ, head_score_TJS) / math.sqrt(num_heads * dim)
    column_S = torch.arange(key_RSD.shape[1])
    return score_TS.masked_fill(column_S > position_T[:, None], -torch.inf)


def _rows_of_blocks(request_index_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the rows of each request into blocks of `ROW_MULTIPLE`; a short last block repeats its first row.

    Returns:
        Row numbers, i64 [B, ROW_MULTIPLE], and which of them are live, bool of the same shape.
    """
    _, count_R = torch.unique_consecutive(request_index_T, return_counts=True)
    num_blocks_R = (count_R + ROW_MULTIPLE - 1) // ROW_MULTIPLE
    request_B = torch.repeat_interleave(num_blocks_R)
    first_block_R = num_blocks_R.cumsum(0) - num_blocks_R
    end_B = count_R.cumsum(0)[request_B]
    begin_B = (count_R.cumsum(0) - count_R)[request_B]
    block_B = torch.arange(request_B.numel(), device=request_index_T.device) - first_block_R[request_B]
    first_B1 = (begin_B + block_B * ROW_MULTIPLE)[:, None]
    row_BM = first_B1 + torch.arange(ROW_MULTIPLE, device=request_index_T.device)
    live_BM = row_BM < end_B[:, None]
    return torch.where(live_BM, row_BM, first_B1), live_BM
