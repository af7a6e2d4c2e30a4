"""Multi-head latent attention of each query row over its own list of cached rows, in absorbed form.

    score_TAK = scale * query_TAX . kv_TKX        over the valid slots of the row
    lse_TA    = logsumexp_K(score_TAK)
    out_TAL   = sum_K exp(score_TAK - lse_TA) * kv_TKX[..., :L]

T = query rows, A = heads, K = slots of a row, X = L + R values of a cached row, L = latent values, R = rope values,
N = tiles of slots, M = T * N.
Everything is float32. A row without a valid slot has out = 0 and lse = -inf.
Source: DeepSeek-V2, section 2.1 (latent attention, absorbed); DeepSeek-V3.2 (token-wise sparse selection).
"""

import torch

from specdec.kernels.batched_product import batched_product
from specdec.kernels.lse_merge import AttentionState, merge_states


def sparse_mla(
    query_TAX: torch.Tensor, kv_TKX: torch.Tensor, valid_TK: torch.Tensor, *, scale: float, latent_dim: int
) -> AttentionState:
    """Attend with every head of a row to the row's valid slots.

    Args:
        query_TAX: Absorbed queries (latent part, then rope part), float32 [T, A, X].
        kv_TKX: Cached rows of each query row's slots, float32 [T, K, X]; zeros where not valid.
        valid_TK: Which slots hold a key, bool [T, K].
        scale: Factor on the scores.
        latent_dim: L, the leading values of a cached row that are also its value vector.
    """
    lowest = torch.finfo(torch.float32).min  # a finite mask: a row without keys averages zeros instead of giving NaN
    score_TAK = batched_product(query_TAX, kv_TKX.transpose(1, 2)).mul_(scale)
    score_TAK.masked_fill_(~valid_TK[:, None], lowest)
    weight_TAK = torch.softmax(score_TAK, dim=-1)
    out_TAL = batched_product(weight_TAK, kv_TKX[..., :latent_dim])
    top_TA = score_TAK.amax(dim=-1)
    lse_TA = (top_TA - weight_TAK.amax(dim=-1).log()).masked_fill_(top_TA == lowest, -torch.inf)
    return AttentionState(out_TAL, lse_TA)


def tiled_sparse_mla(
    query_TAX: torch.Tensor,
    kv_TKX: torch.Tensor,
    valid_TK: torch.Tensor,
    *,
    slots_per_tile: int,
    scale: float,
    latent_dim: int,
) -> AttentionState:
    """Give `sparse_mla` as a merge over tiles of slots, each a product of one fixed shape.

    A row's bits depend on its valid slots and the width of a tile, not on how many tiles there are: a tile without a
    valid slot adds exactly nothing. So a batch needs only the tiles of its longest row.

    Args:
        query_TAX: As in `sparse_mla`, like the arguments not named here.
        kv_TKX: Cached rows, K a multiple of `slots_per_tile`.
        valid_TK: Which slots hold a key.
        slots_per_tile: Width of a tile.
        scale: Factor on the scores.
        latent_dim: L.
    """
    num_rows, num_heads, width = query_TAX.shape
    num_tiles = kv_TKX.shape[1] // slots_per_tile
    if num_tiles == 1:
        return sparse_mla(query_TAX, kv_TKX, valid_TK, scale=scale, latent_dim=latent_dim)
    out_MAL, lse_MA = sparse_mla(
        query_TAX[:, None].expand(-1, num_tiles, -1, -1).reshape(-1, num_heads, width),
        kv_TKX.view(-1, slots_per_tile, width),
        valid_TK.view(-1, slots_per_tile),
        scale=scale,
        latent_dim=latent_dim,
    )
    out_NTAL = out_MAL.view(num_rows, num_tiles, num_heads, latent_dim).transpose(0, 1)
    return merge_states(out_NTAL, lse_MA.view(num_rows, num_tiles, num_heads).transpose(0, 1))


def sparse_mla_ref(
    query_TAX: torch.Tensor, kv_TKX: torch.Tensor, valid_TK: torch.Tensor, *, scale: float, latent_dim: int
) -> AttentionState:
    """Define `sparse_mla`: softmax over the valid slots, row by row, in the dtype of the inputs."""
    outs, lses = [], []
    for query_AX, kv_KX, valid_K in zip(query_TAX, kv_TKX, valid_TK, strict=True):
        key_NX = kv_KX[valid_K]
        score_AN = query_AX @ key_NX.T * scale
        outs.append(torch.softmax(score_AN, dim=-1) @ key_NX[:, :latent_dim])
        lses.append(torch.logsumexp(score_AN, dim=-1))
    return AttentionState(torch.stack(outs), torch.stack(lses))
