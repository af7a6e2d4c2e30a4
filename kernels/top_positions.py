"""The positions with the highest scores, under a total order.

Higher score first, then the earlier position. The result is a set, listed by ascending position: a list in a fixed
order makes every later sum over it reproducible, whichever order the scores had.

T = query rows, S = positions, K = how many are kept.
"""

import torch


def top_positions(scores_TS: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the `k` best positions of each row.

    Args:
        scores_TS: float32 [T, S]; -inf marks a position that may not be chosen. NaN counts as +inf: a damaged key is
            read and shows, where leaving it out would give a wrong result that looks right.
        k: Most positions kept in a row.

    Returns:
        i64 [T, k], ascending, padded with -1 behind the last chosen one (rows with fewer than `k` candidates).
    """
    num_rows, num_positions = scores_TS.shape
    scores_TS = scores_TS.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    candidate_TS = scores_TS > -torch.inf
    if num_positions > k:
        cut_T1 = torch.topk(scores_TS, k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
        above_TS = scores_TS > cut_T1
        level_TS = scores_TS == cut_T1
        room_T1 = k - above_TS.sum(dim=1, keepdim=True)
        chosen_TS = candidate_TS & (above_TS | (level_TS & (level_TS.cumsum(dim=1) <= room_T1)))
    else:
        chosen_TS = candidate_TS
    place_TS = torch.where(chosen_TS, chosen_TS.cumsum(dim=1) - 1, k)  # column k collects what was not chosen
    column_TS = torch.arange(num_positions, device=scores_TS.device).expand(num_rows, -1)
    out_TK = scores_TS.new_full((num_rows, k + 1), -1, dtype=torch.int64)
    return out_TK.scatter_(1, place_TS, column_TS)[:, :k]


def leading_positions(position_T: torch.Tensor, k: int) -> torch.Tensor:
    """Choose every position up to each row's own: what `top_positions` gives while no row has more than `k` candidates.

    Args:
        position_T: Position of each row, i64 [T], each below `k`.
        k: Width of the result.

    Returns:
        i64 [T, k]: 0..position, padded with -1.
    """
    column_K = torch.arange(k, device=position_T.device)
    return torch.where(column_K <= position_T[:, None], column_K, -1)


NO_CANDIDATE = torch.iinfo(torch.int64).max  # ranks behind every candidate


def ranks_of(score: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Write the total order as an integer: the better candidate has the smaller rank, and no two are equal.

    Args:
        score: float32 of any shape; NaN counts as +inf, as in `top_positions`.
        position: i64 of the same shape, 0..2^31 - 1.

    Returns:
        i64: the score's bits, ordered from the highest down, above the 32 bits of the position.
    """
    bits = (score.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0).view(torch.int32)  # no -0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # a negative float's bits fall where its value rises
    return (~ascending).to(torch.int64) << 32 | position


def position_of(rank: torch.Tensor) -> torch.Tensor:
    """Read the position back from what `ranks_of` gave."""
    return rank & 0xFFFFFFFF


def choice_margin(scores_TS: torch.Tensor, k: int) -> torch.Tensor:
    """Give by how much the k-th best score of a row beats the next, f32 [T]; inf where there is no next."""
    if scores_TS.shape[1] <= k:
        return scores_TS.new_full((len(scores_TS),), torch.inf)
    best_TK = scores_TS.topk(k + 1, dim=1).values
    margin_T = best_TK[:, k - 1] - best_TK[:, k]
    return margin_T.masked_fill(best_TK[:, k] == -torch.inf, torch.inf)
