"""The target and its MTP layer as `GlmTarget` and `MtpLayer` are called, computed by the kernels of a GPU.

Rows of any requests run in passes of at most 24 groups of 8 rows of one request. A row's bits do not depend on its
pass: in a chunk of a prompt, verified or in a captured round, it gets the same.

T = rows, G = groups, Q = rows of a group, H = hidden, V = vocabulary, K = positions chosen, P = pages of a request.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from specdec.dcp.communicator import Communicator, ParallelGroups, SingleRank
from specdec.dcp.kv_store import KvStore
from specdec.dcp.layer_split_pool import LayerSplitPool
from specdec.dcp.metadata import BatchMetadata
from specdec.dcp.pool import KvPool
from specdec.dcp.shard_pages import ShardPages
from specdec.kernels.decode_rows import DecodeRows, decode_rows
from specdec.kernels.errors import ConfigError
from specdec.kernels.index_key_pages import PAGE_SIZE
from specdec.kernels.index_select import CandidateMemory
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
        parallel: The groups of this rank.
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
        self.memory = CandidateMemory(num_lists=self.sizes.num_rows, max_positions=max_positions)
        self._launches = LayerLaunches(model.layers, self.sizes, tp=parallel.tp, dcp=parallel.dcp, memory=self.memory)
        self._head = RankHead(model.vocabulary, tp=parallel.tp)

    def forward(
        self,
        token_id_T: torch.Tensor,
        *,
        metadata: BatchMetadata,
        pool: KvStore,
        trace: ForwardTrace | None = None,
        when_stored: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Run one pass over T rows, writing their KV to the pool; as `GlmTarget.forward`, without padding rows.

        Raises:
            ConfigError: A trace is wanted, which only the definitions fill.
        """
        if trace is not None:
            raise ConfigError("only torch traces the choices of a pass: take kernels torch")

        pages = _pages_of(pool)
        hidden_TH = self.norm.new_empty((metadata.num_tokens, len(self.norm)))
        for part in pass_parts(metadata, self.model):
            launches = self._launches.of_requests(len(part.rows.page_BP))
            given_TH = RankPass(self.model, pages, launches, part.rows).forward(
                part.taken(token_id_T, -1), when_stored=when_stored if part.is_last else None
            )
            part.keep(given_TH, hidden_TH)
        return hidden_TH

    def warm_up(self, pool: KvStore | LayerSplitPool) -> None:
        """Run passes of padding rows, of every size: that compiles and loads, for seconds, all that a pass launches."""
        pages = _pages_of(pool)
        for num_groups in range(1, MAX_GROUPS + 1):
            rows = padding_rows(num_groups, self.model, dcp=self.parallel.dcp)
            launches = self._launches.of_requests(num_groups)
            token_T = torch.full_like(rows.places.position_T, -1, dtype=torch.int64)
            hidden_TH = RankPass(self.model, pages, launches, rows).forward(token_T)
            for num_rows in (num_groups, GROUP_ROWS * num_groups):
                self.logits(hidden_TH[:num_rows])

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
        self._choosing = LayerLaunches([mtp.layer], target.sizes, tp=tp, memory=target.memory)
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
        pages = _pages_of(pool)[MTP_LAYER]
        layer, all_launches = (mtp.layer, self._choosing) if selection is None else (mtp.recycled, self._sharing)
        g_TH = hidden_TH.new_empty((metadata.num_tokens, hidden_TH.shape[1]))
        chosen_TK = hidden_TH.new_empty((metadata.num_tokens, model.index_topk), dtype=torch.int32)
        for part in pass_parts(metadata, model):
            launches = all_launches.of_requests(len(part.rows.page_BP))
            choice = launches.new_choice(part.rows.places.count_T) if selection is None else _choice_of(selection, part)
            given_TH = run_mtp(
                model,
                mtp,
                layer,
                launches=launches,
                pages=pages,
                rows=part.rows,
                choice=choice,
                token_T=part.taken(next_token_id_T, -1),
                hidden_TH=part.taken(hidden_TH, 0),
            )
            part.keep(given_TH, g_TH)
            if selection is None:
                part.keep(choice.position_TK, chosen_TK)
        return MtpOutput(g_TH, selection or Selection.of(chosen_TK.long(), metadata))

    def warm_up(self, pool: KvStore | LayerSplitPool) -> None:
        """Run both forms of the layer on padding rows; see `KernelTarget.warm_up`."""
        model, mtp = self.target.model, self._mtp
        pages = _pages_of(pool)[MTP_LAYER]
        for num_groups in range(1, MAX_GROUPS + 1):
            rows = padding_rows(num_groups, model, dcp=SingleRank("dcp"))
            num_rows = GROUP_ROWS * num_groups
            token_T = torch.full_like(rows.places.position_T, -1, dtype=torch.int64)
            hidden_TH = model.final_norm.new_zeros((num_rows, len(model.final_norm)))
            choice = self._choosing.of_requests(num_groups).new_choice(rows.places.count_T)
            for layer, all_launches in ((mtp.layer, self._choosing), (mtp.recycled, self._sharing)):
                run_mtp(
                    model,
                    mtp,
                    layer,
                    launches=all_launches.of_requests(num_groups),
                    pages=pages,
                    rows=rows,
                    choice=choice,
                    token_T=token_T,
                    hidden_TH=hidden_TH,
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPart:
    """The rows of a pass that run together.

    Attributes:
        rows: As launches take them.
        row_T: Row of the pass behind each, i64; 0 for padding.
        is_padding_T: bool.
        live_N: Those that are no padding, i64.
        row_N: Rows of the pass behind them, i64.
        is_last: Whether no part follows: what it has stored of a layer, the pass has.
    """

    rows: PassRows
    row_T: torch.Tensor
    is_padding_T: torch.Tensor
    live_N: torch.Tensor
    row_N: torch.Tensor
    is_last: bool

    def taken(self, values_T: torch.Tensor, missing: int) -> torch.Tensor:
        """Give the values of the rows, and another for padding."""
        taken = values_T.index_select(0, self.row_T)
        return taken.masked_fill_(self.is_padding_T.view(-1, *[1] * (taken.ndim - 1)), missing)

    def keep(self, given_TX: torch.Tensor, kept_TX: torch.Tensor) -> None:
        """Put what was given for the rows where the pass keeps it."""
        kept_TX.index_copy_(0, self.row_N, given_TX.index_select(0, self.live_N))


def _pages_of(pool: KvStore | LayerSplitPool) -> list[LayerPages]:
    """Give the pages of every layer.

    Raises:
        ConfigError: The pool is of another kind.
    """
    if not isinstance(pool, KvPool):
        raise ConfigError(f"the kernels read pools with all layers, got a {type(pool).__name__}")
    return layer_pages(pool)


def pass_parts(metadata: BatchMetadata, model: ModelSlice) -> Iterator[PassPart]:
    """Cut the live rows of a pass into parts that run one after the other; waits for no device.

    Args:
        metadata: Of the rows.
        model: For the rotation and the number of positions chosen.
    """
    device = metadata.position_T.device
    groups = group_rows(metadata.request_index, metadata.position, rows_per_group=GROUP_ROWS)
    for first in range(0, len(groups.request_G), MAX_GROUPS):
        row_GQ, *numbers = (array[first : first + MAX_GROUPS] for array in groups)
        row_T = row_GQ.flatten()
        live_N = np.flatnonzero(row_T >= 0)
        num_rows_G, request_G, start_G = torch.from_numpy(np.stack(numbers)).to(device, non_blocking=True).unbind(0)
        page_BP, shards = metadata.local_page_RP.index_select(0, request_G).int(), None
        if metadata.pages.owned is not None:
            first_owner_G = metadata.pages.owned.first_owner_R.index_select(0, request_G)
            shards = ShardPages.of_local(page_BP, first_owner_B=first_owner_G)
        yield PassPart(
            rows=_placed_rows(start_G, num_rows_G, page_BP, shards, model),
            row_T=torch.from_numpy(row_T.clip(min=0)).to(device, non_blocking=True),
            is_padding_T=torch.from_numpy(row_T < 0).to(device, non_blocking=True),
            live_N=torch.from_numpy(live_N).to(device, non_blocking=True),
            row_N=torch.from_numpy(row_T[live_N]).to(device, non_blocking=True),
            is_last=first + MAX_GROUPS >= len(groups.request_G),
        )


def padding_rows(num_groups: int, model: ModelSlice, *, dcp: Communicator) -> PassRows:
    """Give groups of rows that are all padding."""
    device = model.final_norm.device
    none_G = torch.zeros(num_groups, dtype=torch.int64, device=device)
    page_BP, shards = torch.zeros((num_groups, 1), dtype=torch.int32, device=device), None
    if dcp.size > 1:
        shards = ShardPages.of(page_BP, size=dcp.size, rank=dcp.rank)
        page_BP = shards.page_BP
    return _placed_rows(none_G, none_G, page_BP, shards, model)


def _placed_rows(
    start_G: torch.Tensor,
    num_rows_G: torch.Tensor,
    page_BP: torch.Tensor,
    shards: ShardPages | None,
    model: ModelSlice,
) -> PassRows:
    """Find where the rows of groups stand, behind whose rows padding follows."""
    num_rows, num_pairs = len(start_G) * GROUP_ROWS, len(model.inverse_frequency_F)
    places = DecodeRows.empty(num_rows, num_pairs=num_pairs, device=start_G.device)
    decode_rows(
        start_G,
        num_rows_G,
        page_BP,
        model.inverse_frequency_F,
        page_size=PAGE_SIZE,
        most_keys=model.index_topk,
        before_BP=None if shards is None else shards.before_BP,
        out=places,
    )
    return PassRows(places=places, page_BP=page_BP, shards=shards)


def _choice_of(selection: Selection, part: PassPart) -> Choice:
    """Give what rows attend to that a selection names; all its columns are read, but for -1."""
    row_TK = part.taken(selection.row_TW, -1).int()
    return Choice(
        position_TK=part.taken(selection.position_TK, -1).int(),
        row_TK=row_TK,
        count_T=torch.full((len(row_TK),), row_TK.shape[1], dtype=torch.int32, device=row_TK.device),
    )
