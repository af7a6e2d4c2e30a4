"""Both exchange strategies over thread ranks against attention on one rank, and the bytes they send."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.dcp.communicator import Collective, ParallelGroups
from specdec.dcp.exchange import ExchangeStrategy, exchange_bytes, exchange_states, gather_heads, query_bytes
from specdec.kernels.lse_merge import AttentionState, merge_states_ref
from tests.support.thread_ranks import run_ranks

LATENT_DIM = 8

parametrize_strategies = pytest.mark.parametrize("strategy", ExchangeStrategy)
parametrize_sizes = pytest.mark.parametrize("size", [2, 4, 8])


def make_states(size: int, *, num_rows: int, num_heads: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial attention of every rank for all heads of the group; a third of it, and one row on all ranks, is empty."""
    generator = torch.Generator().manual_seed(seed)
    out_NTGL = torch.randn(size, num_rows, size * num_heads, LATENT_DIM, generator=generator)
    lse_NTG = 5 * torch.randn(size, num_rows, size * num_heads, generator=generator)
    is_empty_NTG = torch.rand(lse_NTG.shape, generator=generator) < 1 / 3
    is_empty_NTG[:, 0] = True
    return out_NTGL.masked_fill(is_empty_NTG[..., None], torch.nan), lse_NTG.masked_fill(is_empty_NTG, -torch.inf)


def exchange_all(
    out_NTGL: torch.Tensor,
    lse_NTG: torch.Tensor,
    strategy: ExchangeStrategy,
    *,
    first_owner_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[list[Collective]]]:
    """Merged output of all heads [T, G, L], and each rank's collectives; first pages are rank 0's unless given."""
    first_T = torch.zeros(out_NTGL.shape[1], dtype=torch.int64) if first_owner_T is None else first_owner_T

    def exchange(groups: ParallelGroups) -> tuple[torch.Tensor, list[Collective]]:
        groups.record.is_recording = True
        state = AttentionState(out_NTGL[groups.dcp.rank], lse_NTG[groups.dcp.rank])
        return exchange_states(state, groups.dcp, strategy, first_owner_T=first_T), groups.record.take()

    outs, records = zip(*run_ranks(exchange, tp_size=len(out_NTGL), dcp_size=len(out_NTGL)), strict=True)
    return torch.cat(outs, dim=1), list(records)


@settings(max_examples=25)
@given(
    size=st.sampled_from([2, 4, 8]),
    strategy=st.sampled_from(ExchangeStrategy),
    num_rows=st.integers(1, 5),
    num_heads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_each_rank_keeps_its_own_heads_merged_over_all_ranks(
    size: int, strategy: ExchangeStrategy, num_rows: int, num_heads: int, seed: int
) -> None:
    out_NTGL, lse_NTG = make_states(size, num_rows=num_rows, num_heads=num_heads, seed=seed)
    merged_TGL, _ = exchange_all(out_NTGL, lse_NTG, strategy)
    expected_TGL = merge_states_ref(out_NTGL.double(), lse_NTG.double()).out_TAL
    torch.testing.assert_close(merged_TGL.double(), expected_TGL.nan_to_num(nan=0.0), rtol=1e-5, atol=1e-6)
    assert not merged_TGL[0].any()


@parametrize_strategies
@parametrize_sizes
def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it(strategy: ExchangeStrategy, size: int) -> None:
    out_NTGL, lse_NTG = make_states(size, num_rows=21, num_heads=3, seed=size)
    whole_TGL, _ = exchange_all(out_NTGL, lse_NTG, strategy)
    for row in range(21):
        alone_TGL, _ = exchange_all(out_NTGL[:, row : row + 1], lse_NTG[:, row : row + 1], strategy)
        assert torch.equal(alone_TGL[0], whole_TGL[row])


@parametrize_strategies
@parametrize_sizes
def test_a_row_has_the_same_bits_whichever_rank_its_pages_begin_on(strategy: ExchangeStrategy, size: int) -> None:
    out_NTGL, lse_NTG = make_states(size, num_rows=17, num_heads=2, seed=size)
    merged_TGL, _ = exchange_all(out_NTGL, lse_NTG, strategy)
    first_owner_T = torch.arange(17) * 5 % size
    shard_NT = (torch.arange(size)[:, None] - first_owner_T) % size  # which shard of the row each rank has now
    row_T = torch.arange(17)
    moved_TGL, _ = exchange_all(
        out_NTGL[shard_NT, row_T], lse_NTG[shard_NT, row_T], strategy, first_owner_T=first_owner_T
    )
    assert torch.equal(moved_TGL, merged_TGL)


@parametrize_sizes
def test_the_strategies_give_the_same_bits(size: int) -> None:
    out_NTGL, lse_NTG = make_states(size, num_rows=5, num_heads=3, seed=size)
    gathered_TGL, packed_TGL = (exchange_all(out_NTGL, lse_NTG, strategy)[0] for strategy in ExchangeStrategy)
    assert torch.equal(gathered_TGL, packed_TGL)


@parametrize_sizes
def test_queries_of_the_group_stand_in_rank_order(size: int) -> None:
    def gather(groups: ParallelGroups) -> torch.Tensor:
        own_TAX = torch.arange(2 * 3 * 5).view(2, 3, 5) + 100 * groups.dcp.rank
        return gather_heads(own_TAX, groups.dcp)

    for query_TGX in run_ranks(gather, tp_size=size, dcp_size=size):
        assert query_TGX.shape == (2, 3 * size, 5)
        assert torch.equal(query_TGX[:, :, 0] // 100, torch.arange(size).repeat_interleave(3).expand(2, -1))
        assert torch.equal(query_TGX[1, 3:6], torch.arange(15, 30).view(3, 5) + 100)


@parametrize_strategies
@parametrize_sizes
def test_bytes_sent_are_those_of_the_formula(strategy: ExchangeStrategy, size: int) -> None:
    num_rows, num_heads = 3, 2
    out_NTGL, lse_NTG = make_states(size, num_rows=num_rows, num_heads=num_heads, seed=0)
    formula = exchange_bytes(strategy, dcp_size=size, num_heads=num_heads, latent_dim=LATENT_DIM)
    _, records = exchange_all(out_NTGL, lse_NTG, strategy)
    for record in records:
        assert sum(collective.num_bytes for collective in record) == num_rows * formula
        assert {collective.group for collective in record} == {"dcp"}
    kinds = {ExchangeStrategy.GATHER_SCATTER: ["all_gather", "all_to_all"], ExchangeStrategy.PACKED: ["all_to_all"]}
    assert [[collective.kind for collective in record] for record in records] == [kinds[strategy]] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@parametrize_sizes
def test_query_bytes_sent_are_those_of_the_formula(size: int, dtype: torch.dtype) -> None:
    def gather(groups: ParallelGroups) -> int:
        groups.record.is_recording = True
        gather_heads(torch.zeros(3, 2, 5, dtype=dtype), groups.dcp)
        return sum(collective.num_bytes for collective in groups.record.take())

    expected = 3 * query_bytes(dcp_size=size, num_heads=2, query_dim=5, value_bytes=dtype.itemsize)
    assert run_ranks(gather, tp_size=size, dcp_size=size) == [expected] * size
