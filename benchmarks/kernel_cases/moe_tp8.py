"""A mixture layer of one TP8 rank, from the tokens to the sum over their experts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import graph_us, relative_error
from benchmarks.kernel_cases import peers
from benchmarks.kernel_cases.rates import BF16_FLOPS_PER_US, memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.block_fp8 import BLOCK_SIZE, dequantise_block_fp8
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
_MOST_UNSORTED = EXPERTS // (4 * CHOSEN)  # tokens for which vLLM does not sort

Bank = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def run() -> list[CaseResult]:
    """Time independent tokens, then tokens that share experts with the others of their request."""
    banks = [_bank() for _ in range(_BANKS)]
    packed = [PackedExperts(*pack_gate_up(*bank[:2]), *pack_down(*bank[2:])) for bank in banks]
    deep_gemm, triton_moe = peers.deep_gemm(), peers.triton_moe(EXPERTS, WIDTH)
    return [
        _measure(
            num_tokens,
            correlation,
            banks,
            packed,
            deep_gemm=deep_gemm if correlation == 0 else None,
            triton_moe=triton_moe if num_tokens <= _MOST_UNSORTED else None,
        )
        for correlation in (0.0, 0.8)
        for num_tokens in (1, 6, 96, 192, 768)
        if num_tokens >= _REQUEST or correlation == 0
    ]


def _measure(
    num_tokens: int,
    correlation: float,
    banks: list[Bank],
    packed: list[PackedExperts],
    *,
    deep_gemm: Any,
    triton_moe: peers.TritonMoe | None,
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
    theirs: dict[str, list[Callable[[], object] | None]] = {}
    if deep_gemm:
        count_E = layer.expert_TC[:num_tokens].flatten().bincount(minlength=EXPERTS).int()
        theirs["DeepGEMM"] = [_masked(deep_gemm, bank, count_E, num_tokens) for bank in banks]
    if triton_moe:
        chosen = layer.expert_TC[:num_tokens], layer.weight_TC[:num_tokens]
        theirs["Triton"] = [_unsorted(triton_moe, bank, *chosen) for bank in banks]
    peers_us = {name: graph_us([call for call in calls if call]) for name, calls in theirs.items() if all(calls)}
    return CaseResult(
        case="moe_tp8",
        shape=f"T={num_tokens}" + (f" correlated {correlation}" if correlation else ""),
        ours_us=ours_us,
        floor_us=max(memory_us(num_bytes), num_flops / BF16_FLOPS_PER_US),
        error=relative_error(outs[-1][same_T], expected_TH[same_T]),
        peers_us=peers_us,
        note=f"{num_active:.0f} routed experts; ours: router to sum; peers: both products of the routed ones alone, "
        "quantised and, for DeepGEMM, sorted before; "
        f"{int((~same_T).sum())} tokens with a near tie left out of the error",
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


def _quantised(values_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give activations as e4m3, and the scale of each block of a row."""
    value_NBI = values_NI.float().unflatten(1, (-1, BLOCK_SIZE))
    scale_NB = value_NBI.abs().amax(dim=2) / torch.finfo(torch.float8_e4m3fn).max
    return (value_NBI / scale_NB[..., None]).to(torch.float8_e4m3fn).flatten(1), scale_NB


