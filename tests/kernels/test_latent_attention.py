"""Cached rows of every format are attended to as their values are; a row's bits are its own."""

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.kernels.latent_attention import (
    HEAD_COUNTS,
    WARPS,
    DenseAttention,
    SparseAttention,
    dense_attention_ref,
    kernel_constants,
    keys_per_split,
    sparse_attention_ref,
)
from specdec.kernels.latent_formats import encode_fp8, encode_fp8_packed
from specdec.kernels.latent_rows import LATENT_DIM, PAGE_ROWS, ROPE_DIM, LatentFormat, latent_rows_ref
from specdec.kernels.lse_merge import AttentionState
from specdec.kernels.sparse_mla import sparse_mla_ref
from tests.support.gpu import needs_gpu
from tests.support.triton_process import run_interpreted
from tests.support.triton_resources import hopper_resources

BFLOAT16, FP8, FP8_PACKED = LatentFormat
LISTED = (BFLOAT16, FP8)
SCALE = 0.04
ROW_SCALE = {BFLOAT16: 1.0, FP8: 0.05, FP8_PACKED: 1.0}
SHARED_BYTES = 227 << 10  # of a block on an H100 or H200
BORDERS = (0, 1, 31, 32, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 513)


def make_pool(row_format: LatentFormat, num_pages: int) -> torch.Tensor:
    """Pages that lie apart, NaN between them; latents of very different sizes."""
    generator = torch.Generator().manual_seed(num_pages)
    size = 2.0 ** torch.randint(-5, 3, (num_pages * 64, 4), generator=generator).repeat_interleave(128, dim=1)
    latent = torch.randn(size.shape, generator=generator) * size
    rope = torch.randn(num_pages * 64, 64, generator=generator)
    if row_format is LatentFormat.BFLOAT16:
        rows = torch.cat((latent, rope), dim=-1).bfloat16().view(torch.uint8)
    elif row_format is LatentFormat.FP8:
        rows = encode_fp8(latent, rope, 0.05)
    else:
        rows = encode_fp8_packed(latent, rope)
    memory = torch.full((num_pages, 64 * row_format.row_bytes + 48), 0xFF, dtype=torch.uint8)
    memory[:, :-48] = rows.view(num_pages, -1)
    return memory[:, :-48]


def make_queries(num_rows: int, num_heads: int) -> torch.Tensor:
    """Queries of very different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(num_rows)
    size = 10.0 ** torch.randint(-4, 1, (num_rows, num_heads, 1), generator=generator)
    query_TAX = (torch.randn(num_rows, num_heads, 576, generator=generator) * size).bfloat16()
    query_TAX[0, 0] = 0
    return query_TAX


def make_lists(num_rows: int, num_slots: int, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of every length with holes, and no row of the pool behind their counts."""
    generator = torch.Generator().manual_seed(num_rows)
    index_TK = torch.randint(0, num_pages * 64, (num_rows, num_slots), generator=generator)
    index_TK[2::3, :100][torch.rand(index_TK[2::3, :100].shape, generator=generator) < 0.7] = -1
    index_TK[3::7, :300] = -1  # a whole split without a key
    count_T = torch.randint(0, num_slots + 1, (num_rows,), generator=generator, dtype=torch.int32)
    for row, count in enumerate((num_slots, 0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257)[:num_rows]):
        count_T[row] = min(count, num_slots)
    index_TK[torch.arange(num_slots) >= count_T[:, None]] = 1 << 30
    return index_TK, count_T


