"""Arithmetic of page ids: one id space over all ranks, translated to a local page once, at the door of a pool.

With M physical pages per rank and N ranks the ids are 0..M*N - 1, and id v is local page v // N of rank v % N. A
replicated pool is the case N = 1 over M*N physical pages, so one allocator serves both. Ownership is read from the id
alone, never from a position. -1 is padding and owned by nobody (beware: `-1 % N` is the last rank, hence `owner`).

Every function takes an int, a numpy int64 array or an i64 tensor, and returns the same kind.

A pool keeps two physical pages outside the id space: the scratch page, which takes the writes of padded and unowned
rows and is never read, and the zero page, which is read for -1 and never written.
"""

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch  # not at run time: transfer plans are made of this arithmetic, and need no torch

Ids = TypeVar("Ids", int, npt.NDArray[np.int64], "torch.Tensor")

NUM_RESERVED_PAGES = 2  # scratch and zero
NUM_FRONT_PAGES = 1  # of these, in front of page 0: the zero page


def num_page_ids(num_pages_per_rank: int, dcp_size: int) -> int:
    """Size of the id space, and the number of physical pages of a replicated pool."""
    return num_pages_per_rank * dcp_size


def scratch_page(num_pages: int) -> int:
    """Physical index of the scratch page of a pool with `num_pages` physical pages."""
    return num_pages


def owner(page_id: Ids, dcp_size: int) -> Ids:
    """Rank that holds a page: 0..dcp_size - 1, or -1 for the padding id -1."""
    result: Ids = page_id % dcp_size - dcp_size * (page_id < 0)
    return result


def page_id_of(local_page: Ids, owner: Ids | int, dcp_size: int) -> Ids:
    """Page id of a physical page of a rank: the inverse of `owner` and `owned_local_page`. Not for padding."""
    result: Ids = local_page * dcp_size + owner
    return result


def owned_local_page(page_id: Ids, dcp_size: int, rank: int) -> Ids:
    """Physical page on `rank`, or -1 where another rank, or nobody, owns the id."""
    local = page_id // dcp_size
    owned = page_id - local * dcp_size == rank  # true for -1 on the last rank too, and -1 is then its local page
    result: Ids = (local + 1) * owned - 1
    return result
