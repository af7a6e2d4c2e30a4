"""The parts of a path move what the path moves, in order of its layers."""

from dataclasses import replace

import numpy as np
import pytest

from specdec.dcp.layout import EntryKind, EntryLayout, FieldLayout
from specdec.ranks.layer_parts import PART_BYTES, layer_parts, parts_by_layer
from specdec.transfer.descriptors import Descriptors, RegionMemory, expand_path
from specdec.transfer.placement import Placement, by_rank
from specdec.transfer.reshard_plan import Path, Span, plan_reshard

PAGE_SIZE, TOKENS = 64, 150
ROW = 656
LATENT_PAGE = PAGE_SIZE * ROW


def path_of(source_layers: list[int], destination_layers: list[int]) -> tuple[Path, RegionMemory, RegionMemory]:
    """The one path from a rank with some layers to a rank with some."""
    placements = [by_rank([layers], page_size=PAGE_SIZE, num_pages=8) for layers in (source_layers, destination_layers)]
    pages = np.array([5, 2, 7]), np.array([0, 6, 1])
    span = Span(
        source=placements[0],
        source_pages=pages[0],
        destination=placements[1],
        destination_pages=pages[1],
        begin=0,
        end=TOKENS,
    )
    (path,) = plan_reshard({"target.latent": span}).paths
    return path, *(memory_of(placement) for placement in placements)


def memory_of(placement: Placement) -> RegionMemory:
    layers = placement.rank_layers[0]
    entry = EntryLayout(EntryKind.LATENT, tuple(layers), PAGE_SIZE, (FieldLayout("latent", 0, ROW, ROW),))
    return RegionMemory.page_major(entry, num_layers=len(layers))


def moved(descriptors: Descriptors) -> dict[int, int]:
    """Where each row goes, by where it is."""
    found: dict[int, int] = {}
    for source, destination, length in zip(
        descriptors.source_offset_X, descriptors.destination_offset_X, descriptors.length_X, strict=True
    ):
        found |= dict(
            zip(range(source, source + length, ROW), range(destination, destination + length, ROW), strict=True)
        )
    return found


@pytest.mark.parametrize(
    ("source_layers", "destination_layers"),
    [
        (list(range(78)), list(range(78))),
        (list(range(20, 30)), list(range(78))),
        ([*range(3), *range(6, 26, 4), *range(40, 60)], list(range(78))),  # places on the one side, not on the other
        ([7], list(range(78))),
    ],
    ids=["all", "a rank's", "uneven", "one"],
)
def test_parts_together_are_the_path(source_layers: list[int], destination_layers: list[int]) -> None:
    wanted = [layer for layer in destination_layers if layer in source_layers]
    path, *memories = path_of(source_layers, wanted)
    parts = list(layer_parts(path, bytes_per_layer_page=LATENT_PAGE))
    assert len(parts) == max(1, len(wanted) // 7)  # 7 layers of a page have 256 KiB
    assert [layer for part in parts for layer in part.route.layers] == wanted
    assert len(parts) == 1 or min(len(part.route.layers) for part in parts) * LATENT_PAGE >= PART_BYTES
    found: dict[int, int] = {}
    for part in parts:
        rows = moved(expand_path(part, *memories))
        assert len(rows) == len(part.route.layers) * TOKENS
        assert not found.keys() & rows.keys()
        found |= rows
    assert found == moved(expand_path(path, *memories))


def test_what_has_few_bytes_a_page_goes_whole() -> None:
    path, *_ = path_of(list(range(78)), list(range(78)))
    (part,) = layer_parts(path, bytes_per_layer_page=PART_BYTES // 78)
    assert part == path


def test_layers_that_are_larger_than_a_part_go_one_by_one() -> None:
    path, *_ = path_of(list(range(5)), list(range(5)))
    parts = list(layer_parts(path, bytes_per_layer_page=3 * PART_BYTES))
    assert [part.route.layers for part in parts] == [(0,), (1,), (2,), (3,), (4,)]


def test_small_entries_go_with_the_next_large_ones() -> None:
    entries = {
        "target.latent": EntryLayout(
            EntryKind.LATENT, tuple(range(78)), PAGE_SIZE, (FieldLayout("latent", 0, ROW, ROW),)
        ),
        "target.index_keys": EntryLayout(EntryKind.INDEX_KEYS, (0, 30), PAGE_SIZE, (FieldLayout("keys", 0, 128, 128),)),
    }
    latents, _, _ = path_of(list(range(78)), list(range(78)))
    keys, _, _ = path_of([0, 30], [0, 30])
    waited_for: dict[str, list[int]] = {kind: [] for kind in entries}
    for layer, part in parts_by_layer([latents, replace(keys, kind="target.index_keys")], entries):
        assert part.route.layers[-1] <= layer
        waited_for[part.kind].append(layer)
    assert waited_for["target.latent"] == [7, *range(14, 78, 7)]  # eight layers, then ten times seven
    assert waited_for["target.index_keys"] == [35]
    assert list(parts_by_layer([], entries)) == []
