"""How few descriptors a path takes, and what they leave out."""

import numpy as np
import pytest

from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.layout import EntryKind, EntryLayout, FieldLayout, KvFormat, PoolLayout
from specdec.dcp.pool import KvPool
from specdec.kernels.errors import TransferError
from specdec.kernels.piece_repeats import Layers, Repeats
from specdec.transfer.descriptors import Descriptors, RegionMemory, expand_path, repeat_path
from specdec.transfer.placement import dcp, layer_split, replicated, token_interleaved
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


def interleaved_path(entry: EntryLayout, *, interleave: int, end: int, begin: int = 0) -> Path:
    """All layers, from a rank that holds all tokens to the first of two that take turns."""
    sizes = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
    span = Span(
        source=replicated(entry.layers, **sizes),
        destination=token_interleaved(entry.layers, width=interleave, num_shards=2, **sizes),
        source_pages=np.array([5, 2, 9, 0, 7]),
        destination_pages=np.array([[3, 8, 1], [0, 4, 6]]),
        begin=begin,
        end=end,
    )
    return next(path for path in plan_reshard({"k": span}).paths if path.destination_rank == 0)


def ranges(copies: Descriptors) -> list[tuple[int, int, int]]:
    arrays = (copies.source_offset_X, copies.destination_offset_X, copies.length_X)
    return sorted(zip(*(array.tolist() for array in arrays), strict=True))


@pytest.mark.parametrize(("interleave", "begin", "end"), [(1, 0, 20), (1, 3, 18), (2, 0, 20), (2, 1, 19), (2, 0, 13)])
def test_interleaved_tokens_of_a_page_are_one_descriptor_for_all_rows_and_layers(
    interleave: int, begin: int, end: int
) -> None:
    for entry in (layout().latent, layout().index_keys):
        path = interleaved_path(entry, interleave=interleave, begin=begin, end=end)
        region = RegionMemory.layer_major(entry, num_pages=NUM_PAGES)
        repeated = repeat_path(path, region, region)
        assert ranges(repeated.once()) == ranges(expand_path(path, region, region))
        assert repeated.num_bytes == repeated.once().num_bytes
        pages = {token // PAGE_SIZE for token in range(begin, end) if token % 2 == 0}
        if interleave == 1:
            assert repeated.repeats is not None
            assert repeated.layers.num_layers == len(entry.layers)
            assert len(repeated) == len(pages) * len(entry.fields)
        else:  # a block a page
            assert repeated.repeats is None


def test_repeats_are_ranges_at_even_steps() -> None:
    one, two = np.array([10, 50]), np.array([100, 0])
    repeats = Repeats(np.array([3, 1]), np.array([7, 9]), np.array([4, 9]))
    copies = Descriptors(one, two, np.array([4, 2]), repeats)
    assert ranges(copies.once()) == [(10, 100, 4), (17, 104, 4), (24, 108, 4), (50, 0, 2)]
    assert copies.num_bytes == 14
    assert [array.tolist() for array in copies.ends()] == [[28, 52], [112, 2]]
    assert ranges(copies[1:].once()) == [(50, 0, 2)]
    assert copies[:1].repeats is not None


def test_layers_are_all_of_it_again_at_even_steps() -> None:
    copies = Descriptors(np.array([10, 50]), np.array([100, 0]), np.array([4, 2]), None, Layers(2, 1000, 500))
    assert ranges(copies.once()) == [(10, 100, 4), (50, 0, 2), (1010, 600, 4), (1050, 500, 2)]
    assert copies.num_bytes == 12
    assert [array.tolist() for array in copies.ends()] == [[1014, 1052], [604, 502]]
    assert copies[:1].layers == copies.layers


def test_layers_at_uneven_places_have_descriptors_of_their_own() -> None:
    entry = layout().index_keys
    sizes = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
    span = Span(
        source=replicated(range(5), **sizes),  # its places of layers 0, 1 and 4 are not evenly spaced
        destination=token_interleaved(entry.layers, width=1, num_shards=2, **sizes),
        source_pages=np.array([5, 2]),
        destination_pages=np.array([[3], [0]]),
        begin=0,
        end=8,
    )
    path = plan_reshard({"k": span}).paths[0]
    region = RegionMemory.layer_major(entry, num_pages=NUM_PAGES)
    repeated = repeat_path(path, region, region)
    assert repeated.layers.num_layers == 1
    assert len(repeated) == 2 * 3 * len(entry.fields)
    assert ranges(repeated.once()) == ranges(expand_path(path, region, region))
