"""Draft with the checkpoint's own MTP layer, on every rank.

After each round `observe` runs the layer over the rows that became final, with the target's hidden states: that writes
(or rewrites) their draft KV and index keys and leaves, for the last row of each request, g and the choice of slots.
`propose` turns g into the first draft, then recycles: K - 1 passes of one row a request. Both place their rows at once
and return what runs the passes (`specdec.ranks.worker` says why).

All of it runs under `dcp_disabled`: the draft pool holds the whole context on every rank, so every rank proposes the
same tokens without a collective over the dcp ranks. Those of tensor parallelism remain, and each draft is agreed by
one: the ranks must not embed different tokens.

Ranks of a layer split share the rows of `observe` as they share those of the target, and the last of them stores the
draft KV. They prefill and never propose, so nothing else is kept.

B = requests, T = rows, K = drafts, H = hidden, S = slots, X = index_topk.
"""

from collections.abc import Callable

import numpy as np
import torch

from specdec.dcp.agreement import agree_drafts
from specdec.dcp.geometry import PoolRole, active_geometry, dcp_disabled
from specdec.dcp.kv_store import PlacedPass
from specdec.dcp.layer_split_pool import LayerSplitPool
from specdec.dcp.page_table import KeptPageTable, PageTable
from specdec.dcp.pool import KvPool
from specdec.drafting.draft import DraftBatch, Drafts, ObservedRows
from specdec.errors import RoundError
from specdec.kernels.logits_transform import transform_logits
from specdec.kernels.row_padding import pad_rows
from specdec.models.glm.kernel_target import KernelMtp
from specdec.models.glm.mtp import MtpIndexSharing, MtpLayer
from specdec.models.glm.selection import Selection
from specdec.sampling.accept import AcceptanceRule, draw_drafts


