"""Gathered rows are the bytes they were, whatever they mean; the Triton kernel equals the definition."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.kernels.pack_rows import pack_rows, pack_rows_ref
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

KERNEL_CHECK = """
import torch
from specdec.kernels.pack_rows import launch_pack_rows, pack_rows_ref

sizes = ((1, 4, 4), (77, 132, 4), (5, 4096, 4), (300, 4, 4), (9, 33, 1), (1, 1, 1), (2, 1500, 1), (30, 656, 16))
for num_rows, row_bytes, word in sizes:
    source = torch.randint(0, 256, (9000,), dtype=torch.uint8)
    out = torch.randint(0, 256, (num_rows * (row_bytes + 16) + 16,), dtype=torch.uint8)
    expected = out.clone()
    offsets = torch.randint(0, (9000 - row_bytes) // word, (num_rows,)) * word
    out_offsets = torch.randperm(num_rows) * (row_bytes + 16) + 16
    pack_rows_ref(source, offsets, expected, out_offsets, row_bytes=row_bytes)
    dtype, size = (torch.uint8, 1) if word == 1 else (torch.int32, 4)
    words = source.view(dtype), offsets // size, out.view(dtype), out_offsets // size
    launch_pack_rows(*words, num_words=row_bytes // size, vector=max(word // 4, 1))
    assert torch.equal(out, expected), (num_rows, row_bytes)
"""


@pytest.mark.parametrize("row_bytes", [1, 3, 4, 132])
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 65])
@pytest.mark.parametrize("order", ["dense", "spaced", "scattered"])
def test_rows_are_gathered_byte_for_byte_and_nothing_else_is_written(
    row_bytes: int, step: int, num_rows: int, order: str
) -> None:
    generator = torch.Generator().manual_seed(row_bytes)
    source = torch.randint(0, 256, (4000,), dtype=torch.uint8, generator=generator)
    offsets = torch.randint(0, (4000 - row_bytes) // step, (num_rows,), generator=generator) * step
    gap = row_bytes if order == "dense" else row_bytes + 4
    out_offsets = (
        torch.randperm(num_rows, generator=generator) if order == "scattered" else torch.arange(num_rows)
    ) * gap
    memory = torch.randint(0, 256, (num_rows * gap + 16,), dtype=torch.uint8, generator=generator)
    expected = memory.clone()
    pack_rows(source, offsets, memory[8:-8], out_offsets, row_bytes=row_bytes)
    pack_rows_ref(source, offsets, expected[8:-8], out_offsets, row_bytes=row_bytes)
    assert torch.equal(memory, expected)


def test_the_definition_copies_a_slice_for_each_row() -> None:
    source, out = torch.arange(200, dtype=torch.uint8), torch.zeros(25, dtype=torch.uint8)
    pack_rows_ref(source, torch.tensor([193, 0, 5]), out, torch.tensor([14, 1, 7]), row_bytes=6)
    assert out.tolist() == [0, *range(6), *range(5, 11), 0, *range(193, 199), *[0] * 5]


def test_nan_payloads_survive() -> None:
    source = torch.tensor([0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.uint8)  # quiet and signalling
    out = torch.empty(8, dtype=torch.uint8)
    pack_rows(source, torch.tensor([4, 0]), out, torch.tensor([0, 4]), row_bytes=4)
    assert out.view(torch.int32).tolist() == [0x7F800001, 0x7FC00001]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset_R": torch.tensor([6])}, "leave source of 9 bytes"),
        ({"offset_R": torch.tensor([-1])}, "leave source of 9 bytes"),
        ({"out_offset_R": torch.tensor([5])}, "leave out of 8 bytes"),
        ({"offset_R": torch.tensor([0, 1])}, "an offset on each side"),
        ({"offset_R": torch.tensor([0], dtype=torch.int32)}, "offsets must be int64"),
        ({"row_bytes": 0}, "at least one byte"),
        ({"source_S": torch.zeros(9, dtype=torch.int8)}, "source must be uint8"),
        ({"out_S": torch.zeros(16, dtype=torch.uint8)[::2]}, "out must be uint8"),
    ],
)
def test_rows_outside_and_other_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "source_S": torch.zeros(9, dtype=torch.uint8),
        "offset_R": torch.tensor([0]),
        "out_S": torch.zeros(8, dtype=torch.uint8),
        "out_offset_R": torch.tensor([0]),
        "row_bytes": 4,
    }
    with pytest.raises(ValueError, match=message):
        pack_rows(**(arguments | changes))


@needs_gpu
@pytest.mark.parametrize(
    ("row_bytes", "step"),  # bytes, words and vectors of four
    [(1, 1), (3, 1), (656, 1), (4, 4), (132, 4), (656, 4), (4100, 4), (16, 16), (656, 16), (4112, 16)],
)
@pytest.mark.parametrize("num_rows", [1, 2, 65])
def test_a_gpu_gathers_the_same_bytes(num_rows: int, row_bytes: int, step: int) -> None:
    source = torch.randint(0, 256, (num_rows * 1280 + 9008,), dtype=torch.uint8)
    offsets = torch.randint(0, (len(source) - row_bytes) // step, (num_rows,)) * step
    out_offsets = torch.randperm(num_rows) * (row_bytes + step)
    expected = torch.randint(0, 256, (num_rows * (row_bytes + step),), dtype=torch.uint8)
    got = expected.cuda()
    pack_rows_ref(source, offsets, expected, out_offsets, row_bytes=row_bytes)
    pack_rows(source.cuda(), offsets, got, out_offsets, row_bytes=row_bytes)
    assert torch.equal(got.cpu(), expected)


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


@pytest.mark.parametrize(("words", "row_words", "vector"), [("*i32", 164, 4), ("*i32", 33, 1), ("*u8", 33, 1)])
def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path, words: str, row_words: int, vector: int) -> None:
    types = (words, "*i64", words, "*i64", "i32")
    sizes = {"WORDS": row_words, "VECTOR": vector, "BLOCK": 1024}
    ptx = ptx_for_hopper("pack_rows.pack_rows_kernel", tmp_path, types=types, constants=sizes, aligned=range(4))
    assert ("st.global.v4.b32" in ptx) == (vector == 4)