def make_pages(length_R: torch.Tensor, num_pages: int, pool_PB: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Pages of requests of these lengths, no page of the pool behind them; rows of no request become NaN."""
    generator = torch.Generator().manual_seed(len(length_R))
    free = torch.randperm(len(pool_PB), generator=generator).int()
    page_RP = torch.full((len(length_R), num_pages), 1 << 24, dtype=torch.int32)
    row_PSB = pool_PB.unflatten(1, (64, row_bytes))
    for pages_P, length in zip(page_RP, length_R.tolist(), strict=True):
        used, free = free[: -(-length // 64)], free[-(-length // 64) :]
        pages_P[: len(used)] = used
        if length % 64:
            row_PSB[int(used[-1]), length % 64 :] = 0xFF
    row_PSB[free.long()] = 0xFF
    return page_RP


COMPARISON = f"""
import torch
from specdec.kernels.latent_attention import DenseAttention, SparseAttention, dense_attention_ref, sparse_attention_ref
from specdec.kernels.latent_formats import encode_fp8, encode_fp8_packed
from specdec.kernels.latent_rows import LatentFormat

{inspect.getsource(make_pool)}
{inspect.getsource(make_queries)}
{inspect.getsource(make_lists)}
{inspect.getsource(make_pages)}
def assert_same(state, expected):
    expected = tuple(tensor.float() for tensor in expected)
    torch.testing.assert_close(tuple(state), expected, rtol=2e-4, atol=2e-5, equal_nan=True)
"""
SPARSE_CHECK = """
for row_format in (LatentFormat.BFLOAT16, LatentFormat.FP8):
    options = {"scale": 0.04, "row_scale": 0.05 if row_format is LatentFormat.FP8 else 1.0}
    pool = make_pool(row_format, 7)
    for rows, heads, slots, dtype in ((12, 8, 300, torch.int64), (5, 64, 70, torch.int32), (4, 16, 1, torch.int32)):
        query, (index, count) = make_queries(rows, heads), make_lists(rows, slots, 7)
        attention = SparseAttention(
            row_format=row_format, max_rows=rows, num_heads=heads, num_slots=slots, device="cpu", index_dtype=dtype
        )
        expected = sparse_attention_ref(query, pool, index, count, row_format=row_format, **options)
        assert_same(attention(query, pool, index.to(dtype), count, **options), expected)
"""
DENSE_CHECK = """
for row_format in LatentFormat:
    options = {"scale": 0.04, "row_scale": 0.05 if row_format is LatentFormat.FP8 else 1.0}
    # The last position of each row; the first request has more lines than a block, the second none at all.
    for heads, positions in (
        (8, [[63, 64, 65, 0, -1, 128, 127, 31, 32, 129], [-1] * 10]),
        (8, [[600], [511], [512], [0]]),
        (64, [[70, 71, 66]]),
        (32, [[-1], [65], [1023]]),
        (8, [[100, -1, 101], [-1, 70, 69]]),
    ):
        pool, position = make_pool(row_format, 30), torch.tensor(positions, dtype=torch.int32)
        longest = int(position.max()) + 1
        pages = make_pages(position.amax(dim=1) + 1, -(-longest // 64) + 3, pool, row_format.row_bytes)[:, :-2]
        query = make_queries(position.numel(), heads)
        attention = DenseAttention(
            row_format=row_format, max_rows=50, max_positions=longest, num_heads=heads, device="cpu"
        )
        reference = pages.where(pages < 1 << 24, 0)
        arguments = (query, pool, reference, position.flatten())
        expected = dense_attention_ref(*arguments, row_format=row_format, **options)
        state = attention(query, pool, pages, position.flatten(), **options)
        assert_same(state, expected)
        # NaN in what one row alone sees reaches its output and no other's.
        request = int(position.amax(dim=1).argmax())
        page = pages[request, (longest - 1) // 64]
        row = pool.unflatten(1, (64, row_format.row_bytes))[page, (longest - 1) % 64]
        # The interpreter takes the NaN of e4m3 for a number.
        num_bytes = row_format.row_bytes
        is_e4m3 = {LatentFormat.BFLOAT16: 0, LatentFormat.FP8: num_bytes, LatentFormat.FP8_PACKED: 512}[row_format]
        for byte in [byte for byte in (514, num_bytes - 2) if byte >= is_e4m3]:
            before = row.clone()
            row[byte : byte + 2] = 0xFF
            poisoned = attention(query, pool, pages, position.flatten(), **options)
            sees = position.flatten() == longest - 1
            assert bool(poisoned.out_TAL[sees].isnan().all()) and bool(poisoned.lse_TA[sees].isnan().all())
            assert_same([tensor[~sees] for tensor in poisoned], [tensor[~sees] for tensor in state])
            row.copy_(before)
"""


def relative_errors(state: AttentionState, expected: AttentionState) -> torch.Tensor:
    """Of each row that has a key."""
    has_key_T = expected.lse_TA[:, 0] > -torch.inf
    difference = (state.out_TAL.double() - expected.out_TAL)[has_key_T].flatten(1)
    return difference.norm(dim=1) / expected.out_TAL[has_key_T].flatten(1).norm(dim=1)


def assert_near(state: AttentionState, expected: AttentionState) -> None:
    """Weights are rounded to bfloat16, and so are outputs where that is asked for."""
    assert float(relative_errors(state, expected).max()) < 4e-3
    torch.testing.assert_close(state.lse_TA.double(), expected.lse_TA, atol=2e-4, rtol=1e-5)
    assert bool((state.out_TAL[expected.lse_TA == -torch.inf] == 0).all())


def strided_on_gpu(pool_PB: torch.Tensor) -> torch.Tensor:
    """The same pages, as far apart, NaN between them."""
    memory = torch.full((len(pool_PB), pool_PB.stride(0)), 0xFF, dtype=torch.uint8, device="cuda")
    memory[:, : pool_PB.shape[1]] = pool_PB.cuda()
    return memory[:, : pool_PB.shape[1]]


@pytest.mark.parametrize("row_format", LatentFormat)
def test_rows_are_read_as_they_were_written(row_format: LatentFormat) -> None:
    generator = torch.Generator().manual_seed(1)
    latent, rope = torch.randn(192, 512, generator=generator), torch.randn(192, 64, generator=generator)
    values = torch.cat((latent, rope), dim=-1)
    encoded = {
        BFLOAT16: values.bfloat16().view(torch.uint8),
        FP8: encode_fp8(latent, rope, 0.05),
        FP8_PACKED: encode_fp8_packed(latent, rope),
    }[row_format]
    assert encoded.shape[1] == row_format.row_bytes
    row_N = torch.tensor([191, 0, 63, 64, 64])
    read = latent_rows_ref(encoded.view(3, -1), row_N, row_format, row_scale=ROW_SCALE[row_format])
    torch.testing.assert_close(read, values[row_N], rtol=2**-4, atol=1e-3)


@pytest.mark.parametrize("row_format", LatentFormat)
def test_the_sparse_definition_is_attention_over_the_listed_values(row_format: LatentFormat) -> None:
    pool_PB, query_TAX = make_pool(row_format, 3), make_queries(9, 8)
    index_TK, count_T = make_lists(9, 130, 3)
    is_key_TK = (torch.arange(130) < count_T[:, None]) & (index_TK >= 0)
    options: dict[str, Any] = {"row_scale": ROW_SCALE[row_format]}
    values = latent_rows_ref(pool_PB, torch.arange(192), row_format, **options).double()
    kv_TKX = values[index_TK.where(is_key_TK, 0)]
    expected = sparse_mla_ref(query_TAX.double(), kv_TKX, is_key_TK, scale=SCALE, latent_dim=LATENT_DIM)
    state = sparse_attention_ref(query_TAX, pool_PB, index_TK, count_T, row_format=row_format, scale=SCALE, **options)
    torch.testing.assert_close(state, expected)
    assert bool((state.out_TAL[1] == 0).all())
    assert bool((state.lse_TA[1] == -torch.inf).all())


def test_the_dense_definition_is_a_loop_over_positions() -> None:
    pool_PB, query_TAX = make_pool(FP8_PACKED, 5), make_queries(4, 8)
    page_RP = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
    position_T = torch.tensor([66, 2, -1, 64], dtype=torch.int32)
    state = dense_attention_ref(query_TAX, pool_PB, page_RP, position_T, row_format=FP8_PACKED, scale=SCALE)
    for row, last in enumerate(position_T.tolist()):
        rows = [int(page_RP[row // 2, position // 64]) * 64 + position % 64 for position in range(last + 1)]
        key_KX = latent_rows_ref(pool_PB, torch.tensor(rows, dtype=torch.int64), FP8_PACKED).double()
        for head, query_X in enumerate(query_TAX[row].double()):
            weights = [math.exp(SCALE * float(query_X @ key_X)) for key_X in key_KX]
            out_L = torch.zeros(LATENT_DIM, dtype=torch.float64)
            for weight, key_X in zip(weights, key_KX, strict=True):
                out_L += weight / sum(weights) * key_X[:LATENT_DIM]
            torch.testing.assert_close(state.out_TAL[row, head], out_L)
            lse = math.log(sum(weights)) if weights else -math.inf
            assert float(state.lse_TA[row, head]) == pytest.approx(lse)


def test_listed_rows_are_attended_to_as_the_definition_says(tmp_path: Path) -> None:
    run_interpreted(COMPARISON + SPARSE_CHECK, tmp_path)


def test_positions_are_attended_to_as_the_definition_says_and_nan_stays_where_it_is_seen(tmp_path: Path) -> None:
    run_interpreted(COMPARISON + DENSE_CHECK, tmp_path)


@pytest.mark.parametrize("num_heads", [8, *(pytest.param(heads, marks=pytest.mark.full) for heads in (16, 32)), 64])
@pytest.mark.parametrize(
    ("row_format", "is_paged", "most_spilled"),
    [
        (BFLOAT16, False, 128),
        (FP8, False, 192),
        # Tiles that not all lines see are rare: their loop spills, the one of all others does not.
        (BFLOAT16, True, 256),
        (FP8, True, 1024),
        (FP8_PACKED, True, 640),
    ],
)
def test_the_kernel_compiles_for_hopper_and_fits(
    tmp_path: Path, row_format: LatentFormat, num_heads: int, *, is_paged: bool, most_spilled: int
) -> None:
    split_keys = keys_per_split(num_heads, is_paged=is_paged)
    constants = kernel_constants(row_format, num_heads, split_keys, is_paged=is_paged)
    absent = ("out_ptr", "lse_ptr") if is_paged else ("part_ptr", "top_sum_ptr")
    given = ("part_ptr", "top_sum_ptr") if is_paged else ("out_ptr", "lse_ptr")
    resources = hopper_resources(
        "latent_attention.latent_attention_kernel",
        tmp_path,
        types=("*bf16", "*u8", "*i32", "*i32", "*fp32", "*fp32", "i32", "i32", "i32", "fp32", "fp32"),
        constants=constants | {"ON_GPU": True} | dict.fromkeys(absent),
        aligned=("query_ptr", "pool_ptr", "page_stride", *given),
        options={"num_warps": WARPS, "launch_pdl": True},
    )
    assert resources.spilled_bytes <= most_spilled
    assert resources.shared_bytes <= SHARED_BYTES
    assert "wgmma.mma_async.sync.aligned.m64n" in resources.ptx
    assert "mma.sync" not in resources.ptx
    assert "griddepcontrol.wait" in resources.ptx
    assert "cp.async.cg.shared.global" in resources.ptx  # 16 bytes at once


SIZES: dict[str, Any] = {"row_format": FP8, "max_rows": 4, "num_heads": 8, "device": "cpu"}


def test_other_sizes_are_refused() -> None:
    for changes, message in (
        ({"num_heads": 12}, r"num_heads must be one of .*got 12"),
        ({"out_dtype": torch.float16}, "out float32 or bfloat16.*got 8 and torch.float16"),
        ({"max_rows": 0}, "1 to 65535 rows .*got 0 and 100"),
        ({"max_rows": 1 << 16}, "1 to 65535 rows .*got 65536 and 100"),
    ):
        with pytest.raises(ValueError, match=message):
            SparseAttention(**(SIZES | {"num_slots": 100} | changes))
        with pytest.raises(ValueError, match=message):
            DenseAttention(**(SIZES | {"max_positions": 100} | changes))
    with pytest.raises(ValueError, match="packed format are attended to by PackedSparseMla"):
        SparseAttention(**(SIZES | {"num_slots": 100, "row_format": FP8_PACKED}))
    with pytest.raises(ValueError, match="index is int64 or int32"):
        SparseAttention(**SIZES, num_slots=100, index_dtype=torch.int16)
    with pytest.raises(ValueError, match="at least one key, got 4 and 0"):
        DenseAttention(**SIZES, max_positions=0)


def test_other_tensors_are_refused() -> None:
    pool_PB, query_TAX = make_pool(FP8, 3), make_queries(4, 8)
    index_TK, count_T = make_lists(4, 100, 3)
    page_RP = torch.zeros(2, 3, dtype=torch.int32)
    common: dict[str, Any] = {"query_TAX": query_TAX, "pool_PB": pool_PB}
    sparse = SparseAttention(**SIZES, num_slots=100), {"index_TK": index_TK, "count_T": count_T}
    dense = DenseAttention(**SIZES, max_positions=100), {"page_RP": page_RP, "position_T": count_T}
    both: tuple[tuple[dict[str, Any], str], ...] = (
        ({"query_TAX": query_TAX.float()}, r"query must be torch.bfloat16 \(4, 8, 576\)"),
        ({"out_TAL": torch.zeros(4, 8, 512).bfloat16()}, "out must be torch.float32"),
        ({"lse_TA": torch.zeros(4, 9)}, r"lse must be torch.float32 \(4, 8\)"),
        ({"pool_PB": pool_PB[:, :-576]}, r"pool must be uint8 \[P, 36864\]"),
        ({"pool_PB": torch.empty(3, 36872, dtype=torch.uint8)[:, :-8]}, "multiples of 16 bytes.*36872 bytes apart"),
    )
    for (attention, tensors), own in (
        (
            sparse,
            (
                ({"index_TK": index_TK.int()}, "index must be torch.int64"),
                ({"index_TK": index_TK[:, :-1]}, "index must be .*contiguous"),
                ({"count_T": count_T.long()}, "count must be torch.int32"),
            ),
        ),
        (
            dense,
            (
                ({"page_RP": page_RP.long()}, r"pages must be int32 \[R, P\], got torch.int64"),
                ({"page_RP": page_RP.T}, r"pages must be int32 \[R, P\]"),
                ({"page_RP": page_RP.repeat(2, 1)[:3]}, "4 rows of 3 requests"),
                ({"position_T": count_T.long()}, "position must be torch.int32"),
            ),
        ),
    ):
        for changes, message in (*both, *own):
            with pytest.raises(ValueError, match=message):
                attention(**(common | tensors | changes), scale=SCALE)
    more = make_queries(8, 8)
    with pytest.raises(ValueError, match="for 4 query rows, got 8"):
        dense[0](more, pool_PB, page_RP, count_T.repeat(2), scale=SCALE)


@needs_gpu
@pytest.mark.parametrize("num_heads", HEAD_COUNTS)
@pytest.mark.parametrize("row_format", LISTED)
@pytest.mark.parametrize(("num_rows", "num_slots"), [(1, 2048), (13, 1100), (192, 2048), (20, 200)])
def test_a_gpu_attends_to_lists_as_the_definition_and_a_row_alone_as_among_others(
    row_format: LatentFormat, num_heads: int, num_rows: int, num_slots: int
) -> None:
    pool_PB, query_TAX = make_pool(row_format, 40), make_queries(num_rows, num_heads)
    index_TK, count_T = make_lists(num_rows, num_slots, 40)
    options: dict[str, Any] = {"scale": SCALE, "row_scale": ROW_SCALE[row_format]}
    sizes: dict[str, Any] = {"row_format": row_format, "num_heads": num_heads, "num_slots": num_slots, "device": "cuda"}
    attention = SparseAttention(**sizes, max_rows=num_rows)
    memory, query_TAX, index_TK, count_T = strided_on_gpu(pool_PB), query_TAX.cuda(), index_TK.cuda(), count_T.cuda()
    state = attention(query_TAX, memory, index_TK, count_T, **options)
    first = (query_TAX[:14], memory, index_TK[:14], count_T[:14])
    expected = sparse_attention_ref(*first, row_format=row_format, **options)
    assert_near(AttentionState(*(tensor[:14] for tensor in state)), expected)
    for row in range(0, num_rows, 7):
        one = slice(row, row + 1)
        alone = attention(query_TAX[one], memory, index_TK[one], count_T[one], **options)
        assert torch.equal(alone.out_TAL[0], state.out_TAL[row])
        assert torch.equal(alone.lse_TA[0], state.lse_TA[row])
    other = SparseAttention(**sizes, max_rows=num_rows, out_dtype=torch.bfloat16, index_dtype=torch.int32)
    rounded = other(query_TAX, memory, index_TK.int(), count_T, **options)
    assert torch.equal(rounded.out_TAL, state.out_TAL.bfloat16())
    assert torch.equal(rounded.lse_TA, state.lse_TA)


@needs_gpu
@pytest.mark.parametrize("num_heads", HEAD_COUNTS)
@pytest.mark.parametrize("row_format", LatentFormat)
@pytest.mark.parametrize("rows_per_request", [1, 6, 9])
def test_a_gpu_attends_to_positions_as_the_definition_and_a_row_alone_as_among_others(
    row_format: LatentFormat, num_heads: int, rows_per_request: int
) -> None:
    first_R1 = torch.tensor([*BORDERS, 1100, 2047, 2300])[:, None]  # 2,560 positions are several splits
    position_RQ = first_R1 + torch.arange(rows_per_request)
    position_RQ[7, -1] = -1  # a row that is padding
    position_RQ[9] = -1
    position_RQ[16, 0] = 40  # a row far in front of the others
    pool_PB, query_TAX = make_pool(row_format, 170), make_queries(position_RQ.numel(), num_heads)
    page_RP = make_pages(position_RQ.amax(dim=1) + 1, 40, pool_PB, row_format.row_bytes)
    position_T = position_RQ.flatten().int()
    options: dict[str, Any] = {"scale": SCALE, "row_scale": ROW_SCALE[row_format]}
    sizes: dict[str, Any] = {"row_format": row_format, "num_heads": num_heads, "max_positions": 2560, "device": "cuda"}
    attention = DenseAttention(**sizes, max_rows=len(position_T))
    memory, query_TAX = strided_on_gpu(pool_PB), query_TAX.cuda()
    page_RP, position_T = page_RP.cuda(), position_T.cuda()
    state = attention(query_TAX, memory, page_RP, position_T, **options)
    reference_RP = page_RP.where(page_RP < 1 << 24, 0)
    expected = dense_attention_ref(query_TAX, memory, reference_RP, position_T, row_format=row_format, **options)
    assert_near(state, expected)
    for row in range(0, len(position_T), 5):
        request = row // rows_per_request
        one = slice(row, row + 1)
        alone = attention(query_TAX[one], memory, page_RP[request : request + 1], position_T[one], **options)
        assert torch.equal(alone.out_TAL[0], state.out_TAL[row])
        assert torch.equal(alone.lse_TA[0], state.lse_TA[row])
    larger = DenseAttention(**(sizes | {"max_positions": 100_000}), max_rows=len(position_T))
    out_TAL, lse_TA = torch.full_like(state.out_TAL, torch.nan), torch.full_like(state.lse_TA, torch.nan)
    larger(query_TAX, memory, page_RP, position_T, **options, out_TAL=out_TAL, lse_TA=lse_TA)
    assert torch.equal(out_TAL, state.out_TAL)
    out_TAL.fill_(torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(query_TAX, memory, page_RP, position_T, **options, out_TAL=out_TAL, lse_TA=lse_TA)
    for _ in range(3):
        graph.replay()
    assert torch.equal(out_TAL, state.out_TAL)
    assert torch.equal(lse_TA, state.lse_TA)


@needs_gpu
@pytest.mark.parametrize("row_format", LatentFormat)
def test_nan_in_a_row_reaches_the_rows_that_see_it_and_no_other(row_format: LatentFormat) -> None:
    pool_PB, query_TAX = make_pool(row_format, 40), make_queries(12, 8).cuda()
    position_T = torch.tensor([600, 601, 602, 603, 604, 605, *[62, 63, 64, 65, -1, 66]], dtype=torch.int32)
    page_RP = make_pages(torch.tensor([606, 67]), 10, pool_PB, row_format.row_bytes)
    options: dict[str, Any] = {"scale": SCALE, "row_scale": ROW_SCALE[row_format]}
    attention = DenseAttention(row_format=row_format, max_rows=12, max_positions=640, num_heads=8, device="cuda")
    arguments = page_RP.cuda(), position_T.cuda()
    clean = attention(query_TAX, strided_on_gpu(pool_PB), *arguments, **options)
    assert bool(clean.out_TAL.isfinite().all())
    for byte in (2, 256, 510, 514, 530, row_format.row_bytes - 2):
        poisoned_PB = pool_PB.clone()
        for request, position in enumerate((603, 64)):
            row_SB = poisoned_PB[page_RP[request, position // 64]].view(PAGE_ROWS, row_format.row_bytes)
            row_SB[position % 64, byte : byte + 2] = 0xFF
        state = attention(query_TAX, poisoned_PB.cuda(), *arguments, **options)
        sees = torch.zeros(12, dtype=torch.bool)
        sees[[3, 4, 5, 8, 9, 11]] = True
        assert bool(state.out_TAL[sees].isnan().all())
        assert bool(state.lse_TA[sees].isnan().all())
        assert torch.equal(state.out_TAL[~sees], clean.out_TAL[~sees])
        assert torch.equal(state.lse_TA[~sees], clean.lse_TA[~sees])


@needs_gpu
@pytest.mark.parametrize("row_format", LatentFormat)
def test_one_split_that_needs_no_folding_gives_the_bits_of_several(row_format: LatentFormat) -> None:
    position_T = torch.tensor([500, -1, 501, 502, 503, -1, *[31, 32, 0, 255, 256, -1]], dtype=torch.int32)
    pool_PB, query_TAX = make_pool(row_format, 40), make_queries(12, 8)
    page_RP = make_pages(torch.tensor([504, 257]), 9, pool_PB, row_format.row_bytes)
    options: dict[str, Any] = {"scale": SCALE, "row_scale": ROW_SCALE[row_format]}
    reference_RP = page_RP.where(page_RP < 1 << 24, 0)
    expected = dense_attention_ref(query_TAX, pool_PB, reference_RP, position_T, row_format=row_format, **options)
    arguments = query_TAX.cuda(), strided_on_gpu(pool_PB), page_RP.cuda(), position_T.cuda()
    states = [
        DenseAttention(row_format=row_format, max_rows=12, max_positions=most, num_heads=8, device="cuda")(
            *arguments, **options
        )
        for most in (512, 576)
    ]
    assert_near(AttentionState(*(tensor.cpu() for tensor in states[0])), expected)
    assert torch.equal(states[0].out_TAL, states[1].out_TAL)
    assert torch.equal(states[0].lse_TA, states[1].lse_TA)


@needs_gpu
@pytest.mark.parametrize("row_format", LISTED)
def test_nan_in_a_listed_row_reaches_its_reader_and_no_other(row_format: LatentFormat) -> None:
    pool_PB = make_pool(row_format, 3).contiguous()
    pool_PB.view(-1, row_format.row_bytes)[70, 300:302] = 0xFF
    index_TK = torch.arange(64, 128).expand(2, -1).clone()
    index_TK[1, 6] = -1  # row 70
    attention = SparseAttention(row_format=row_format, max_rows=2, num_heads=8, num_slots=64, device="cuda")
    count_T = torch.tensor([64, 64], dtype=torch.int32, device="cuda")
    state = attention(make_queries(2, 8).cuda(), pool_PB.cuda(), index_TK.cuda(), count_T, scale=SCALE)
    assert bool(state.out_TAL[0].isnan().all())
    assert bool(state.lse_TA[0].isnan().all())
    assert bool(state.out_TAL[1].isfinite().all())
    assert bool(state.lse_TA[1].isfinite().all())


@needs_gpu
@pytest.mark.parametrize("row_format", LatentFormat)
@pytest.mark.parametrize(("num_requests", "num_heads", "last"), [(1, 64, 131_071), (32, 64, 4095), (1, 8, 200_001)])
def test_long_contexts_equal_the_definition(
    row_format: LatentFormat, num_requests: int, num_heads: int, last: int
) -> None:
    num_pages = last // PAGE_ROWS + 1
    pool_PB = make_pool(row_format, 1000).cuda().repeat(-(-num_requests * num_pages // 1000), 1)
    page_RP = torch.randperm(len(pool_PB), device="cuda")[: num_requests * num_pages].view(num_requests, -1).int()
    position_T = torch.full((num_requests,), last, dtype=torch.int32, device="cuda")
    query_TAX = torch.randn(num_requests, num_heads, LATENT_DIM + ROPE_DIM, device="cuda").bfloat16()
    options: dict[str, Any] = {"scale": SCALE, "row_scale": ROW_SCALE[row_format]}
    attention = DenseAttention(
        row_format=row_format, max_rows=num_requests, max_positions=last + 1, num_heads=num_heads, device="cuda"
    )
    state = attention(query_TAX, pool_PB, page_RP, position_T, **options)
    for row in (0, num_requests - 1):
        one = slice(row, row + 1)
        arguments = (query_TAX[one], pool_PB, page_RP[one], position_T[one])
        expected = dense_attention_ref(*arguments, row_format=row_format, **options)
        assert_near(AttentionState(*(tensor[one] for tensor in state)), expected)
