"""Random transfers of one kind of entry, and the plain definition of what each must leave in memory.

A case has both sides' placements, page tables and memory. `moved_by_definition` moves one token of one layer at a time;
every byte of memory that is not moved holds noise, so that a byte too many or too few is seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdec.dcp.layout import FieldLayout
from specdec.transfer.descriptors import RegionMemory
from specdec.transfer.placement import Placement, by_rank, layer_split, on_one_rank, replicated, sharded
from specdec.transfer.reshard_plan import Span

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
FIELDS = (("keys", 3), ("scales", 2))


@dataclass(frozen=True)
class ReshardCase:
    """One transfer; memory is a list of one array of bytes per rank."""

    span: Span
    source_regions: Sequence[RegionMemory]
    destination_regions: Sequence[RegionMemory]
    source_memory: Sequence[U8]
    destination_memory: Sequence[U8]


def random_case(seed: int) -> ReshardCase:
    """Any geometry to any other."""
    rng = np.random.default_rng(seed)
    layers = sorted(rng.choice(12, size=int(rng.integers(1, 6)), replace=False).tolist())
    end = int(rng.integers(0, 40))
    begin = int(rng.integers(0, end + 1)) if rng.random() < 0.7 else 0
    page_size = int(rng.choice([1, 2, 4, 8]))
    other = page_size if rng.random() < 0.7 else int(rng.choice([1, 2, 3, 4, 6, 8]))
    source, destination = (_random_placement(rng, layers, size, end) for size in (page_size, other))
    num_fields = int(rng.integers(1, 3))
    source_regions, destination_regions = (_random_regions(rng, side, num_fields) for side in (source, destination))
    span = Span(
        source=source,
        destination=destination,
        source_pages=_random_pages(rng, source, begin, end),
        destination_pages=_random_pages(rng, destination, begin, end),
        begin=begin,
        end=end,
    )
    source_memory = _noise(rng, source, source_regions)
    write_cells(span, source, span.source_pages, source_regions, source_memory)
    return ReshardCase(
        span=span,
        source_regions=source_regions,
        destination_regions=destination_regions,
        source_memory=source_memory,
        destination_memory=_noise(rng, destination, destination_regions),
    )


def moved_by_definition(case: ReshardCase) -> list[U8]:
    """Memory of the destination ranks after the transfer: one token, one layer and one field at a time."""
    memory = [rank.copy() for rank in case.destination_memory]
    write_cells(case.span, case.span.destination, case.span.destination_pages, case.destination_regions, memory)
    return memory


def place_of(side: Placement, pages: I64, token: int) -> tuple[int, int, int]:
    """Shard, local page and row of one token, as the docstring of `transfer.placement` says it."""
    if side.block_width is None:
        page_id = int(pages[token // side.page_size])
        return page_id % side.num_shards, page_id // side.num_shards, token % side.page_size
    shard = token // side.block_width % side.num_shards
    before = sum(t // side.block_width % side.num_shards == shard for t in range(token))
    return shard, int(pages[shard, before // side.page_size]), before % side.page_size


def offset_of(region: RegionMemory, name: str, page: int, place: int, row: int) -> int:
    """Byte at which a field of a token begins."""
    (field,) = (field for field in region.fields if field.name == name)
    return page * region.page_stride + place * region.layer_stride + field.offset + row * field.stride


def write_cells(span: Span, side: Placement, pages: I64, regions: Sequence[RegionMemory], memory: Sequence[U8]) -> None:
    """Write the cells of the span wherever a side keeps them; what a cell holds depends on layer, token and field."""
    for rank, held in enumerate(side.rank_layers):
        for token in range(span.begin, span.end):
            shard, page, row = place_of(side, pages, token)
            if shard != side.rank_shard[rank]:
                continue
            for place, layer in enumerate(held):
                for field in regions[rank].fields:
                    to = offset_of(regions[rank], field.name, page, place, row)
                    seed = hash((layer, token, len(field.name)))
                    memory[rank][to : to + field.size] = [(seed >> 8 * i) % 256 for i in range(field.size)]


def _random_placement(rng: np.random.Generator, layers: list[int], page_size: int, num_tokens: int) -> Placement:
    num_pages = num_tokens + 4
    sizes = {"page_size": page_size, "num_pages": num_pages}
    match int(rng.integers(6)):
        case 0:
            return layer_split(layers, num_ranks=int(rng.integers(1, 5)), model_layers=12, **sizes)
        case 1:
            return replicated(layers, num_ranks=int(rng.integers(1, 5)), **sizes)
        case 2:
            num_ranks = int(rng.integers(1, 4))
            return on_one_rank(layers, rank=num_ranks - 1, num_ranks=num_ranks, **sizes)
        case 3:  # stages that take turns, each on some ranks
            num_stages, num_replicas = int(rng.integers(1, 4)), int(rng.integers(1, 3))
            stages = [layers[stage::num_stages] for stage in range(num_stages)]
            return by_rank([stage for stage in stages for _ in range(num_replicas)], **sizes)
        case kind:
            dcp_size = int(rng.integers(1, 5))
            return sharded(
                [layers[:2], layers[2:]] if rng.random() < 0.3 else [layers],
                dcp_size=dcp_size,
                tp_size=dcp_size * int(rng.integers(1, 3)),
                block_width=None if kind == 4 else int(rng.integers(1, page_size + 1)),
                **sizes,
            )


def _random_pages(rng: np.random.Generator, side: Placement, begin: int, end: int) -> I64:
    """Pages in any order; those that the span does not need are padding where whole pages are owned by their ids."""
    if side.block_width is None:
        pages = rng.permutation(side.num_pages * side.num_shards)[: -(-end // side.page_size)]
        if rng.random() < 0.5:
            pages = np.sort(pages)
        pages[: begin // side.page_size] = -1
        return pages.astype(np.int64)
    num_pages = -(-side.local_length(end, 0) // side.page_size) + 1
    return np.stack([rng.permutation(side.num_pages)[:num_pages] for _ in range(side.num_shards)]).astype(np.int64)


def _random_regions(rng: np.random.Generator, side: Placement, num_fields: int) -> list[RegionMemory]:
    """Page-major, layer-major or with gaps; fields behind each other, or side by side in every token."""
    by_token, kind = rng.random() < 0.3, int(rng.integers(3))
    gap = int(rng.integers(0, 3)) if kind == 2 else 0
    fields, token_bytes = [], sum(size for _, size in FIELDS[:num_fields]) + gap
    offset = 0
    for name, size in FIELDS[:num_fields]:
        fields.append(FieldLayout(name, offset, token_bytes if by_token else size, size))
        offset += size if by_token else size * side.page_size
    size = token_bytes * side.page_size
    return [
        RegionMemory(
            page_size=side.page_size,
            page_stride=size if kind == 1 else size * max(len(held), 1),
            layer_stride=size * side.num_pages if kind == 1 else size,
            fields=tuple(fields),
        )
        for held in side.rank_layers
    ]


def _noise(rng: np.random.Generator, side: Placement, regions: Sequence[RegionMemory]) -> list[U8]:
    memory = []
    for held, region in zip(side.rank_layers, regions, strict=True):
        size = side.num_pages * region.page_stride + max(len(held), 1) * region.layer_stride
        memory.append(rng.integers(0, 256, size, dtype=np.uint8))
    return memory
