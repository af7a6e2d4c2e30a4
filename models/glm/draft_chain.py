"""The MTP layer's part of a round on one GPU: refresh the rows that became final, then draft, in launches alone.

    refresh    Q rows a request of (emitted token, the target's hidden state): their draft KV, g and the index choice
    draft 1    of the last refreshed row's g
    draft j+1  one row a request of (draft j, g of the pass before), at the refreshed row's choice or at its own

`MtpLayer` and `MtpDraft` define it. A CUDA graph holds all of it: which rows are live, and where, is read from what
`commit_runs` left on the device. B = requests, Q = K + 1 rows of each, T = B * Q, K = drafts, H = hidden, X = positions
chosen, P = pages of a request.
"""

import copy
from dataclasses import dataclass, replace

import torch

from specdec.dcp.communicator import Communicator
from specdec.kernels.bf16_linear import bf16_linear
from specdec.kernels.commit_runs import CommittedRuns, RunState
from specdec.kernels.decode_rows import DecodeRows, decode_rows
from specdec.kernels.embed_rows import embed_rows
from specdec.kernels.errors import ConfigError
from specdec.kernels.first_entries import first_entries
from specdec.kernels.index_key_pages import PAGE_SIZE
from specdec.kernels.index_select import CandidateMemory
from specdec.kernels.joined_norms import joined_norms
from specdec.kernels.noise_keys import noise_keys
from specdec.kernels.take_rows import take_rows
from specdec.models.glm.layer_launches import Choice, LayerLaunches, LayerPages, PassRows, PassSizes
from specdec.models.glm.layer_slice import LayerSlice, ModelSlice, MtpSlice
from specdec.models.glm.mtp import MtpIndexSharing
from specdec.models.glm.token_draw import RowNoise, TokenDraw


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestNoise:
    """How requests draw, in memory that stays.

    Attributes:
        stream_key_B: `stream_key` of the target's stream, which drafts share, i64.
        temperature_B: float32; of a greedy request, 1.
        greedy_B: bool.
    """

    stream_key_B: torch.Tensor
    temperature_B: torch.Tensor
    greedy_B: torch.Tensor

    def of_rows(self, start_B: torch.Tensor, *, rows_per_request: int, first: int = 0) -> RowNoise:
        """Give the noise of each request's rows j = first .. first + Q - 1, which stand at start + j."""
        key_T = self.stream_key_B.new_empty(len(start_B) * rows_per_request)
        noise_keys(self.stream_key_B, start_B, first=first, out_T=key_T)
        return RowNoise(
            key_T=key_T,
            temperature_T=self.temperature_B.repeat_interleave(rows_per_request),
            greedy_T=self.greedy_B.repeat_interleave(rows_per_request),
        )


