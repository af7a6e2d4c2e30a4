"""Packed rows are attended to as their values are; a row's bits do not depend on the batch or on how it is cut."""

from typing import Any

import pytest
import torch

from specdec.kernels.absorbed_query import absorbed_query
from specdec.kernels.latent_attention import HEAD_COUNTS
from specdec.kernels.latent_formats import decode_fp8_packed, encode_fp8_packed
from specdec.kernels.latent_rows import LATENT_DIM, PAGE_ROWS, ROPE_DIM
from specdec.kernels.lse_merge import AttentionState
from specdec.kernels.packed_sparse_mla import (
    ROW_BYTES,
    Blocks,
    PackedSparseMla,
    WrittenLast,
    blocks_for,
    kernel_macros,
    packed_sparse_mla_ref,
    slots_per_split,
    split_kernel_macros,
    teams_kernel_macros,
)
from specdec.kernels.rotary import Rotation
from specdec.kernels.sparse_mla import sparse_mla_ref
from specdec.kernels.take_rows import take_rows
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu
from tests.support.misaligned import misaligned

SLOTS = 1100  # no multiple of a tile or a split
SCALE = 0.04
MANY_HEADS = (32, 64)
TEAMS = {"few_rows": 0, "most_rows": 0}
ONE_BLOCK, TWO_BLOCKS = Blocks(teams=1, tiles=1, stages=5, per_sm=1), Blocks(teams=1, tiles=2, stages=2, per_sm=2)


def make_pool(num_pages: int) -> torch.Tensor:
    """Pages that lie apart, NaN between them; latents of very different sizes."""
    generator = torch.Generator().manual_seed(num_pages)
    size = 2.0 ** torch.randint(-5, 5, (num_pages * PAGE_ROWS, 4), generator=generator).repeat_interleave(128, dim=1)
    latent = torch.randn(size.shape, generator=generator) * size
    rope = torch.randn(num_pages * PAGE_ROWS, ROPE_DIM, generator=generator)
    memory = torch.full((num_pages, PAGE_ROWS * ROW_BYTES + 48), 0xFF, dtype=torch.uint8)
    memory[:, :-48] = encode_fp8_packed(latent, rope).view(num_pages, -1)
    return memory[:, :-48]


