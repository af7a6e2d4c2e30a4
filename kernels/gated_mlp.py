"""The gated MLP, alone and as a bank of experts.

    mlp(x)    = down( silu(gate x) * (up x) )
    experts(x) = sum_C weight_TC * mlp_{expert_TC}(x)

T = tokens, H = hidden, M = width, X = 2M, E = experts held, C = chosen experts of a token, P = pairs of (token, expert
held), B = blocks of R pairs of one expert.
Gate rows stand before up rows in `gate_up`.
Source: Shazeer, "GLU Variants Improve Transformer"; DeepSeek-V3, section 2.1.2.
"""

import torch
import torch.nn.functional as F

from specdec.kernels.batched_product import batched_product
from specdec.kernels.expert_routing import Routing
from specdec.kernels.linear import linear, widened
from specdec.kernels.row_padding import ROW_MULTIPLE

_GATHER_VALUES = 1 << 20  # weights of experts gathered at once


def gated_mlp(x_TH: torch.Tensor, gate_up_XH: torch.Tensor, down_HM: torch.Tensor) -> torch.Tensor:
    """Apply one gated MLP: `gate_up_XH` is [2M, H], `down_HM` [H, M]; T is a multiple of the row block."""
    return linear(_gate(linear(x_TH, gate_up_XH)), down_HM)


def expert_mlp(
    x_TH: torch.Tensor,
    routing: Routing,
    gate_up_EXH: torch.Tensor,
    down_EHM: torch.Tensor,
    *,
    first_expert: int = 0,
) -> torch.Tensor:
    """Apply each token's experts and add their outputs by weight.

    The pairs are sorted by expert and laid out in blocks of `ROW_MULTIPLE` rows, each of one expert and zero-padded;
    a block is a product of fixed shape, so that a token does not depend on the tokens that share its experts.

    Args:
        x_TH: Tokens [T, H].
        routing: Experts and weights of each token.
        gate_up_EXH: [E, 2M, H].
        down_EHM: [E, H, M].
        first_expert: Number of the first of the E experts; chosen experts outside of them contribute nothing.

    Returns:
        [T, H], the dtype of `x_TH`; summed in float32, best expert first.
    """
    num_experts, hidden_size = gate_up_EXH.shape[0], x_TH.shape[1]
    num_pairs, num_chosen = routing.expert_TC.numel(), routing.expert_TC.shape[1]
    expert_P = routing.expert_TC.flatten() - first_expert
    pair_P = ((expert_P >= 0) & (expert_P < num_experts)).nonzero()[:, 0]
    expert_P = expert_P[pair_P]
    order_P = torch.argsort(expert_P, stable=True)
    count_E = torch.bincount(expert_P, minlength=num_experts)
    num_blocks_E = (count_E + ROW_MULTIPLE - 1) // ROW_MULTIPLE
    end_E = num_blocks_E.cumsum(0) * ROW_MULTIPLE
    shift_E = (end_E - num_blocks_E * ROW_MULTIPLE) - (count_E.cumsum(0) - count_E)  # how far rows move to make room
    row_P = torch.arange(expert_P.numel(), device=x_TH.device) + shift_E[expert_P[order_P]]
    expert_B = torch.repeat_interleave(num_blocks_E)

    grouped_NH = x_TH.new_zeros((len(expert_B) * ROW_MULTIPLE, hidden_size))
    pair_P = pair_P[order_P]
    grouped_NH[row_P] = x_TH[pair_P // num_chosen]
    grouped_BRH = grouped_NH.view(-1, ROW_MULTIPLE, hidden_size)
    out_BRH = torch.empty_like(grouped_BRH)
    at_once = max(1, _GATHER_VALUES // gate_up_EXH[0].numel())
    for start in range(0, len(expert_B), at_once):
        blocks = slice(start, start + at_once)
        gate_up_BHX = widened(gate_up_EXH[expert_B[blocks]]).transpose(1, 2)
        hidden_BRM = _gate(batched_product(widened(grouped_BRH[blocks]), gate_up_BHX).to(x_TH.dtype))
        down_BMH = widened(down_EHM[expert_B[blocks]]).transpose(1, 2)
        out_BRH[blocks] = batched_product(widened(hidden_BRM), down_BMH).to(x_TH.dtype)

    out_PH = torch.zeros((num_pairs, hidden_size), dtype=torch.float32, device=x_TH.device)
    out_PH[pair_P] = out_BRH.view(-1, hidden_size)[row_P].float()
    out_TCH = out_PH.view(-1, num_chosen, hidden_size).mul_(routing.weight_TC[..., None])
    return out_TCH.sum(dim=1).to(x_TH.dtype)


def expert_mlp_ref(
    x_TH: torch.Tensor,
    routing: Routing,
    gate_up_EXH: torch.Tensor,
    down_EHM: torch.Tensor,
    *,
    first_expert: int = 0,
) -> torch.Tensor:
    """Define `expert_mlp`: one token and one expert at a time, in the dtype of the inputs."""
    out_TH = torch.zeros_like(x_TH)
    for t in range(x_TH.shape[0]):
        for expert, weight in zip(routing.expert_TC[t], routing.weight_TC[t], strict=True):
            if 0 <= (place := int(expert) - first_expert) < len(down_EHM):
                out_TH[t] += weight * F.linear(_gate(F.linear(x_TH[t], gate_up_EXH[place])), down_EHM[place])
    return out_TH


def _gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
