"""The pages of a batch of requests, translated for the pool that will be read and written.

Passes over the same pages (the draft steps of a round) share a table, and rounds of the same requests patch it: in most
rounds a few of many requests gain a page, and none loses one.

R = requests, G = some of them, N = pages gained, P = pages of the longest request, Q = columns of the table, at least
1 + P; O = most pages of one request that one rank owns, the same on every rank.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specdec.dcp.geometry import Geometry
from specdec.dcp.owned_pages import OwnedPages
from specdec.dcp.page_ids import num_page_ids, owned_local_page, scratch_page
from specdec.kernels.row_padding import padded_rows

Int64Array = npt.NDArray[np.int64]

_NUM_SPARE_PAGES = 16  # by which the longest request may grow before its kept table is built anew


@dataclass(frozen=True, slots=True, eq=False)
class RowRequests:
    """Which request of a table each row of a pass belongs to; passes of the same shape share it.

    Attributes:
        request_index: i64 [n] on the host, as it was given.
        num_padded: T.
        first_slot: Where page 0 of each row's request lies in the flattened table, i64 [n] on the host.
        request_index_T: The same as `request_index` on the pool's device, 0 for padding rows.
        first_slot_T1: The same as `first_slot` on the pool's device, [T, 1], 1 for padding rows: they read request 0.
    """

    request_index: Int64Array
    num_padded: int
    first_slot: Int64Array
    request_index_T: torch.Tensor
    first_slot_T1: torch.Tensor


class PageTable:
    """Page ids of R requests and where this rank holds them. Tensors are i64 on the pool's device.

    A request may gain pages behind those it has, and keeps all it has: what was built on the table stays right.
    In arrays of Q columns the first is a border, so that page index -1 is no page; column 1 + p is for page p.

    Attributes:
        geometry: What this was built for; a pool of another geometry refuses it.
        page_size: Tokens of a page, a power of two; `position >> page_shift` is a page index, `position & offset_mask`
            the place in the page.
        num_pages: Physical pages of the pool that is meant, reserved pages not counted.
        is_on_host: Whether tensors and arrays are the same memory.
        num_requests: R.
        max_pages: P.
        page_id_RQ: On the host: page ids, -1 where the request has no page.
        write_page_RQ: On the host: physical page that takes a row's KV, the scratch page where another rank owns the
            page, -1 where the request has no page.
        bordered_page_RQ: Physical pages of this rank, -1 where it does not own the page or there is none:
            [max(R, 1), Q]; padding rows read request 0, which need not exist.
        local_page_RP: The part of it that holds pages.
        owned: The pages of this rank side by side; None where it owns all.
    """

    def __init__(
        self,
        page_id_RP: Int64Array,
        *,
        geometry: Geometry,
        page_size: int,
        num_pages: int,
        device: torch.device | str,
        num_spare: int,
    ) -> None:
        self.geometry = geometry
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_requests, self.max_pages = page_id_RP.shape
        shape = max(self.num_requests, 1), 1 + self.max_pages + num_spare
        self.page_id_RQ = np.full(shape, -1, dtype=np.int64)
        self.owned = OwnedPages(shape, geometry=geometry, device=device) if geometry.size > 1 else None
        # A rank that owns every page finds it at its id, for reading and for writing.
        self.write_page_RQ = self.page_id_RQ if self.owned is None else self.page_id_RQ.copy()
        self._local_page_RQ = self.page_id_RQ if self.owned is None else self.page_id_RQ.copy()
        self.bordered_page_RQ = torch.from_numpy(self._local_page_RQ).to(device)
        self.is_on_host = self.bordered_page_RQ.device.type == "cpu"
        self._num_ids = num_page_ids(num_pages, geometry.size)
        # Arrays: numpy would make one of an int in every call.
        self.page_shift = np.array(page_size.bit_length() - 1)
        self.offset_mask = np.array(page_size - 1)
        self._row_requests: RowRequests | None = None
        self._check(int(page_id_RP.max(initial=-1)))
        self.page_id_RQ[: self.num_requests, 1 : 1 + self.max_pages] = page_id_RP
        if self.owned is not None:
            self._translate(np.arange(self.num_requests), self.owned)
        self.local_page_RP = self.bordered_page_RQ[: self.num_requests, 1 : 1 + self.max_pages]
        self._copy_to_device()

    @property
    def owned_page_RO(self) -> torch.Tensor:
        """Physical pages of this rank side by side, in order, -1 behind a request's last."""
        return self.local_page_RP if self.owned is None else self.owned.page_RO[: self.num_requests]

    @property
    def owned_index_RO(self) -> torch.Tensor:
        """Page index of each of `owned_page_RO`; any behind a request's last."""
        if self.owned is None:
            return torch.arange(self.max_pages, device=self.local_page_RP.device).expand(self.num_requests, -1)
        return self.owned.index_RO[: self.num_requests]

    def grow(self, page_id_RP: Int64Array) -> bool:
        """Take in the pages that the requests gained.

        Args:
            page_id_RP: All their page ids, -1 behind the last page of each, i64 [R, P].

        Returns:
            False, with nothing changed, where these are not the same requests with as many pages or more, or where they
            are more than the table has columns for.

        Raises:
            ValueError: An id lies outside the id space.
        """
        num_requests, max_pages = page_id_RP.shape
        num_columns = self.page_id_RQ.shape[1]
        if num_requests != self.num_requests or not self.max_pages <= max_pages < num_columns:
            return False
        known_RP = self.page_id_RQ[:num_requests, 1 : 1 + max_pages]
        # Flat, and then one by one: they are few, and a search in two dims took ten times as long.
        gained = [divmod(place, max_pages) for place in (page_id_RP != known_RP).reshape(-1).nonzero()[0].tolist()]
        if any(known_RP[place] >= 0 for place in gained):
            return False
        for place in gained:
            self._check(page_id_RP[place])
        for place in gained:
            known_RP[place] = page_id_RP[place]
        if max_pages > self.max_pages:
            self.max_pages = max_pages
            self.local_page_RP = self.bordered_page_RQ[:num_requests, 1 : 1 + max_pages]
        if gained and self.owned is not None:
            self._translate(np.array(sorted({request_index for request_index, _ in gained})), self.owned)
        self._copy_to_device()
        return True

    def row_requests(self, request_index: Int64Array) -> RowRequests:
        """Prepare the rows of a pass, whose requests `request_index` names: i64 [n] in 0..R - 1.

        Kept for the next pass, where that hands in the very same array: one that cannot be written to.

        Raises:
            ValueError: A row belongs to no request of the table.
        """
        kept = self._row_requests
        if kept is not None and kept.request_index is request_index:
            return kept
        num_rows = len(request_index)
        if num_rows and not 0 <= request_index.min() <= request_index.max() < self.num_requests:
            raise ValueError(f"request_index must lie in 0..{self.num_requests - 1}, got {request_index}")
        rows = np.zeros((2, padded_rows(num_rows)), dtype=np.int64)
        rows[0, :num_rows] = request_index
        rows[1] = rows[0] * self.write_page_RQ.shape[1] + 1
        request_index_T, first_slot_T = self.on_device(rows).unbind(0)
        made = RowRequests(request_index, rows.shape[1], rows[1, :num_rows], request_index_T, first_slot_T[:, None])
        self._row_requests = None if request_index.flags.writeable else made
        return made

    def on_device(self, array: Int64Array) -> torch.Tensor:
        """Give an array as a tensor on the pool's device; on a CPU it is the same memory."""
        tensor = torch.from_numpy(array)
        return tensor if self.is_on_host else tensor.to(self.bordered_page_RQ.device)

    def _check(self, largest_id: int) -> None:
        if largest_id >= self._num_ids:
            raise ValueError(f"page ids must lie in 0..{self._num_ids - 1}, got {largest_id}")

    def _translate(self, request_index_G: Int64Array, owned: OwnedPages) -> None:
        """Find where this rank holds the pages of some requests."""
        pages = slice(1, 1 + self.max_pages)
        page_id_GP = self.page_id_RQ[request_index_G, pages]
        local_page_GP = owned_local_page(page_id_GP, self.geometry.size, self.geometry.rank)
        is_elsewhere_GP = (local_page_GP < 0) & (page_id_GP >= 0)
        self.write_page_RQ[request_index_G, pages] = np.where(
            is_elsewhere_GP, scratch_page(self.num_pages), local_page_GP
        )
        self._local_page_RQ[request_index_G, pages] = local_page_GP
        owned.fill(request_index_G, page_id_GP, local_page_GP)

    def _copy_to_device(self) -> None:
        """Bring the tensor up to date."""
        if not self.is_on_host:
            self.bordered_page_RQ.copy_(torch.from_numpy(self._local_page_RQ))


