"""Attention and selection over thread ranks against one rank: the same positions, the same output, the same bytes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.dcp.communicator import Collective, ParallelGroups, single_rank_groups
from specdec.dcp.exchange import ExchangeStrategy, exchange_bytes, query_bytes
from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.global_top_k import candidate_bytes
from specdec.dcp.layout import KvFormat, PoolLayout
from specdec.dcp.metadata import build_metadata
from specdec.dcp.pool import KvPool
from specdec.kernels.errors import GeometryError
from specdec.kernels.rotary import inverse_frequency, rotation_at
from specdec.kernels.row_padding import pad_rows
from specdec.models.glm.attention import LatentAttention
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.selection import Selection
from tests.support.thread_ranks import run_ranks
from tests.support.tiny_checkpoint import tiny_config, tiny_spec

CONFIG = GlmConfig.from_dict(tiny_config(tiny_spec(index_topk=8)))
PREFIX = "layers.0"
PAGE_SIZE = 4
ONE_RANK = Geometry(1, 0, PoolRole.TARGET)

parametrize_strategies = pytest.mark.parametrize("exchange", ExchangeStrategy)
Rows = list[tuple[int, int]]  # (request, position) of each row of a pass


def make_parameters() -> dict[str, torch.Tensor]:
    """An attention layer and its indexer; rows of weights have length 1."""
    generator = torch.Generator().manual_seed(0)
    nope, rope, value = CONFIG.qk_nope_head_dim, CONFIG.qk_rope_head_dim, CONFIG.v_head_dim
    latent, hidden, num_heads = CONFIG.kv_lora_rank, CONFIG.hidden_size, CONFIG.num_heads

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    return {
        f"{PREFIX}.attention.qkv_a_proj": matrix(CONFIG.q_lora_rank + latent + rope, hidden),
        f"{PREFIX}.attention.q_a_layernorm": 1 + 0.1 * torch.randn(CONFIG.q_lora_rank, generator=generator),
        f"{PREFIX}.attention.kv_a_layernorm": 1 + 0.1 * torch.randn(latent, generator=generator),
        f"{PREFIX}.attention.q_b_proj": 2 * matrix(num_heads * (nope + rope), CONFIG.q_lora_rank),
        f"{PREFIX}.attention.kv_b_proj": matrix(num_heads, nope + value, latent),
        f"{PREFIX}.attention.o_proj": matrix(hidden, num_heads * value),
        f"{PREFIX}.indexer.wq_b": matrix(CONFIG.index_num_heads * CONFIG.index_head_dim, CONFIG.q_lora_rank),
        f"{PREFIX}.indexer.wk": matrix(CONFIG.index_head_dim, hidden),
        f"{PREFIX}.indexer.k_norm_weight": torch.ones(CONFIG.index_head_dim),
        f"{PREFIX}.indexer.k_norm_bias": torch.zeros(CONFIG.index_head_dim),
        f"{PREFIX}.indexer.weights_proj": matrix(CONFIG.index_num_heads, hidden),
    }


PARAMETERS = make_parameters()


def share_of(parameters: Mapping[str, torch.Tensor], *, rank: int, size: int) -> dict[str, torch.Tensor]:
    """The heads of one tensor-parallel rank."""
    share = dict(parameters)
    for name, dim in (("q_b_proj", 0), ("kv_b_proj", 0), ("o_proj", 1)):
        share[f"{PREFIX}.attention.{name}"] = parameters[f"{PREFIX}.attention.{name}"].chunk(size, dim=dim)[rank]
    return share


class Case(NamedTuple):
    """Requests, the passes that write and attend to their rows, and where their pages lie."""

    lengths: list[int]
    passes: list[Rows]
    kv_format: KvFormat = KvFormat.FLOAT32
    dtype: torch.dtype = torch.float32
    index_topk: int = 8

    def x_of(self, rows: Rows) -> torch.Tensor:
        """The normed input of each row: a function of request and position."""
        values = torch.randn(len(self.lengths), 450, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
        request, position = torch.tensor(rows, dtype=torch.int64).T
        return values[request, position].to(self.dtype)

    def page_table(self, dcp_size: int) -> tuple[np.ndarray, int]:
        """Page ids in no order, so that a rank may own many pages of a request, or none; and pages of a rank."""
        num_pages_R = [-(-length // PAGE_SIZE) for length in self.lengths]
        num_pages = sum(num_pages_R)
        ids = np.random.default_rng(len(self.lengths)).permutation(num_pages * dcp_size).astype(np.int64)
        table = np.full((len(self.lengths), max(num_pages_R)), -1, dtype=np.int64)
        for request, count in enumerate(num_pages_R):
            table[request, :count], ids = ids[:count], ids[count:]
        return table, num_pages


class Outcome(NamedTuple):
    """Rows of all passes in order."""

    out_TH: torch.Tensor
    position_TK: torch.Tensor
    collectives: list[list[Collective]]  # of each pass


def run_rank(case: Case, groups: ParallelGroups, *, exchange: ExchangeStrategy, geometry: Geometry) -> Outcome:
    page_table, num_pages = case.page_table(geometry.size)
    pool = make_pool(case.kv_format, geometry, num_pages)
    share = share_of(PARAMETERS, rank=groups.tp.rank, size=groups.tp.size)
    attention = LatentAttention(
        replace(CONFIG, index_topk=case.index_topk),
        {name: tensor.to(case.dtype) if "k_norm" not in name else tensor for name, tensor in share.items()},
        PREFIX,
        has_indexer=True,
        latent_norm_eps=1e-5,
        parallel=groups,
        exchange=exchange,
    )
    frequency = inverse_frequency(theta=1e4, dim=CONFIG.qk_rope_head_dim, device=torch.device("cpu"))
    outs, positions, collectives = [], [], []
    groups.record.is_recording = True
    for rows in case.passes:
        request_index, position = np.array(rows, dtype=np.int64).T
        metadata = build_metadata(
            geometry=geometry,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            request_index=request_index,
            position=position,
            page_table=page_table,
        )
        out_TH, selection = attention.forward(
            pad_rows(case.x_of(rows)),
            rotation_at(metadata.position_T, frequency),
            None,
            metadata=metadata,
            pool=pool,
            layer=0,
        )
        assert not out_TH[len(rows) :].any()
        assert selection.position_TK.shape == (len(rows), case.index_topk)
        outs.append(out_TH[: len(rows)])
        positions.append(selection.position_TK)
        collectives.append(groups.record.take())
    return Outcome(torch.cat(outs), torch.cat(positions), collectives)


def make_pool(kv_format: KvFormat, geometry: Geometry, num_pages: int) -> KvPool:
    """A pool whose memory is NaN."""
    layout = PoolLayout(
        role=geometry.role,
        page_size=PAGE_SIZE,
        kv_format=kv_format,
        kv_lora_rank=CONFIG.kv_lora_rank,
        rope_head_dim=CONFIG.qk_rope_head_dim,
        index_head_dim=CONFIG.index_head_dim,
        num_latent_layers=1,
        index_layers=(0,),
        fp8_scales=(0.05,) if kv_format is KvFormat.FP8 else (),
    )
    pool = KvPool(layout, num_pages=num_pages, geometry=geometry)
    for entry in layout.entries:
        pool.buffer(entry.kind).fill_(0xFF)  # NaN in float32, bfloat16 and e4m3 alike
    return pool


def run_dcp(
    case: Case, *, tp_size: int, dcp_size: int, exchange: ExchangeStrategy = ExchangeStrategy.PACKED
) -> list[Outcome]:
    def run(groups: ParallelGroups) -> Outcome:
        geometry = Geometry(dcp_size, groups.dcp.rank, PoolRole.TARGET)
        return run_rank(case, groups, exchange=exchange, geometry=geometry)

    return run_ranks(run, tp_size=tp_size, dcp_size=dcp_size)


def run_one_rank(case: Case) -> Outcome:
    with torch.inference_mode():
        return run_rank(case, single_rank_groups(), exchange=ExchangeStrategy.PACKED, geometry=ONE_RANK)


def prompts_then_verification(lengths: list[int], num_drafts: int) -> list[Rows]:
    """Every prompt in one pass, then its last rows once more, as a verification of drafts has them."""
    prompts = [(request, p) for request, length in enumerate(lengths) for p in range(length)]
    last = [(request, p) for request, n in enumerate(lengths) for p in range(max(0, n - num_drafts - 1), n)]
    return [prompts, last]


def assert_equal_outcomes(outcomes: list[Outcome], expected: Outcome, *, atol: float = 2e-5) -> None:
    for outcome in outcomes:
        assert torch.equal(outcome.position_TK, expected.position_TK)
        assert torch.equal(outcome.out_TH, outcomes[0].out_TH)  # bits: a sum over ranks is the same on each
        torch.testing.assert_close(outcome.out_TH, expected.out_TH, atol=atol, rtol=0)


@parametrize_strategies
@pytest.mark.parametrize(("tp_size", "dcp_size"), [(2, 1), (2, 2), (4, 2), (4, 4), (8, 4)])
def test_prompts_of_every_length_up_to_two_pages_a_rank_and_one_token(
    tp_size: int, dcp_size: int, exchange: ExchangeStrategy
) -> None:
    lengths = list(range(1, 2 * PAGE_SIZE * dcp_size + 2))
    case = Case(lengths, prompts_then_verification(lengths, num_drafts=3))
    outcomes = run_dcp(case, tp_size=tp_size, dcp_size=dcp_size, exchange=exchange)
    assert_equal_outcomes(outcomes, run_one_rank(case))


@parametrize_strategies
def test_eight_ranks_with_a_head_each(exchange: ExchangeStrategy) -> None:
    lengths = [1, 2, 5, 17, 2 * PAGE_SIZE * 8 + 1]
    case = Case(lengths, prompts_then_verification(lengths, num_drafts=5))
    assert_equal_outcomes(run_dcp(case, tp_size=8, dcp_size=8, exchange=exchange), run_one_rank(case))


@pytest.mark.parametrize("kv_format", KvFormat)
@pytest.mark.parametrize("dcp_size", [2, 4])
def test_every_kv_format_gives_what_it_gives_on_one_rank(kv_format: KvFormat, dcp_size: int) -> None:
    lengths = [3, 40, 9]
    case = Case(lengths, prompts_then_verification(lengths, num_drafts=3), kv_format=kv_format)
    assert_equal_outcomes(run_dcp(case, tp_size=4, dcp_size=dcp_size), run_one_rank(case))


@parametrize_strategies
def test_a_bfloat16_layer_differs_by_rounding_only(exchange: ExchangeStrategy) -> None:
    lengths = [3, 40]
    passes = prompts_then_verification(lengths, num_drafts=3)
    case = Case(lengths, passes, kv_format=KvFormat.BFLOAT16, dtype=torch.bfloat16)
    outcomes = run_dcp(case, tp_size=4, dcp_size=4, exchange=exchange)
    assert_equal_outcomes(outcomes, run_one_rank(case), atol=0.03)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    sizes=st.sampled_from([(2, 2), (4, 2), (4, 4), (8, 8)]),
    exchange=st.sampled_from(ExchangeStrategy),
    num_drafts=st.integers(0, 5),
)
def test_any_batch_gives_what_one_rank_gives(
    lengths: list[int], sizes: tuple[int, int], exchange: ExchangeStrategy, num_drafts: int
) -> None:
    case = Case(lengths, prompts_then_verification(lengths, num_drafts))
    assert_equal_outcomes(run_dcp(case, tp_size=sizes[0], dcp_size=sizes[1], exchange=exchange), run_one_rank(case))


@parametrize_strategies
@pytest.mark.parametrize(("tp_size", "dcp_size"), [(2, 2), (4, 2), (4, 4)])
def test_one_pass_and_row_by_row_give_the_same_bits(tp_size: int, dcp_size: int, exchange: ExchangeStrategy) -> None:
    lengths = [5, 41]
    rows = [(request, p) for request, length in enumerate(lengths) for p in range(length)]
    whole, alone, chunked = (
        run_dcp(Case(lengths, passes), tp_size=tp_size, dcp_size=dcp_size, exchange=exchange)[0]
        for passes in ([rows], [[row] for row in rows], [rows[i : i + 7] for i in range(0, len(rows), 7)])
    )
    for other in (alone, chunked):
        assert torch.equal(other.position_TK, whole.position_TK)
        assert torch.equal(other.out_TH, whole.out_TH)


@pytest.mark.parametrize(("tp_size", "dcp_size"), [(1, 1), (2, 2)])
def test_many_rows_and_several_tiles_of_slots_give_the_bits_of_few(tp_size: int, dcp_size: int) -> None:
    """One product over all slots of a rank would differ: its 150 slots of a row have other bits in 192 than in 256."""
    lengths = [450, 3, 300, 20]
    prompts, last = prompts_then_verification(lengths, num_drafts=3)
    assert len(prompts) > 256  # more than are exchanged at once
    together, apart = (
        Case(lengths, passes, index_topk=400)
        for passes in (
            [prompts, last],
            [*(prompts[i : i + 61] for i in range(0, len(prompts), 61)), *([row] for row in last)],
        )
    )
    whole = run_dcp(together, tp_size=tp_size, dcp_size=dcp_size)
    assert_equal_outcomes(whole, run_one_rank(together))
    other = run_dcp(apart, tp_size=tp_size, dcp_size=dcp_size)[0]
    assert torch.equal(other.position_TK, whole[0].position_TK)
    assert torch.equal(other.out_TH, whole[0].out_TH)


@parametrize_strategies
def test_every_rank_sends_the_bytes_of_the_formulas(exchange: ExchangeStrategy) -> None:
    tp_size, dcp_size, num_heads = 4, 2, 2
    lengths = [1, 6, 30]
    case = Case(lengths, [*prompts_then_verification(lengths, num_drafts=3), [(0, 0)], [(0, 0), (1, 5)]])
    outcomes = run_dcp(case, tp_size=tp_size, dcp_size=dcp_size, exchange=exchange)
    most_owned = max(np.bincount(row[row >= 0] % dcp_size).max() for row in case.page_table(dcp_size)[0])
    per_row = query_bytes(
        dcp_size=dcp_size,
        num_heads=num_heads,
        query_dim=CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim,
        value_bytes=4,
    ) + exchange_bytes(exchange, dcp_size=dcp_size, num_heads=num_heads, latent_dim=CONFIG.kv_lora_rank)
    candidates = candidate_bytes(dcp_size=dcp_size, num_candidates=min(CONFIG.index_topk, int(most_owned) * PAGE_SIZE))
    for index, rows in enumerate(case.passes):
        is_scored = max(position for _, position in rows) >= CONFIG.index_topk
        for outcome in outcomes:
            dcp = [collective for collective in outcome.collectives[index] if collective.group == "dcp"]
            assert sum(collective.num_bytes for collective in dcp) == len(rows) * (per_row + is_scored * candidates)
            assert outcome.collectives[index] == outcomes[0].collectives[index]


def test_metadata_of_one_rank_makes_no_dcp_collective_in_a_group_of_many() -> None:
    lengths = [30, 2]
    case = Case(lengths, prompts_then_verification(lengths, num_drafts=3))
    expected = run_one_rank(case)

    def run_replicated(groups: ParallelGroups) -> Outcome:
        groups.dcp.record.is_recording = True
        whole = ParallelGroups(tp=single_rank_groups().tp, dcp=groups.dcp)  # every rank holds all heads and all pages
        outcome = run_rank(case, whole, exchange=ExchangeStrategy.PACKED, geometry=ONE_RANK)
        assert groups.dcp.record.take() == []
        return outcome

    for outcome in run_ranks(run_replicated, tp_size=4, dcp_size=4):
        assert torch.equal(outcome.position_TK, expected.position_TK)
        assert torch.equal(outcome.out_TH, expected.out_TH)


@pytest.mark.parametrize("geometry", [Geometry(2, 0, PoolRole.TARGET), Geometry(4, 1, PoolRole.TARGET)])
def test_metadata_of_another_group_is_refused_before_anything_is_written(geometry: Geometry) -> None:
    case = Case([3], [[(0, 0)]])

    def run(groups: ParallelGroups) -> None:
        for other in (groups, single_rank_groups()):
            with pytest.raises(GeometryError, match="dcp ranks"):
                run_rank(case, other, exchange=ExchangeStrategy.PACKED, geometry=geometry)

    run_ranks(lambda groups: run(groups) if groups.dcp.rank == 1 - geometry.rank else None, tp_size=2, dcp_size=2)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    dcp_size=st.sampled_from([1, 2, 4, 8]),
    num_drafts=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_every_slot_read_holds_the_selected_position_of_the_rows_own_request(
    lengths: list[int], dcp_size: int, num_drafts: int, seed: int
) -> None:
    prompts, rows = prompts_then_verification(lengths, num_drafts)
    generator = np.random.default_rng(seed)
    selected = torch.full((len(rows), 24), -1)
    for t, (_, position) in enumerate(rows):
        chosen = generator.permutation(position + 1)[: generator.integers(1, 25)]
        selected[t, : len(chosen)] = torch.from_numpy(np.sort(chosen))
    read: list[list[int]] = [[] for _ in rows]
    page_table, num_pages = Case(lengths, []).page_table(dcp_size)
    for rank in range(dcp_size):
        geometry = Geometry(dcp_size, rank, PoolRole.TARGET)
        pool = make_pool(KvFormat.FLOAT32, geometry, num_pages)
        metadata_of_prompts, metadata = (
            build_metadata(
                geometry=geometry,
                page_size=PAGE_SIZE,
                num_pages=num_pages,
                request_index=np.array(some, dtype=np.int64)[:, 0],
                position=np.array(some, dtype=np.int64)[:, 1],
                page_table=page_table,
            )
            for some in (prompts, rows)
        )
        tag_T = metadata_of_prompts.request_index_T * 1000 + metadata_of_prompts.position_T
        tags = tag_T[:, None].expand(-1, CONFIG.kv_lora_rank).float()
        pool.write_latent(0, tags, tags[:, : CONFIG.qk_rope_head_dim], metadata_of_prompts)
        selection = Selection.of(selected, metadata)
        assert selection.row_TW.shape[1] % selection.slots_per_tile == 0
        assert torch.equal(selection.row_TW >= 0, selection.owned_TW)
        found_TW = pool.gather_latent(0, selection.row_TW)[..., 0]
        assert not found_TW[~selection.owned_TW].any()
        for t, (request, _) in enumerate(rows):
            num_owned = int(selection.owned_TW[t].sum())
            assert selection.owned_TW[t, :num_owned].all()
            tags_of_row = found_TW[t, :num_owned].int().tolist()
            assert tags_of_row == sorted(tags_of_row)
            read[t] += [tag - 1000 * request for tag in tags_of_row]
    assert [sorted(positions) for positions in read] == [row[row >= 0].tolist() for row in selected]


def test_a_rank_works_on_as_many_tiles_as_its_own_share_needs() -> None:
    page_table = np.arange(64, dtype=np.int64)[None]
    selected = torch.arange(256)[None]
    widths = {}
    for dcp_size in (1, 2, 4, 8):
        metadata = build_metadata(
            geometry=Geometry(dcp_size, 0, PoolRole.TARGET),
            page_size=PAGE_SIZE,
            num_pages=64 // dcp_size,
            request_index=np.zeros(1, dtype=np.int64),
            position=np.array([255]),
            page_table=page_table,
        )
        widths[dcp_size] = Selection.of(selected, metadata).row_TW.shape[1]
    assert widths == {1: 256, 2: 128, 4: 64, 8: 64}
