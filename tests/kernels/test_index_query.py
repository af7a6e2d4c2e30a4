"""Quantised index queries score like the queries they were made of, and the kernel equals its definition."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.kernels.index_key_format import decode_index_keys, encode_index_keys
from specdec.kernels.index_query import index_query, index_query_ref
from specdec.kernels.index_scores import index_scores_ref
from specdec.kernels.latent_formats import from_e4m3
from specdec.kernels.rotary import Rotation, inverse_frequency, rotate, rotation_at
from tests.support.far_rows import far_rows
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

# The interpreter's e4m3 is not hardware's, but the same for the same row wherever it lies.
FAR_ROWS_CHECK = """
import torch
from specdec.kernels.index_query import index_query
from specdec.kernels.rotary import Rotation

x, projected, angle = torch.randn(3, 4, 64), torch.randn(3, 4), torch.rand(3, 16)
rotation = Rotation(cos_TP=angle.cos(), sin_TP=angle.sin())
step = (1 << 30) + 8
far_x = torch.empty(2 * step + 256).as_strided((3, 4, 64), (step, 64, 1)).copy_(x)
far_projected = torch.empty(2 * step + 4).as_strided((3, 4), (step, 1)).copy_(projected)
results = []
for each_x, each_projected in ((x, projected), (far_x, far_projected)):
    query, weight = torch.full((3, 4, 64), 255, dtype=torch.uint8), torch.full((3, 4), torch.nan)
    index_query(each_x, each_projected, rotation, query_TJD=query, weight_TJ=weight)
    results.append((query, weight))
