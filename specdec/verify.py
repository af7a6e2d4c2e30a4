"""The target pass of a round: one forward over the known tokens and the drafts of every scheduled request."""

from collections.abc import Callable

import torch

from specdec.dcp.layer_split_pool import LayerSplitPool
from specdec.dcp.page_table import KeptPageTable
from specdec.dcp.pool import KvPool
from specdec.kernels.row_padding import pad_rows
from specdec.models.glm.kernel_target import KernelTarget
from specdec.models.glm.target import GlmTarget
from specdec.models.glm.trace import ForwardTrace
from specdec.round_rows import RoundRows


def place_target_rows(
    rows: RoundRows,
    *,
    target: GlmTarget | KernelTarget,
    pool: KvPool | LayerSplitPool,
    page_table: KeptPageTable,
    trace: ForwardTrace | None = None,
    when_stored: Callable[[int], None] | None = None,
) -> Callable[[], torch.Tensor]:
    """Place the rows in the target pool; what is returned runs the pass over them and writes their KV.

    Args:
        rows: T rows with their pages.
        target: The model.
        pool: The target pool.
        page_table: Of that pool, kept from round to round.
        trace: Filled with the pass's choices where given: of the rows that this rank computes.
        when_stored: Called with each layer once this rank has stored the rows there; see `GlmTarget.forward`.

    Returns:
        Gives the hidden states after the final norm, [T, H], of all rows on every rank.
    """
    placed = pool.place(page_table.of(rows.page_id_BP), request_index=rows.request_index_T, position=rows.position_T)
    token_id_T = pad_rows(torch.from_numpy(rows.token_id_T[placed.rows]).to(pool.device))

    def forward() -> torch.Tensor:
        return target.forward(
            token_id_T, metadata=placed.metadata, pool=placed.store, trace=trace, when_stored=when_stored
        )

    return lambda: placed.whole(placed.run(forward))
