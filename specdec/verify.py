"""The target pass of a round: known tokens and drafts of every scheduled request, in one batch.

B = scheduled requests, T = rows, H = hidden, V = vocabulary, K = drafts.
"""

from dataclasses import dataclass

import numpy as np
import torch

from specdec.dcp.geometry import PoolRole, active_geometry
from specdec.dcp.metadata import build_metadata
from specdec.dcp.pool import KvPool
from specdec.draft import Drafts
from specdec.kernels.row_padding import pad_rows
from specdec.models.glm.target import GlmTarget
from specdec.scheduler import ScheduledBatch
from specdec.slot_table import Int64Array, SlotTable


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetPass:
    """What the target computed for T rows; request b has rows first_row_B[b] .. first_row_B[b] + num_rows_B[b] - 1.

    Attributes:
        first_row_B: i64 [B].
        num_rows_B: Known tokens and drafts, i64 [B].
        request_index_T: Request of each row, i64 [T].
        position_T: Position of each row, i64 [T].
        hidden_TH: Hidden states after the final norm, [T, H].
    """

    first_row_B: Int64Array
    num_rows_B: Int64Array
    request_index_T: Int64Array
    position_T: Int64Array
    hidden_TH: torch.Tensor


def verify(batch: ScheduledBatch, drafts: Drafts, *, slots: SlotTable, target: GlmTarget, pool: KvPool) -> TargetPass:
    """Run the target over the round's rows and write their KV.

    The drafts are put behind the known tokens in `slots.token_SX`; what is rejected is overwritten by later rounds.

    Args:
        batch: The scheduled requests.
        drafts: Their drafts, one row a scheduled request.
        slots: Tokens and pages of the requests.
        target: The model.
        pool: The target pool.
    """
    num_rows_B = batch.num_known_B + drafts.num_drafts_B
    first_row_B = np.cumsum(num_rows_B) - num_rows_B
    request_index_T = np.repeat(np.arange(len(num_rows_B)), num_rows_B)
    position_T = np.arange(len(request_index_T)) - first_row_B[request_index_T] + batch.start_B[request_index_T]
    num_columns = drafts.token_id_BK.shape[1]
    if num_columns:
        column_BK = slots.length_S[batch.slot_B][:, None] + np.arange(num_columns)
        slots.token_SX[batch.slot_B[:, None], column_BK] = drafts.token_id_BK
    num_pages = int(slots.num_pages_S[batch.slot_B].max())
    metadata = build_metadata(
        geometry=active_geometry(size=pool.geometry.size, rank=pool.geometry.rank, role=PoolRole.TARGET),
        page_size=pool.layout.page_size,
        num_pages=pool.num_pages,
        request_index=request_index_T,
        position=position_T,
        page_table=slots.page_id_SP[batch.slot_B, :num_pages],
        device=pool.device,
    )
    token_id_T = torch.from_numpy(slots.token_SX[batch.slot_B[request_index_T], position_T].astype(np.int64))
    hidden_TH = target.forward(pad_rows(token_id_T.to(pool.device)), metadata=metadata, pool=pool)
    return TargetPass(
        first_row_B=first_row_B,
        num_rows_B=num_rows_B,
        request_index_T=request_index_T,
        position_T=position_T,
        hidden_TH=hidden_TH[: len(position_T)],
    )


def drawing_rows(batch: ScheduledBatch, drafts: Drafts, target_pass: TargetPass) -> Int64Array:
    """Rows whose logits are drawn from: the last known token of each final request, and its drafts; i64 ascending."""
    rank_T = np.arange(len(target_pass.position_T)) - target_pass.first_row_B[target_pass.request_index_T]
    first_drawn_B = np.where(batch.final_B, batch.num_known_B - 1, target_pass.num_rows_B)
    return np.flatnonzero(rank_T >= first_drawn_B[target_pass.request_index_T])
