"""Who gets which pages: one allocator for the id space that the sharded and the replicated pool share.

A page is free when nobody holds it: allocating gives the first hold, every further holder (a prefix tree, a second
request, a transfer that still writes) retains it, and each releases its own hold.
"""

import operator
from collections.abc import Iterable

from specdec.dcp.page_ids import num_page_ids, owner, page_id_of
from specdec.kernels.errors import ConfigError, OutOfPagesError


class PageAllocator:
    """Free lists by owner, and a count of holders for each page.

    The policy spreads the pages of a request over the ranks: its next page goes to the rank after the owner of its last
    one, and to the rank with most free pages when there is no last page or that rank is full. It is only a policy: who
    owns a page is read from its id, and nothing relies on the rotation.

    Not thread-safe. Recently released pages are handed out first, so memory that was never touched stays so.
    """

    def __init__(self, num_pages_per_rank: int, dcp_size: int) -> None:
        if num_pages_per_rank < 1 or dcp_size < 1:
            raise ConfigError(f"num_pages_per_rank and dcp_size must be >= 1, got {num_pages_per_rank} and {dcp_size}")
        self._dcp_size = dcp_size
        self._num_holders = [0] * num_page_ids(num_pages_per_rank, dcp_size)
        self._free = [
            [page_id_of(local_page, rank, dcp_size) for local_page in reversed(range(num_pages_per_rank))]
            for rank in range(dcp_size)
        ]
        self._num_free = len(self._num_holders)

    @property
    def num_pages(self) -> int:
        """Size of the id space."""
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._num_free

    def num_holders(self, page_id: int) -> int:
        """How many hold this page; 0 when it is free."""
        self._check_id(page_id)
        return self._num_holders[page_id]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` pages, each with one holder: the caller. All of them or none.

        Args:
            count: Pages wanted, >= 0.
            after: Last page of the request that grows; None for its first pages.

        Raises:
            OutOfPagesError: Fewer than `count` pages are free.
        """
        if count > self._num_free:
            raise OutOfPagesError(f"{count} KV pages wanted, {self._num_free} of {self.num_pages} free")
        page_ids = []
        for _ in range(count):
            free = self._free[(owner(after, self._dcp_size) + 1) % self._dcp_size] if after is not None else None
            if not free:
                free = max(self._free, key=len)
            after = free.pop()
            self._num_holders[after] = 1
            page_ids.append(after)
        self._num_free -= len(page_ids)
        return page_ids

    def retain(self, page_ids: Iterable[int]) -> None:
        """Add one holder to each page. All of them or none.

        Raises:
            ValueError: A page is free or unknown.
        """
        ids = [operator.index(page_id) for page_id in page_ids]
        for page_id in ids:
            self._check_id(page_id)
            if not self._num_holders[page_id]:
                raise ValueError(f"page {page_id} is free and cannot be retained")
        for page_id in ids:
            self._num_holders[page_id] += 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Take one holder from each page, as often as it is listed; pages without holders become free. All or none.

        Raises:
            ValueError: A page is unknown, or has fewer holders than it is listed: it would be freed twice.
        """
        ids = [operator.index(page_id) for page_id in page_ids]
        num_holders = self._num_holders
        freed = []
        for num_done, page_id in enumerate(ids):
            if not 0 <= page_id < len(num_holders) or not num_holders[page_id]:
                for done in ids[:num_done]:
                    num_holders[done] += 1
                self._check_id(page_id)
                raise ValueError(f"page {page_id} has no holder left and cannot be released again")
            num_holders[page_id] -= 1
            if not num_holders[page_id]:
                freed.append(page_id)
        for page_id in freed:
            self._free[owner(page_id, self._dcp_size)].append(page_id)
        self._num_free += len(freed)

    def _check_id(self, page_id: int) -> None:
        if not 0 <= page_id < len(self._num_holders):
            raise ValueError(f"page ids must lie in 0..{len(self._num_holders) - 1}, got {page_id}")
