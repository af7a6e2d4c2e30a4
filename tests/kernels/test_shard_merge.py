"""Shards merged in one launch equal the merge in order, with empty shards, strange strides and both bases."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.kernels.lse_merge import merge_states, merge_states_ref
from specdec.kernels.shard_merge import merge_shards, merge_shards_ref
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

KERNEL_CHECK = """
import torch
from specdec.kernels.shard_merge import merge_shards, merge_shards_ref

for sizes in ((1, 2, 2, 16), (2, 3, 2, 8), (3, 1, 1, 33), (8, 2, 8, 512)):
    out, lse = torch.randn(*sizes), 5 * torch.randn(sizes[:3])
    lse[torch.rand_like(lse) < 0.3] = -torch.inf
    lse[:, 0, 0] = -torch.inf
    out.masked_fill_((lse == -torch.inf)[..., None], torch.nan)
    first_owner = torch.randint(sizes[0], (1 if sizes[1] == 2 else sizes[1],))
    memory = {"out_TAL": torch.full(sizes[1:], 9.0), "lse_TA": torch.full(sizes[1:3], 9.0)}
    merged = merge_shards(out, lse, **memory, first_owner_B=first_owner, base=2.0)
    expected = merge_shards_ref(out, lse, first_owner_B=first_owner, base=2.0)
    torch.testing.assert_close(tuple(merged), tuple(expected), rtol=1e-5, atol=1e-5)
"""

# The third head begins behind 2^31 values of the first.
FAR_HEADS_CHECK = """
import torch
from specdec.kernels.shard_merge import merge_shards, merge_shards_ref

step = (1 << 30) + 8
out, lse = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 3)
far = torch.empty(2 * step + 16, dtype=torch.bfloat16).as_strided((2, 1, 3, 8), (8, 16, step, 1)).copy_(out)
memory = {"out_TAL": torch.full((1, 3, 8), 9.0), "lse_TA": torch.full((1, 3), 9.0)}
torch.testing.assert_close(tuple(merge_shards(far, lse, **memory)), tuple(merge_shards_ref(far, lse)))
"""


def make_shards(*sizes: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Views into messages [out, lse] a head; a third of the shards are empty, their outputs NaN, and all of row 0."""
    num_shards, num_rows, num_heads, num_values = sizes
    message = torch.randn(num_shards, num_rows, num_heads, num_values + 1, device=device)
    lse_NTA = message[..., -1] * 5
    lse_NTA[torch.rand_like(lse_NTA) < 0.3] = -torch.inf
    lse_NTA[:, :1, 0] = -torch.inf
    out_NTAL = message.to(dtype)[..., :-1]
    return out_NTAL.masked_fill_((lse_NTA == -torch.inf)[..., None], torch.nan), lse_NTA


