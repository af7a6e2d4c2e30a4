"""The sum, its norm and the quantised norm of one launch against the definition, and this against float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.kernels.add_rms_norm import QuantisedRows, add_rms_norm, add_rms_norm_ref
from specdec.kernels.latent_formats import encode_fp8_packed
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

# The interpreter cuts to bfloat16 where hardware rounds, and its e4m3 is no better: sums of few bits are exact, norms
# are a rounding off, and quantised values are left to the GPU.
KERNEL_CHECK = """
import torch
from specdec.kernels.add_rms_norm import QuantisedRows, add_rms_norm, add_rms_norm_ref

for num_rows, num_features in ((1, 128), (3, 2176), (2, 6144)):
    x, delta = (torch.randint(-8, 9, (num_rows, num_features)).bfloat16() for _ in range(2))
    weight = torch.randn(num_features).bfloat16()
    total, normed, quantised = add_rms_norm_ref(x, delta, weight, eps=1e-5)
    out = torch.full_like(x, torch.nan)
    q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    rows = QuantisedRows(q, torch.full((num_rows, num_features // 128), torch.nan))
    add_rms_norm(x, delta, weight, eps=1e-5, normed_TH=out, quantised=rows)
    assert torch.equal(x, total)
    torch.testing.assert_close(out, normed, rtol=2**-6, atol=0)
    torch.testing.assert_close(rows.scale_TG, quantised.scale_TG, rtol=2**-6, atol=0)
"""


def make_rows(num_rows: int, num_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(num_rows, num_features).bfloat16(),
        torch.randn(num_rows, num_features).bfloat16(),
        torch.randn(num_features).bfloat16(),
    )


def test_the_definition_is_the_norm_of_the_sum() -> None:
    x_TH, delta_TH, weight_H = make_rows(3, 384)
    total_TH, normed_TH, quantised = add_rms_norm_ref(x_TH, delta_TH, weight_H, eps=1e-5)
    exact_TH = x_TH.double() + delta_TH.double()
    torch.testing.assert_close(total_TH.double(), exact_TH, rtol=2**-8, atol=0)
    exact_TH *= (exact_TH.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt() * weight_H.double()
    torch.testing.assert_close(normed_TH.double(), exact_TH, rtol=2**-6, atol=1e-6)
    values_TH = (quantised.q_TH.double().unflatten(1, (-1, 128)) * quantised.scale_TG.double()[..., None]).flatten(1)
    torch.testing.assert_close(values_TH, normed_TH.double(), rtol=2**-4, atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_TH": torch.zeros(2, 100, dtype=torch.bfloat16)}, "H must be a multiple of 128, got 100"),
        ({"delta_TH": torch.zeros(2, 256)}, "delta_TH must be torch.bfloat16"),
        ({"weight_H": torch.zeros(128, dtype=torch.bfloat16)}, "weight_H must be"),
        ({"normed_TH": torch.zeros(256, 2, dtype=torch.bfloat16).T}, "normed_TH must be"),
        ({"quantised": QuantisedRows(torch.zeros(2, 256), torch.zeros(2, 2))}, "q_TH must be torch.float8_e4m3fn"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(changes: dict[str, Any], message: str) -> None:
    x_TH, delta_TH, weight_H = make_rows(2, 256)
    arguments: dict[str, Any] = {"x_TH": x_TH, "delta_TH": delta_TH, "weight_H": weight_H, "eps": 1e-5}
    with pytest.raises(ValueError, match=message):
        add_rms_norm(**(arguments | changes))


@needs_gpu
@pytest.mark.parametrize(("num_rows", "num_features"), [(1, 128), (3, 2176), (192, 6144), (0, 6144)])
@pytest.mark.parametrize("hostile", [False, True])
def test_a_gpu_gives_what_the_definition_gives(num_rows: int, num_features: int, hostile: bool) -> None:
    x_TH, delta_TH, weight_H = make_rows(num_rows, num_features)
    if hostile and num_rows:
        x_TH[0] = delta_TH[0] = 0
        x_TH[-1, 5] = torch.inf
        x_TH[num_rows // 2, 7] = torch.nan
        weight_H[[20, 70]] = torch.tensor([torch.inf, torch.nan]).bfloat16()
    expected = add_rms_norm_ref(x_TH, delta_TH, weight_H, eps=1e-5)
    x, delta, weight = x_TH.cuda(), delta_TH.cuda(), weight_H.cuda()
    normed, q = torch.full_like(x, 9), torch.empty_like(x, dtype=torch.float8_e4m3fn)
    quantised = QuantisedRows(q, torch.full((num_rows, num_features // 128), 9.0, device="cuda"))
    add_rms_norm(x, delta, weight, eps=1e-5, normed_TH=normed, quantised=quantised)
    torch.testing.assert_close(x.cpu(), expected[0], rtol=0, atol=0, equal_nan=True)
    # The sums' last digits differ, and move a value over a border of a rounding now and then; it is rounded once more.
    torch.testing.assert_close(normed.cpu(), expected[1], rtol=2**-6, atol=0, equal_nan=True)
    is_other_TH = (normed.cpu() != expected[1]) & ~expected[1].isnan()
    assert int(is_other_TH.sum()) <= 1e-3 * normed.numel()
    rows = encode_fp8_packed(normed.cpu(), normed.cpu()[:, :0])  # exact on the same normed values
    q_TH, scale_TG = rows[:, :num_features], rows[:, num_features:].contiguous().view(torch.float32)
    expected_q_TH = q_TH.contiguous().view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(quantised.q_TH.cpu().float(), expected_q_TH, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(quantised.scale_TG.cpu(), scale_TG)


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


@pytest.mark.parametrize("left_out", [(), ("q_ptr", "scale_ptr"), ("normed_ptr",)])
def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path, left_out: tuple[str, ...]) -> None:
    outs = {"normed_ptr": "*bf16", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    types = ("*bf16", "*bf16", "*bf16", *(kind for name, kind in outs.items() if name not in left_out), "fp32")
    sizes = {"FEATURES": 6144, "BLOCK": 2048, "GROUP": 128, "STARTS_EARLY": True, **dict.fromkeys(left_out)}
    ptx = ptx_for_hopper(
        "add_rms_norm.add_rms_norm_kernel",
        tmp_path,
        types=types,
        constants=sizes,
        aligned=[0, 1, 2, *(3 + place for place, name in enumerate(outs) if name not in left_out)],
        options={"num_warps": 8},
    )
    assert ptx.count("ld.global.v4.b32") == 9  # three steps of x, delta and weight
