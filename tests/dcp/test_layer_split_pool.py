"""A layer-split pool holds and shows every rank what one pool that one rank writes holds and shows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.dcp.communicator import SingleRank
from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.held_layers import layers_of_ranks
from specdec.dcp.layer_split import split_layers
from specdec.dcp.layer_split_pool import LayerSplitPool
from specdec.dcp.layout import KvFormat, PoolLayout
from specdec.dcp.page_table import PageTable, build_page_table
from specdec.dcp.pool import KvPool
from specdec.kernels.row_padding import padded_rows
from tests.support.thread_ranks import ThreadGroups

NUM_LAYERS, INDEX_LAYERS = 5, (0, 1, 4)
NUM_PAGES = 40
LATENT, ROPE, KEY = 8, 4, 8
NUM_SHARED = 4  # rows that the first two requests have in common, in the same pages
# Of each request: rows before the pass, rows of the pass.
PASSES = (((0, 6), (0, 6)), ((6, 3), (6, 1)), ((9, 1), (7, 4), (0, 1)))


@given(num_layers=st.integers(0, 100), num_ranks=st.integers(1, 20))
def test_layers_are_split_into_even_runs(num_layers: int, num_ranks: int) -> None:
    runs = split_layers(num_layers, num_ranks)
    assert [layer for run in runs for layer in run] == list(range(num_layers))
    lengths = [len(run) for run in runs]
    assert len(runs) == num_ranks
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_78_layers_over_8_ranks() -> None:
    assert [len(run) for run in split_layers(78, 8)] == [10, 10, 10, 10, 10, 10, 9, 9]


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_the_draft_layer_belongs_to_the_last_rank(num_ranks: int) -> None:
    layout = layout_of(PoolRole.DRAFT, KvFormat.FLOAT32, page_size=4)
    layers = layers_of_ranks(layout, num_ranks)
    assert [len(each) for each in layers] == [0] * (num_ranks - 1) + [NUM_LAYERS]


@pytest.mark.parametrize("role", PoolRole)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kv_format", KvFormat)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_rank_reads_what_one_pool_holds(
    num_ranks: int, kv_format: KvFormat, page_size: int, role: PoolRole
) -> None:
    layout = layout_of(role, kv_format, page_size=page_size)
    whole = KvPool(layout, num_pages=NUM_PAGES, geometry=Geometry(1, 0, role))
    poison(whole)
    expected = [seen for rows in PASSES for seen in run_pass(whole, rows)]
    groups = ThreadGroups(tp_size=1, dcp_size=1, cp_size=num_ranks)

    def on_rank(rank: int) -> tuple[LayerSplitPool, list[torch.Tensor], list[Any]]:
        pool = pool_of(layout, groups.ranks[rank].cp)
        poison(pool.storage, pool.transient)
        pool.cp.record.is_recording = True
        return pool, [seen for rows in PASSES for seen in run_pass(pool, rows)], pool.cp.record.take()

    ranks = groups.run(on_rank)
    for pool, seen, collectives in ranks:
        for ours, theirs in zip(seen, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert [each[:2] for each in collectives] == [each[:2] for each in ranks[0][2]]
        assert sum(each.kind == "broadcast" for each in collectives) == (num_ranks > 1) * 2 * (NUM_LAYERS + 3)
        for kind, place_of in pool.storage.held.place_of.items():
            for layer, place in place_of.items():
                theirs = whole.buffer(kind)[:NUM_PAGES, whole.held.place_of[kind][layer]]
                assert torch.equal(pool.buffer(kind)[:NUM_PAGES, place], theirs)
    held = [layer for pool, _, _ in ranks for layer in pool.layers]
    assert held == list(range(NUM_LAYERS))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_of_a_pass_are_shared_evenly_and_come_back_in_order(num_ranks: int) -> None:
    groups = ThreadGroups(tp_size=1, dcp_size=1, cp_size=num_ranks)
    layout = layout_of(PoolRole.TARGET, KvFormat.FLOAT32, page_size=4)
    x_TH = torch.arange(14.0).view(7, 2)

    def on_rank(rank: int) -> tuple[int, torch.Tensor]:
        pages, request_index, position = rows_of(((0, 5), (0, 2)), layout.page_size)
        placed = pool_of(layout, groups.ranks[rank].cp).place(pages, request_index=request_index, position=position)
        return placed.metadata.num_tokens, placed.whole(x_TH[placed.rows])

    counts, wholes = zip(*groups.run(on_rank), strict=True)
    assert list(counts) == [len(each) for each in split_layers(7, num_ranks)]
    assert all(torch.equal(whole, x_TH) for whole in wholes)


def test_a_layer_that_is_not_in_the_slot_cannot_be_read() -> None:
    layout = layout_of(PoolRole.TARGET, KvFormat.FLOAT32, page_size=4)
    pages, request_index, position = rows_of(((0, 2),), layout.page_size)
    placed = pool_of(layout, SingleRank("cp")).place(pages, request_index=request_index, position=position)
    placed.store.write_latent(0, torch.ones(8, LATENT), torch.ones(8, ROPE), placed.metadata)
    with pytest.raises(AssertionError, match="latent of layer 1 were asked for, but the slot holds layer 0"):
        placed.store.gather_latent(1, torch.zeros((1, 1), dtype=torch.int64))


@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_count_once_the_pass_has_ended(page_size: int) -> None:
    layout = layout_of(PoolRole.TARGET, KvFormat.FLOAT32, page_size=page_size)
    pool = pool_of(layout, SingleRank("cp"))
    page_ids = page_ids_of(1, page_size)
    asked = np.array([9])
    assert pool.committed_prefix(page_ids, asked).tolist() == [0]
    run_pass(pool, ((0, 6),))
    assert pool.committed_prefix(page_ids, asked).tolist() == [6]
    assert pool.committed_prefix(page_ids, np.array([5])).tolist() == [5]
    pages, request_index, position = rows_of(((4, 3),), page_size)
    placed = pool.place(pages, request_index=request_index, position=position)
    assert pool.committed_prefix(page_ids, asked).tolist() == [6]  # placing alone changes nothing
    with pytest.raises(MemoryError):
        placed.run(broken)
    assert pool.committed_prefix(page_ids, asked).tolist() == [4]
    placed.run(lambda: torch.zeros(8, 1))
    assert pool.committed_prefix(page_ids, asked).tolist() == [7]
    pool.num_committed_M[page_ids[0, 0]] = 0
    assert pool.committed_prefix(page_ids, asked).tolist() == [0]


def run_pass(pool: KvPool | LayerSplitPool, rows: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Write rows of requests in every layer; gives what is read in each: all rows so far, latents and index keys."""
    pages, request_index, position = rows_of(rows, pool.layout.page_size, pool.geometry.role)
    placed = pool.place(pages, request_index=request_index, position=position)
    own_request, own_position = request_index[placed.rows], position[placed.rows]
    seen: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        for layer in range(NUM_LAYERS):
            latent_TX = values(own_request, own_position, LATENT + ROPE, layer=layer)
            placed.store.write_latent(layer, latent_TX[:, :LATENT], latent_TX[:, LATENT:], placed.metadata)
            visible = [(request, row) for request, each in enumerate(rows) for row in range(sum(each))]
            request_V, row_V = np.array(visible).T
            size = pool.layout.page_size
            physical_V = pages.page_id_RQ[request_V, 1 + row_V // size] * size + row_V % size
            seen.append(placed.store.gather_latent(layer, torch.from_numpy(physical_V)[None])[0])
            if layer in INDEX_LAYERS:
                key_TD = values(own_request, own_position, KEY, layer=layer)
                placed.store.write_index_key(layer, key_TD, placed.metadata)
                seen.append(placed.store.gather_index_keys(layer, placed.metadata)[request_V, row_V])
        return torch.zeros(len(latent_TX), 1)

    assert len(placed.run(forward)) == len(own_position)
    assert all(each.isfinite().all() for each in seen)
    return seen


def values(request: np.ndarray, position: np.ndarray, num_values: int, *, layer: int) -> torch.Tensor:
    """Values of some rows, which depend on the row alone; those behind are padding, NaN."""
    rows = [
        np.random.default_rng((layer, 0 if row < NUM_SHARED else each, row)).standard_normal(num_values)
        for each, row in zip(request.tolist(), position.tolist(), strict=True)
    ]
    padding = np.full((padded_rows(len(rows)) - len(rows), num_values), np.nan)
    return torch.from_numpy(np.concatenate((np.array(rows).reshape(-1, num_values), padding))).float()


def poison(*pools: KvPool) -> None:
    for pool in pools:
        for entry in pool.layout.entries:
            pool.buffer(entry.kind).fill_(0xFF)


def broken() -> torch.Tensor:
    raise MemoryError


def layout_of(role: PoolRole, kv_format: KvFormat, *, page_size: int) -> PoolLayout:
    return PoolLayout(
        role=role,
        page_size=page_size,
        kv_format=kv_format,
        kv_lora_rank=LATENT,
        rope_head_dim=ROPE,
        index_head_dim=KEY,
        num_latent_layers=NUM_LAYERS,
        index_layers=INDEX_LAYERS,
        fp8_scales=tuple(0.25 * 2**layer for layer in range(NUM_LAYERS)) if kv_format is KvFormat.FP8 else (),
    )


def pool_of(layout: PoolLayout, cp: Any) -> LayerSplitPool:
    return LayerSplitPool(layout, num_pages=NUM_PAGES, layers_of_ranks=layers_of_ranks(layout, cp.size), cp=cp)


def page_ids_of(num_requests: int, page_size: int) -> np.ndarray:
    """Pages for 12 rows a request; the first two requests share those of their first rows."""
    per_request = -(-12 // page_size)
    page_ids = np.random.default_rng(0).permutation(NUM_PAGES)[: 3 * per_request].reshape(3, per_request)
    page_ids[1, : NUM_SHARED // page_size] = page_ids[0, : NUM_SHARED // page_size]
    return page_ids[:num_requests].astype(np.int64)


def rows_of(
    rows: Sequence[tuple[int, int]], page_size: int, role: PoolRole = PoolRole.TARGET
) -> tuple[PageTable, np.ndarray, np.ndarray]:
    pages = build_page_table(
        page_ids_of(len(rows), page_size),
        geometry=Geometry(1, 0, role),
        page_size=page_size,
        num_pages=NUM_PAGES,
    )
    request_index = np.repeat(np.arange(len(rows)), [count for _, count in rows])
    position = np.concatenate([start + np.arange(count) for start, count in rows])
    return pages, request_index, position
