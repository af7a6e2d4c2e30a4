"""A whole decoding round on the device: verify, draw, commit, refresh, draft, in launches alone.

What the next round needs stays on the device (`RunState`), so rounds follow each other without the host; it reads the
emitted ids, admits and retires requests, and gives them pages. `EngineCore` defines what a round does to a request.

B = places for requests, K = drafts, Q = K + 1 rows of a request, T = B * Q, P = pages of a request.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import nvtx
import torch

from specdec.dcp.communicator import Communicator, SingleRank
from specdec.dcp.geometry import dcp_disabled
from specdec.dcp.shard_pages import ShardPages
from specdec.kernels.commit_runs import CommittedRuns, RunState, commit_runs
from specdec.kernels.decode_rows import DecodeRows, decode_rows
from specdec.kernels.first_entries import first_entries
from specdec.kernels.index_key_pages import PAGE_SIZE
from specdec.kernels.index_select import CandidateMemory
from specdec.models.glm.draft_chain import DraftChain, RequestNoise
from specdec.models.glm.layer_launches import LayerLaunches, LayerPages, PassRows, PassSizes
from specdec.models.glm.layer_slice import ModelSlice
from specdec.models.glm.mtp import MtpIndexSharing
from specdec.models.glm.rank_head import RankHead
from specdec.models.glm.rank_pass import RankPass
from specdec.models.glm.token_draw import TokenDraw


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSizes:
    """The shape of a round.

    Attributes:
        num_requests: B.
        num_draft_tokens: K.
        max_positions: Most positions of a request.
        with_noise: Whether requests may draw with noise; else all are greedy.
    """

    num_requests: int
    num_draft_tokens: int
    max_positions: int
    with_noise: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPages:
    """Where a rank keeps KV.

    Attributes:
        target: Of each layer.
        draft: Of the MTP layer; None without drafts.
    """

    target: Sequence[LayerPages]
    draft: LayerPages | None


class DecodeRound:
    """Runs rounds of one shape.

    Before a request's round runs, it must have pages up to position length + 2 K - 1: the round writes rows up to
    length + K - 1, and the drafts behind it, if all were kept, up to length + 2 K - 1.

    Args:
        model: The rank's slice.
        pages: The rank's pools.
        sizes: Of the rounds.
        index_sharing: What drafts behind the first attend to.
        tp: Ranks that hold the other slices; None runs this one alone.
        dcp: Ranks of these that share the target's pages.
        memory: For the choices of all passes on one stream; None makes one.

    Attributes:
        state: Of the requests; a place with no rows holds none, and is left alone.
        page_id_BP: Page ids of each request, i32; `take_pages` lets what was written here count.
        noise: How requests draw; None where all are greedy.
        runs: What the last round gave.
        chain: Refreshes and drafts; None without drafts.
    """

    def __init__(
        self,
        model: ModelSlice,
        pages: RoundPages,
        sizes: RoundSizes,
        *,
        index_sharing: MtpIndexSharing = MtpIndexSharing.ANCHOR,
        tp: Communicator | None = None,
        dcp: Communicator | None = None,
        memory: CandidateMemory | None = None,
    ) -> None:
        tp, dcp = tp or SingleRank("tp"), dcp or SingleRank("dcp")
        device = model.final_norm.device
        num_requests, rows_per_request = sizes.num_requests, sizes.num_draft_tokens + 1
        self._model, self._dcp = model, dcp
        self.state = RunState.zeros(num_requests, rows_per_request, device=device)
        self.runs = CommittedRuns.empty(num_requests, rows_per_request, device=device)
        max_pages = -(-sizes.max_positions // PAGE_SIZE)
        self.page_id_BP = torch.zeros((num_requests, max_pages), dtype=torch.int32, device=device)
        self._shards: ShardPages | None = None
        if dcp.size > 1:
            self._shards = ShardPages.of(self.page_id_BP, size=dcp.size, rank=dcp.rank)
        self.noise: RequestNoise | None = None
        if sizes.with_noise:
            self.noise = RequestNoise(
                stream_key_B=torch.zeros(num_requests, dtype=torch.int64, device=device),
                temperature_B=torch.ones(num_requests, device=device),
                greedy_B=torch.ones(num_requests, dtype=torch.bool, device=device),
            )
        pass_sizes = PassSizes(
            num_requests=num_requests,
            rows_per_request=rows_per_request,
            max_positions=sizes.max_positions,
            index_topk=model.index_topk,
            eps=model.eps,
            routed_scaling=model.routed_scaling,
        )
        memory = memory or CandidateMemory(num_lists=pass_sizes.num_rows, max_positions=sizes.max_positions)
        self._places = DecodeRows.empty(pass_sizes.num_rows, num_pairs=len(model.inverse_frequency_F), device=device)
        self._start_B = torch.empty_like(self.state.length_B)
        self._target = RankPass(
            model,
            pages.target,
            LayerLaunches(model.layers, pass_sizes, tp=tp, dcp=dcp, memory=memory),
            self._rows(),
        )
        self._draw = TokenDraw(
            RankHead(model.vocabulary, tp=tp),
            max_rows=pass_sizes.num_rows,
            vocab_size=tp.size * len(model.vocabulary.head_VH),
            device=device,
            with_noise=sizes.with_noise,
        )
        self.chain: DraftChain | None = None
        if sizes.num_draft_tokens:
            if model.mtp is None or pages.draft is None:
                raise ValueError("drafts need the MTP layer's weights and a pool for its KV")
            self.chain = DraftChain(
                model,
                model.mtp,
                pages.draft,
                pass_sizes,
                page_BP=self.page_id_BP,
                draw=self._draw,
                index_sharing=index_sharing,
                tp=tp,
                memory=memory,
            )

    def of_requests(self, num_requests: int) -> "DecodeRound":
        """Give rounds of the first `num_requests` places, in the same memory."""
        part = copy.copy(self)
        part.state, part.runs = first_entries(self.state, num_requests), first_entries(self.runs, num_requests)
        part.page_id_BP = self.page_id_BP[:num_requests]
        part._shards = None if self._shards is None else first_entries(self._shards, num_requests)
        part.noise = None if self.noise is None else first_entries(self.noise, num_requests)
        part._start_B = self._start_B[:num_requests]
        part._places = first_entries(self._places, num_requests * self.state.token_BQ.shape[1])
        part._target = self._target.of_requests(num_requests, part._rows())
        part.chain = None if self.chain is None else self.chain.of_requests(num_requests)
        return part

    def take_pages(self) -> None:
        """Find where this rank has the pages that were written to `page_id_BP`."""
        if self._shards is not None:
            self._shards.take(ShardPages.of(self.page_id_BP, size=self._dcp.size, rank=self._dcp.rank))

    def launch(self) -> None:
        """Run a round on the current stream."""
        with nvtx.annotate("verify"):
            hidden_TH = self.verify()
        with nvtx.annotate("commit"):
            self.commit(hidden_TH)
        if self.chain is not None:
            with nvtx.annotate("draft"), dcp_disabled():
                self.chain.run(hidden_TH, self.runs, self.state, self.noise)

    def verify(self) -> torch.Tensor:
        """Run the target over the last token and the drafts of every request; hidden states, bfloat16 [T, H]."""
        torch.sub(self.state.length_B, 1, out=self._start_B)
        decode_rows(
            self._start_B,
            self.state.num_rows_B,
            self._rows().page_BP,
            self._model.inverse_frequency_F,
            page_size=PAGE_SIZE,
            most_keys=self._model.index_topk,
            before_BP=None if self._shards is None else self._shards.before_BP,
            out=self._places,
        )
        return self._target.forward(self.state.token_BQ.flatten())

    def commit(self, hidden_TH: torch.Tensor) -> None:
        """Draw the target's own token of every row and move the requests on.

        Args:
            hidden_TH: What `verify` gave.
        """
        noise = None
        if self.noise is not None:
            noise = self.noise.of_rows(self._start_B, rows_per_request=self.state.token_BQ.shape[1])
        drawn = self._draw(hidden_TH, noise)
        commit_runs(drawn.token_T.contiguous(), drawn.is_drawn_T, self.state, out=self.runs)

    def _rows(self) -> PassRows:
        """Rows of the target, as its passes read them."""
        if self._shards is None:
            return PassRows(places=self._places, page_BP=self.page_id_BP)
        return PassRows(places=self._places, page_BP=self._shards.page_BP, shards=self._shards)
