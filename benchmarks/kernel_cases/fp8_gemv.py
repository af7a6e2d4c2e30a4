"""Block-FP8 linear maps of few rows."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_timing import graph_us, num_sets, relative_error
from benchmarks.kernel_cases import peers
from benchmarks.kernel_cases.rates import BF16_FLOPS_PER_US, memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.block_fp8_linear import BlockFp8Linear, block_fp8_linear_ref, concatenated_scales

_SHAPES = {"q_a + kv_a": ((2048, 576), 6144), "q_b": ((2048,), 2048), "o": ((6144,), 2048), "index": ((4096,), 2048)}


def run() -> list[CaseResult]:
    """Time the projections of a layer of a TP8 rank."""
    return [_measure(name, rows) for name in _SHAPES for rows in (1, 6, 16, 32, 96, 192)]


def _measure(name: str, num_rows: int) -> CaseResult:
    parts, num_in = _SHAPES[name]
    num_out = sum(parts)
    num_bytes = num_out * num_in + 2 * num_rows * (num_in + num_out)
    deep_gemm = peers.deep_gemm()
    ours: list[Callable[[], object]] = []
    deep: list[Callable[[], object]] = []
    bf16: list[Callable[[], object]] = []
    for _ in range(num_sets(num_out * num_in)):
        weight_OI = torch.randint(0, 256, (num_out, num_in), dtype=torch.uint8, device="cuda")
        weight_OI = weight_OI.masked_fill_(weight_OI & 0x7F == 0x7F, 0).view(torch.float8_e4m3fn)
        scales = [1e-3 * torch.rand(-(-rows // 128), num_in // 128, device="cuda") for rows in parts]
        x_TI = torch.randn(num_rows, num_in, device="cuda").bfloat16()
        out_TO = torch.empty(num_rows, num_out, dtype=torch.bfloat16, device="cuda")
        linear = BlockFp8Linear(weight_OI, concatenated_scales(scales, parts))
        ours.append(partial(linear, x_TI, out_TO=out_TO))
        wide_OI = torch.randn(num_out, num_in, device="cuda").bfloat16()
        bf16.append(partial(torch.mm, x_TI, wide_OI.T, out=torch.empty_like(out_TO)))
        if deep_gemm:
            x_q, x_scale = deep_gemm.utils.math.per_token_cast_to_fp8(x_TI, use_ue8m0=False)
            x_scale = deep_gemm.utils.layout.get_mn_major_tma_aligned_tensor(x_scale)
            call = (x_q, x_scale), (weight_OI, torch.cat(scales)), torch.empty_like(out_TO)
            deep.append(partial(deep_gemm.fp8_gemm_nt, *call))
    ours_us = graph_us(ours)
    expected_TO = block_fp8_linear_ref(x_TI, linear.weight_OI, linear.scale_JB)
    return CaseResult(
        case="fp8_gemv",
        shape=f"{name} {num_out}x{num_in} M={num_rows}",
        ours_us=ours_us,
        floor_us=max(memory_us(num_bytes), 2 * num_rows * num_out * num_in / BF16_FLOPS_PER_US),
        error=relative_error(out_TO, expected_TO),
        peers_us={"torch bf16": graph_us(bf16)} | ({"DeepGEMM": graph_us(deep)} if deep_gemm else {}),
        note="DeepGEMM is given activations that are already quantised; ours reads bfloat16",
    )