def make_rows(num_rows: int, num_heads: int, pool_PB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of very different sizes; lists of every length with holes, and no row of the pool behind their counts."""
    generator = torch.Generator().manual_seed(num_rows)
    size = 10.0 ** torch.randint(-4, 1, (num_rows, num_heads, 1), generator=generator)
    query_TAX = (torch.randn(num_rows, num_heads, LATENT_DIM + ROPE_DIM, generator=generator) * size).bfloat16()
    query_TAX[0, 0] = 0
    index_TK = torch.randint(0, len(pool_PB) * PAGE_ROWS, (num_rows, SLOTS), generator=generator)
    index_TK[2::3, :300][torch.rand(index_TK[2::3, :300].shape, generator=generator) < 0.7] = -1
    index_TK[3::7, :600] = -1  # a whole split without a key
    count_T = torch.randint(0, SLOTS + 1, (num_rows,), generator=generator, dtype=torch.int32)
    for row, count in enumerate((SLOTS, 0, 1, 63, 64, 65, 256, 257, 512, 513)[:num_rows]):
        count_T[row] = count
    index_TK[torch.arange(SLOTS) >= count_T[:, None]] = 1 << 30
    return query_TAX, index_TK, count_T


def relative_errors(state: AttentionState, expected: AttentionState) -> torch.Tensor:
    """Of each row that has a key."""
    has_key_T = expected.lse_TA[:, 0] > -torch.inf
    difference = (state.out_TAL.double() - expected.out_TAL)[has_key_T].flatten(1)
    return difference.norm(dim=1) / expected.out_TAL[has_key_T].flatten(1).norm(dim=1)


def test_the_definition_is_attention_over_the_decoded_rows() -> None:
    pool_PB = make_pool(3)
    query_TAX, index_TK, count_T = make_rows(9, 8, pool_PB)
    is_key_TK = (torch.arange(SLOTS) < count_T[:, None]) & (index_TK >= 0)
    values = decode_fp8_packed(pool_PB.reshape(-1, ROW_BYTES), LATENT_DIM, ROPE_DIM).double()
    kv_TKX = values[index_TK.where(is_key_TK, 0)]
    expected = sparse_mla_ref(query_TAX.double(), kv_TKX, is_key_TK, scale=SCALE, latent_dim=LATENT_DIM)
    state = packed_sparse_mla_ref(query_TAX, pool_PB, index_TK, count_T, scale=SCALE)
    torch.testing.assert_close(state, expected)
    assert bool((state.out_TAL[1] == 0).all())
    assert bool((state.lse_TA[1] == -torch.inf).all())


@pytest.mark.parametrize("num_heads", HEAD_COUNTS)
@pytest.mark.parametrize(("index_bytes", "out_bytes"), [(4, 2), (8, 4)])
def test_the_kernels_compile_and_spill_few_words(num_heads: int, index_bytes: int, out_bytes: int) -> None:
    for written_last in WrittenLast:
        sizes = (num_heads, index_bytes, out_bytes, written_last)
        blocks = blocks_for(num_heads)
        macros, shared_bytes = kernel_macros(*sizes, blocks)
        spilled = most_bytes_spilled("packed_sparse_mla.cu", macros)
        assert spilled <= 32  # addresses and the like, a load or two a tile
        assert blocks.per_sm * (shared_bytes + 1024) <= 228 << 10
        if num_heads in MANY_HEADS:
            macros, shared_bytes = teams_kernel_macros(*sizes)
            spilled = most_bytes_spilled("packed_sparse_mla_teams.cu", macros)
            assert spilled <= 128  # kept apart once a tile, while it is scored
            assert dict(macros)["PER_SM"] * (shared_bytes + 1024) <= 228 << 10
        macros, shared_bytes = split_kernel_macros(*sizes)
        assert most_bytes_spilled("packed_sparse_mla_split.cu", macros) <= 32
        assert shared_bytes + 1024 <= 228 << 10


def test_other_sizes_are_refused() -> None:
    sizes = {"max_rows": 4, "num_heads": 8, "num_slots": SLOTS, "device": "cpu"}
    for changes, message in (
        ({"num_heads": 12}, r"num_heads must be one of .*got 12"),
        ({"blocks": TWO_BLOCKS}, "whole blocks, got 8"),
        ({"out_dtype": torch.float16}, "out is float32 or bfloat16.*got torch.float16"),
        ({"index_dtype": torch.int16}, "an index int64 or int32.*torch.int16"),
        ({"max_rows": 0}, "there are rows"),
        ({"num_slots": (64 << 8) + 1}, "1 to 64 splits"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedSparseMla(**(sizes | changes))


def test_other_tensors_are_refused() -> None:
    pool_PB = make_pool(3)
    query_TAX, index_TK, count_T = make_rows(4, 8, pool_PB)
    kernel = PackedSparseMla(max_rows=4, num_heads=8, num_slots=SLOTS, device="cpu")
    tensors = {"query_TAX": query_TAX, "pool_PB": pool_PB, "index_TK": index_TK, "count_T": count_T}
    for changes, message in (
        ({"query_TAX": query_TAX.float()}, r"query must be torch.bfloat16 \(4, 8, 576\)"),
        ({"query_TAX": query_TAX.repeat(2, 1, 1)}, "for 4 query rows, got 8"),
        ({"index_TK": index_TK.int()}, "index must be torch.int64"),
        ({"index_TK": index_TK[:, :-1]}, "index must be .*contiguous"),
        ({"count_T": count_T.long()}, "count must be torch.int32"),
        ({"out_TAL": torch.zeros(4, 8, 512).bfloat16()}, "out must be torch.float32"),
        ({"lse_TA": torch.zeros(4, 9)}, r"lse must be torch.float32 \(4, 8\)"),
        ({"query_TAX": misaligned(query_TAX)}, "query must begin at a multiple of 16 bytes"),
        ({"out_TAL": misaligned(torch.zeros(4, 8, 512))}, "out must begin at a multiple of 16 bytes"),
        ({"pool_PB": pool_PB[:, :-656]}, r"pool must be uint8 \[P, 41984\]"),
        ({"pool_PB": torch.empty(3, 41992, dtype=torch.uint8)[:, :-8]}, "multiples of 16 bytes.*41992 bytes apart"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel(**(tensors | changes), scale=SCALE)


@needs_gpu
@pytest.mark.parametrize("num_heads", HEAD_COUNTS)
@pytest.mark.parametrize("num_rows", [1, 13, 150, 300])
def test_the_kernel_equals_the_definition_and_a_row_is_the_same_in_every_batch(num_heads: int, num_rows: int) -> None:
    pool_PB = make_pool(40)
    query_TAX, index_TK, count_T = make_rows(num_rows, num_heads, pool_PB)
    expected = packed_sparse_mla_ref(query_TAX[:16], pool_PB, index_TK[:16], count_T[:16], scale=SCALE)
    memory = torch.full((40, PAGE_ROWS * ROW_BYTES + 48), 0xFF, dtype=torch.uint8, device="cuda")
    memory[:, :-48] = pool_PB.cuda()
    query_TAX, index_TK, count_T = query_TAX.cuda(), index_TK.cuda(), count_T.cuda()
    sizes = {"max_rows": num_rows, "num_heads": num_heads, "num_slots": SLOTS, "device": "cuda"}
    kernel = PackedSparseMla(**sizes)
    state = kernel(query_TAX, memory[:, :-48], index_TK, count_T, scale=SCALE)
    first = AttentionState(*(tensor[:16].cpu() for tensor in state))
    assert float(relative_errors(first, expected).max()) < 1e-3
    torch.testing.assert_close(first.lse_TA.double(), expected.lse_TA, atol=2e-4, rtol=1e-5)
    assert bool((first.out_TAL[expected.lse_TA == -torch.inf] == 0).all())
    for row in range(0, num_rows, 7):
        one = slice(row, row + 1)
        alone = kernel(query_TAX[one], memory[:, :-48], index_TK[one], count_T[one], scale=SCALE)
        assert torch.equal(alone.out_TAL[0], state.out_TAL[row])
        assert torch.equal(alone.lse_TA[0], state.lse_TA[row])
    ways: list[dict[str, Any]] = [{"few_rows": num_rows}, {"few_rows": 0, "most_rows": num_rows, "blocks": ONE_BLOCK}]
    if num_heads > 8:
        ways.append({"few_rows": 0, "most_rows": num_rows, "blocks": TWO_BLOCKS})
    if num_heads in MANY_HEADS:
        ways.append(TEAMS)
    for way in ways:
        other = PackedSparseMla(**sizes, **way)
        for written_last in WrittenLast:
            state_of_other = other(
                query_TAX, memory[:, :-48], index_TK, count_T, scale=SCALE, written_last=written_last
            )
            assert torch.equal(state_of_other.out_TAL, state.out_TAL)
            assert torch.equal(state_of_other.lse_TA, state.lse_TA)
    out_TAL, lse_TA = torch.full_like(state.out_TAL, torch.nan), torch.full_like(state.lse_TA, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(query_TAX, memory[:, :-48], index_TK, count_T, scale=SCALE, out_TAL=out_TAL, lse_TA=lse_TA)
    for _ in range(3):
        graph.replay()
    assert torch.equal(out_TAL, state.out_TAL)
    assert torch.equal(lse_TA, state.lse_TA)


@needs_gpu
@pytest.mark.parametrize("byte", [5, 511, 530])
def test_nan_in_a_row_that_is_read_reaches_the_output_and_no_other_row(byte: int) -> None:
    pool_PB = make_pool(3).contiguous()
    pool_PB.view(-1, ROW_BYTES)[70, byte : byte + 2] = 0x7F if byte < LATENT_DIM else 0xFF
    index_TK = torch.arange(64, 128, dtype=torch.int32).expand(2, -1).clone()
    index_TK[1, 6] = -1  # row 70
    count_T = torch.tensor([64, 64], dtype=torch.int32)
    for num_heads, way in ((8, {}), (8, {"few_rows": 0}), *((each, TEAMS) for each in MANY_HEADS)):
        query_TAX = torch.randn(2, num_heads, LATENT_DIM + ROPE_DIM).bfloat16()
        kernel = PackedSparseMla(
            max_rows=2,
            num_heads=num_heads,
            num_slots=64,
            device="cuda",
            out_dtype=torch.bfloat16,
            index_dtype=torch.int32,
            **way,
        )
        inputs = (tensor.cuda() for tensor in (query_TAX, pool_PB, index_TK, count_T))
        state = kernel(*inputs, scale=SCALE)
        assert bool(state.out_TAL[0].isnan().all())
        assert bool(state.lse_TA[0].isnan().all())
        assert bool(state.out_TAL[1].isfinite().all())
        assert bool(state.lse_TA[1].isfinite().all())


@needs_gpu
@pytest.mark.parametrize("num_heads", HEAD_COUNTS)
def test_a_row_of_as_many_splits_as_there_may_be_equals_the_definition(num_heads: int) -> None:
    num_slots = 64 * slots_per_split(num_heads)
    pool_PB = make_pool(40)
    query_TAX = torch.randn(3, num_heads, LATENT_DIM + ROPE_DIM).bfloat16()
    index_TK = torch.randint(0, 40 * PAGE_ROWS, (3, num_slots))
    count_T = torch.tensor([num_slots, num_slots - 1, 70], dtype=torch.int32)
    expected = packed_sparse_mla_ref(query_TAX, pool_PB, index_TK, count_T, scale=SCALE)
    memory = torch.full((40, PAGE_ROWS * ROW_BYTES + 48), 0xFF, dtype=torch.uint8, device="cuda")
    memory[:, :-48] = pool_PB.cuda()
    inputs = (query_TAX.cuda(), memory[:, :-48], index_TK.cuda(), count_T.cuda())
    sizes = {"max_rows": 3, "num_heads": num_heads, "num_slots": num_slots, "device": "cuda"}
    kernel, kernel_for_many = PackedSparseMla(**sizes), PackedSparseMla(**sizes, few_rows=0)
    states = [each(*inputs, scale=SCALE) for each in (kernel, kernel_for_many) for _ in range(3)]
    for state in states:  # one behind the other: the counters of a call are zeros for the next
        assert torch.equal(state.out_TAL, states[0].out_TAL)
    alone = kernel(inputs[0][:1], memory[:, :-48], inputs[2][:1], inputs[3][:1], scale=SCALE)  # a part for each split
    assert torch.equal(alone.out_TAL[0], states[0].out_TAL[0])
    first = AttentionState(*(tensor.cpu() for tensor in states[0]))
    assert float(relative_errors(first, expected).max()) < 1e-3
    torch.testing.assert_close(first.lse_TA.double(), expected.lse_TA, atol=2e-4, rtol=1e-5)


@needs_gpu
@pytest.mark.parametrize(("num_heads", "num_rows"), [(8, 6), (8, 40), (64, 40)])
def test_queries_of_the_kernel_in_front_are_read_after_its_end(num_heads: int, num_rows: int) -> None:
    pool_PB = make_pool(40).contiguous().cuda()
    query_TAX, index_TK, count_T = (tensor.cuda() for tensor in make_rows(num_rows, num_heads, pool_PB.cpu()))
    chosen_TK = index_TK.where(index_TK < 1 << 30, -1).int()
    kernel = PackedSparseMla(
        max_rows=num_rows,
        num_heads=num_heads,
        num_slots=SLOTS,
        device="cuda",
        out_dtype=torch.bfloat16,
        index_dtype=torch.int32,
    )
    x_TAY = torch.randn(num_rows, num_heads, 192 + ROPE_DIM, device="cuda").bfloat16()
    key_up_ANL = torch.randn(num_heads, 192, LATENT_DIM, device="cuda").bfloat16() / 14
    angle_TP = torch.randn(num_rows, ROPE_DIM // 2, device="cuda")
    rotation = Rotation(cos_TP=angle_TP.cos(), sin_TP=angle_TP.sin())
    order_T = torch.randperm(num_rows, device="cuda")
    row_TK = torch.empty_like(chosen_TK)
    out_TAL = torch.empty(num_rows, num_heads, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    lse_TA = torch.empty(num_rows, num_heads, device="cuda")

    def run(last: WrittenLast) -> None:
        take_rows(order_T, [chosen_TK], [row_TK])
        absorbed_query(x_TAY, key_up_ANL, rotation, out_TAX=query_TAX)
        kernel(query_TAX, pool_PB, row_TK, count_T, scale=SCALE, written_last=last, out_TAL=out_TAL, lse_TA=lse_TA)

    run(WrittenLast.ANYTHING)
    expected = out_TAL.clone(), lse_TA.clone()
    run(WrittenLast.QUERIES)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query_TAX.fill_(torch.nan)
        row_TK.fill_(-1)
        run(WrittenLast.QUERIES)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out_TAL, expected[0])
        assert torch.equal(lse_TA, expected[1])
