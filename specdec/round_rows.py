"""The rows of one round: known tokens and drafts of every scheduled request, request by request.

B = scheduled requests, T = rows, K = drafts.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specdec.draft import Drafts
from specdec.scheduler import ScheduledBatch
from specdec.slot_table import Int64Array, SlotTable


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRows:
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


def lay_out_rows(batch: ScheduledBatch, drafts: Drafts, slots: SlotTable) -> RoundRows:
    """Lay out a round and put its drafts behind the known tokens in `slots.token_SX`.

    What is rejected there is overwritten by later rounds.
    """
    num_rows_B = batch.num_known_B + drafts.num_drafts_B
    first_row_B, request_index_T, rank_T = _places(num_rows_B.tobytes())
    position_T = rank_T + batch.start_B[request_index_T]
    num_columns = drafts.token_id_BK.shape[1]
    if num_columns:
        column_BK = slots.length_S[batch.slot_B][:, None] + np.arange(num_columns)
        slots.token_SX[batch.slot_B[:, None], column_BK] = drafts.token_id_BK
    return RoundRows(
        first_row_B=first_row_B,
        num_rows_B=num_rows_B,
        request_index_T=request_index_T,
        rank_T=rank_T,
        position_T=position_T,
        token_id_T=slots.token_SX[batch.slot_B[request_index_T], position_T].astype(np.int64),
        page_id_BP=slots.page_ids(batch.slot_B),
    )


@lru_cache(maxsize=16)
def _places(num_rows: bytes) -> tuple[Int64Array, Int64Array, Int64Array]:
    """First row of each request, and the request and the place of each row; rounds that repeat their shape share them.

    Args:
        num_rows: Rows of each request, the bytes of i64 [B].
    """
    num_rows_B = np.frombuffer(num_rows, dtype=np.int64)
    first_row_B = np.cumsum(num_rows_B) - num_rows_B
    request_index_T = np.repeat(np.arange(len(num_rows_B)), num_rows_B)
    rank_T = np.arange(len(request_index_T)) - first_row_B[request_index_T]
    for shared in (first_row_B, request_index_T, rank_T):
        shared.setflags(write=False)
    return first_row_B, request_index_T, rank_T