assert (results[0][0] != 255).any(dim=2).all() and results[0][1].isfinite().all()
assert all(torch.equal(far, near) for far, near in zip(*results))
"""


def rows(num_rows: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, Rotation]:
    torch.manual_seed(num_rows)
    x_TJD = torch.randn(num_rows, 32, 128, device=device) * torch.logspace(-8, 8, 32, device=device)[:, None]
    frequency = inverse_frequency(theta=8e6, dim=64, device=torch.device(device))
    rotation = rotation_at(torch.randint(0, 1 << 20, (num_rows,), device=device), frequency)
    return x_TJD, torch.randn(num_rows, 32, device=device), rotation


def test_scores_of_quantised_queries_are_the_formula_on_what_they_hold() -> None:
    x_TJD, projected_TJ, rotation = rows(6)
    query_TJD, weight_TJ = index_query_ref(x_TJD, projected_TJ, rotation)
    key_SD, scale_S = encode_index_keys(torch.randn(50, 128))
    products = torch.einsum("tjd,sd->tjs", from_e4m3(query_TJD).double(), from_e4m3(key_SD).double()).relu()
    score_TS = torch.einsum("tj,tjs->ts", weight_TJ.double(), products) * scale_S.double()

    rotated = torch.cat((rotate(x_TJD[..., :64], rotation), x_TJD[..., 64:]), dim=-1)
    held = decode_index_keys(*encode_index_keys(rotated))
    assert float((held - rotated).norm() / rotated.norm()) < 0.04  # e4m3 keeps 4 bits
    expected = index_scores_ref(
        held.double(),
        projected_TJ.double(),
        decode_index_keys(key_SD, scale_S).double()[None],
        request_index_T=torch.zeros(6, dtype=torch.long),
        position_T=torch.full((6,), 49),
    )
    torch.testing.assert_close(score_TS, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_TJD": torch.zeros(2, 32, 256)[..., ::2]}, "x must be .*rows that are contiguous"),
        ({"x_TJD": torch.zeros(2, 32, 128, dtype=torch.float64)}, "x must be .*got torch.float64"),
        ({"projected_TJ": torch.zeros(2, 64)[:, ::2]}, "projected must be .*rows that are contiguous"),
        ({"query_TJD": torch.zeros(2, 32, 128)}, "query must be torch.uint8"),
        ({"weight_TJ": torch.zeros(32, 2).T}, "weight must be .*contiguous"),
        ({"rotation": Rotation(cos_TP=torch.zeros(2, 32).double(), sin_TP=torch.zeros(2, 32))}, "cos_TP must be"),
        ({"rotation": Rotation(cos_TP=torch.zeros(2, 128), sin_TP=torch.zeros(2, 128))}, "got 32, 128 and 256"),
    ],
)
def test_other_dtypes_and_layouts_are_refused(changes: dict[str, Any], message: str) -> None:
    x_TJD, projected_TJ, rotation = rows(2)
    arguments: dict[str, Any] = {
        "x_TJD": x_TJD,
        "projected_TJ": projected_TJ,
        "rotation": rotation,
        "query_TJD": torch.zeros(2, 32, 128, dtype=torch.uint8),
        "weight_TJ": torch.zeros(2, 32),
    }
    with pytest.raises(ValueError, match=message):
        index_query(**(arguments | changes))


def test_shapes_that_do_not_go_together_are_refused() -> None:
    x_TJD, projected_TJ, rotation = rows(2)
    with pytest.raises(ValueError, match=r"got \(2, 32, 128\), \(2, 32, 128\), \(2, 32\) and \(2, 16\)"):
        index_query(
            x_TJD,
            projected_TJ,
            rotation,
            query_TJD=torch.zeros(2, 32, 128, dtype=torch.uint8),
            weight_TJ=torch.zeros(2, 16),
        )


def test_rows_may_lie_further_apart_than_32_bits_count(tmp_path: Path) -> None:
    run_interpreted(FAR_ROWS_CHECK, tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*bf16", "*fp32", "*fp32", "*fp32", "*u8", "*fp32", "i32", "i32", "i32")
    sizes = {"HEADS": 4, "DIM": 128, "ROPE": 64, "FACTOR": 0.015, "LARGEST": 1e38, "SMALLEST": 1e-35}
    sizes["STARTS_EARLY"] = True
    assert ptx_for_hopper("index_query.index_query_kernel", tmp_path, types=types, constants=sizes)


@needs_gpu  # Triton's interpreter rounds e4m3 wrongly
@pytest.mark.parametrize("num_rows", [1, 6, 192])
def test_a_gpu_gives_the_bits_of_the_definition(num_rows: int) -> None:
    x_TJD, projected_TJ, rotation = rows(num_rows, "cuda")
    x_TJD[0, 0, 3], x_TJD[0, 1], x_TJD[0, 2, 5], x_TJD[0, 3] = torch.nan, 0, torch.inf, 1e-40
    wide_TY = torch.randn(num_rows, 160, device="cuda")
    wide_TY[:, 128:] = projected_TJ
    query_TJD = torch.full(x_TJD.shape, 255, dtype=torch.uint8, device="cuda")
    weight_TJ = torch.full((num_rows, 32), torch.nan, device="cuda")
    index_query(x_TJD, wide_TY[:, 128:], rotation, query_TJD=query_TJD, weight_TJ=weight_TJ)
    expected_TJD, expected_TJ = index_query_ref(x_TJD, projected_TJ, rotation)
    # A product fused with a sum may round a rotated value to the other side, and a value on the border with it.
    assert float((query_TJD != expected_TJD).float().mean()) < 1e-4
    torch.testing.assert_close(weight_TJ, expected_TJ, rtol=1e-6, atol=0, equal_nan=True)


@needs_gpu
def test_a_gpu_finds_rows_that_lie_further_apart_than_32_bits_count() -> None:
    x_TJD, projected_TJ, rotation = rows(3, "cuda")
    x_TJD = x_TJD.bfloat16()
    results = []
    for each_TJD, each_TJ in ((x_TJD, projected_TJ), (far_rows(x_TJD), far_rows(projected_TJ))):
        query_TJD = torch.full(x_TJD.shape, 255, dtype=torch.uint8, device="cuda")
        weight_TJ = torch.full((3, 32), torch.nan, device="cuda")
        index_query(each_TJD, each_TJ, rotation, query_TJD=query_TJD, weight_TJ=weight_TJ)
        results.append((query_TJD, weight_TJ))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
