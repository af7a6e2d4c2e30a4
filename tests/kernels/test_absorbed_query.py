"""Absorbed queries and values equal their definitions, whatever rows stand beside them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.kernels.absorbed_query import absorbed_query, value_up
from specdec.kernels.rotary import Rotation, inverse_frequency, rotate, rotation_at
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

KERNEL_CHECK = """
import torch
from specdec.kernels.absorbed_query import absorbed_query, absorbed_query_ref, value_up
from specdec.kernels.linear import head_linear
from specdec.kernels.rotary import inverse_frequency, rotation_at

for rows, heads, nope, latent, rope, value in ((8, 2, 48, 96, 16, 40), (24, 3, 192, 144, 64, 33)):
    x = torch.randn(rows, heads, nope + rope)
    kv_b = torch.randn(heads, nope + value, latent)
    key_up, up = kv_b[:, :nope], kv_b[:, nope:].transpose(1, 2)
    frequency = inverse_frequency(theta=1e4, dim=rope, device=torch.device("cpu"))
    rotation = rotation_at(torch.randint(0, 1000, (rows,)), frequency)
    out = torch.full((rows, heads, latent + rope), torch.nan)
    expected = absorbed_query_ref(x, key_up, rotation)
    torch.testing.assert_close(absorbed_query(x, key_up, rotation, out_TAX=out), expected, atol=1e-4, rtol=1e-4)

    five = rotation_at(torch.zeros(5, dtype=torch.long), frequency)
    five.cos_TP.copy_(rotation.cos_TP[3:8]), five.sin_TP.copy_(rotation.sin_TP[3:8])
    alone = torch.full((5, heads, latent + rope), torch.nan)
    assert torch.equal(absorbed_query(x[3:8].contiguous(), key_up, five, out_TAX=alone), out[3:8])

    latents, values = torch.randn(rows, heads, latent), torch.full((rows, heads, value), torch.nan)
    expected = head_linear(latents, up)
    torch.testing.assert_close(value_up(latents, up, out_TAV=values), expected, atol=1e-4, rtol=1e-4)
"""

# The last row, and the third head of the weight, begin behind 2^31 values.
FAR_ROWS_CHECK = """
import torch
from specdec.kernels.absorbed_query import absorbed_query
from specdec.kernels.rotary import Rotation

x, key_up, angle = torch.randn(3, 3, 24), torch.randn(3, 16, 32), torch.rand(3, 4)
rotation = Rotation(cos_TP=angle.cos(), sin_TP=angle.sin())
step = (1 << 30) + 8
far = torch.empty(2 * step + 72).as_strided((3, 3, 24), (step, 24, 1)).copy_(x)
far_key_up = torch.empty(2 * step + 512).as_strided((3, 16, 32), (step, 32, 1)).copy_(key_up)
near_out, far_out = torch.full((3, 3, 40), torch.nan), torch.full((3, 3, 40), torch.nan)
absorbed_query(x, key_up, rotation, out_TAX=near_out)
assert near_out.isfinite().all()
for each_x, each_key_up in ((far, key_up), (x, far_key_up)):
    assert torch.equal(absorbed_query(each_x, each_key_up, rotation, out_TAX=far_out), near_out)