class DraftChain:
    """Runs refresh and drafts of one shape.

    Args:
        model: The rank's slice.
        mtp: Of it, the MTP layer.
        pages: Where the layer keeps its KV; the draft pool's.
        sizes: Of the refresh: Q rows a request.
        page_BP: Physical pages of each request in that pool, i32, in memory that stays.
        draw: Of the head.
        index_sharing: What drafts behind the first attend to.
        tp: Ranks that hold the other slices.
        memory: For choices.

    Attributes:
        g_BH: g of each request's last refreshed row, bfloat16.
        anchor: What that row attended to; None where drafts choose for themselves.

    Raises:
        ConfigError: `index_sharing` is of a kind that has no kernel.
    """

    def __init__(
        self,
        model: ModelSlice,
        mtp: MtpSlice,
        pages: LayerPages,
        sizes: PassSizes,
        *,
        page_BP: torch.Tensor,
        draw: TokenDraw,
        index_sharing: MtpIndexSharing,
        tp: Communicator,
        memory: CandidateMemory,
    ) -> None:
        if index_sharing is MtpIndexSharing.ANCHOR_AND_DRAFTS:
            raise ConfigError(
                f"mtp_index_sharing {index_sharing} does not run on the kernels: take anchor, which GLM-5.2 is made "
                "for, or off"
            )
        self._model, self._mtp, self._pages, self._sizes = model, mtp, pages, sizes
        self._page_BP, self._draw = page_BP, draw
        num_pairs = len(model.inverse_frequency_F)
        self._refresh = _MtpPass(mtp.layer, sizes, page_BP, num_pairs, tp=tp, memory=memory)
        recycled = mtp.recycled if index_sharing is MtpIndexSharing.ANCHOR else mtp.layer
        self._recycle = _MtpPass(recycled, replace(sizes, rows_per_request=1), page_BP, num_pairs, tp=tp, memory=memory)
        self.g_BH = torch.empty((sizes.num_requests, len(mtp.enorm)), dtype=torch.bfloat16, device=page_BP.device)
        self.anchor: Choice | None = None
        if index_sharing is MtpIndexSharing.ANCHOR:
            anchor_count_B = torch.zeros(sizes.num_requests, dtype=torch.int32, device=page_BP.device)
            self.anchor = self._recycle.choice = self._recycle.launches.new_choice(anchor_count_B)

    def of_requests(self, num_requests: int) -> "DraftChain":
        """Give chains of so many requests, no more than this is for, in the same memory."""
        part = copy.copy(self)
        part._sizes = replace(self._sizes, num_requests=num_requests)
        part._page_BP = self._page_BP[:num_requests]
        part._refresh = self._refresh.of_requests(num_requests, part._page_BP)
        part._recycle = self._recycle.of_requests(num_requests, part._page_BP)
        part.g_BH = self.g_BH[:num_requests]
        part.anchor = None if self.anchor is None else part._recycle.choice
        return part

    def run(self, hidden_TH: torch.Tensor, runs: CommittedRuns, state: RunState, noise: RequestNoise | None) -> None:
        """Refresh and draft, on the current stream; drafts go to `state.token_BQ[:, 1:]`.

        Args:
            hidden_TH: The target's hidden states of the verified rows, after the final norm.
            runs: What was emitted.
            state: Of the requests, after the commit.
            noise: Of the requests; None where all are greedy.
        """
        self.refresh(hidden_TH, runs, state, noise)
        for num_drafted in range(1, self._sizes.rows_per_request - 1):
            self.recycle(num_drafted, runs, state, noise)

    def refresh(
        self, hidden_TH: torch.Tensor, runs: CommittedRuns, state: RunState, noise: RequestNoise | None
    ) -> None:
        """Refresh, and draft once; arguments as of `run`."""
        refresh = self._refresh
        self._place(refresh, runs.start_B, runs.num_refreshed_B, first=0)
        g_TH = self._pass(refresh, runs.emitted_BQ.flatten(), hidden_TH)
        sources, outs = [g_TH], [self.g_BH]
        if self.anchor is not None:
            chosen, anchor = refresh.choice, self.anchor
            sources += [chosen.position_TK, chosen.row_TK, chosen.count_T]
            outs += [anchor.position_TK, anchor.row_TK, anchor.count_T]
        take_rows(runs.last_row_B, sources, outs)
        self._draft(self.g_BH, 0, runs, state, noise)

    def recycle(self, num_drafted: int, runs: CommittedRuns, state: RunState, noise: RequestNoise | None) -> None:
        """Draft once more, of the last draft and of the g that gave it.

        Args:
            num_drafted: Drafts so far, at least 1.
            runs: What was emitted.
            state: Of the requests, after the commit.
            noise: As of `run`.
        """
        recycle = self._recycle
        self._place(recycle, runs.last_position_B, runs.num_recycled_B, first=num_drafted - 1)
        g_BH = self.g_BH if num_drafted == 1 else recycle.launches.normed_TH
        g_BH = self._pass(recycle, state.token_BQ[:, num_drafted].contiguous(), g_BH)
        self._draft(g_BH, num_drafted, runs, state, noise)

    def _draft(
        self, g_BH: torch.Tensor, num_drafted: int, runs: CommittedRuns, state: RunState, noise: RequestNoise | None
    ) -> None:
        """Draw the draft behind `num_drafted` others, with the noise of the target's row that will judge it."""
        row_noise = None
        if noise is not None:
            row_noise = noise.of_rows(runs.last_position_B, rows_per_request=1, first=num_drafted)
        state.token_BQ[:, num_drafted + 1].copy_(self._draw(g_BH, row_noise).token_T)

    def _pass(self, mtp_pass: "_MtpPass", token_T: torch.Tensor, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Run the MTP layer; gives g in memory that the next pass of this shape overwrites."""
        return run_mtp(
            self._model,
            self._mtp,
            mtp_pass.layer,
            launches=mtp_pass.launches,
            pages=self._pages,
            rows=mtp_pass.rows,
            choice=mtp_pass.choice,
            token_T=token_T,
            hidden_TH=hidden_TH,
        )

    def _place(self, mtp_pass: "_MtpPass", start_B: torch.Tensor, num_rows_B: torch.Tensor, *, first: int) -> None:
        decode_rows(
            start_B,
            num_rows_B,
            self._page_BP,
            self._model.inverse_frequency_F,
            first=first,
            page_size=PAGE_SIZE,
            most_keys=self._sizes.index_topk,
            out=mtp_pass.rows.places,
        )


def run_mtp(
    model: ModelSlice,
    mtp: MtpSlice,
    layer: LayerSlice,
    *,
    launches: LayerLaunches,
    pages: LayerPages,
    rows: PassRows,
    choice: Choice,
    token_T: torch.Tensor,
    hidden_TH: torch.Tensor,
) -> torch.Tensor:
    """Run the MTP layer over T rows on the current stream, writing their draft KV.

    Args:
        model: The rank's slice, for the vocabulary.
        mtp: Of it, the MTP layer.
        layer: Its decoder layer, in the form that is to run.
        launches: Of as many rows.
        pages: Of the layer, in the draft pool.
        rows: Where they stand.
        choice: What they attend to; the layer's indexer, where the form has it, makes it anew.
        token_T: x[t+1] of each row t, i64; anything for padding.
        hidden_TH: The target's hidden state of row t after the final norm, or g of the row before; bfloat16.

    Returns:
        g, bfloat16 [T, H], in memory of the launches that the next pass overwrites.
    """
    num_rows, hidden_dim = hidden_TH.shape
    x_TH, joined_TX = torch.empty_like(hidden_TH), hidden_TH.new_empty((num_rows, 2 * hidden_dim))
    position_T, vocabulary = rows.places.position_T, model.vocabulary
    embed_rows(token_T, position_T, vocabulary.embedding_VH, first_id=vocabulary.first_id, out_TH=x_TH)
    launches.sum_over_ranks(x_TH)
    joined_norms(x_TH, mtp.enorm, hidden_TH, mtp.hnorm, eps=model.eps, out_TX=joined_TX)
    columns = slice(mtp.first_column, mtp.first_column + mtp.eh_proj.shape[1])
    bf16_linear(joined_TX[:, columns], mtp.eh_proj, out_TO=launches.delta_TH)
    launches.begin(x_TH)
    launches.run(layer, pages, rows, choice, x_TH)
    return launches.add_norm(x_TH, mtp.head_norm)


class _MtpPass:
    """Memory of passes of one shape, and the layer as they run it."""

    def __init__(
        self,
        layer: LayerSlice,
        sizes: PassSizes,
        page_BP: torch.Tensor,
        num_pairs: int,
        *,
        tp: Communicator,
        memory: CandidateMemory,
    ) -> None:
        self.layer = layer
        self.rows = PassRows(
            places=DecodeRows.empty(sizes.num_rows, num_pairs=num_pairs, device=page_BP.device), page_BP=page_BP
        )
        self.launches = LayerLaunches([layer], sizes, tp=tp, memory=memory)
        self.choice: Choice = self.launches.new_choice(self.rows.places.count_T)

    def of_requests(self, num_requests: int, page_BP: torch.Tensor) -> "_MtpPass":
        part = copy.copy(self)
        part.launches = self.launches.of_requests(num_requests)
        num_rows = len(part.launches.normed_TH)
        part.rows = PassRows(places=first_entries(self.rows.places, num_rows), page_BP=page_BP)
        part.choice = first_entries(self.choice, num_rows)
        return part
