"""Multi-head latent attention of each query row over its own list of cached rows, in absorbed form.

    score_TAK = scale * query_TAX . kv_TKX        over the valid slots of the row
    lse_TA    = logsumexp_K(score_TAK)
    out_TAL   = sum_K exp(score_TAK - lse_TA) * kv_TKX[..., :L]

T = query rows, A = heads, K = slots of a row, X = L + R values of a cached row, L = latent values, R = rope values.
Everything is float32. A row without a valid slot has out = 0 and lse = -inf.
Source: DeepSeek-V2, section 2.1 (latent attention, absorbed); DeepSeek-V3.2 (token-wise sparse selection).
"""

from typing import NamedTuple

import torch


class AttentionState(NamedTuple):
    """Attention over some of the keys, in the form that merges with attention over the others.

    Attributes:
        out_TAL: Weighted latents, float32 [T, A, L].
        lse_TA: Log-sum-exp of the scores, natural log, float32 [T, A]; -inf for a row without keys.
    """

    out_TAL: torch.Tensor
    lse_TA: torch.Tensor


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
    score_TAK = torch.bmm(query_TAX, kv_TKX.transpose(1, 2)).mul_(scale)
    score_TAK.masked_fill_(~valid_TK[:, None], lowest)
    weight_TAK = torch.softmax(score_TAK, dim=-1)
    out_TAL = torch.bmm(weight_TAK, kv_TKX[..., :latent_dim])
    top_TA = score_TAK.amax(dim=-1)
    lse_TA = (top_TA - weight_TAK.amax(dim=-1).log()).masked_fill_(top_TA == lowest, -torch.inf)
    return AttentionState(out_TAL, lse_TA)


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
