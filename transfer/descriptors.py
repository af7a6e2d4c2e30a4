"""From paths of a plan to byte ranges, given how each side's memory of one kind of entry is laid out.

A token's field in one layer lies at

    page * page_stride + place * layer_stride + field.offset + row * field.stride

bytes from the start of its region, which a pool with all layers of a page side by side (page-major), one with all pages
of a layer side by side (layer-major) and those of other engines fill with numbers of their own. What is contiguous on
both sides is one descriptor: fields, rows, layers, pages, in any combination.

X = descriptors, E = pieces of one run of rows each, K = ranges that each of some pieces has.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specdec.dcp.layout import EntryLayout, FieldLayout
from specdec.kernels.errors import TransferError
from specdec.transfer.pieces import Pieces
from specdec.transfer.placement import I64
from specdec.transfer.reshard_plan import Path
from specdec.transfer.routes import LayerRun


@dataclass(frozen=True, eq=False, slots=True)
class Descriptors:
    """Contiguous bytes to be copied, i64 [X] each, in bytes; offsets count from the start of each side's region.

    Attributes:
        source_offset_X: First byte that is read.
        destination_offset_X: First byte that is written.
        length_X: Bytes, >= 1.
    """

    source_offset_X: I64
    destination_offset_X: I64
    length_X: I64

    def __len__(self) -> int:
        return len(self.length_X)

    @property
    def num_bytes(self) -> int:
        """Bytes of all descriptors."""
        return int(self.length_X.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionMemory:
    """How one rank's region of one kind of entry is laid out.

    Attributes:
        page_size: Tokens of a page.
        page_stride: Bytes from a page to the next, in one layer.
        layer_stride: Bytes from a layer's part of a page to that of the next place.
        fields: Fields of a token within a layer's page, by name.
    """

    page_size: int
    page_stride: int
    layer_stride: int
    fields: tuple[FieldLayout, ...]

    @classmethod
    def page_major(cls, entry: EntryLayout, *, num_layers: int) -> "RegionMemory":
        """All layers of a page side by side, as `KvPool` keeps them; `num_layers` are those that the rank holds."""
        size = entry.bytes_per_layer_page
        return cls(
            page_size=entry.page_size, page_stride=size * num_layers, layer_stride=size, fields=tuple(entry.fields)
        )

    @classmethod
    def layer_major(cls, entry: EntryLayout, *, num_pages: int) -> "RegionMemory":
        """All pages of a layer side by side; `num_pages` are all that the region has room for."""
        size = entry.bytes_per_layer_page
        return cls(
            page_size=entry.page_size, page_stride=size, layer_stride=size * num_pages, fields=tuple(entry.fields)
        )


class SharedField(NamedTuple):
    """A field that both sides have: its bytes in a token, and offset and stride on each side."""

    size: int
    source_offset: int
    source_stride: int
    destination_offset: int
    destination_stride: int

    @property
    def is_dense(self) -> bool:
        """Whether neighbouring rows are contiguous on both sides."""
        return self.source_stride == self.destination_stride == self.size


def expand_path(path: Path, source: RegionMemory, destination: RegionMemory) -> Descriptors:
    """Give the fewest descriptors that move exactly the cells of a path.

    Raises:
        TransferError: The sides do not have the same fields.
    """
    fields = shared_fields(path.kind, source, destination)
    runs = path.pieces.runs()
    if not len(runs):
        none = np.zeros(0, np.int64)
        return Descriptors(none, none, none)
    layers = layer_offsets(path.layer_runs, source, destination)
    parts: list[tuple[I64, I64, I64]] = []
    lengths = runs.num_tokens_E
    for num_tokens in [int(lengths[0])] if (lengths == lengths[0]).all() else np.unique(lengths).tolist():
        same_E = lengths == num_tokens  # there are few different lengths: whole pages or blocks, and parts of them
        same = runs if same_E.all() else _select(runs, np.flatnonzero(same_E))
        ranges = [_field_ranges(field, num_tokens, layers) for field in fields]
        parts += _expand_same(same, fields, ranges, (source.page_stride, destination.page_stride))
    return merge_adjacent(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def shared_fields(kind: str, source: RegionMemory, destination: RegionMemory) -> tuple[SharedField, ...]:
    """Pair fields by name; neighbours in every row of both sides become one.

    Raises:
        TransferError: A field is missing on one side, or has another size.
    """
    sizes, wanted = ({field.name: field.size for field in side.fields} for side in (source, destination))
    if sizes != wanted:
        raise TransferError(f"{kind}: both sides must have the same fields, got bytes per token {sizes} and {wanted}")
    at_source = {field.name: field for field in source.fields}
    shared: list[SharedField] = []
    for field in sorted(destination.fields, key=lambda field: field.offset):
        own = at_source[field.name]
        new = SharedField(field.size, own.offset, own.stride, field.offset, field.stride)
        last = shared[-1] if shared else None
        if (
            last is not None
            and (last.source_stride, last.destination_stride) == (new.source_stride, new.destination_stride)
            and last.source_offset + last.size == new.source_offset
            and last.destination_offset + last.size == new.destination_offset
        ):
            shared[-1] = last._replace(size=last.size + new.size)
        else:
            shared.append(new)
    return tuple(shared)


def layer_offsets(layer_runs: tuple[LayerRun, ...], source: RegionMemory, destination: RegionMemory) -> tuple[I64, I64]:
    """Bytes from the start of a page to each layer of a path, on both sides: i64 [layers]."""
    places = [run.places for run in layer_runs]
    source_K = np.array([place for at_source, _ in places for place in at_source], np.int64)
    destination_K = np.array([place for _, at_destination in places for place in at_destination], np.int64)
    return source_K * source.layer_stride, destination_K * destination.layer_stride


def merge_adjacent(source_offset_X: I64, destination_offset_X: I64, length_X: I64) -> Descriptors:
    """Join what follows each other on both sides; the result is ordered by source offset."""
    if not (source_offset_X[1:] > source_offset_X[:-1]).all():
        order_X = source_offset_X.argsort(kind="stable")
        source_offset_X, destination_offset_X, length_X = (
            array[order_X] for array in (source_offset_X, destination_offset_X, length_X)
        )
    begins_X = np.ones(len(length_X), bool)
    begins_X[1:] = source_offset_X[1:] != source_offset_X[:-1] + length_X[:-1]
    begins_X[1:] |= destination_offset_X[1:] != destination_offset_X[:-1] + length_X[:-1]
    if begins_X.all():
        return Descriptors(source_offset_X, destination_offset_X, length_X)
    first_X = np.flatnonzero(begins_X)
    return Descriptors(source_offset_X[first_X], destination_offset_X[first_X], np.add.reduceat(length_X, first_X))


def _select(runs: Pieces, index_E: I64) -> Pieces:
    return Pieces(
        runs.source_page_E[index_E],
        runs.source_row_E[index_E],
        runs.destination_page_E[index_E],
        runs.destination_row_E[index_E],
        runs.first_token_E[index_E],
        runs.num_tokens_E[index_E],
    )


def _expand_same(
    runs: Pieces,
    fields: tuple[SharedField, ...],
    ranges: list[tuple[I64, I64, I64]],
    page_strides: tuple[int, int],
) -> list[tuple[I64, I64, I64]]:
    """Descriptors of pieces of the same length: the ranges of each field within a page, at every piece."""
    source_page_E = runs.source_page_E * page_strides[0]
    destination_page_E = runs.destination_page_E * page_strides[1]
    if not runs.source_row_E.any() and not runs.destination_row_E.any():
        # Rows from 0 on: the fields have no row to differ by, and may join each other and the next layer.
        joined = merge_adjacent(*(np.concatenate(arrays) for arrays in zip(*ranges, strict=True)))
        return [
            _at_every_piece(
                (joined.source_offset_X, joined.destination_offset_X, joined.length_X),
                source_page_E,
                destination_page_E,
            )
        ]
    return [
        _at_every_piece(
            field_ranges,
            source_page_E + runs.source_row_E * field.source_stride,
            destination_page_E + runs.destination_row_E * field.destination_stride,
        )
        for field, field_ranges in zip(fields, ranges, strict=True)
    ]


def _field_ranges(field: SharedField, num_tokens: int, layers: tuple[I64, I64]) -> tuple[I64, I64, I64]:
    """Ranges of one field in rows 0..num_tokens - 1 of every layer: offsets within both pages, and lengths."""
    source_K, destination_K = layers[0] + field.source_offset, layers[1] + field.destination_offset
    if field.is_dense:
        return source_K, destination_K, np.full(len(source_K), num_tokens * field.size)
    row = np.arange(num_tokens)
    source_K = (source_K[:, None] + row * field.source_stride).reshape(-1)
    destination_K = (destination_K[:, None] + row * field.destination_stride).reshape(-1)
    return source_K, destination_K, np.full(len(source_K), field.size)


def _at_every_piece(ranges: tuple[I64, I64, I64], source_E: I64, destination_E: I64) -> tuple[I64, I64, I64]:
    """Ranges x pieces, pieces side by side, so that neighbouring pages of a layer-major pool stand together."""
    source_K, destination_K, length_K = ranges
    return (
        (source_K[:, None] + source_E).reshape(-1),
        (destination_K[:, None] + destination_E).reshape(-1),
        np.repeat(length_K, len(source_E)),
    )
