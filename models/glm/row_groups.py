"""Rows of any requests in groups of equal size, as the kernels take them: rows of one request at adjacent positions.

n = rows, G = groups, Q = rows of a group.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class RowGroups(NamedTuple):
    """Groups of the rows of a pass; all arrays i64.

    Attributes:
        row_GQ: Rows of each group, in order, -1 behind its last.
        num_rows_G: Rows of each group.
        request_G: Request of each group.
        start_G: Position of its first row.
    """

    row_GQ: Int64Array
    num_rows_G: Int64Array
    request_G: Int64Array
    start_G: Int64Array


def group_rows(request_index: Int64Array, position: Int64Array, *, rows_per_group: int) -> RowGroups:
    """Cut rows into groups, without changing their order.

    Args:
        request_index: Request of each row, i64 [n].
        position: Position of each row, i64 [n].
        rows_per_group: Q.
    """
    row_n = np.arange(len(request_index))
    is_first_n = np.ones(len(row_n), dtype=np.bool_)  # of a run of one request at adjacent positions
    is_first_n[1:] = (request_index[1:] != request_index[:-1]) | (position[1:] != position[:-1] + 1)
    place_n = row_n - np.maximum.accumulate(np.where(is_first_n, row_n, 0))
    group_n = np.cumsum(place_n % rows_per_group == 0) - 1
    num_rows_G = np.bincount(group_n)
    row_GQ = np.full((len(num_rows_G), rows_per_group), -1, dtype=np.int64)
    row_GQ[group_n, place_n % rows_per_group] = row_n
    first_G = row_GQ[:, 0]
    return RowGroups(row_GQ, num_rows_G, request_index[first_G], position[first_G])
