"""Rows of any requests in groups of equal size, as the kernels take them: the rows of a group share their pages.

n = rows, G = groups, Q = rows of a group.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class RowGroups(NamedTuple):
    """Groups of the rows of a pass; arrays cannot be written to.

    Attributes:
        row_GQ: Rows of each group, in order, -1 behind its last, i64.
        request_G: Request of each group, i64.
    """

    row_GQ: Int64Array
    request_G: Int64Array


def group_rows(request_index: Int64Array, *, rows_per_group: int) -> RowGroups:
    """Cut rows into groups: as few as can be without changing their order.

    Args:
        request_index: Request of each row, i64 [n]; rows of a request stand together.
        rows_per_group: Q.
    """
    return _grouped(request_index.tobytes(), rows_per_group)


@lru_cache(maxsize=16)
def _grouped(request_index: bytes, rows_per_group: int) -> RowGroups:
    """Group the rows; most passes repeat what the one before had."""
    request_n = np.frombuffer(request_index, dtype=np.int64)
    row_n = np.arange(len(request_n))
    is_first_n = np.ones(len(request_n), dtype=np.bool_)
    is_first_n[1:] = request_n[1:] != request_n[:-1]
    place_n = row_n - np.maximum.accumulate(np.where(is_first_n, row_n, 0))  # among the rows of its request
    group_n = np.cumsum(place_n % rows_per_group == 0) - 1
    num_groups = int(group_n[-1]) + 1 if len(group_n) else 0
    row_GQ = np.full((num_groups, rows_per_group), -1, dtype=np.int64)
    row_GQ[group_n, place_n % rows_per_group] = row_n
    groups = RowGroups(row_GQ, request_n[row_GQ[:, 0]])
    for array in groups:
        array.setflags(write=False)
    return groups
