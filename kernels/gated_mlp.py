"""The gated MLP, alone and as a bank of experts.

    mlp(x)    = down( silu(gate x) * (up x) )
    experts(x) = sum_C weight_TC * mlp_{expert_TC}(x)

T = tokens, H = hidden, M = width, E = experts, C = chosen experts of a token, P = T * C pairs of (token, expert).
Gate rows stand before up rows in `gate_up`.
Source: Shazeer, "GLU Variants Improve Transformer"; DeepSeek-V3, section 2.1.2.
"""

import torch
import torch.nn.functional as F

from specdec.kernels.expert_routing import Routing
from specdec.kernels.row_padding import ROW_MULTIPLE


def gated_mlp(x_TH: torch.Tensor, gate_up_XH: torch.Tensor, down_HM: torch.Tensor) -> torch.Tensor:
    """Apply one gated MLP: `gate_up_XH` is [2M, H], `down_HM` [H, M]; T is a multiple of the row block."""
    return F.linear(_gate(F.linear(x_TH, gate_up_XH)), down_HM)


def expert_mlp(x_TH: torch.Tensor, routing: Routing, gate_up_EXH: torch.Tensor, down_EHM: torch.Tensor) -> torch.Tensor:
    """Apply each token's experts and add their outputs by weight.

    The pairs are sorted by expert and each expert's group is padded to a multiple of the row block, so that an
    expert's rows do not depend on how many tokens chose it; one grouped product serves all experts.

    Args:
        x_TH: Tokens [T, H].
        routing: Experts and weights of each token.
        gate_up_EXH: [E, 2M, H].
        down_EHM: [E, H, M].

    Returns:
        [T, H], the dtype of `x_TH`; summed in float32, best expert first.
    """
    num_experts = gate_up_EXH.shape[0]
    num_chosen = routing.expert_TC.shape[1]
    expert_P = routing.expert_TC.flatten()
    order_P = torch.argsort(expert_P, stable=True)
    count_E = torch.bincount(expert_P, minlength=num_experts)
    padded_E = (count_E + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE
    end_E = padded_E.cumsum(0)
    shift_E = (end_E - padded_E) - (count_E.cumsum(0) - count_E)  # how far an expert's rows move to make room
    row_P = torch.arange(expert_P.numel(), device=x_TH.device) + shift_E[expert_P[order_P]]

    grouped_NH = x_TH.new_zeros((int(end_E[-1]), x_TH.shape[1]))
    grouped_NH[row_P] = x_TH[order_P // num_chosen]
    ends = end_E.to(torch.int32)
    hidden_NM = _gate(F.grouped_mm(grouped_NH, gate_up_EXH.transpose(1, 2), offs=ends))
    out_NH = F.grouped_mm(hidden_NM, down_EHM.transpose(1, 2), offs=ends)

    out_PH = torch.empty((expert_P.numel(), x_TH.shape[1]), dtype=torch.float32, device=x_TH.device)
    out_PH[order_P] = out_NH[row_P].float()
    out_TCH = out_PH.view(-1, num_chosen, x_TH.shape[1]).mul_(routing.weight_TC[..., None])
    return out_TCH.sum(dim=1).to(x_TH.dtype)


def expert_mlp_ref(
    x_TH: torch.Tensor, routing: Routing, gate_up_EXH: torch.Tensor, down_EHM: torch.Tensor
) -> torch.Tensor:
    """Define `expert_mlp`: one token and one expert at a time, in the dtype of the inputs."""
    out_TH = torch.zeros_like(x_TH)
    for t in range(x_TH.shape[0]):
        for expert, weight in zip(routing.expert_TC[t], routing.weight_TC[t], strict=True):
            out_TH[t] += weight * gated_mlp(x_TH[t], gate_up_EXH[expert], down_EHM[expert])
    return out_TH


def _gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