def test_the_definition_is_the_merge_of_all_shards() -> None:
    out_NTAL, lse_NTA = make_shards(4, 5, 2, 8, device="cpu")
    merged = merge_shards_ref(out_NTAL, lse_NTA, first_owner_B=torch.tensor([0, 3, 2, 1, 0]))
    expected = merge_states_ref(out_NTAL.double(), lse_NTA.double())
    torch.testing.assert_close(merged.out_TAL.double(), expected.out_TAL.nan_to_num(nan=0.0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged.lse_TA.double(), expected.lse_TA, rtol=1e-6, atol=1e-6)


def test_the_sum_begins_with_the_first_owner() -> None:
    out_NTAL, lse_NTA = make_shards(4, 3, 2, 8, device="cpu")
    expected = merge_states(out_NTAL.roll(1, 0), lse_NTA.roll(1, 0))
    for first_owner_B in (torch.tensor([3]), torch.tensor([3, 3, 3])):
        turned = merge_shards_ref(out_NTAL, lse_NTA, first_owner_B=first_owner_B)
        assert torch.equal(turned.out_TAL, expected.out_TAL)
        assert torch.equal(turned.lse_TA, expected.lse_TA)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_NTAL": torch.zeros(2, 3, 4, 8, dtype=torch.float16)}, "out_NTAL must be float32 or bfloat16"),
        ({"out_NTAL": torch.zeros(2, 3, 8, 4).mT}, "adjacent values"),
        ({"lse_NTA": torch.zeros(2, 3, 5)}, "lse_NTA must be"),
        ({"lse_TA": torch.zeros(4, 3).T}, "lse_TA must be"),
        ({"out_TAL": torch.zeros(3, 4, 9)}, "out_TAL must be"),
        ({"first_owner_B": torch.zeros(3, dtype=torch.int32)}, r"first_owner_B must be torch\.int64 \(3,\)"),
        ({"first_owner_B": torch.zeros(6, dtype=torch.int64)[::2]}, "first_owner_B must be .*contiguous"),
        ({"first_owner_B": torch.zeros(2, dtype=torch.int64)}, "3 rows are not those of 2 requests"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "out_NTAL": torch.zeros(2, 3, 4, 8),
        "lse_NTA": torch.zeros(2, 3, 4),
        "out_TAL": torch.zeros(3, 4, 8),
        "lse_TA": torch.zeros(3, 4),
    }
    with pytest.raises(ValueError, match=message):
        merge_shards(**(arguments | changes))


@needs_gpu
@pytest.mark.parametrize("sizes", [(1, 2, 2, 16), (3, 1, 1, 33), (8, 7, 8, 512), (4, 0, 8, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_merges_as_the_definition(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    out_NTAL, lse_NTA = make_shards(*sizes, device="cuda", dtype=dtype)
    owners = [torch.randint(sizes[0], (num,), device="cuda") for num in {1, sizes[1]} if num]
    for first_owner_B in (None, *owners):
        for base in (math.e, 2.0):
            out_TAL, lse_TA = torch.full(sizes[1:], 9.0, device="cuda"), torch.full(sizes[1:3], 9.0, device="cuda")
            options = {"first_owner_B": first_owner_B, "base": base}
            merged = merge_shards(out_NTAL, lse_NTA, out_TAL=out_TAL, lse_TA=lse_TA, **options)
            expected = merge_shards_ref(out_NTAL, lse_NTA, **options)
            torch.testing.assert_close(tuple(merged), tuple(expected), rtol=1e-5, atol=1e-5)


@needs_gpu
def test_a_row_has_the_same_bits_alone() -> None:
    out_NTAL, lse_NTA = make_shards(8, 37, 8, 512, device="cuda")
    outs = [torch.empty(37, 8, 512, device="cuda") for _ in range(2)]
    lses = [torch.empty(37, 8, device="cuda") for _ in range(2)]
    merge_shards(out_NTAL, lse_NTA, out_TAL=outs[0], lse_TA=lses[0])
    for row in range(37):
        one = slice(row, row + 1)
        merge_shards(out_NTAL[:, one], lse_NTA[:, one], out_TAL=outs[1][one], lse_TA=lses[1][one])
    assert torch.equal(*outs)
    assert torch.equal(*lses)


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


def test_heads_may_lie_further_apart_than_32_bits_count(tmp_path: Path) -> None:
    run_interpreted(FAR_HEADS_CHECK, tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*bf16", "*fp32", "*i64", "*bf16", "*fp32", *("i32",) * 8)
    sizes = {"SHARDS": 8, "VALUES": 512, "BLOCK": 512, "LN_BASE": 1.0, "STARTS_EARLY": True}
    ptx = ptx_for_hopper(
        "shard_merge.merge_shards_kernel",
        tmp_path,
        types=types,
        constants=sizes,
        aligned=(0, 1, 2, 3, 4, 6, 7, 8),
        options={"num_warps": 2},
    )
    assert ptx.count("evict_first.L2::cache_hint.v4.b32") == 8  # one of a thread a shard
    assert "griddepcontrol.wait" in ptx
