"""Where the rows of one forward pass lie in one pool.

T = query rows, padded to a multiple of 8 so that a row's result does not depend on how many rows are beside it; R = requests;
P = pages of the longest request; K = selected slots. Translation from page ids to physical pages happens here, once per pass,
for the geometry that the record carries.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specdec.dcp.geometry import Geometry
from specdec.dcp.page_ids import num_page_ids, owned_local_page, scratch_page

ROW_MULTIPLE = 8

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchMetadata:
    """Rows, positions and pages of one pass over one pool. All tensors are i64 on the pool's device.

    Attributes:
        geometry: What this was built for; a pool of another geometry refuses it.
        page_size: Tokens of a page, a power of two.
        num_pages: Physical pages of the pool that is meant, reserved pages not counted.
        num_tokens: Live rows, 0..T; the rows behind them are padding.
        max_context: Largest position + 1, 0 without live rows.
        request_index_T: Row of the page table, 0 for padding rows.
        position_T: Position in the request, -1 for padding rows.
        write_page_T: Physical page that takes a row's KV; the scratch page for padding rows and rows another rank owns.
        write_offset_T: Place in that page, 0..page_size - 1.
        page_table_RP: Page ids, -1 behind the last page of a request.
        local_page_RP: Physical pages of this rank, -1 where it does not own the page.
    """

    geometry: Geometry
    page_size: int
    num_pages: int
    num_tokens: int
    max_context: int
    request_index_T: torch.Tensor
    position_T: torch.Tensor
    write_page_T: torch.Tensor
    write_offset_T: torch.Tensor
    page_table_RP: torch.Tensor
    local_page_RP: torch.Tensor
    _first_slot_T1: torch.Tensor  # where a row's request starts in _local_page_flat, its border column skipped
    _local_page_flat: torch.Tensor  # [R * (1 + P)]: local_page_RP behind a column of -1

    @property
    def write_row_T(self) -> torch.Tensor:
        """Physical token row that takes a row's KV: `page * page_size + offset`, the same in every layer."""
        return self.write_page_T * self.page_size + self.write_offset_T

    def rows_of(self, selected_TK: torch.Tensor) -> torch.Tensor:
        """Physical token rows of selected positions of each row's request: i64 [T, K].

        Args:
            selected_TK: Positions below P * page_size, -1 where padded, of all rows or of the live ones; i64.

        Returns:
            `page * page_size + offset`, and -1 where padded or where this rank does not own the position.
        """
        page_index_TK = selected_TK >> (self.page_size.bit_length() - 1)  # -1 stays -1: the border column
        slot_TK = page_index_TK + self._first_slot_T1[: len(selected_TK)]
        local_page_TK = self._local_page_flat.index_select(0, slot_TK.view(-1)).view_as(slot_TK)
        row_TK = torch.add(selected_TK, local_page_TK.sub_(page_index_TK), alpha=self.page_size)
        return row_TK.clamp_(min=-1)  # an unowned page gave offset - page_size


def build_metadata(
    *,
    geometry: Geometry,
    page_size: int,
    num_pages: int,
    request_index: Int64Array,
    position: Int64Array,
    page_table: Int64Array,
    device: torch.device | str = "cpu",
) -> BatchMetadata:
    """Build the metadata of one pass from numpy arrays, which are copied.

    Args:
        geometry: Of the pool that is meant.
        page_size: Tokens of a page, a power of two.
        num_pages: Physical pages of that pool on this rank, reserved pages not counted.
        request_index: Row of `page_table` for each query row, i64 [n].
        position: Position of each query row in its request, i64 [n], >= 0.
        page_table: Page ids of each request, -1 behind its last page, i64 [R, P].
        device: Where the tensors go.

    Raises:
        ValueError: A row lies outside the page table or has no page, or an id lies outside the id space.
    """
    num_tokens = len(position)
    num_requests, max_pages = page_table.shape
    num_rows = -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    local_pages = np.empty((num_requests, max_pages + 1), dtype=np.int64)
    local_pages[:, 0] = -1
    local_pages[:, 1:] = page_table if geometry.size == 1 else owned_local_page(page_table, geometry.size, geometry.rank)

    rows = np.empty((5, num_rows), dtype=np.int64)
    request_index_T, position_T, write_page_T, write_offset_T, first_slot_T = rows
    if num_rows > num_tokens:
        rows[:, num_tokens:] = np.array([[0], [-1], [scratch_page(num_pages)], [0], [1]])
    max_context = 0
    if num_tokens:
        max_context = _largest(position) + 1
        if max_context > max_pages * page_size:
            raise ValueError(
                f"positions must lie in the page table's 0..{max_pages * page_size - 1} "
                f"({max_pages} pages of {page_size}), got {position}"
            )
        if _largest(request_index) >= num_requests:
            raise ValueError(f"request_index must lie in 0..{num_requests - 1}, got {request_index}")
        num_ids = num_page_ids(num_pages, geometry.size)
        page_index = position >> (page_size.bit_length() - 1)
        write_id = page_table[request_index, page_index]
        if _largest(write_id) >= num_ids or page_table.max() >= num_ids:
            raise ValueError(
                f"page ids must lie in 0..{num_ids - 1} and every row needs a page to write to, "
                f"got ids up to {page_table.max()} and rows for the ids {write_id}"
            )
        if geometry.size > 1:
            write_id = owned_local_page(write_id, geometry.size, geometry.rank)
            write_id[write_id < 0] = scratch_page(num_pages)
        request_index_T[:num_tokens] = request_index
        position_T[:num_tokens] = position
        write_page_T[:num_tokens] = write_id
        write_offset_T[:num_tokens] = position & (page_size - 1)
        first_slot_T[:num_tokens] = request_index * (max_pages + 1) + 1

    request_index_t, position_t, write_page_t, write_offset_t, first_slot_t = torch.from_numpy(rows).to(device)
    padded_table = torch.from_numpy(local_pages).to(device)
    local_page_RP = padded_table[:, 1:]
    return BatchMetadata(
        geometry=geometry,
        page_size=page_size,
        num_pages=num_pages,
        num_tokens=num_tokens,
        max_context=max_context,
        request_index_T=request_index_t,
        position_T=position_t,
        write_page_T=write_page_t,
        write_offset_T=write_offset_t,
        page_table_RP=local_page_RP if geometry.size == 1 else torch.from_numpy(page_table.copy()).to(device),
        local_page_RP=local_page_RP,
        _first_slot_T1=first_slot_t[:, None],
        _local_page_flat=padded_table.view(-1),
    )


def _largest(values: Int64Array) -> int:
    """Largest value, where a negative one counts as larger than any: one pass checks both bounds."""
    return int(np.maximum.reduce(values.view(np.uint64)))
