"""The rows of one round: known tokens and drafts of every scheduled request, request by request.

B = scheduled requests, T = rows, K = drafts, D = rows that are drafts.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from specdec.drafting.draft import Drafts
from specdec.scheduler import ScheduledBatch
from specdec.slot_table import Int64Array, SlotTable


class RoundRows(NamedTuple):
    """T rows; request b has rows first_row_B[b] .. first_row_B[b] + num_rows_B[b] - 1, in order of position.

    Attributes:
        first_row_B: i64 [B].
        num_rows_B: Known tokens and drafts, i64 [B].
        request_index_T: Request of each row, i64 [T].
        rank_T: Place of each row among the rows of its request, i64 [T].
        position_T: Position of each row, i64 [T].
        token_id_T: Token of each row, i64 [T].
        page_id_BP: Pages of each request, -1 padded, i64 [B, P].
    """

    first_row_B: Int64Array
    num_rows_B: Int64Array
    request_index_T: Int64Array
    rank_T: Int64Array
    position_T: Int64Array
    token_id_T: Int64Array
    page_id_BP: Int64Array

    def from_place(self, place_B: Int64Array) -> Int64Array:
        """Rows at or behind a place of their request, i64 ascending."""
        return np.flatnonzero(self.rank_T >= place_B[self.request_index_T])

    def before_place(self, place_B: Int64Array) -> Int64Array:
        """Rows before a place of their request, i64 ascending."""
        return np.flatnonzero(self.rank_T < place_B[self.request_index_T])

    def without(self, row_R: Int64Array) -> "RoundRows":
        """Leave rows out; what is said of the requests stays as it is."""
        by_row = ("request_index_T", "rank_T", "position_T", "token_id_T")
        return self._replace(**{name: np.delete(getattr(self, name), row_R) for name in by_row})


def lay_out_rows(batch: ScheduledBatch, drafts: Drafts, slots: SlotTable) -> RoundRows:
    """Lay out a round."""
    shape = _round_shape(
        batch.num_known_B.tobytes(), drafts.num_drafts_B.tobytes(), num_columns=drafts.token_id_BK.shape[1]
    )
    position_T = batch.start_B[shape.request_index_T] + shape.rank_T
    first_token_T = slots.first_token_S[batch.slot_B][shape.request_index_T]
    token_id_T = slots.token[first_token_T + position_T].astype(np.int64)
    token_id_T[shape.draft_row_D] = drafts.token_id_BK.reshape(-1)[shape.draft_D]
    return RoundRows(
        first_row_B=shape.first_row_B,
        num_rows_B=shape.num_rows_B,
        request_index_T=shape.request_index_T,
        rank_T=shape.rank_T,
        position_T=position_T,
        token_id_T=token_id_T,
        page_id_BP=slots.page_ids(batch.slot_B),
    )


class _RoundShape(NamedTuple):
    """What depends on the numbers of rows alone; arrays cannot be written to.

    Attributes:
        draft_row_D: Rows that are drafts.
        draft_D: Which draft each of them is, in the flattened [B, K].
    """

    first_row_B: Int64Array
    num_rows_B: Int64Array
    request_index_T: Int64Array
    rank_T: Int64Array
    draft_row_D: Int64Array
    draft_D: Int64Array


@lru_cache(maxsize=16)
def _round_shape(num_known: bytes, num_drafts: bytes, *, num_columns: int) -> _RoundShape:
    """Shape of a round; most rounds repeat that of the one before.

    Args:
        num_known: Known tokens of each request, the bytes of i64 [B].
        num_drafts: Drafts of each request, the bytes of i64 [B].
        num_columns: K.
    """
    num_known_B = np.frombuffer(num_known, dtype=np.int64)
    num_rows_B = num_known_B + np.frombuffer(num_drafts, dtype=np.int64)
    first_row_B = np.cumsum(num_rows_B) - num_rows_B
    request_index_T = np.repeat(np.arange(len(num_rows_B)), num_rows_B)
    rank_T = np.arange(len(request_index_T)) - first_row_B[request_index_T]
    place_T = rank_T - num_known_B[request_index_T]  # of a row among the drafts of its request
    draft_row_D = np.flatnonzero(place_T >= 0)
    shape = _RoundShape(
        first_row_B=first_row_B,
        num_rows_B=num_rows_B,
        request_index_T=request_index_T,
        rank_T=rank_T,
        draft_row_D=draft_row_D,
        draft_D=request_index_T[draft_row_D] * num_columns + place_T[draft_row_D],
    )
    for shared in shape:
        shared.setflags(write=False)
    return shape
