"""The pages of a batch of requests, translated once for the pool that will be read and written.

R = requests, P = pages of the longest request. Passes over the same pages (the draft steps of a round) share a table.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specdec.dcp.geometry import Geometry
from specdec.dcp.page_ids import num_page_ids, owned_local_page

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageTable:
    """Page ids of R requests and where this rank holds them. Tensors are i64 on the pool's device.

    Attributes:
        geometry: What this was built for; a pool of another geometry refuses it.
        page_size: Tokens of a page, a power of two.
        num_pages: Physical pages of the pool that is meant, reserved pages not counted.
        page_id_RP: Page ids on the host, -1 behind the last page of a request: the caller's array, not to be changed.
        page_table_RP: The same on the device, a copy.
        local_page_RP: Physical pages of this rank, -1 where it does not own the page.
        bordered_page_RQ: `local_page_RP` behind a first column of -1, so that page index -1 is no page:
            [max(R, 1), Q = 1 + P]; padding rows read request 0, which need not exist.
    """

    geometry: Geometry
    page_size: int
    num_pages: int
    page_id_RP: Int64Array
    page_table_RP: torch.Tensor
    local_page_RP: torch.Tensor
    bordered_page_RQ: torch.Tensor


def build_page_table(
    page_id_RP: Int64Array, *, geometry: Geometry, page_size: int, num_pages: int, device: torch.device | str = "cpu"
) -> PageTable:
    """Translate the page ids of a batch, i64 [R, P] with -1 behind the last page of each request.

    Raises:
        ValueError: An id lies outside the id space.
    """
    num_requests, max_pages = page_id_RP.shape
    num_ids = num_page_ids(num_pages, geometry.size)
    if page_id_RP.size and np.maximum.reduce(page_id_RP, axis=None) >= num_ids:
        raise ValueError(f"page ids must lie in 0..{num_ids - 1}, got {page_id_RP.max()}")
    local_page = page_id_RP if geometry.size == 1 else owned_local_page(page_id_RP, geometry.size, geometry.rank)
    bordered = np.empty((max(num_requests, 1), max_pages + 1), dtype=np.int64)
    bordered[:, 0] = -1
    bordered[:num_requests, 1:] = local_page
    bordered_page_RQ = torch.from_numpy(bordered).to(device)
    local_page_RP = bordered_page_RQ[:num_requests, 1:]
    return PageTable(
        geometry=geometry,
        page_size=page_size,
        num_pages=num_pages,
        page_id_RP=page_id_RP,
        page_table_RP=local_page_RP if geometry.size == 1 else torch.from_numpy(page_id_RP.copy()).to(device),
        local_page_RP=local_page_RP,
        bordered_page_RQ=bordered_page_RQ,
    )