class MtpDraft:
    """The MTP layer of one rank as it drafts.

    Args:
        mtp: The layer.
        pool: The draft pool; its physical pages are the page ids themselves.
        rule: The acceptance rule, which decides how drafts are drawn.
        num_slots: Slots whose state is kept between rounds.
        index_sharing: What recycled steps attend to.
    """

    def __init__(
        self,
        mtp: MtpLayer | KernelMtp,
        pool: KvPool | LayerSplitPool,
        *,
        rule: AcceptanceRule,
        num_slots: int,
        index_sharing: MtpIndexSharing,
    ) -> None:
        self.mtp = mtp
        self.pool = pool
        self.rule = rule
        self.index_sharing = index_sharing
        config = mtp.target.config
        embedding = mtp.target.embed_tokens
        self.g_SH = embedding.new_zeros((num_slots, config.hidden_size))
        self.anchor_SX = torch.full((num_slots, config.index_topk), -1, dtype=torch.int64, device=embedding.device)
        with dcp_disabled():
            geometry = active_geometry(size=pool.geometry.size, rank=pool.geometry.rank, role=PoolRole.DRAFT)
        self._page_table = KeptPageTable(
            geometry=geometry, page_size=pool.layout.page_size, num_pages=pool.num_pages, device=pool.device
        )

    def observe(self, rows: ObservedRows) -> Callable[[], None]:
        """Place the refresh pass; it keeps g and the selection of each request's last row.

        Raises:
            RoundError: A rank of a layer split has lost draft KV that the rows attend to.
        """
        is_split = isinstance(self.pool, LayerSplitPool)
        if isinstance(self.pool, LayerSplitPool):
            _check_prior_rows(self.pool, rows)
        with dcp_disabled():
            request_index_T = np.repeat(np.arange(len(rows.slot_B)), rows.num_rows_B)
            placed = self.pool.place(
                self._page_table.of(rows.page_id_BP), request_index=request_index_T, position=rows.position_T
            )
        next_token_id_T = pad_rows(torch.from_numpy(rows.next_token_id_T[placed.rows]).to(self.g_SH.device))
        hidden_TH = pad_rows(rows.hidden_TH[placed.rows])
        last_B = torch.from_numpy(np.cumsum(rows.num_rows_B) - 1).to(self.g_SH.device)
        slot_B = torch.from_numpy(rows.slot_B).to(self.g_SH.device)

        def forward() -> torch.Tensor:
            with dcp_disabled():
                output = self.mtp.forward(next_token_id_T, hidden_TH, metadata=placed.metadata, pool=placed.store)
            if not is_split:
                self.g_SH[slot_B] = output.g_TH[last_B]
                self.anchor_SX[slot_B] = output.selection.position_TK[last_B]
            return output.g_TH

        def run() -> None:
            placed.run(forward)

        return run

    def propose(self, batch: DraftBatch) -> Callable[[], Drafts]:
        """Place the draft passes; they draft up to `num_drafts_B` tokens a request.

        A request leaves the passes once it has its drafts.
        """
        if isinstance(self.pool, LayerSplitPool):
            raise AssertionError("ranks of a layer split prefill: they keep nothing to draft from")
        with dcp_disabled():
            pages = self._page_table.of(batch.page_id_BP)
        return lambda: self._draft(batch, pages)

    def _draft(self, batch: DraftBatch, pages: PageTable) -> Drafts:
        num_drafts_B = batch.num_drafts_B
        token_id_BK = np.zeros((len(num_drafts_B), int(num_drafts_B.max())), dtype=np.int64)
        probs_K: list[torch.Tensor] = []
        slot_B = torch.from_numpy(batch.slot_B).to(self.g_SH.device)
        g_BH, anchor_BX = self.g_SH[slot_B], self.anchor_SX[slot_B]
        tp = self.mtp.target.parallel.tp
        with dcp_disabled():
            for step in range(token_id_BK.shape[1]):
                if step:
                    live_B = np.flatnonzero(num_drafts_B > step)
                    live = torch.from_numpy(live_B).to(g_BH.device)
                    anchor_position_B = batch.length_B[live_B] - 2  # the row whose g gave the first draft
                    g_BH[live] = self._recycle(
                        self.pool.place(pages, request_index=live_B, position=anchor_position_B + step),
                        last_draft_B=torch.from_numpy(token_id_BK[live_B, step - 1]).to(g_BH.device),
                        g_BH=g_BH[live],
                        anchor_BX=anchor_BX[live],
                        num_drafted=step,
                    )
                drafts = [
                    row[: min(step, count)].tolist() for row, count in zip(token_id_BK, num_drafts_B, strict=True)
                ]
                rows = batch.sampling.draft_rows(batch.length_B, drafts)
                drawn = draw_drafts(transform_logits(self.mtp.target.logits(g_BH), rows.rules), rows, self.rule)
                token_id_BK[:, step] = agree_drafts(tp, drawn.value_B, drawn.token_id_B).cpu().numpy()
                if drawn.draft_probs_BV is not None:
                    probs_K.append(drawn.draft_probs_BV)
        return Drafts(
            token_id_BK=token_id_BK,
            num_drafts_B=num_drafts_B,
            draft_probs_BKV=torch.stack(probs_K, dim=1) if probs_K else None,
        )

    def _recycle(
        self,
        placed: PlacedPass,
        *,
        last_draft_B: torch.Tensor,
        g_BH: torch.Tensor,
        anchor_BX: torch.Tensor,
        num_drafted: int,
    ) -> torch.Tensor:
        """Run one row a request, made of its last draft and its last g; returns the next g, [B, H]."""
        metadata, selection = placed.metadata, None
        if self.index_sharing is MtpIndexSharing.ANCHOR:
            selection = Selection.of(anchor_BX, metadata)
        elif self.index_sharing is MtpIndexSharing.ANCHOR_AND_DRAFTS:
            own_position_B = metadata.position_T[: metadata.num_tokens]
            drafted_BK = own_position_B[:, None] - torch.arange(num_drafted - 1, -1, -1, device=g_BH.device)
            selection = Selection.of(torch.cat((anchor_BX, drafted_BK), dim=1), metadata)
        output = self.mtp.forward(
            pad_rows(last_draft_B), pad_rows(g_BH), metadata=metadata, pool=placed.store, selection=selection
        )
        return output.g_TH[: metadata.num_tokens]


def _check_prior_rows(pool: LayerSplitPool, rows: ObservedRows) -> None:
    start_B = rows.position_T[np.cumsum(rows.num_rows_B) - rows.num_rows_B]
    stored_B = pool.committed_prefix(rows.page_id_BP, start_B)
    if (stored_B < start_B).any():
        raise RoundError(
            f"cp rank {pool.cp.rank} has stored {stored_B.tolist()} rows of draft KV of these requests, their next "
            f"rows attend to {start_B.tolist()}"
        )
