"""From paths of a plan to byte ranges, given how each side's memory of one kind of entry is laid out.

A token's field in one layer lies at

    page * page_stride + place * layer_stride + field.offset + row * field.stride

bytes from the start of its region, which a pool with all layers of a page side by side (page-major), one with all pages
of a layer side by side (layer-major) and those of other engines fill with numbers of their own. What is contiguous on
both sides is one descriptor: fields, rows, layers, pages, in any combination.

Where tokens are interleaved on one side there are as many ranges as tokens in every layer, but evenly spaced within a
page: `repeat_path` tells those of a page and field as one descriptor with repeats, for all layers.

X = descriptors, E = pieces of one run of rows each, K = ranges that each of some pieces has.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specdec.dcp.layout import EntryLayout, FieldLayout
from specdec.kernels.errors import TransferError
from specdec.kernels.piece_repeats import ONE_LAYER, Layers, Repeats
from specdec.transfer.pieces import Pieces
from specdec.transfer.placement import I64
from specdec.transfer.reshard_plan import Path
from specdec.transfer.routes import LayerRun

# Above all counts and steps, so that no sum of products overflows.
MOST_REPEATS = 1 << 31
MOST_LAYERS, MOST_LAYER_STEP = 1 << 16, 1 << 46


@dataclass(frozen=True, eq=False, slots=True)
class Descriptors:
    """Contiguous bytes to be copied, i64 [X] each, in bytes; offsets count from the start of each side's region.

    Attributes:
        source_offset_X: First byte that is read.
        destination_offset_X: First byte that is written.
        length_X: Bytes, >= 1.
        repeats: How often, and how far apart, each is to be copied, all below `MOST_REPEATS`; None where each is once.
        layers: In which all of them are to be copied so.
    """

    source_offset_X: I64
    destination_offset_X: I64
    length_X: I64
    repeats: Repeats | None = None
    layers: Layers = ONE_LAYER

    def __len__(self) -> int:
        return len(self.length_X)

    def __getitem__(self, part: slice) -> "Descriptors":
        repeats = None if self.repeats is None else self.repeats.part(part)
        return Descriptors(
            self.source_offset_X[part], self.destination_offset_X[part], self.length_X[part], repeats, self.layers
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all descriptors."""
        return int(self.bytes_X.sum())

    @property
    def bytes_X(self) -> I64:
        """Bytes of each descriptor, in all layers and with its repeats."""
        bytes_X = self.length_X if self.repeats is None else self.length_X * self.repeats.count_X
        return bytes_X if self.layers.num_layers == 1 else bytes_X * self.layers.num_layers

    def ends(self) -> tuple[I64, I64]:
        """One past the last byte of each descriptor in the last layer, on both sides."""
        last_layer = self.layers.num_layers - 1
        source_X, destination_X = self.length_X + self.source_offset_X, self.length_X + self.destination_offset_X
        source_X += last_layer * self.layers.source_step
        destination_X += last_layer * self.layers.destination_step
        if self.repeats is not None:
            last_row_X = self.repeats.count_X - 1
            source_X += last_row_X * self.repeats.source_step_X
            destination_X += last_row_X * self.repeats.destination_step_X
        return source_X, destination_X

    def once(self) -> "Descriptors":
        """The same bytes with a descriptor of its own for each layer and repeat."""
        source_X, destination_X, length_X = self.source_offset_X, self.destination_offset_X, self.length_X
        if self.repeats is not None:
            count_X, source_step_X, destination_step_X = self.repeats
            within = np.arange(int(count_X.sum())) - np.repeat(np.cumsum(count_X) - count_X, count_X)
            source_X = np.repeat(source_X, count_X) + within * np.repeat(source_step_X, count_X)
            destination_X = np.repeat(destination_X, count_X) + within * np.repeat(destination_step_X, count_X)
            length_X = np.repeat(length_X, count_X)
        if self.layers.num_layers > 1:
            layer_K = np.arange(self.layers.num_layers)[:, None]
            source_X = (layer_K * self.layers.source_step + source_X).reshape(-1)
            destination_X = (layer_K * self.layers.destination_step + destination_X).reshape(-1)
            length_X = np.tile(length_X, self.layers.num_layers)
        return Descriptors(source_X, destination_X, length_X)


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


def repeat_path(path: Path, source: RegionMemory, destination: RegionMemory) -> Descriptors:
    """Give the bytes of `expand_path`, with one descriptor for all blocks of a piece in one field.

    It is for all layers where these are evenly spaced, and for one where they are not. Where there are no blocks, or
    these are one run on both sides, the descriptors are those of `expand_path`.

    Raises:
        TransferError: The sides do not have the same fields.
    """
    pieces, blocks = path.pieces, path.pieces.blocks
    fields = shared_fields(path.kind, source, destination)
    if blocks is None or not len(pieces) or not all(field.is_dense for field in fields):
        return expand_path(path, source, destination)
    whole_E = pieces.num_tokens_E // blocks.width
    if whole_E.max() <= 1 or blocks.source_step == blocks.destination_step == blocks.width:
        return expand_path(path, source, destination)
    rest_E = pieces.num_tokens_E - whole_E * blocks.width  # tokens of a block at the end that is not whole
    groups = (
        (np.flatnonzero(whole_E), blocks.width, whole_E, np.zeros_like(whole_E)),
        (np.flatnonzero(rest_E), rest_E, np.ones_like(rest_E), whole_E),
    )
    source_layer_K, destination_layer_K = layer_offsets(path.layer_runs, source, destination)
    layers = _even_layers(source_layer_K, destination_layer_K)
    if layers.num_layers > 1:
        source_layer_K, destination_layer_K = source_layer_K[:1], destination_layer_K[:1]
    parts: list[tuple[I64, ...]] = []
    for field in fields:
        source_K, destination_K = source_layer_K + field.source_offset, destination_layer_K + field.destination_offset
        for index_E, tokens, count_E, skipped_E in groups:
            source_row_E = (pieces.source_row_E + skipped_E * blocks.source_step)[index_E]
            destination_row_E = (pieces.destination_row_E + skipped_E * blocks.destination_step)[index_E]
            source_E = pieces.source_page_E[index_E] * source.page_stride + source_row_E * field.source_stride
            destination_E = pieces.destination_page_E[index_E] * destination.page_stride
            destination_E += destination_row_E * field.destination_stride
            length_E = np.broadcast_to(tokens, whole_E.shape)[index_E] * field.size
            parts.append(
                (
                    (source_K[:, None] + source_E).reshape(-1),
                    (destination_K[:, None] + destination_E).reshape(-1),
                    np.tile(length_E, len(source_K)),
                    np.tile(count_E[index_E], len(source_K)),
                    np.full(len(source_K) * len(index_E), blocks.source_step * field.source_stride),
                    np.full(len(source_K) * len(index_E), blocks.destination_step * field.destination_stride),
                )
            )
    source_X, destination_X, length_X, *repeats = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Descriptors(source_X, destination_X, length_X, Repeats(*repeats), layers)


def _even_layers(source_K: I64, destination_K: I64) -> Layers:
    """All layers where each is as far from the one before as the others, else one."""
    steps = [np.unique(np.diff(offset_K)).tolist() for offset_K in (source_K, destination_K)]
    if any(len(found) != 1 or not 0 <= found[0] < MOST_LAYER_STEP for found in steps):
        return ONE_LAYER
    return Layers(len(source_K), steps[0][0], steps[1][0])


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
