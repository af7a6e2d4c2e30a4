"""The target and its MTP layer as `GlmTarget` and `MtpLayer` are called, computed by the kernels of a GPU.

Rows of any requests run in passes of at most 24 groups of 8 rows of one request. A row's bits do not depend on its
pass: in a chunk of a prompt, verified or in a captured round, it gets the same.

T = rows, G = groups, Q = rows of a group, H = hidden, V = vocabulary, K = positions chosen, P = pages of a request.
"""

from collections.abc import Callable

import torch

from specdec.dcp.communicator import ParallelGroups
from specdec.dcp.kv_store import KvStore
from specdec.dcp.layout import EntryKind
from specdec.dcp.metadata import BatchMetadata
from specdec.dcp.pool import KvPool
from specdec.kernels.decode_rows import DecodeRows
from specdec.kernels.errors import ConfigError
from specdec.kernels.rotary import rotation_at
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.draft_chain import run_mtp
from specdec.models.glm.layer_launches import Choice, LayerLaunches, LayerPages, PassRows, PassSizes, layer_pages
from specdec.models.glm.layer_slice import ModelSlice
from specdec.models.glm.mtp import MTP_LAYER, MtpOutput
from specdec.models.glm.rank_head import RankHead
from specdec.models.glm.rank_pass import RankPass
from specdec.models.glm.row_groups import group_rows
from specdec.models.glm.selection import Selection
from specdec.models.glm.trace import ForwardTrace

GROUP_ROWS, MAX_GROUPS = 8, 24
MAX_ROWS = GROUP_ROWS * MAX_GROUPS


