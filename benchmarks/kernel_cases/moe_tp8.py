"""A mixture layer of one TP8 rank, from the tokens to the sum over their experts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_timing import graph_us, relative_error
from benchmarks.kernel_cases import peers
from benchmarks.kernel_cases.rates import BF16_FLOPS_PER_US, memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.moe_experts import (
    CHOSEN,
    EXPERTS,
    HIDDEN,
    WIDTH,
    MixtureLayer,
    PackedExperts,
    moe_ref,
    pack_down,
    pack_gate_up,
)

_BANKS = 2  # of weights: any two calls in a row use different ones
_EXPERT_BYTES = 3 * HIDDEN * WIDTH
_REQUEST = 6  # tokens that are verified together

Bank = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def run() -> list[CaseResult]:
    """Time independent tokens, then tokens that share experts with the others of their request."""
    banks = [_bank() for _ in range(_BANKS)]
    packed = [PackedExperts(*pack_gate_up(*bank[:2]), *pack_down(*bank[2:])) for bank in banks]
    deep_gemm = peers.deep_gemm()
    return [
        _measure(num_tokens, correlation, banks, packed, deep_gemm if correlation == 0 else None)
        for correlation in (0.0, 0.8)
        for num_tokens in (1, 6, 96, 192, 768)
        if num_tokens >= _REQUEST or correlation == 0
    ]


def _measure(
    num_tokens: int, correlation: float, banks: list[Bank], packed: list[PackedExperts], deep_gemm: Any
) -> CaseResult:
    layer = MixtureLayer(torch.device("cuda"))
    router_EH = (0.02 * torch.randn(EXPERTS, HIDDEN, device="cuda")).bfloat16()
    bias_E = 5 + 0.01 * torch.randn(EXPERTS, device="cuda")
    xs = [_tokens(num_tokens, correlation) for _ in range(2 * _BANKS)]
    outs = [torch.empty_like(x_TH) for x_TH in xs]
    ours_us = graph_us(
        [partial(layer, x_TH, router_EH, bias_E, packed[i % _BANKS], outs[i], scaling=2.5) for i, x_TH in enumerate(xs)]
    )
    experts = list(zip(*banks[(len(xs) - 1) % _BANKS], strict=True))
    expected_TH, routing = moe_ref(xs[-1], router_EH, bias_E, experts, num_chosen=CHOSEN, scaling=2.5)
    same_T = (layer.expert_TC[:num_tokens] == routing.expert_TC).all(dim=1)
    num_active = 0.0  # routed experts of a call, the mean
    for x_TH in xs:
        layer(x_TH, router_EH, bias_E, packed[0], torch.empty_like(x_TH), scaling=2.5)
        num_active += layer.expert_TC[:num_tokens].unique().numel() / len(xs)
    num_bytes = (1 + num_active) * _EXPERT_BYTES
    num_flops = 2 * num_tokens * (CHOSEN + 1) * _EXPERT_BYTES
    peers_us = {}
    if deep_gemm:
        count_E = layer.expert_TC[:num_tokens].flatten().bincount(minlength=EXPERTS).int()
        peers_us["DeepGEMM"] = graph_us([_masked(deep_gemm, bank, count_E, num_tokens) for bank in banks])
    return CaseResult(
        case="moe_tp8",
        shape=f"T={num_tokens}" + (f" correlated {correlation}" if correlation else ""),
        ours_us=ours_us,
        floor_us=max(memory_us(num_bytes), num_flops / BF16_FLOPS_PER_US),
        error=relative_error(outs[-1][same_T], expected_TH[same_T]),
        peers_us=peers_us,
        note=f"{num_active:.0f} routed experts; ours: router to sum; DeepGEMM: both masked products of the routed ones "
        f"alone, sorted and quantised before; {int((~same_T).sum())} tokens with a near tie left out of the error",
    )


def _bank() -> Bank:
    def weights(*shape: int) -> torch.Tensor:
        byte = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        return byte.masked_fill_(byte & 0x7F == 0x7F, 0).view(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return 1e-5 + 3e-4 * torch.rand(*shape, device="cuda")

    num, blocks = EXPERTS + 1, HIDDEN // 128
    return (
        weights(num, 2 * WIDTH, HIDDEN),
        scales(num, 2 * WIDTH // 128, blocks),
        weights(num, HIDDEN, WIDTH),
        scales(num, blocks, WIDTH // 128),
    )


def _tokens(num_tokens: int, correlation: float) -> torch.Tensor:
    """Draw tokens of which those of a request have a common part."""
    common = torch.randn(-(-num_tokens // _REQUEST), 1, HIDDEN, device="cuda").expand(-1, _REQUEST, -1)
    own = torch.randn(num_tokens, HIDDEN, device="cuda")
    common_TH = common.reshape(-1, HIDDEN)[:num_tokens]
    return (correlation**0.5 * common_TH + (1 - correlation) ** 0.5 * own).bfloat16()


def _masked(deep_gemm: Any, bank: Bank, count_E: torch.Tensor, num_tokens: int) -> Callable[[], object]:
    """Both products of the routed experts, on activations that are already sorted and quantised."""
    most = -(-int(count_E.max()) // 64) * 64

    def operand(num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(EXPERTS * most, num_inputs, device="cuda").bfloat16()
        q, scale = deep_gemm.utils.math.per_token_cast_to_fp8(values, use_ue8m0=False)
        scale = deep_gemm.utils.layout.get_mn_major_tma_aligned_tensor(scale.view(EXPERTS, most, -1))
        return q.view(EXPERTS, most, -1), scale

    x, hidden = operand(HIDDEN), operand(WIDTH)
    gate_up = torch.empty(EXPERTS, most, 2 * WIDTH, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(EXPERTS, most, HIDDEN, dtype=torch.bfloat16, device="cuda")
    mean = max(1, num_tokens * CHOSEN // EXPERTS)
    weights = [each[:EXPERTS] for each in bank]

    def call() -> None:
        deep_gemm.m_grouped_fp8_gemm_nt_masked(x, (weights[0], weights[1]), gate_up, count_E, mean)
        deep_gemm.m_grouped_fp8_gemm_nt_masked(hidden, (weights[2], weights[3]), out, count_E, mean)

    return call
