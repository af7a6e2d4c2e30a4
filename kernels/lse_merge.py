"""Merge attention computed over disjoint shards of the keys.

    lse_TA  = log sum_N exp(lse_NTA)
    out_TAL = sum_N exp(lse_NTA - lse_TA) * out_NTAL

N = shards, T = query rows, A = heads, L = values of a head's output. A shard is what a rank holds, or a tile of slots.
LSE is float32 and a natural logarithm; -inf says that a row has no key in a shard, and its output there is ignored,
whatever it holds. A row without keys in any shard gives zeros and -inf. Shards are added from first to last, so empty
shards behind the others do not change a bit of the result.
Source: the split-KV reduction of Flash-Decoding.
"""

import math
from typing import NamedTuple

import torch

from specdec.kernels.sum_in_order import sum_in_order


class AttentionState(NamedTuple):
    """Attention over some of the keys, in the form that merges with attention over the others.

    Attributes:
        out_TAL: Weighted latents, float32 [T, A, L].
        lse_TA: Log-sum-exp of the scores, natural log, float32 [T, A]; -inf for a row without keys.
    """

    out_TAL: torch.Tensor
    lse_TA: torch.Tensor


class ShardWeights(NamedTuple):
    """What each shard contributes to the merged output.

    Attributes:
        weight_NTA: Factors on the shards' outputs, sum 1 over N; exactly 0 where a shard is empty.
        lse_TA: Log-sum-exp over all shards; -inf where all are empty.
    """

    weight_NTA: torch.Tensor
    lse_TA: torch.Tensor


def merge_states(out_NTAL: torch.Tensor, lse_NTA: torch.Tensor) -> AttentionState:
    """Merge the states of N shards, float32 [N, T, A, L] and [N, T, A]."""
    weight_NTA, lse_TA = shard_weights(lse_NTA)
    shards = zip(out_NTAL, lse_NTA, weight_NTA, strict=True)
    return AttentionState(sum_in_order(weighted(*shard) for shard in shards), lse_TA)


def merge_states_ref(out_NTAL: torch.Tensor, lse_NTA: torch.Tensor) -> AttentionState:
    """Define `merge_states`: the formula, in the dtype of the inputs."""
    out_NTAL = torch.where((lse_NTA == -torch.inf)[..., None], 0.0, torch.softmax(lse_NTA, dim=0)[..., None] * out_NTAL)
    return AttentionState(out_NTAL.sum(dim=0), torch.logsumexp(lse_NTA, dim=0))


def shard_weights(lse_NTA: torch.Tensor) -> ShardWeights:
    """Compute each shard's share of the merged output from the LSEs of all shards."""
    top_TA = lse_NTA.amax(dim=0)
    share_NTA = torch.exp(lse_NTA - top_TA.masked_fill(top_TA == -torch.inf, 0.0))  # -inf - -inf would be NaN
    total_TA = sum_in_order(share_NTA).clamp(min=1.0)  # below 1 only where all shards are empty
    return ShardWeights(share_NTA / total_TA, top_TA + total_TA.log())


def weighted(out_TAL: torch.Tensor, lse_TA: torch.Tensor, weight_TA: torch.Tensor) -> torch.Tensor:
    """Apply a shard's weights to its output: zeros where it is empty, even if its output is NaN there."""
    return out_TAL.masked_fill((lse_TA == -torch.inf)[..., None], 0.0).mul_(weight_TA[..., None])


def natural_lse(lse_TA: torch.Tensor, *, base: float) -> torch.Tensor:
    """Convert the LSE of a kernel that works in another base: FlashInfer's is of base 2.

    Args:
        lse_TA: `log_base(sum exp(score))`, -inf for a row without keys.
        base: What the kernel's adapter states about its kernel.
    """
    return lse_TA * math.log(base)