"""


def test_rows_may_lie_further_apart_than_32_bits_count(tmp_path: Path) -> None:
    run_interpreted(FAR_ROWS_CHECK, tmp_path)


def test_the_kernel_equals_the_definitions(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


@pytest.mark.parametrize("are_few", [True, False])
def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path, are_few: bool) -> None:
    types = ("*bf16", "*bf16", "*fp32", "*fp32", "*bf16", "*u8", *["i32"] * 7)
    sizes = {"INNER": 192, "OUTER": 512, "ROPE": 64, "ROWS": 16, "COLUMNS": 32, "DEPTH": 64}
    sizes |= {"LINE_INNER": 1, "LINE_OUTER": 32, "ARE_FEW": are_few, "STARTS_EARLY": True}
    assert ptx_for_hopper("absorbed_query.absorbed_query_kernel", tmp_path, types=types, constants=sizes)


def test_other_shapes_dtypes_and_layouts_are_refused() -> None:
    rotation = Rotation(cos_TP=torch.zeros(8, 4), sin_TP=torch.zeros(8, 4))
    queries = {"x_TAY": torch.zeros(8, 2, 24), "key_up_ANL": torch.zeros(2, 16, 32), "rotation": rotation}
    changed: tuple[tuple[dict[str, Any], str], ...] = (
        ({"x_TAY": torch.zeros(8, 2, 24).bfloat16()}, "queries must be torch.float32"),
        ({"x_TAY": torch.zeros(8, 2, 48)[..., ::2]}, "queries must be .*rows that are contiguous"),
        ({"key_up_ANL": torch.zeros(3, 16, 32)}, "key_up must be .* of 2 heads"),
        ({"key_up_ANL": torch.zeros(2, 16, 32).half()}, "key_up must be bfloat16 or float32"),
        ({"key_up_ANL": torch.zeros(2, 24, 32), "x_TAY": torch.zeros(8, 2, 32)}, "multiple of 16 values, got 24"),
        ({"rotation": Rotation(cos_TP=torch.zeros(4, 8).T, sin_TP=torch.zeros(8, 4))}, "cos_TP must be .*contiguous"),
        ({"rotation": Rotation(cos_TP=torch.zeros(7, 4), sin_TP=torch.zeros(8, 4))}, r"cos_TP must be .*\(8, 4\)"),
        ({"out_TAX": torch.zeros(8, 2, 40).bfloat16()}, "out must be torch.float32"),
        ({"out_TAX": torch.zeros(2, 8, 40).transpose(0, 1)}, "out must be .*contiguous"),
    )
    for change, message in changed:
        with pytest.raises(ValueError, match=message):
            absorbed_query(**({**queries, "out_TAX": torch.zeros(8, 2, 40)} | change))
    three = Rotation(cos_TP=torch.zeros(8, 3), sin_TP=torch.zeros(8, 3))
    with pytest.raises(ValueError, match="R / 2 must be a power of two, got 3"):
        absorbed_query(torch.zeros(8, 2, 22), torch.zeros(2, 16, 32), three, out_TAX=torch.zeros(8, 2, 38))
    with pytest.raises(ValueError, match=r"latents must be .*contiguous"):
        value_up(torch.zeros(2, 8, 32).transpose(0, 1), torch.zeros(2, 32, 9), out_TAV=torch.zeros(8, 2, 9))
    with pytest.raises(ValueError, match=r"out must be torch\.bfloat16"):
        value_up(torch.zeros(8, 2, 32), torch.zeros(2, 32, 9).bfloat16(), out_TAV=torch.zeros(8, 2, 9))
    with pytest.raises(ValueError, match=r"ahead must be .*contiguous"):
        value_up(torch.zeros(8, 2, 32), torch.zeros(2, 32, 9), out_TAV=torch.zeros(8, 2, 9), ahead=torch.ones(9, 8).T)
    with pytest.raises(ValueError, match=r"R = 8, got \(8, 2, 20\)"):
        absorbed_query(torch.zeros(8, 2, 20), torch.zeros(2, 16, 32), rotation, out_TAX=torch.zeros(8, 2, 40))
    with pytest.raises(ValueError, match=r"got \(8, 2, 32\), \(8, 2, 9\) and \(2, 32, 10\)"):
        value_up(torch.zeros(8, 2, 32), torch.zeros(2, 32, 10), out_TAV=torch.zeros(8, 2, 9))


@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 6, 17, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_gives_rows_that_are_right_and_do_not_depend_on_others(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    x_TAY = torch.randn(num_rows, 24, 256, device="cuda", dtype=dtype)[:, :8]
    kv_b = torch.randn(8, 192 + 256, 512, device="cuda", dtype=dtype) * 0.05
    key_up, up = kv_b[:, :192], kv_b[:, 192:].transpose(1, 2)
    frequency = inverse_frequency(theta=8e6, dim=64, device=torch.device("cuda"))
    rotation = rotation_at(torch.randint(0, 1 << 20, (num_rows,), device="cuda"), frequency)
    out = absorbed_query(x_TAY, key_up, rotation, out_TAX=x_TAY.new_full((num_rows, 8, 576), torch.nan))
    absorbed = torch.einsum("tan,anl->tal", x_TAY[..., :192].double(), key_up.double())
    expected = torch.cat((absorbed, rotate(x_TAY[..., 192:].double(), rotation)), dim=-1)
    tolerance = 5e-3 if dtype is torch.bfloat16 else 1e-5
    assert float((out.double() - expected).norm() / expected.norm()) < tolerance

    latent_TAL = torch.randn(num_rows, 8, 512, device="cuda")
    values = value_up(latent_TAL, up, out_TAV=x_TAY.new_full((num_rows, 8, 256), torch.nan))
    expected = torch.einsum("tal,alv->tav", latent_TAL.to(dtype).double(), up.double())
    assert float((values.double() - expected).norm() / expected.norm()) < tolerance

    last = Rotation(cos_TP=rotation.cos_TP[-1:].clone(), sin_TP=rotation.sin_TP[-1:].clone())
    alone = absorbed_query(x_TAY[-1:], key_up, last, out_TAX=torch.empty_like(out[-1:]))
    assert torch.equal(alone, out[-1:])
    for num_ahead in (0, 100, 128, 128 * 9000 + 5):
        ahead = torch.zeros(num_ahead, dtype=torch.uint8, device="cuda")
        alone = value_up(latent_TAL[-1:].contiguous(), up, out_TAV=torch.empty_like(values[-1:]), ahead=ahead)
        assert torch.equal(alone, values[-1:])
