"""Rows of several tensors are taken at once, whatever they hold."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.kernels.take_rows import take_rows, take_rows_ref
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

KERNEL_CHECK = """
import torch
from specdec.kernels.take_rows import take_rows, take_rows_ref

for row in (torch.tensor([4, 0, 4]), torch.tensor([2])):
    sources = (
        torch.randn(5, 1030),
        torch.randint(-9, 9, (5, 2048), dtype=torch.int32),
        torch.arange(5, dtype=torch.int32),
        torch.randn(5, 3, 6).bfloat16(),
    )
    for num_sources in range(1, 5):
        outs = [torch.full_like(source[:1].expand(len(row), *source.shape[1:]), 77).contiguous() for source in sources]
        take_rows(row, sources[:num_sources], outs[:num_sources])
        for out, expected in zip(outs, take_rows_ref(row, sources[:num_sources])):
            assert torch.equal(out, expected)
        assert all(bool((out == 77).all()) for out in outs[num_sources:])

# A row behind 2^31 words.
far = torch.empty((1 << 30) + 2, 2, dtype=torch.int32)
far[-1] = torch.tensor([3, 4])
out = torch.zeros(1, 2, dtype=torch.int32)
take_rows(torch.tensor([len(far) - 1]), [far], [out])
assert out.tolist() == [[3, 4]]
"""


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*i64", *("*i32", "*i32", "i32") * 4)
    sizes = {"BLOCK": 1024, "STARTS_EARLY": True}
    assert ptx_for_hopper("take_rows.take_rows_kernel", tmp_path, types=types, constants=sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_B": torch.zeros(2).int()}, "row_B must be torch.int64"),
        ({"sources": [torch.zeros(3, 4)] * 5, "outs": [torch.zeros(2, 4)] * 5}, "1..4 sources .* got 5 and 5"),
        ({"outs": []}, "as many outs, got 1 and 0"),
        ({"sources": [torch.zeros(3, 8)[:, ::2]]}, "source 0 must be .*contiguous"),
        ({"outs": [torch.zeros(3, 4)]}, r"out 0 must be torch.float32 \(2, 4\)"),
        (
            {"sources": [torch.zeros(3, 3).bfloat16()], "outs": [torch.zeros(2, 3).bfloat16()]},
            "whole words of 4 bytes, got 6 bytes",
        ),
    ],
)
def test_other_shapes_dtypes_and_layouts_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "row_B": torch.zeros(2, dtype=torch.int64),
        "sources": [torch.zeros(3, 4)],
        "outs": [torch.zeros(2, 4)],
    }
    with pytest.raises(ValueError, match=message):
        take_rows(**(arguments | changes))


@needs_gpu
@pytest.mark.parametrize("num_taken", [0, 1, 32])
def test_a_gpu_takes_the_same_rows(num_taken: int) -> None:
    row_B = torch.randint(192, (num_taken,), device="cuda")
    sources = [
        torch.randn(192, 6144, device="cuda").bfloat16(),
        torch.randint(1 << 30, (192, 2048), dtype=torch.int32, device="cuda"),
        torch.randint(1 << 30, (192, 2048), dtype=torch.int32, device="cuda"),
        torch.arange(192, dtype=torch.int32, device="cuda"),
    ]
    sources[0][0, 0] = torch.nan
    outs = [torch.full_like(source, 7)[:num_taken] for source in sources]
    take_rows(row_B, sources, outs)
    for out, expected in zip(outs, take_rows_ref(row_B, sources), strict=True):
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
