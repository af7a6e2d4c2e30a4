"""Drafting knows nothing of the ranks that share pages: every rank holds the whole draft KV and proposes alone.

Tags such as A6 are explained in `tests/INVARIANTS.md`.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from specdec.dcp.communicator import Collective
from specdec.dcp.geometry import PoolRole
from specdec.drafting.draft import DraftBatch, Drafts, ObservedRows
from specdec.errors import GeometryError
from specdec.models.glm.mtp import MTP_LAYER, MtpIndexSharing
from specdec.ranks.passes import Ranks
from specdec.ranks.worker import Worker
from specdec.sampling.sampling_rows import RequestSampling, SamplingBatch
from tests.support.engines import (
    PARALLEL,
    VOCAB_SIZE,
    Ask,
    Checkpoints,
    CoreRun,
    RecordedDrafts,
    drawn,
    greedy,
    prompt_of,
)
from tests.support.matrix import asks_of
from tests.support.thread_engine import ThreadEngine, ThreadEngines

LENGTHS = (23, 1, 10)  # one request shorter than a page, two longer than what the indexer chooses
K = 4
NUM_PAGE_IDS = 32


class DraftRun(NamedTuple):
    """What one rank drafted, and everything it left behind."""

    token_id_BK: list[list[int]]
    g_SH: torch.Tensor
    anchor_SX: torch.Tensor
    pool_bytes: list[torch.Tensor]
    groups: set[str]


def draft_from_given_hidden_states(worker: Worker) -> DraftRun:
    """Refresh three requests with hidden states that depend on nothing, then draft; twice, as rounds do."""
    assert worker.draft is not None
    page_size = worker.draft.pool.layout.page_size
    page_id_BP = np.random.default_rng(0).permutation(NUM_PAGE_IDS)[:24].reshape(3, 8).astype(np.int64)
    hidden_TH = torch.randn(sum(LENGTHS) + 3, PARALLEL.hidden_size, generator=torch.Generator().manual_seed(1))
    ids_T = np.random.default_rng(2).integers(0, VOCAB_SIZE, size=len(hidden_TH))
    params = (greedy(9), drawn(5, 9), greedy(9, repetition_penalty=1.3))
    sampling = SamplingBatch(
        [
            RequestSampling(each, choice=0, prompt_ids=prompt_of(length), stop_ids=(), vocab_size=VOCAB_SIZE)
            for each, length in zip(params, LENGTHS, strict=True)
        ],
        device=torch.device("cpu"),
    )
    drafted: list[list[int]] = []
    worker.groups.record.is_recording = True
    for begin_B, num_rows_B in ((np.zeros(3, dtype=np.int64), np.array(LENGTHS)), (np.array(LENGTHS), np.ones(3, int))):
        position_T = np.concatenate([begin + np.arange(n) for begin, n in zip(begin_B, num_rows_B, strict=True)])
        num_rows = len(position_T)
        worker.draft.observe(
            ObservedRows(
                slot_B=np.array([2, 0, 1]),
                num_rows_B=num_rows_B,
                position_T=position_T,
                next_token_id_T=ids_T[:num_rows],
                row_T=np.arange(num_rows),
                hidden_TH=hidden_TH[:num_rows],
                page_id_BP=page_id_BP,
            )
        )()
        batch = DraftBatch(
            slot_B=np.array([2, 0, 1]),
            length_B=begin_B + num_rows_B + 1,
            num_drafts_B=np.array([K, 2, K]),
            page_id_BP=page_id_BP,
            requests=(),
            sampling=sampling,
        )
        assert page_size * page_id_BP.shape[1] > batch.length_B.max() + K
        drafted += worker.draft.propose(batch)().token_id_BK.tolist()
    worker.groups.record.is_recording = False
    pool = worker.draft.pool
    return DraftRun(
        token_id_BK=drafted,
        g_SH=worker.draft.g_SH.clone(),
        anchor_SX=worker.draft.anchor_SX.clone(),
        # Without the scratch page, which takes the writes of padding rows.
        pool_bytes=[pool.buffer(entry.kind)[:-1].clone() for entry in pool.layout.entries],
        groups={collective.group for collective in worker.groups.record.take()},
    )


@pytest.mark.parametrize("sharing", MtpIndexSharing)
@pytest.mark.parametrize(("tp_size", "dcp_size"), [(2, 2), (4, 2), (4, 4)])
def test_drafts_of_given_hidden_states_have_the_same_bits_however_many_ranks_share_pages(
    tp_size: int, dcp_size: int, sharing: MtpIndexSharing, thread_engines: ThreadEngines
) -> None:
    """B20, B21, A25: compared with ranks that share no pages; equality over ranks alone would prove nothing.

    Tokens, g, the chosen positions and all bytes of draft KV, on every rank.
    """
    runs = {}
    for size in (1, dcp_size):
        with thread_engines.open(
            tp_size=tp_size,
            dcp_size=size,
            num_draft_tokens=K,
            num_pages=NUM_PAGE_IDS // size,
            max_model_len=64,
            mtp_index_sharing=sharing,
        ) as running:
            running.poison()
            runs[size] = running.on_every_rank(draft_from_given_hidden_states)
    expected = runs[1][0]
    assert torch.isfinite(expected.g_SH[:3]).all()
    for drafted in (*runs[1], *runs[dcp_size]):
        assert drafted.token_id_BK == expected.token_id_BK
        assert torch.equal(drafted.g_SH, expected.g_SH)
        assert torch.equal(drafted.anchor_SX, expected.anchor_SX)
        assert all(map(torch.equal, drafted.pool_bytes, expected.pool_bytes))
        assert drafted.groups == {"tp"}


class CountedDraft:
    """Stands between a core and its ranks and keeps the collectives of each pass of the draft, by rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.verifying: list[list[list[Collective]]] = []
        self.drafting: list[list[list[Collective]]] = []
        ranks.record_collectives(True)

    def observe(self, rows: ObservedRows) -> None:
        self.verifying.append(self.ranks.record_collectives(True))
        self.ranks.observe(rows)
        self.drafting.append(self.ranks.record_collectives(True))

    def propose(self, batch: DraftBatch) -> Drafts:
        self.ranks.record_collectives(True)
        drafts = self.ranks.propose(batch)
        self.drafting.append(self.ranks.record_collectives(True))
        return drafts