class KeptPageTable:
    """The page table of the last pass over one pool, for the next one.

    What it answers is always the table of the page ids that it is asked about: it compares them, and builds a new table
    where other requests come. Passes before may hold the same table, grown since.

    Args:
        geometry: Of the pool.
        page_size: Tokens of a page, a power of two.
        num_pages: Physical pages of the pool on this rank, reserved pages not counted.
        device: Of the pool.
    """

    def __init__(
        self, *, geometry: Geometry, page_size: int, num_pages: int, device: torch.device | str = "cpu"
    ) -> None:
        self._geometry = geometry
        self._page_size = page_size
        self._num_pages = num_pages
        self._device = device
        self._table: PageTable | None = None
        self._page_id_RP: Int64Array | None = None

    def of(self, page_id_RP: Int64Array) -> PageTable:
        """Return the table of these page ids, i64 [R, P] with -1 behind the last page of each request.

        Costs nothing where it is the very array of the last call, one that cannot be written to.

        Raises:
            ValueError: An id lies outside the id space.
        """
        table = self._table
        if table is not None and self._page_id_RP is page_id_RP:
            return table
        self._table = None  # an error below leaves no table that is half grown
        if table is None or not table.grow(page_id_RP):
            table = build_page_table(
                page_id_RP,
                geometry=self._geometry,
                page_size=self._page_size,
                num_pages=self._num_pages,
                device=self._device,
                num_spare=_NUM_SPARE_PAGES,
            )
        self._table = table
        self._page_id_RP = None if page_id_RP.flags.writeable else page_id_RP
        return table


def build_page_table(
    page_id_RP: Int64Array,
    *,
    geometry: Geometry,
    page_size: int,
    num_pages: int,
    device: torch.device | str = "cpu",
    num_spare: int = 0,
) -> PageTable:
    """Translate the page ids of a batch, i64 [R, P] with -1 behind the last page of each request.

    Args:
        page_id_RP: The page ids; copied.
        geometry: Of the pool that is meant.
        page_size: Tokens of a page, a power of two.
        num_pages: Physical pages of that pool on this rank, reserved pages not counted.
        device: Where the tensors go.
        num_spare: Pages by which the longest request may grow.

    Raises:
        ValueError: An id lies outside the id space.
    """
    return PageTable(
        page_id_RP,
        geometry=geometry,
        page_size=page_size,
        num_pages=num_pages,
        device=device,
        num_spare=num_spare,
    )
