"""The residual add, the norm of the sum and its FP8 form in one launch."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import graph_us, num_sets, relative_error
from benchmarks.kernel_cases.rates import memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.add_rms_norm import QuantisedRows, add_rms_norm
from specdec.kernels.latent_formats import PACKED_GROUP_SIZE, encode_fp8_packed

_FEATURES, _EPS = 6144, 1e-5


def run() -> list[CaseResult]:
    """Time both outputs, in bfloat16 alone and in FP8 alone, against torch's two or more launches."""
    return [_measure(rows, quantise=quantise) for quantise in (False, True) for rows in (1, 6, 96, 192)]


def _measure(num_rows: int, *, quantise: bool) -> CaseResult:
    num_groups = _FEATURES // PACKED_GROUP_SIZE
    num_bytes = num_rows * _FEATURES * (6 + (1 if quantise else 2)) + 2 * _FEATURES
    weight_H = (1 + 0.1 * torch.randn(_FEATURES, device="cuda")).bfloat16()
    ours: list[Callable[[], object]] = []
    peers: list[Callable[[], object]] = []
    for _ in range(num_sets(num_bytes)):
        x_TH, delta_TH = (torch.randn(num_rows, _FEATURES, device="cuda").bfloat16() for _ in range(2))
        normed_TH = None if quantise else torch.empty_like(x_TH)
        quantised = None
        if quantise:
            q_TH = torch.empty_like(x_TH, dtype=torch.float8_e4m3fn)
            quantised = QuantisedRows(q_TH, torch.empty(num_rows, num_groups, device="cuda"))
        outs = {"normed_TH": normed_TH, "quantised": quantised}
        ours.append(partial(add_rms_norm, x_TH, delta_TH, weight_H, eps=_EPS, **outs))  # type: ignore[arg-type]
        peers.append(partial(_in_torch, x_TH.clone(), delta_TH, weight_H, quantise=quantise))
    sum_TH = (x_TH + delta_TH).double()
    ours[-1]()
    exact_TH = sum_TH * (sum_TH.square().mean(dim=1, keepdim=True) + _EPS).rsqrt() * weight_H.double()
    if quantised is not None:
        values_TGV = quantised.q_TH.double().unflatten(1, (num_groups, -1)) * quantised.scale_TG.double()[..., None]
        normed_TH = values_TGV.flatten(1)
    assert normed_TH is not None
    error = relative_error(normed_TH, exact_TH)  # before the timing, in which the sums grow
    return CaseResult(
        case="add_rms_norm",
        shape=f"T={num_rows}" + (" fp8" if quantise else ""),
        ours_us=graph_us(ours),
        floor_us=memory_us(num_bytes),
        error=error,
        peers_us={"torch": graph_us(peers)},
        note="one e4m3 rounding is 0.03" if quantise else "",
    )


def _in_torch(x_TH: torch.Tensor, delta_TH: torch.Tensor, weight_H: torch.Tensor, *, quantise: bool) -> None:
    x_TH += delta_TH
    normed_TH = F.rms_norm(x_TH, x_TH.shape[1:], weight_H, _EPS)
    if quantise:
        encode_fp8_packed(normed_TH, normed_TH[:, :0])