@pytest.mark.parametrize("ranks", [(2, 2), (4, 2), (4, 4)])
def test_drafting_never_meets_the_ranks_that_share_pages_and_all_ranks_take_the_same_steps(
    ranks: tuple[int, int], thread_engines: ThreadEngines
) -> None:
    """A25, B60, B61: by group, since both groups may hold the same ranks; whatever pages a rank owns."""
    with thread_engines.open(tp_size=ranks[0], dcp_size=ranks[1], num_draft_tokens=3, page_size=4) as running:
        run = running.core_run()
        counted = CountedDraft(running.ranks)
        run.core.draft = counted
        for ask in asks_of("both", num_drafts=3):  # the shortest leave ranks without a page
            run.add(ask)
        run.finish()
    assert counted.drafting
    for by_rank in counted.drafting:
        assert all(collectives == by_rank[0] for collectives in by_rank)
        assert {collective.group for collective in by_rank[0]} == {"tp"}
    for by_rank in counted.verifying:
        assert all(collectives == by_rank[0] for collectives in by_rank)
        assert {collective.group for collective in by_rank[0]} == {"tp", "dcp"}


@pytest.mark.parametrize("ranks", [(2, 1), (2, 2), (4, 2), (8, 8)])
def test_draft_pool_holds_every_page_id_on_every_rank(ranks: tuple[int, int], thread_engines: ThreadEngines) -> None:
    """A6, A12, B23: one id space; the draft pool has the target's pages times the ranks that share them."""
    with thread_engines.open(tp_size=ranks[0], dcp_size=ranks[1], num_draft_tokens=3, num_pages=40) as running:
        run = running.core_run()
        for rank, worker in enumerate(running.workers):
            assert worker.draft is not None
            assert worker.pool.num_pages == 40
            assert (worker.pool.geometry.size, worker.pool.geometry.rank) == (ranks[1], rank % ranks[1])
            assert worker.draft.pool.num_pages == 40 * ranks[1] == run.core.scheduler.allocator.num_pages
            assert worker.draft.pool.geometry.size == 1
            assert worker.draft.pool.geometry.role is PoolRole.DRAFT


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_row_of_draft_kv_is_written_on_every_rank_and_the_same(
    page_size: int, thread_engines: ThreadEngines
) -> None:
    """A29, B30: index keys are as long as latents after every refresh; with requests that come, grow and go."""
    with thread_engines.open(
        tp_size=4, dcp_size=4, num_draft_tokens=3, page_size=page_size, prefill_chunk_tokens=7, max_num_requests=3
    ) as running:
        running.poison()
        run = running.core_run()
        for ask in asks_of("both", num_drafts=3):
            run.add(ask)
        while run.step():
            for request in run.requests:
                if request.slot is not None:
                    assert_equal_draft_kv(running, run, request.request_id)


def assert_equal_draft_kv(running: ThreadEngine, run: CoreRun, request_id: int) -> None:
    request = run.requests[request_id]
    pools = [worker.draft.pool for worker in running.workers if worker.draft is not None]
    kv = [run.kv(request, pool, layer=MTP_LAYER) for pool in pools]
    for latent_TX, key_TD in kv:
        assert torch.isfinite(latent_TX).all()
        assert torch.isfinite(key_TD).all()
        assert torch.equal(latent_TX, kv[0][0])
        assert torch.equal(key_TD, kv[0][1])


def test_drafts_and_acceptance_are_those_of_one_rank(checkpoints: Checkpoints, thread_engines: ThreadEngines) -> None:
    """B20, A6: the same proposals round by round, not only the same acceptance."""
    asks = asks_of("both", num_drafts=3)
    proposed = []
    for tp_size, dcp_size in ((1, 1), (2, 2), (4, 4)):
        with thread_engines.open(tp_size=tp_size, dcp_size=dcp_size, num_draft_tokens=3) as running:
            run = running.core_run()
            recorded = RecordedDrafts.of(run)
            for ask in asks:
                run.add(ask)
            run.finish()
            proposed.append(recorded.token_ids)
    assert proposed[0] == proposed[1] == proposed[2]


def test_a_draft_that_would_run_over_the_shared_pages_is_an_error_at_once(thread_engines: ThreadEngines) -> None:
    """A25, A27: one rank's geometry over a sharded pool fails before anything is written, not by low acceptance."""
    with thread_engines.open(tp_size=2, dcp_size=2, num_draft_tokens=3) as running:
        run = running.core_run()
        for worker in running.workers:
            assert worker.draft is not None
            worker.draft.pool = worker.pool
        run.add(Ask(prompt_of(9), greedy(6)))
        run.finish()
        error = run.updates[0][-1].error
        causes = []
        while error is not None:
            causes.append(error)
            error = error.__cause__
        assert any(isinstance(cause, GeometryError) or "GeometryError" in str(cause) for cause in causes)
