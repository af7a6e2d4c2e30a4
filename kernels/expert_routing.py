"""Choose the experts of each token: sigmoid scores, a bias that steers the choice only, optional expert groups.

    score  = sigmoid(router x)
    choice = top k of score + bias            (within the best groups, where there are groups)
    weight = score[choice] / (sum score[choice] + 1e-20) * scaling

T = tokens, E = experts, G = groups, C = chosen experts. All in float32: the bias has a large common part and a
small spread, so rounding it reorders experts. Ties: the lower expert id wins.
Source: DeepSeek-V3, section 2.1.2 ("noaux_tc"); `GlmMoeDsaForCausalLM` in transformers.
"""

from typing import NamedTuple

import torch

from specdec.kernels.linear import linear


class Routing(NamedTuple):
    """The experts of T tokens.

    Attributes:
        expert_TC: Chosen experts, best first, i64 [T, C].
        weight_TC: Their weights, float32 [T, C].
    """

    expert_TC: torch.Tensor
    weight_TC: torch.Tensor


def route(
    x_TH: torch.Tensor,
    router_EH: torch.Tensor,
    bias_E: torch.Tensor,
    *,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    normalise: bool,
    scaling: float,
) -> Routing:
    """Choose `num_chosen` experts for each token.

    Args:
        x_TH: Tokens, any float dtype; T is a multiple of the row block.
        router_EH: Router weight, float32 [E, H].
        bias_E: Choice bias, float32 [E].
        num_chosen: C.
        num_groups: G, divides E; 1 means no groups.
        num_chosen_groups: Groups that stay; a group's strength is the sum of its two best biased scores.
        normalise: Divide the chosen scores by their sum.
        scaling: Factor on the weights.
    """
    score_TE = torch.sigmoid(linear(x_TH.float(), router_EH))
    biased_TE = score_TE + bias_E
    if num_groups > 1:
        biased_TGX = biased_TE.unflatten(1, (num_groups, -1))
        strength_TG = biased_TGX.topk(2, dim=-1).values.sum(dim=-1)
        dropped_TG = _descending(strength_TG)[:, num_chosen_groups:]
        biased_TGX = biased_TGX.scatter(
            1, dropped_TG[..., None].expand(-1, -1, biased_TGX.shape[-1]), torch.full_like(biased_TGX, -torch.inf)
        )
        biased_TE = biased_TGX.flatten(1)
    expert_TC = _descending(biased_TE)[:, :num_chosen]
    weight_TC = score_TE.gather(1, expert_TC)
    if normalise:
        weight_TC = weight_TC / (weight_TC.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(expert_TC, weight_TC * scaling)


def _descending(value_TE: torch.Tensor) -> torch.Tensor:
    """Return the indices that sort each row from high to low; equal values keep their order."""
    return value_TE.sort(dim=-1, descending=True, stable=True).indices
