"""The pages of each request that one rank owns, side by side.

R = requests, G = some of them, N = owned pages of these, P = pages of the longest request, Q = columns of the page
table, C = ranks and one; O = most pages of one request that one rank owns: the same on every rank, so that what they
exchange is of one shape.
"""

import numpy as np
import numpy.typing as npt
import torch

from specdec.dcp.geometry import Geometry
from specdec.dcp.page_ids import owner

Int64Array = npt.NDArray[np.int64]


class OwnedPages:
    """Beside a page table of `shape` [R, Q], whose column 1 + p is for page p. Tensors are i64 on the pool's device.

    Attributes:
        page_RO: Physical pages of this rank in order, -1 behind a request's last.
        index_RO: Page index of each of them, 0 behind the last.
        first_owner_R: Rank that owns the first page of the request; 0 where it has none.
        before_RQ: On the host: how many pages of the request before this one the rank owns.
    """

    def __init__(self, shape: tuple[int, int], *, geometry: Geometry, device: torch.device | str) -> None:
        self._geometry = geometry
        self._most_owned = 0
        self._page_RQ = np.full(shape, -1, dtype=np.int64)
        self._index_RQ = np.zeros(shape, dtype=np.int64)
        self._page_on_device = torch.from_numpy(self._page_RQ).to(device)
        self._index_on_device = torch.from_numpy(self._index_RQ).to(device)
        self._first_owner_R = np.zeros(shape[0], dtype=np.int64)
        self.first_owner_R = torch.from_numpy(self._first_owner_R).to(device)
        self.before_RQ = np.zeros(shape, dtype=np.int64)
        self.page_RO = self._page_on_device[:, :0]
        self.index_RO = self._index_on_device[:, :0]

    def fill(self, request_index_G: Int64Array, page_id_GP: Int64Array, local_page_GP: Int64Array) -> None:
        """Take in all pages of requests that gained some: their ids and where this rank holds them, else -1."""
        size, num_requests = self._geometry.size, len(request_index_G)
        is_owned_GP = local_page_GP >= 0
        before_GP: Int64Array = np.cumsum(is_owned_GP, axis=1) - is_owned_GP
        self.before_RQ[request_index_G, 1 : 1 + page_id_GP.shape[1]] = before_GP
        owned_N = is_owned_GP.reshape(-1).nonzero()[0]  # flat: a search in two dims took ten times as long
        g_N, page_index_N = np.divmod(owned_N, max(page_id_GP.shape[1], 1))
        place = request_index_G[g_N], before_GP.reshape(-1)[owned_N]
        self._page_RQ[place] = local_page_GP.reshape(-1)[owned_N]
        self._index_RQ[place] = page_index_N
        self._first_owner_R[request_index_G] = owner(page_id_GP[:, 0], size).clip(min=0) if page_id_GP.size else 0
        if self._page_on_device.device.type != "cpu":
            self.first_owner_R.copy_(torch.from_numpy(self._first_owner_R))
            self._page_on_device.copy_(torch.from_numpy(self._page_RQ))
            self._index_on_device.copy_(torch.from_numpy(self._index_RQ))

        # Column 0 counts what no rank owns.
        column_GP = owner(page_id_GP, size) + 1 + np.arange(num_requests)[:, None] * (size + 1)
        num_owned_GC = np.bincount(column_GP.reshape(-1), minlength=num_requests * (size + 1)).reshape(-1, size + 1)
        most_owned = int(num_owned_GC[:, 1:].max(initial=self._most_owned))
        if most_owned > self._most_owned or self.page_RO.shape[1] == 0:
            self._most_owned = most_owned
            self.page_RO = self._page_on_device[:, :most_owned]
            self.index_RO = self._index_on_device[:, :most_owned]
