"""Pack strided rows before they are sent, so that what is contiguous at the destination is one descriptor.

Where tokens are interleaved on one side only, neighbours at the destination are not neighbours at the source, and a
path has a descriptor for every token, layer and field. Packing copies these rows into a buffer first:

    source rows --gather--> buffer, destination order --few descriptors--> destination

The buffer is bounded. A path that is larger goes in slices, each of whole rows in destination order, and never row by
row. This file says what is gathered and sent; `kernels.pack_rows` gathers.

R = rows of one slice and field: tokens that lie behind each other on both sides, the same number in each row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.kernels.errors import TransferError
from specdec.kernels.pack_rows import pack_rows
from specdec.transfer.descriptors import (
    Descriptors,
    RegionMemory,
    SharedField,
    expand_path,
    layer_offsets,
    merge_adjacent,
    shared_fields,
)
from specdec.transfer.pieces import Pieces
from specdec.transfer.placement import I64
from specdec.transfer.reshard_plan import Path

_ALIGNMENT = 16  # bytes; regions begin at a multiple, so that rows are gathered in whole words


@dataclass(frozen=True, eq=False, slots=True)
class GatheredRows:
    """Rows of one field.

    Attributes:
        source_offset_R: First byte of each row in the source region, i64 [R].
        buffer_offset_R: First byte of each row in the buffer region, i64 [R].
        row_bytes: Bytes of a row.
    """

    source_offset_R: I64
    buffer_offset_R: I64
    row_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class PackedSlice:
    """A part of a path that fits into a region of the buffer.

    Attributes:
        rows: What is gathered, by field.
        descriptors: What is sent then; source offsets count from the start of the buffer region.
    """

    rows: tuple[GatheredRows, ...]
    descriptors: Descriptors

    def gather(self, source_S: torch.Tensor, buffer_S: torch.Tensor) -> None:
        """Fill a buffer region; on a GPU asynchronously, on the current stream.

        The caller makes that stream wait for whatever wrote the KV, and the write for the gather.

        Args:
            source_S: The source region, u8 [bytes].
            buffer_S: The buffer region, u8 [bytes].
        """
        for rows in self.rows:
            offsets = (torch.from_numpy(each) for each in (rows.source_offset_R, rows.buffer_offset_R))
            source_offset_R, buffer_offset_R = offsets
            pack_rows(source_S, source_offset_R, buffer_S, buffer_offset_R, row_bytes=rows.row_bytes)


def pack_path(
    path: Path, source: RegionMemory, destination: RegionMemory, *, capacity_bytes: int
) -> Iterator[PackedSlice]:
    """Cut a path into slices for a buffer region; one without pieces has none.

    Args:
        path: What is sent. Paths of one group of `paths_by_pack` have the same slices.
        source: Memory that is gathered from.
        destination: Memory that is written.
        capacity_bytes: Size of the buffer region.

    Raises:
        TransferError: Not even one row fits, or the sides do not have the same fields.
    """
    fields = [_rows_of(path, field, source, destination) for field in shared_fields(path.kind, source, destination)]
    source_offset_R, destination_offset_R = (
        np.concatenate(arrays) for arrays in zip(*(rows[:2] for rows in fields), strict=True)
    )
    counts = [len(offset_R) for offset_R, _, _ in fields]
    row_bytes = [size for _, _, size in fields]
    field_R, length_R = np.repeat(np.arange(len(fields)), counts), np.repeat(row_bytes, counts)
    order_R = destination_offset_R.argsort(kind="stable")
    source_offset_R, destination_offset_R = source_offset_R[order_R], destination_offset_R[order_R]
    field_R, length_R = field_R[order_R], length_R[order_R]
    end_R = np.cumsum(length_R)
    first = 0
    while first < len(end_R):
        used = int(end_R[first] - length_R[first])
        end = int(np.searchsorted(end_R, used + capacity_bytes, side="right"))
        if end == first:
            raise TransferError(
                f"{path.kind}: a region of {capacity_bytes} bytes of the pack buffer must hold a row of "
                f"{length_R[first]}"
            )
        part = slice(first, end)
        buffer_offset_R = end_R[part] - length_R[part] - used
        rows = []
        for field, size in enumerate(row_bytes):
            own_R = np.flatnonzero(field_R[part] == field)
            if len(own_R):
                rows.append(GatheredRows(source_offset_R[part][own_R], buffer_offset_R[own_R], size))
        descriptors = merge_adjacent(buffer_offset_R, destination_offset_R[part], length_R[part])
        yield PackedSlice(tuple(rows), descriptors)
        first = end


def packing_pays(path: Path, source: RegionMemory, destination: RegionMemory, *, capacity_bytes: int) -> bool:
    """Whether a path takes fewer descriptors packed; page-level paths between page-major pools do not."""
    slices = pack_path(path, source, destination, capacity_bytes=capacity_bytes)
    num_packed = sum(len(part.descriptors) for part in slices)
    return num_packed < len(expand_path(path, source, destination))


def paths_by_pack(paths: Sequence[Path]) -> list[list[Path]]:
    """Group paths whose packed bytes and offsets are the same: peers of a shard that read the same layers of a rank.

    Holds where the memory of these destination ranks is laid out alike. A group is gathered once and sent to each.
    """
    groups: dict[tuple[object, ...], list[Path]] = {}
    for path in paths:
        groups.setdefault((path.kind, path.source_rank, id(path.pieces), path.layer_runs), []).append(path)
    return list(groups.values())


def region_bytes_of_chunk(path_tokens: int, num_layers: int, destination: RegionMemory) -> int:
    """Size of a buffer region that takes `path_tokens` tokens of `num_layers` layers in one slice."""
    size = path_tokens * num_layers * sum(field.size for field in destination.fields)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class PackBuffer:
    """Memory for packs in regions of equal size, as many as there are packs in flight; they never overlap.

    One buffer per sending worker; `specdec.transfer.packed_sending` says when a region may be filled again.

    Attributes:
        memory: The registered memory, u8 [bytes].
        num_regions: Regions.
        region_bytes: Bytes of a region, a multiple of 16.
    """

    def __init__(self, memory: torch.Tensor, *, num_regions: int) -> None:
        self.memory = memory
        self.num_regions = num_regions
        self.region_bytes = memory.numel() // num_regions // _ALIGNMENT * _ALIGNMENT
        if memory.dtype != torch.uint8 or self.region_bytes < 1:
            raise TransferError(
                f"a pack buffer is uint8 and has at least {_ALIGNMENT} bytes for each of its {num_regions} regions, "
                f"got {memory.numel()} of {memory.dtype}"
            )

    def offset(self, region: int) -> int:
        """First byte of a region, to be added to the source offsets of what is sent from it."""
        return region * self.region_bytes

    def view(self, region: int) -> torch.Tensor:
        """Memory of a region, u8 [region_bytes]."""
        return self.memory[self.offset(region) : self.offset(region) + self.region_bytes]


def _rows_of(path: Path, field: SharedField, source: RegionMemory, destination: RegionMemory) -> tuple[I64, I64, int]:
    """Offsets on both sides of the rows of a field, and the bytes of each."""
    runs = path.pieces.runs()
    tokens_of_row = int(np.gcd.reduce(runs.num_tokens_E)) if field.is_dense and len(runs) else 1
    source_row_T, destination_row_T = _row_starts(runs, tokens_of_row)
    rows_per_run = runs.num_tokens_E // tokens_of_row
    source_T = np.repeat(runs.source_page_E * source.page_stride, rows_per_run) + source_row_T * field.source_stride
    destination_T = np.repeat(runs.destination_page_E * destination.page_stride, rows_per_run)
    destination_T = destination_T + destination_row_T * field.destination_stride
    source_layer_K, destination_layer_K = layer_offsets(path.layer_runs, source, destination)
    source_R = (source_layer_K[:, None] + (source_T + field.source_offset)).reshape(-1)
    destination_R = (destination_layer_K[:, None] + (destination_T + field.destination_offset)).reshape(-1)
    return source_R, destination_R, tokens_of_row * field.size


def _row_starts(runs: Pieces, tokens_of_row: int) -> tuple[I64, I64]:
    """First row on both sides of every `tokens_of_row` tokens of every run."""
    num_E = runs.num_tokens_E // tokens_of_row
    before_E = np.cumsum(num_E) - num_E
    step_T = (np.arange(int(num_E.sum())) - np.repeat(before_E, num_E)) * tokens_of_row
    return np.repeat(runs.source_row_E, num_E) + step_T, np.repeat(runs.destination_row_E, num_E) + step_T