def _product(quantised: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply quantised activations with the weight of one expert, in float32."""
    (q_NI, scale_NB), value_OI = quantised, torch.empty(weight.shape, device="cuda")
    dequantise_block_fp8(weight, scale, first_row=0, first_col=0, out_RC=value_OI)
    value_NBI = q_NI.float().unflatten(1, (-1, BLOCK_SIZE)) * scale_NB[..., None]
    return F.linear(value_NBI.flatten(1), value_OI)


def _masked(deep_gemm: Any, bank: Bank, count_E: torch.Tensor, num_tokens: int) -> Callable[[], object] | None:
    """Both products of the routed experts, on activations that are already sorted and quantised."""
    most = -(-int(count_E.max()) // 64) * 64
    x, hidden = (_quantised(torch.randn(EXPERTS * most, num, device="cuda")) for num in (HIDDEN, WIDTH))
    gate_up = torch.empty(EXPERTS, most, 2 * WIDTH, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(EXPERTS, most, HIDDEN, dtype=torch.bfloat16, device="cuda")
    mean = max(1, num_tokens * CHOSEN // EXPERTS)
    weights = [each[:EXPERTS] for each in bank]

    def operand(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = deep_gemm.utils.layout.get_mn_major_tma_aligned_tensor(scale.view(EXPERTS, most, -1))
        return q.view(EXPERTS, most, -1), scale

    operands = operand(*x), operand(*hidden)

    def call() -> None:
        deep_gemm.m_grouped_fp8_gemm_nt_masked(operands[0], (weights[0], weights[1]), gate_up, count_E, mean)
        deep_gemm.m_grouped_fp8_gemm_nt_masked(operands[1], (weights[2], weights[3]), out, count_E, mean)

    call()
    expert = int(count_E.argmax())
    rows = slice(expert * most, expert * most + int(count_E[expert]))
    is_right = _are_right("DeepGEMM", inputs=(x, hidden), outs=(gate_up, out), bank=bank, expert=expert, rows=rows)
    return call if is_right else None


def _unsorted(
    moe: peers.TritonMoe, bank: Bank, expert_TC: torch.Tensor, weight_TC: torch.Tensor
) -> Callable[[], object] | None:
    """Both products of each token with its experts, as vLLM calls the kernel for few tokens: a block for each pair."""
    import triton.language as tl  # noqa: PLC0415

    num_tokens, sizes = len(expert_TC), moe.sizes_for(len(expert_TC))
    num_pairs = num_tokens * CHOSEN
    x, hidden = (
        _quantised(torch.randn(num, each, device="cuda")) for num, each in ((num_tokens, HIDDEN), (num_pairs, WIDTH))
    )
    gate_up = torch.empty(num_pairs, 2 * WIDTH, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(num_pairs, HIDDEN, dtype=torch.bfloat16, device="cuda")
    num_rows = torch.tensor([num_pairs * sizes["BLOCK_SIZE_M"]], dtype=torch.int32, device="cuda")

    def multiply(
        quantised: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
    ) -> None:
        (q, q_scale), (_, num_out, num_in) = quantised, weight.shape
        moe.kernel[(num_pairs * -(-num_out // sizes["BLOCK_SIZE_N"]),)](
            q,
            weight,
            out,
            None,  # bias
            q_scale,
            scale,
            weight_TC,
            None,  # no order: a block is a pair
            expert_TC,
            num_rows,
            num_out,
            num_in,
            num_pairs * sizes["BLOCK_SIZE_M"],
            num_pairs,
            *q.stride(),
            weight.stride(0),
            weight.stride(2),
            weight.stride(1),
            *out.stride(),
            *q_scale.stride(),
            scale.stride(0),
            scale.stride(2),
            scale.stride(1),
            0,
            0,
            BLOCK_SIZE,
            BLOCK_SIZE,
            naive_block_assignment=True,
            SPLIT_K=1,
            MUL_ROUTED_WEIGHT=len(q) == num_pairs,  # the product with down
            top_k=num_pairs // len(q),
            compute_type=tl.bfloat16,
            use_fp8_w8a8=True,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            per_channel_quant=False,
            HAS_BIAS=False,
            SWAP_AB=sizes["BLOCK_SIZE_M"] < 64 <= sizes["BLOCK_SIZE_N"],  # as vLLM does on Hopper
            **sizes,
        )

    def call() -> None:
        multiply(x, bank[0], bank[1], gate_up)
        multiply(hidden, bank[2], bank[3], out)

    call()
    unweighted = out[:1].float() / weight_TC.flatten()[:1, None]
    outs, expert, rows = (gate_up, unweighted), int(expert_TC[0, 0]), slice(0, 1)
    is_right = _are_right("Triton", inputs=(x, hidden), outs=outs, bank=bank, expert=expert, rows=rows)
    return call if is_right else None


def _are_right(
    name: str,
    *,
    inputs: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    outs: tuple[torch.Tensor, ...],
    bank: Bank,
    expert: int,
    rows: slice,
) -> bool:
    """Whether both products are those of the expert in its rows."""
    return all(
        peers.is_right(
            f"{name}, {part}",
            out.flatten(0, -2)[rows],
            _product((quantised[0][rows], quantised[1][rows]), weight[expert], scale[expert]),
        )
        for part, quantised, out, weight, scale in zip(
            ("gate and up", "down"), inputs, outs, bank[::2], bank[1::2], strict=True
        )
    )