class KernelTarget:
    """The target of one rank; see `GlmTarget`.

    Args:
        config: The checkpoint's config.
        model: The rank's slice.
        parallel: The groups of this rank; pools are whole on it.
        max_positions: Most positions of a request.
    """

    def __init__(
        self,
        config: GlmConfig,
        model: ModelSlice,
        *,
        parallel: ParallelGroups,
        max_positions: int,
    ) -> None:
        self.config = config
        self.parallel = parallel
        self.model = model
        self.embed_tokens = model.vocabulary.embedding_VH
        self.norm = model.final_norm
        self.sizes = PassSizes(
            num_requests=MAX_GROUPS,
            rows_per_request=GROUP_ROWS,
            max_positions=max_positions,
            index_topk=model.index_topk,
            eps=model.eps,
            routed_scaling=model.routed_scaling,
        )
        self._pages = _PoolPages()
        self._launches = LayerLaunches(model.layers, self.sizes, tp=parallel.tp)
        self._head = RankHead(model.vocabulary, tp=parallel.tp)

    def forward(
        self,
        token_id_T: torch.Tensor,
        *,
        metadata: BatchMetadata,
        pool: KvStore,
        trace: ForwardTrace | None = None,
    ) -> torch.Tensor:
        """Run one pass over T rows, writing their KV to the pool; as `GlmTarget.forward`, without padding rows.

        Raises:
            ConfigError: A trace is wanted, which only the definitions fill.
        """
        if trace is not None:
            raise ConfigError("only torch traces the choices of a pass: take kernels torch")

        pages = self._pages.of(pool)

        def run(row_T: torch.Tensor, rows: PassRows) -> torch.Tensor:
            launches = self._launches.of_requests(len(rows.page_BP))
            return RankPass(self.model, pages, launches, rows).forward(_taken(token_id_T, row_T, -1))

        return in_groups(metadata, self.model, run, like=self.norm)

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Apply the head to any number of rows after the final norm: float32 [T, V], whole on every rank."""
        return self._head.logits(hidden_TH)


class KernelMtp:
    """The MTP layer of one rank; see `MtpLayer`.

    Args:
        target: The target, whose embedding and head it shares; its slice has the layer's weights.
    """

    def __init__(self, target: KernelTarget) -> None:
        mtp, tp = target.model.mtp, target.parallel.tp
        assert mtp is not None
        self.target = target
        self._mtp = mtp
        self._pages = _PoolPages()
        self._choosing = LayerLaunches([mtp.layer], target.sizes, tp=tp)
        self._sharing = LayerLaunches([mtp.recycled], target.sizes, tp=tp)

    def forward(
        self,
        next_token_id_T: torch.Tensor,
        hidden_TH: torch.Tensor,
        *,
        metadata: BatchMetadata,
        pool: KvStore,
        selection: Selection | None = None,
    ) -> MtpOutput:
        """Run the layer on T rows, writing their draft KV; as `MtpLayer.forward`, without padding rows."""
        model, mtp = self.target.model, self._mtp
        pages = self._pages.of(pool)[MTP_LAYER]
        layer, all_launches = (mtp.layer, self._choosing) if selection is None else (mtp.recycled, self._sharing)
        chosen_TK = hidden_TH.new_empty((metadata.num_tokens, model.index_topk), dtype=torch.int32)

        def run(row_T: torch.Tensor, rows: PassRows) -> torch.Tensor:
            launches = all_launches.of_requests(len(rows.page_BP))
            choice = launches.new_choice(rows.places.count_T) if selection is None else _choice_of(selection, row_T)
            g_TH = run_mtp(
                model,
                mtp,
                layer,
                launches=launches,
                pages=pages,
                rows=rows,
                choice=choice,
                token_T=_taken(next_token_id_T, row_T, -1),
                hidden_TH=_taken(hidden_TH, row_T, 0),
            )
            if selection is None:
                chosen_TK[row_T[row_T >= 0]] = choice.position_TK[row_T >= 0]
            return g_TH

        g_TH = in_groups(metadata, model, run, like=self.target.norm)
        if selection is None:
            selection = Selection.of(chosen_TK.long(), metadata)
        return MtpOutput(g_TH, selection)


class _PoolPages:
    """The pages of a pool as launches take them, described anew where the pool has taken other memory."""

    def __init__(self) -> None:
        self._address = 0
        self._pages: list[LayerPages] = []

    def of(self, pool: KvStore) -> list[LayerPages]:
        """Give the pages of every layer.

        Raises:
            ConfigError: The pool is of another kind.
        """
        if not isinstance(pool, KvPool):
            raise ConfigError(f"the kernels read whole pools, got a {type(pool).__name__}")
        address = pool.buffer(EntryKind.LATENT).data_ptr()
        if address != self._address:
            self._pages, self._address = layer_pages(pool), address
        return self._pages


def in_groups(
    metadata: BatchMetadata,
    model: ModelSlice,
    run: Callable[[torch.Tensor, PassRows], torch.Tensor],
    *,
    like: torch.Tensor,
) -> torch.Tensor:
    """Run passes over all live rows, in order, and put what they give together.

    Args:
        metadata: Of the rows.
        model: For the rotation and the number of positions chosen.
        run: Takes the row behind each row of a pass, i64 with -1 for padding, and the pass's rows; gives a vector each.
        like: A vector of the dtype and length that it gives.

    Returns:
        Vectors of the live rows, in their order.
    """
    out_TH = like.new_empty((metadata.num_tokens, len(like)))
    row_GQ, request_G = group_rows(metadata.request_index, rows_per_group=GROUP_ROWS)
    for first in range(0, len(request_G), MAX_GROUPS):
        groups = slice(first, first + MAX_GROUPS)
        row_T = torch.from_numpy(row_GQ[groups].flatten()).to(like.device)
        request_B = torch.from_numpy(request_G[groups].copy()).to(like.device)
        position_T = _taken(metadata.position_T, row_T, -1)
        places = DecodeRows(
            position_T=position_T.int(),
            write_row_T=_taken(metadata.write_row_T, row_T, -1),
            count_T=(position_T + 1).clamp(max=model.index_topk).int(),
            rotation=rotation_at(position_T.clamp(min=0), model.inverse_frequency_F),
        )
        rows = PassRows(places=places, page_BP=metadata.local_page_RP[request_B].int())
        is_live_T = row_T >= 0
        out_TH[row_T[is_live_T]] = run(row_T, rows)[is_live_T]
    return out_TH


def _choice_of(selection: Selection, row_T: torch.Tensor) -> Choice:
    """Give what rows attend to that a selection names; all its columns are read, but for -1."""
    row_TK = _taken(selection.row_TW, row_T, -1).int()
    return Choice(
        position_TK=_taken(selection.position_TK, row_T, -1).int(),
        row_TK=row_TK,
        count_T=torch.full((len(row_TK),), row_TK.shape[1], dtype=torch.int32, device=row_TK.device),
    )


def _taken(values_T: torch.Tensor, row_T: torch.Tensor, missing: int) -> torch.Tensor:
    """Give the values of rows, and another where there is no row."""
    taken = values_T[row_T.clamp(min=0)]
    is_missing_T = (row_T < 0).view(-1, *[1] * (taken.ndim - 1))
    return taken.masked_fill(is_missing_T, missing)
