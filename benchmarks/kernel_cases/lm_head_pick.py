"""The best token of each row out of a rank's slice of the vocabulary."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_timing import graph_us, num_sets, relative_error
from benchmarks.kernel_cases.rates import memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.block_fp8_linear import concatenated_scales
from specdec.kernels.lm_head_pick import LmHeadPick

_IDS, _HIDDEN = 19360, 6144


def run() -> list[CaseResult]:
    """Time an eighth of the vocabulary."""
    return [_measure(rows, is_fp8=is_fp8) for is_fp8 in (False, True) for rows in (1, 16, 32)]


def _measure(num_rows: int, *, is_fp8: bool) -> CaseResult:
    num_bytes = _IDS * _HIDDEN * (1 if is_fp8 else 2) + 2 * num_rows * _HIDDEN
    ours: list[Callable[[], object]] = []
    torches: list[Callable[[], object]] = []
    x_TI = torch.randn(num_rows, _HIDDEN, device="cuda").bfloat16()
    for _ in range(num_sets(num_bytes)):
        wide_VI = torch.randn(_IDS, _HIDDEN, device="cuda").bfloat16()
        scale_IJ = torch.rand(-(-_IDS // 128), _HIDDEN // 128, device="cuda")
        scale_JB = concatenated_scales([scale_IJ], [_IDS])
        scales = (scale_JB,) if is_fp8 else ()
        pick = LmHeadPick(wide_VI.to(torch.float8_e4m3fn) if is_fp8 else wide_VI, *scales)
        ours.append(partial(pick, x_TI))
        torches.append(partial(_in_torch, x_TI, wide_VI))
    logits_TV = torch.empty(num_rows, _IDS, device="cuda")
    pick(x_TI, logits_TV=logits_TV)
    value_VI = pick.weight_VI.double()
    if is_fp8:
        value_VI *= scale_JB.repeat_interleave(64, 0)[:_IDS].repeat_interleave(128, 1)
    return CaseResult(
        case="lm_head_pick",
        shape=f"{_IDS}x{_HIDDEN} {'fp8' if is_fp8 else 'bf16'} B={num_rows}",
        ours_us=graph_us(ours * 2),
        floor_us=memory_us(num_bytes),
        error=relative_error(logits_TV, x_TI.double() @ value_VI.T),
        peers_us={"torch bf16, max": graph_us(torches * 2)},
    )


def _in_torch(x_TI: torch.Tensor, weight_VI: torch.Tensor) -> None:
    (x_TI @ weight_VI.T).max(dim=1)
