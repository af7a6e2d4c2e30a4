"""Where the rows of one forward pass lie in one pool.

T = query rows, padded to a multiple of 8 so that a row's result does not depend on how many rows are beside it;
R = requests; P = pages of the longest request; K = selected slots; O = pages of a request that a rank owns.
"""

from typing import NamedTuple

import numpy as np
import torch

from specdec.dcp.geometry import Geometry
from specdec.dcp.page_ids import scratch_page
from specdec.dcp.page_table import Int64Array, PageTable, build_page_table

_ONE = np.array(1)  # numpy would make an array of an int in every call


class BatchMetadata(NamedTuple):
    """Rows, positions and pages of one pass over one pool. All tensors are i64 on the pool's device.

    Attributes:
        pages: Pages of the requests, with the geometry that this was built for.
        num_tokens: Live rows, 0..T; the rows behind them are padding.
        max_context: Largest position + 1, 0 without live rows.
        request_index_T: Row of the page table, 0 for padding rows.
        position_T: Position in the request, -1 for padding rows.
        write_page_T: Physical page that takes a row's KV; the scratch page for padding rows and rows another rank owns.
        write_offset_T: Place in that page, 0..page_size - 1.
        owned_length_T: How many positions up to a row's own this rank owns; 0 for padding rows. Over the ranks they add
            up to position + 1.
        first_slot_T1: Where page 0 of a row's request lies in the flattened `pages.bordered_page_RQ`: [T, 1].
        request_index: Request of each live row, i64 [num_tokens], on the host.
        position: Its position, likewise.
    """

    pages: PageTable
    num_tokens: int
    max_context: int
    request_index_T: torch.Tensor
    position_T: torch.Tensor
    write_page_T: torch.Tensor
    write_offset_T: torch.Tensor
    owned_length_T: torch.Tensor
    first_slot_T1: torch.Tensor
    request_index: Int64Array
    position: Int64Array

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
    def local_page_RP(self) -> torch.Tensor:
        """Physical pages of this rank, -1 where it does not own the page."""
        return self.pages.local_page_RP

    @property
    def first_owner_T(self) -> torch.Tensor:
        """Rank that owns the first page of each row's request: i64 [T]."""
        if self.pages.owned is None:
            return torch.zeros_like(self.request_index_T)
        return self.pages.owned.first_owner_R[self.request_index_T]

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

    def owned_positions(self, column_TK: torch.Tensor) -> torch.Tensor:
        """Positions of a row's request that stand at `column_TK` among those this rank owns: i64 [T, K].

        Args:
            column_TK: Columns of what `KvPool.gather_index_keys` gives, below the request's owned pages * page_size,
                -1 where padded, of all rows or of the live ones; i64.

        Returns:
            Positions, -1 where padded.
        """
        shift = self.page_size.bit_length() - 1
        index_TO = self.pages.owned_index_RO[self.request_index_T[: len(column_TK)]]
        page_index_TK = index_TO.gather(1, (column_TK >> shift).clamp_(min=0))
        position_TK = (page_index_TK << shift) + (column_TK & (self.page_size - 1))
        return position_TK.masked_fill_(column_TK < 0, -1)


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
        request_index: Request of each query row, i64 [n] in 0..R - 1. Passes that hand in the very same array, one that
            cannot be written to, share what is made of it.
        position: Position of each query row in its request, i64 [n] in 0..P * page_size - 1.

    Raises:
        ValueError: A row lies outside the table, or has no page to write to.
    """
    requests = pages.row_requests(request_index)
    num_tokens = len(position)
    rows = np.empty((4, requests.num_padded), dtype=np.int64)
    if requests.num_padded > num_tokens:
        rows[:, num_tokens:] = np.array([[-1], [scratch_page(pages.num_pages)], [0], [0]])
    max_context = 0
    if num_tokens:
        max_context = int(position[position.argmax()]) + 1
        num_positions = pages.max_pages * pages.page_size
        if max_context > num_positions or position[position.argmin()] < 0:
            raise ValueError(
                f"positions must lie in 0..{num_positions - 1}, which is {pages.max_pages} pages of "
                f"{pages.page_size}, got {position}"
            )
        slot = (position >> pages.page_shift) + requests.first_slot
        write_page = pages.write_page_RQ.reshape(-1)[slot]
        if write_page[write_page.argmin()] < 0:
            raise ValueError(f"every query row needs a page to write to, got the pages {write_page}")
        rows[0, :num_tokens] = position
        rows[1, :num_tokens] = write_page
        offset = np.bitwise_and(position, pages.offset_mask, out=rows[2, :num_tokens])
        if pages.owned is None:
            np.add(position, _ONE, out=rows[3, :num_tokens])
        else:
            is_owned = write_page != scratch_page(pages.num_pages)
            num_before = pages.owned.before_RQ.reshape(-1)[slot] * pages.page_size
            rows[3, :num_tokens] = num_before + is_owned * (offset + 1)
    position_T, write_page_T, write_offset_T, owned_length_T = pages.on_device(rows).unbind(0)
    return BatchMetadata(
        pages=pages,
        num_tokens=num_tokens,
        max_context=max_context,
        request_index_T=requests.request_index_T,
        position_T=position_T,
        write_page_T=write_page_T,
        write_offset_T=write_offset_T,
        owned_length_T=owned_length_T,
        first_slot_T1=requests.first_slot_T1,
        request_index=request_index,
        position=position,
    )
