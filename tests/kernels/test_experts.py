"""Routing against its formula, and grouped experts against one pair at a time."""

import pytest
import torch

from specdec.kernels.expert_routing import Routing, route
from specdec.kernels.gated_mlp import expert_mlp, expert_mlp_ref


def route_by_formula(
    x_H: torch.Tensor, router_EH: torch.Tensor, bias_E: torch.Tensor, *, groups: int, kept: int
) -> list[int]:
    score_E = torch.sigmoid(router_EH.double() @ x_H.double())
    biased = (score_E + bias_E.double()).tolist()
    size = len(biased) // groups
    strength = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    allowed = sorted(range(groups), key=lambda g: (-strength[g], g))[:kept]
    candidates = [e for e in range(len(biased)) if e // size in allowed]
    return sorted(candidates, key=lambda e: (-biased[e], e))[:2]


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (2, 1)])
def test_the_bias_steers_the_choice_and_not_the_weight(groups: int, kept: int) -> None:
    x_TH, router_EH, bias_E = torch.randn(16, 24), torch.randn(8, 24), torch.randn(8)
    routing = route(
        x_TH, router_EH, bias_E, num_chosen=2, num_groups=groups, num_chosen_groups=kept, normalise=True, scaling=2.5
    )
    assert routing.expert_TC.tolist() == [
        route_by_formula(x_H, router_EH, bias_E, groups=groups, kept=kept) for x_H in x_TH
    ]
    score_TC = torch.sigmoid(x_TH @ router_EH.T).gather(1, routing.expert_TC)
    torch.testing.assert_close(routing.weight_TC, 2.5 * score_TC / score_TC.sum(1, keepdim=True))


def test_equal_scores_choose_the_lower_expert() -> None:
    routing = route(
        torch.zeros(8, 4),
        torch.zeros(6, 4),
        torch.zeros(6),
        num_chosen=3,
        num_groups=1,
        num_chosen_groups=1,
        normalise=False,
        scaling=1.0,
    )
    assert (routing.expert_TC == torch.arange(3)).all()
    assert (routing.weight_TC == 0.5).all()


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 40])
def test_grouped_experts_equal_one_pair_at_a_time(num_tokens: int) -> None:
    x_TH = torch.randn(num_tokens, 24)
    gate_up_EXH, down_EHM = torch.randn(8, 32, 24), torch.randn(8, 24, 16)
    expert_TC = torch.stack([torch.randperm(8)[:2] for _ in range(num_tokens)])
    routing = Routing(expert_TC, torch.rand(num_tokens, 2))
    expected = expert_mlp_ref(
        x_TH.double(), Routing(expert_TC, routing.weight_TC.double()), gate_up_EXH.double(), down_EHM.double()
    )
    torch.testing.assert_close(
        expert_mlp(x_TH, routing, gate_up_EXH, down_EHM).double(), expected, rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_whatever_tokens_share_its_experts(dtype: torch.dtype) -> None:
    x_TH = torch.randn(50, 24, dtype=dtype)
    gate_up_EXH, down_EHM = torch.randn(8, 32, 24, dtype=dtype), torch.randn(8, 24, 16, dtype=dtype)
    routing = Routing(torch.stack([torch.randperm(8)[:2] for _ in range(50)]), torch.rand(50, 2))
    whole_TH = expert_mlp(x_TH, routing, gate_up_EXH, down_EHM)
    for row in range(50):
        alone = Routing(routing.expert_TC[row : row + 1], routing.weight_TC[row : row + 1])
        assert torch.equal(expert_mlp(x_TH[row : row + 1], alone, gate_up_EXH, down_EHM)[0], whole_TH[row])
