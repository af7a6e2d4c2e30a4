"""The target pass of a round: one forward over the known tokens and the drafts of every scheduled request."""

import torch

from specdec.dcp.geometry import PoolRole, active_geometry
from specdec.dcp.metadata import build_metadata
from specdec.dcp.pool import KvPool
from specdec.kernels.row_padding import pad_rows
from specdec.models.glm.target import GlmTarget
from specdec.round_rows import RoundRows


def verify(rows: RoundRows, *, target: GlmTarget, pool: KvPool) -> torch.Tensor:
    """Run the target over the rows and write their KV.

    Args:
        rows: T rows with their pages.
        target: The model.
        pool: The target pool.

    Returns:
        Hidden states after the final norm, [T, H].
    """
    metadata = build_metadata(
        geometry=active_geometry(size=pool.geometry.size, rank=pool.geometry.rank, role=PoolRole.TARGET),
        page_size=pool.layout.page_size,
        num_pages=pool.num_pages,
        request_index=rows.request_index_T,
        position=rows.position_T,
        page_table=rows.page_id_BP,
        device=pool.device,
    )
    token_id_T = torch.from_numpy(rows.token_id_T).to(pool.device)
    return target.forward(pad_rows(token_id_T), metadata=metadata, pool=pool)[: len(token_id_T)]
