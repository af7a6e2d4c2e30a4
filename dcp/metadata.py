"""Where the rows of one forward pass lie in one pool.

T = query rows, padded to a multiple of 8 so that a row's result does not depend on how many rows are beside it;
R = requests; P = pages of the longest request; K = selected slots.
"""

from dataclasses import dataclass

import numpy as np
import torch

from specdec.dcp.geometry import Geometry
from specdec.dcp.page_ids import num_page_ids, owned_local_page, scratch_page
from specdec.dcp.page_table import Int64Array, PageTable, build_page_table
from specdec.kernels.row_padding import padded_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchMetadata:
    """Rows, positions and pages of one pass over one pool. All tensors are i64 on the pool's device.

    Attributes:
        pages: Pages of the requests, with the geometry that this was built for.
        num_tokens: Live rows, 0..T; the rows behind them are padding.
        max_context: Largest position + 1, 0 without live rows.
        request_index_T: Row of the page table, 0 for padding rows.
        position_T: Position in the request, -1 for padding rows.
        write_page_T: Physical page that takes a row's KV; the scratch page for padding rows and rows another rank owns.
        write_offset_T: Place in that page, 0..page_size - 1.
        first_slot_T1: Where page 0 of a row's request lies in the flattened `pages.bordered_page_RQ`: [T, 1].
    """

    pages: PageTable
    num_tokens: int
    max_context: int
    request_index_T: torch.Tensor
    position_T: torch.Tensor
    write_page_T: torch.Tensor
    write_offset_T: torch.Tensor
    first_slot_T1: torch.Tensor

    @property
    def geometry(self) -> Geometry:
        """What this was built for; a pool of another geometry refuses it."""
        return self.pages.geometry

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.pages.page_size

    @property
    def num_pages(self) -> int:
        """Physical pages of the pool that is meant, reserved pages not counted."""
        return self.pages.num_pages

    @property
    def page_table_RP(self) -> torch.Tensor:
        """Page ids, -1 behind the last page of a request."""
        return self.pages.page_table_RP

    @property
    def local_page_RP(self) -> torch.Tensor:
        """Physical pages of this rank, -1 where it does not own the page."""
        return self.pages.local_page_RP

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
        slot_TK = page_index_TK + self.first_slot_T1[: len(selected_TK)]
        local_page_TK = self.pages.bordered_page_RQ.view(-1).index_select(0, slot_TK.reshape(-1)).view_as(slot_TK)
        row_TK = torch.add(selected_TK, local_page_TK.sub_(page_index_TK), alpha=self.page_size)
        return row_TK.clamp_(min=-1)  # a position of another rank gave offset - page_size


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
    """Build the metadata of one pass: `build_page_table`, then `place_rows`, whose arguments and errors these are.

    Args:
        geometry: Of the pool that is meant.
        page_size: Tokens of a page, a power of two.
        num_pages: Physical pages of that pool on this rank, reserved pages not counted.
        request_index: Row of `page_table` for each query row, i64 [n].
        position: Position of each query row in its request, i64 [n].
        page_table: Page ids of each request, -1 behind its last page, i64 [R, P].
        device: Where the tensors go.
    """
    pages = build_page_table(page_table, geometry=geometry, page_size=page_size, num_pages=num_pages, device=device)
    return place_rows(pages, request_index=request_index, position=position)


def place_rows(pages: PageTable, *, request_index: Int64Array, position: Int64Array) -> BatchMetadata:
    """Metadata of one pass over n query rows, which may be of any requests and in any order.

    Args:
        pages: Pages of the requests; passes that share them share this.
        request_index: Request of each query row, i64 [n] in 0..R - 1.
        position: Position of each query row in its request, i64 [n] in 0..P * page_size - 1.

    Raises:
        ValueError: A row lies outside the table, or has no page to write to.
    """
    geometry, page_size, num_pages = pages.geometry, pages.page_size, pages.num_pages
    num_requests, max_pages = pages.page_id_RP.shape
    num_tokens = len(position)
    rows = np.empty((5, padded_rows(num_tokens)), dtype=np.int64)
    if rows.shape[1] > num_tokens:
        rows[:, num_tokens:] = np.array([[0], [-1], [scratch_page(num_pages)], [0], [1]])
    max_context = 0
    if num_tokens:
        max_context = _largest(position) + 1
        if max_context > max_pages * page_size:
            raise ValueError(
                f"positions must lie in 0..{max_pages * page_size - 1}, which is {max_pages} pages of {page_size}, "
                f"got {position}"
            )
        if _largest(request_index) >= num_requests:
            raise ValueError(f"request_index must lie in 0..{num_requests - 1}, got {request_index}")
        page_index = position >> (page_size.bit_length() - 1)
        write_page = pages.page_id_RP[request_index, page_index]
        if _largest(write_page) >= num_page_ids(num_pages, geometry.size):
            raise ValueError(f"every query row needs a page to write to, got the page ids {write_page}")
        if geometry.size > 1:
            write_page = owned_local_page(write_page, geometry.size, geometry.rank)
            write_page[write_page < 0] = scratch_page(num_pages)
        live = rows[:, :num_tokens]
        live[0] = request_index
        live[1] = position
        live[2] = write_page
        live[3] = position & (page_size - 1)
        live[4] = request_index * (max_pages + 1) + 1

    rows_on_device = torch.from_numpy(rows).to(pages.local_page_RP.device)
    request_index_T, position_T, write_page_T, write_offset_T, first_slot_T = rows_on_device.unbind(0)
    return BatchMetadata(
        pages=pages,
        num_tokens=num_tokens,
        max_context=max_context,
        request_index_T=request_index_T,
        position_T=position_T,
        write_page_T=write_page_T,
        write_offset_T=write_offset_T,
        first_slot_T1=first_slot_T[:, None],
    )


def _largest(values: Int64Array) -> int:
    """Largest value, where a negative one counts as larger than any: one pass checks both bounds."""
    return int(np.maximum.reduce(values.view(np.uint64)))
