"""How few descriptors a path takes, and what they leave out."""

import numpy as np
import pytest

from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.layout import EntryKind, EntryLayout, FieldLayout, KvFormat, PoolLayout
from specdec.dcp.pool import KvPool
from specdec.kernels.errors import TransferError
from specdec.transfer.descriptors import Descriptors, RegionMemory, expand_path
from specdec.transfer.placement import dcp, layer_split, replicated
from specdec.transfer.reshard_plan import Path, Span, plan_reshard

PAGE_SIZE, NUM_PAGES = 4, 16


def layout(kv_format: KvFormat = KvFormat.FP8_PACKED) -> PoolLayout:
    return PoolLayout(
        role=PoolRole.TARGET,
        page_size=PAGE_SIZE,
        kv_format=kv_format,
        kv_lora_rank=16,
        rope_head_dim=4,
        index_head_dim=8,
        num_latent_layers=6,
        index_layers=(0, 1, 4),
    )


def first_path(
    entry: EntryLayout, *, source_pages: list[int], destination_pages: list[int], begin: int = 0, end: int
) -> Path:
    """Rank 0 of a layer split over two ranks to the only destination rank."""
    sizes = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
    span = Span(
        source=layer_split(entry.layers, num_ranks=2, model_layers=6, **sizes),
        destination=replicated(entry.layers, **sizes),
        source_pages=np.array(source_pages),
        destination_pages=np.array(destination_pages),
        begin=begin,
        end=end,
    )
    return plan_reshard({"k": span}).paths[0]


def page_major(entry: EntryLayout, path: Path) -> Descriptors:
    source = RegionMemory.page_major(entry, num_layers=len(path.route.layers))
    return expand_path(path, source, RegionMemory.page_major(entry, num_layers=len(entry.layers)))


def layer_major(entry: EntryLayout, path: Path) -> Descriptors:
    region = RegionMemory.layer_major(entry, num_pages=NUM_PAGES)
    return expand_path(path, region, region)


def test_a_page_major_pool_takes_a_descriptor_for_each_page_and_a_layer_major_one_for_each_layer_of_it() -> None:
    latent = layout().latent
    path = first_path(latent, source_pages=[5, 2, 9], destination_pages=[1, 7, 4], end=12)
    assert len(page_major(latent, path)) == 3
    assert set(page_major(latent, path).length_X.tolist()) == {3 * latent.bytes_per_layer_page}
    assert len(layer_major(latent, path)) == 9


def test_neighbouring_pages_are_joined_where_they_are_neighbours_on_both_sides() -> None:
    latent = layout().latent
    path = first_path(latent, source_pages=[2, 3, 4, 8, 7], destination_pages=[5, 6, 7, 11, 10], end=20)
    assert len(layer_major(latent, path)) == 3 * 2  # 2..4, and 7 with 8, though they come the other way round
    index_keys = layout().index_keys  # whole pages join keys and scales too
    path = first_path(index_keys, source_pages=[2, 3, 4], destination_pages=[5, 6, 7], end=12)
    assert len(layer_major(index_keys, path)) == 2


def test_whole_layers_that_are_all_of_a_pool_on_both_sides_are_one_descriptor() -> None:
    latent = layout().latent
    sizes = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
    span = Span(
        source=replicated(range(6), **sizes),
        destination=replicated(range(6), **sizes),
        source_pages=np.arange(5),
        destination_pages=np.arange(5) + 3,
        begin=0,
        end=20,
    )
    (path,) = plan_reshard({"k": span}).paths
    (length,) = page_major(latent, path).length_X.tolist()
    assert length == 5 * latent.bytes_per_page


def test_index_keys_of_part_of_a_page_move_keys_and_scales_in_two_places() -> None:
    """A35: 8 + 4 bytes for each token here, never 12 in one."""
    index_keys = layout(KvFormat.FP8_PACKED).index_keys
    path = first_path(index_keys, source_pages=[3], destination_pages=[6], begin=1, end=3)
    copies = layer_major(index_keys, path)
    page_bytes = index_keys.bytes_per_layer_page
    layer_bytes = NUM_PAGES * page_bytes
    expected = [
        (3 * page_bytes + layer * layer_bytes + offset, length)
        for layer in range(2)
        for offset, length in ((8, 16), (36, 8))
    ]
    assert list(zip(copies.source_offset_X.tolist(), copies.length_X.tolist(), strict=True)) == expected
    assert (copies.destination_offset_X - copies.source_offset_X == 3 * page_bytes).all()


def test_stale_rows_of_a_last_page_are_not_sent() -> None:
    """A41."""
    latent = layout().latent
    path = first_path(latent, source_pages=[0, 1], destination_pages=[0, 1], end=6)
    copies = page_major(latent, path)
    assert copies.num_bytes == 6 * 3 * latent.bytes_per_token


def test_offsets_are_those_of_a_pool() -> None:
    pool = KvPool(layout(), num_pages=NUM_PAGES, geometry=Geometry(1, 0, PoolRole.TARGET))
    buffer = pool.buffer(EntryKind.LATENT)
    latent = layout().latent
    path = first_path(latent, source_pages=[3], destination_pages=[6], end=4)
    copies = page_major(latent, path)
    buffer[6, 0:3] = 7
    (begin,), (length,) = copies.destination_offset_X.tolist(), copies.length_X.tolist()
    flat = buffer.reshape(-1)
    assert (flat[begin : begin + length] == 7).all()
    assert int((flat == 7).sum()) == length


def test_a_path_without_tokens_has_no_descriptors() -> None:
    sizes = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
    span = Span(
        source=replicated([0], **sizes),
        destination=dcp([0], dcp_size=2, **sizes),
        source_pages=np.array([0]),
        destination_pages=np.array([0]),
        begin=0,
        end=3,
    )
    latent = layout().latent
    counts = [len(page_major(latent, path)) for path in plan_reshard({"k": span}).paths]
    assert counts == [1, 0]


def test_sides_with_other_fields_are_refused() -> None:
    latent = layout().latent
    path = first_path(latent, source_pages=[0], destination_pages=[0], end=4)
    source = RegionMemory.page_major(latent, num_layers=3)
    for fields in ((FieldLayout("latent", 0, 99, 99),), (FieldLayout("keys", 0, 44, 44),)):
        other = RegionMemory(page_size=PAGE_SIZE, page_stride=1000, layer_stride=100, fields=fields)
        with pytest.raises(TransferError, match="k: both sides must have the same fields"):
            expand_path(path, source, other)
