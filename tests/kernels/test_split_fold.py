"""Splits are folded into what they are together; the bits do not depend on how many could have been there."""

import inspect
from pathlib import Path

import pytest
import torch

from specdec.kernels.lse_merge import AttentionState, merge_states_ref
from specdec.kernels.split_fold import fold_splits, fold_splits_ref
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted


def make_splits(num_splits: int, num_rows: int, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits of 64 keys; lengths from 0 to all, NaN behind them, a quarter of the splits without a key."""
    generator = torch.Generator().manual_seed(num_splits)
    rows = (num_splits, num_rows, num_heads)
    part_NTAL = torch.randn(*rows, 512, generator=generator)
    top_NTA = 20 * torch.randn(rows, generator=generator)
    sum_NTA = 1 + 63 * torch.rand(rows, generator=generator)
    is_empty_NTA = torch.rand(rows, generator=generator) < 0.25
    part_NTAL[is_empty_NTA] = 0
    top_sum_NTA2 = torch.stack(
        (top_NTA.masked_fill(is_empty_NTA, -torch.inf), sum_NTA.masked_fill(is_empty_NTA, 0)), dim=-1
    )
    length_T = torch.randint(0, num_splits * 64 + 1, (num_rows,), generator=generator, dtype=torch.int32)
    length_T[:2] = torch.tensor([num_splits * 64, 0])
    is_behind_NT = torch.arange(num_splits)[:, None] * 64 >= length_T
    part_NTAL[is_behind_NT] = torch.nan
    top_sum_NTA2[is_behind_NT] = torch.nan
    return part_NTAL, top_sum_NTA2, length_T


def new_state(num_rows: int, num_heads: int, **options: object) -> AttentionState:
    shape = (num_rows, num_heads)
    out_TAL = torch.full((*shape, 512), 9.0, **options)  # type: ignore[call-overload]
    return AttentionState(out_TAL, torch.full(shape, 9.0, device=out_TAL.device))


KERNEL_CHECK = f"""
import torch
from specdec.kernels.lse_merge import AttentionState
from specdec.kernels.split_fold import fold_splits, fold_splits_ref

{inspect.getsource(make_splits)}
{inspect.getsource(new_state)}
for num_splits, num_rows, num_heads in ((1, 2, 2), (3, 4, 2), (8, 2, 1), (9, 3, 2), (200, 4, 1)):
    part, top_sum, length = make_splits(num_splits, num_rows, num_heads)
    for offset in (0, 1):
        state = new_state(num_rows, num_heads)
        fold_splits(part, top_sum, length - offset, state, split_keys=64, length_offset=offset, factor=0.5)
        expected = fold_splits_ref(part, top_sum, length, split_keys=64, factor=0.5)
        torch.testing.assert_close(tuple(state), tuple(tensor.float() for tensor in expected), rtol=1e-5, atol=1e-5)
    more = torch.full((2, num_splits + 7, *part.shape[1:]), torch.nan)
    more[0, :num_splits], more[1, :num_splits, ..., :2] = part, top_sum
    same = new_state(num_rows, num_heads)
    sums = more[1, ..., :2].contiguous()
    fold_splits(more[0], sums, length - offset, same, split_keys=64, length_offset=offset, factor=0.5)
    assert torch.equal(same.out_TAL, state.out_TAL) and torch.equal(same.lse_TA, state.lse_TA)
"""


def test_the_definition_is_the_merge_of_the_splits_as_shards() -> None:
    part_NTAL, top_sum_NTA2, _ = make_splits(5, 3, 2)
    part_NTAL, top_sum_NTA2 = part_NTAL[:, :1].double(), top_sum_NTA2[:, :1].double()  # the row that has all keys
    top_NTA, sum_NTA = top_sum_NTA2.unbind(-1)
    lse_NTA = top_NTA * torch.tensor(2.0).log() + sum_NTA.log()
    expected = merge_states_ref(part_NTAL / sum_NTA[..., None], lse_NTA)
    folded = fold_splits_ref(part_NTAL, top_sum_NTA2, torch.tensor([5 * 64]), split_keys=64)
    torch.testing.assert_close(tuple(folded), tuple(expected), rtol=1e-6, atol=1e-6)


def test_a_row_without_keys_gives_zeros() -> None:
    part_NTAL, top_sum_NTA2, length_T = make_splits(3, 2, 2)
    folded = fold_splits_ref(part_NTAL, top_sum_NTA2, length_T, split_keys=64)
    assert bool((folded.out_TAL[1] == 0).all())
    assert bool((folded.lse_TA[1] == -torch.inf).all())


def test_other_shapes_are_refused() -> None:
    part_NTAL, top_sum_NTA2, length_T = make_splits(3, 2, 2)
    with pytest.raises(ValueError, match=r"must go with parts \(3, 2, 2, 512\)"):
        fold_splits(part_NTAL, top_sum_NTA2, length_T[:1], new_state(2, 2), split_keys=64)


def test_the_kernel_equals_the_definition_whatever_the_capacity(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


@pytest.mark.parametrize(("values", "at_once"), [(512, 8), (128, 16)])
def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path, values: int, at_once: int) -> None:
    types = ("*fp32", "*fp32", "*i32", "*bf16", "*fp32", "i32", "i32", "fp32")
    sizes = {"SPLIT": 512, "LENGTH_OFFSET": 1, "LATENT": 512, "VALUES": values, "AT_ONCE": at_once, "TOPS": 128}
    ptx = ptx_for_hopper(
        "split_fold.fold_splits_kernel",
        tmp_path,
        types=types,
        constants=sizes | {"STARTS_EARLY": True},
        aligned=(0, 1, 3, 4),
        options={"num_warps": values // 128},
    )
    assert ptx.count("ld.global.v4.b32") == at_once  # 16 bytes of a thread a split
    assert "griddepcontrol.wait" in ptx


@needs_gpu
@pytest.mark.parametrize(("num_splits", "num_rows", "num_heads"), [(1, 3, 8), (2, 192, 64), (8, 33, 16), (300, 6, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_folds_as_the_definition_and_a_row_alone_as_among_others(
    num_splits: int, num_rows: int, num_heads: int, dtype: torch.dtype
) -> None:
    part_NTAL, top_sum_NTA2, length_T = make_splits(num_splits, num_rows, num_heads)
    expected = fold_splits_ref(part_NTAL, top_sum_NTA2, length_T, split_keys=64, factor=0.5)
    part_NTAL, top_sum_NTA2, length_T = part_NTAL.cuda(), top_sum_NTA2.cuda(), length_T.cuda()
    state = new_state(num_rows, num_heads, device="cuda", dtype=dtype)
    fold_splits(part_NTAL, top_sum_NTA2, length_T, state, split_keys=64, factor=0.5)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(state.out_TAL.double().cpu(), expected.out_TAL, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.lse_TA.double().cpu(), expected.lse_TA, rtol=1e-5, atol=1e-5)
    more = torch.full((9, num_rows, num_heads, 512), torch.nan, device="cuda")
    padded = torch.cat((part_NTAL, more)), torch.cat((top_sum_NTA2, more[..., :2]))
    same = new_state(num_rows, num_heads, device="cuda", dtype=dtype)
    fold_splits(*padded, length_T, same, split_keys=64, factor=0.5)
    assert torch.equal(same.out_TAL, state.out_TAL)
    for row in range(0, num_rows, 5):
        one = slice(row, row + 1)
        alone = new_state(1, num_heads, device="cuda", dtype=dtype)
        parts = part_NTAL[:, one].contiguous(), top_sum_NTA2[:, one].contiguous()
        fold_splits(*parts, length_T[one], alone, split_keys=64, factor=0.5)
        assert torch.equal(alone.out_TAL[0], state.out_TAL[row])
        assert torch.equal(alone.lse_TA[0], state.lse_TA[row])
