"""The decode round: schedule, draft, verify, accept, commit, refresh.

One thread at a time may call an `EngineCore`; `specdec.engine.Engine` adds threads, text and files around it.

B = scheduled requests, F = those of them that draw a token, T = rows, K = drafts, K1 = K + 1, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.accept import AcceptanceRule, VerifyResult, verify_by_rejection, verify_sampled
from specdec.commit import Committed, commit
from specdec.dcp.pool import KvPool
from specdec.draft import DraftBatch, Drafts, DraftSource, ObservedRows
from specdec.errors import RequestError, SpecdecError
from specdec.kernels.logits_transform import transform_logits
from specdec.models.glm.target import GlmTarget
from specdec.request import Request, RequestUpdate
from specdec.round_rows import RoundRows, lay_out_rows
from specdec.sampling_rows import SamplingBatch
from specdec.scheduler import ScheduledBatch, Scheduler
from specdec.slot_table import BoolArray, Int64Array, SlotTable
from specdec.token_logprobs import TokenLogprobs, token_logprobs
from specdec.verify import verify


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the round decided for the F requests that draw.

    Attributes:
        index_F: Their places in the batch, i64 [F].
        token_id_FK1: Emitted ids, i64 [F, K1]; -1 beyond `num_accepted_F` + 1.
        num_accepted_F: Drafts kept, i64 [F]; the token after them is not counted.
        drawable_F: False where no token could be drawn and the request must fail.
        logits_TV: The target's logits of the drawing rows, f32.
        transformed_TV: The same as drawn from.
        first_row_F: First drawing row of each request, i64 [F].
    """

    index_F: Int64Array
    token_id_FK1: Int64Array
    num_accepted_F: Int64Array
    drawable_F: BoolArray
    logits_TV: torch.Tensor
    transformed_TV: torch.Tensor
    first_row_F: Int64Array


class EngineCore:
    """Runs rounds over one target model, one draft source and their pools.

    Args:
        target: The model.
        pool: The target pool.
        scheduler: Owns the requests and their pages.
        draft: Where drafts come from; None for decoding without speculation.
        rule: The acceptance rule.
    """

    def __init__(
        self,
        *,
        target: GlmTarget,
        pool: KvPool,
        scheduler: Scheduler,
        draft: DraftSource | None,
        rule: AcceptanceRule,
    ) -> None:
        self.target = target
        self.pool = pool
        self.scheduler = scheduler
        self.draft = draft
        self.rule = rule
        self._sampling: tuple[tuple[int, ...], SamplingBatch] | None = None

    @property
    def slots(self) -> SlotTable:
        """The running requests."""
        return self.scheduler.slots

    def step(self) -> bool:
        """Run one round; False when there was nothing to run.

        An error inside a round fails the requests that took part in it, and no other.
        """
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        requests = [self.slots.request_at(slot) for slot in batch.slot_B.tolist()]
        try:
            drafts = self._propose(batch)
            rows = lay_out_rows(batch, drafts, self.slots)
            hidden_TH = verify(rows, target=self.target, pool=self.pool)
            decision = self._accept(batch, drafts, rows, hidden_TH)
            committed = self._commit(batch, drafts, rows, hidden_TH, decision)
            if decision is not None and committed is not None:
                self._deliver(decision, committed)
            self._refresh(batch, rows, hidden_TH, decision)
        except BaseException as error:  # whatever it was, these requests end and the engine lives on
            self._fail(requests, error)
            if not isinstance(error, Exception):
                raise
        return True

    def cancel(self, request: Request) -> None:
        """End a request that waits or runs, free what it holds and send its last update; nothing for one that ended."""
        if request.finished:
            return
        if request.slot is None:
            self.scheduler.waiting.remove(request)
        else:
            self.scheduler.finish(request.slot, num_refreshed=int(self.slots.computed_S[request.slot]))
        self._end(request, RequestUpdate(text=request.judge.flush(), finish_reason="cancelled"))

    def _propose(self, batch: ScheduledBatch) -> Drafts:
        """Ask the draft source for the drafts the schedule left room for."""
        num_requests = len(batch.slot_B)
        wanting = np.flatnonzero(batch.num_drafts_B)
        if self.draft is None or len(wanting) == 0:
            no_drafts = np.zeros(num_requests, dtype=np.int64)
            return Drafts(token_id_BK=np.zeros((num_requests, 0), dtype=np.int64), num_drafts_B=no_drafts)
        slot_W = batch.slot_B[wanting]
        requests = [self.slots.request_at(slot) for slot in slot_W.tolist()]
        proposed = self.draft.propose(
            DraftBatch(
                slot_B=slot_W,
                length_B=self.slots.length_S[slot_W],
                num_drafts_B=batch.num_drafts_B[wanting],
                page_id_BP=self.slots.page_ids(slot_W),
                requests=requests,
                sampling=self._sampling_of(requests),
            )
        )
        if len(wanting) == num_requests:
            return proposed
        token_id_BK = np.zeros((num_requests, proposed.token_id_BK.shape[1]), dtype=np.int64)
        token_id_BK[wanting] = proposed.token_id_BK
        num_drafts_B = np.zeros(num_requests, dtype=np.int64)
        num_drafts_B[wanting] = proposed.num_drafts_B
        probs = proposed.draft_probs_BKV
        if probs is not None:
            probs = probs.new_zeros((num_requests, *probs.shape[1:])).index_copy(
                0, torch.from_numpy(wanting).to(probs.device), probs
            )
        return Drafts(token_id_BK=token_id_BK, num_drafts_B=num_drafts_B, draft_probs_BKV=probs)

    def _accept(
        self, batch: ScheduledBatch, drafts: Drafts, rows: RoundRows, hidden_TH: torch.Tensor
    ) -> Decision | None:
        """Judge the drafts of every request that draws; None when the round only computed parts of prompts."""
        index_F = np.flatnonzero(batch.final_B)
        if len(index_F) == 0:
            return None
        row_T = rows.from_place(np.where(batch.final_B, batch.num_known_B - 1, rows.num_rows_B))
        logits_TV = self.target.logits(hidden_TH[torch.from_numpy(row_T)])
        num_drafts_F = drafts.num_drafts_B[index_F]
        sampling = self._sampling_of([self.slots.request_at(slot) for slot in batch.slot_B[index_F].tolist()])
        token_ids = [row[:count].tolist() for row, count in zip(drafts.token_id_BK[index_F], num_drafts_F, strict=True)]
        drawn_rows = sampling.verify_rows(self.slots.length_S[batch.slot_B[index_F]], token_ids)
        transformed_TV = transform_logits(logits_TV, drawn_rows.rules)
        if self.rule is AcceptanceRule.SAMPLED:
            result = verify_sampled(transformed_TV, drawn_rows)
        else:
            probs = drafts.draft_probs_BKV
            most = drawn_rows.draft_ids_BK.shape[1]
            result = verify_by_rejection(
                transformed_TV, drawn_rows, None if probs is None else probs[torch.from_numpy(index_F), :most]
            )
        return _decision(index_F, num_drafts_F, result, logits_TV, transformed_TV)

    def _commit(
        self,
        batch: ScheduledBatch,
        drafts: Drafts,
        rows: RoundRows,
        hidden_TH: torch.Tensor,
        decision: Decision | None,
    ) -> Committed | None:
        """Move the lengths, judge stops token by token, free what ended."""
        slots = self.slots
        slots.computed_S[batch.slot_B] += batch.num_known_B
        for b in np.flatnonzero(slots.attended_S[batch.slot_B]).tolist():
            first = int(rows.first_row_B[b])
            self._commit_prompt_logprobs(
                slots.request_at(int(batch.slot_B[b])),
                begin=int(batch.start_B[b]),
                hidden_TH=hidden_TH[first : first + int(batch.num_known_B[b])],
            )
        if decision is None:
            return None
        committed = commit(
            slots,
            slot_F=batch.slot_B[decision.index_F],
            token_id_FK1=decision.token_id_FK1,
            num_accepted_F=decision.num_accepted_F,
            num_drafts_F=drafts.num_drafts_B[decision.index_F],
        )
        for f in np.flatnonzero(committed.ended_F | ~decision.drawable_F).tolist():
            # The rows of this round are not refreshed any more: only those before it may be shared. Where no token
            # could be drawn the KV itself may hold what is not finite.
            num_refreshed = int(batch.start_B[decision.index_F[f]]) if decision.drawable_F[f] else 0
            self.scheduler.finish(int(committed.slot_F[f]), num_refreshed=num_refreshed)
        return committed

    def _deliver(self, decision: Decision, committed: Committed) -> None:
        """Send every request that drew its new tokens and their text."""
        token_ids = committed.token_id_FK1.tolist()
        for f, request in enumerate(committed.requests):
            if not decision.drawable_F[f]:
                num_output = len(request.output_ids) - int(committed.num_delivered_F[f])
                error = _undrawable(request, num_output=num_output)
                self._end(request, RequestUpdate(finish_reason="error", error=error))
                continue
            delivered = tuple(token_ids[f][: committed.num_delivered_F[f]])
            delivery = committed.delivery_by_index.get(f) or request.judge.push(delivered)
            update = RequestUpdate(
                token_ids=delivered,
                text=delivery.text,
                logprobs=self._logprobs(request, decision, f, delivered),
                finish_reason=delivery.finish.finish_reason,
            )
            if update.finish_reason is None:
                request.on_update(update)
            else:
                self._end(request, update)

    def _refresh(
        self, batch: ScheduledBatch, rows: RoundRows, hidden_TH: torch.Tensor, decision: Decision | None
    ) -> None:
        """Let the draft source observe the rows that became final, then offer whole prompts to the prefix tree."""
        running = np.flatnonzero(self.slots.active_S[batch.slot_B])
        if len(running) == 0:
            return
        slot_R = batch.slot_B[running]
        if self.draft is not None:
            num_final_B = batch.num_known_B.copy()
            if decision is not None:
                num_final_B[decision.index_F] += decision.num_accepted_F
            num_final_B[~self.slots.active_S[batch.slot_B]] = 0
            row_T = rows.before_place(num_final_B)
            position_T = rows.position_T[row_T]
            slot_T = batch.slot_B[rows.request_index_T[row_T]]
            self.draft.observe(
                ObservedRows(
                    slot_B=slot_R,
                    num_rows_B=num_final_B[running],
                    position_T=position_T,
                    next_token_id_T=self.slots.token_SX[slot_T, position_T + 1].astype(np.int64),
                    hidden_TH=hidden_TH[torch.from_numpy(row_T)],
                    page_id_BP=self.slots.page_ids(slot_R),
                )
            )
        prompt_ended = batch.final_B[running] & batch.prefill_B[running]
        for slot in slot_R[prompt_ended].tolist():
            self.scheduler.cache_prefix(slot, num_refreshed=int(self.slots.computed_S[slot]))

    def _commit_prompt_logprobs(self, request: Request, *, begin: int, hidden_TH: torch.Tensor) -> None:
        """Keep the log-probabilities of the prompt tokens that rows `begin` and on predict, once each."""
        num_top = request.params.prompt_logprobs
        done = len(request.prompt_logprobs)
        end = min(begin + len(hidden_TH), len(request.prompt_ids) - 1)
        if num_top is None or end <= done:
            return
        logits_TV = self.target.logits(hidden_TH[done - begin : end - begin])
        token_ids = request.prompt_ids[done + 1 : end + 1].tolist()
        request.prompt_logprobs += token_logprobs(logits_TV, logits_TV, token_ids, num_top=num_top)

    def _logprobs(
        self, request: Request, decision: Decision, f: int, token_ids: tuple[int, ...]
    ) -> tuple[TokenLogprobs, ...] | None:
        if request.params.logprobs is None:
            return None
        rows = slice(int(decision.first_row_F[f]), int(decision.first_row_F[f]) + len(token_ids))
        return tuple(
            token_logprobs(
                decision.logits_TV[rows],
                decision.transformed_TV[rows],
                list(token_ids),
                num_top=request.params.logprobs,
            )
        )

    def _end(self, request: Request, update: RequestUpdate) -> None:
        request.finished = True
        request.on_update(update)

    def _fail(self, requests: Sequence[Request], error: BaseException) -> None:
        """End those requests of a round that have not ended; what the round wrote for them is not trusted."""
        for request in requests:
            if request.slot is not None:
                self.scheduler.finish(request.slot, num_refreshed=0)
            if not request.finished:
                self._end(request, RequestUpdate(finish_reason="error", error=error))

    def _sampling_of(self, requests: Sequence[Request]) -> SamplingBatch:
        """Return the sampling batch of these requests; kept from round to round while they stay the same."""
        key = tuple(request.request_id for request in requests)
        if self._sampling is None or self._sampling[0] != key:
            batch = SamplingBatch([request.sampling for request in requests], device=self.pool.device)
            self._sampling = key, batch
        return self._sampling[1]


def _decision(
    index_F: Int64Array,
    num_drafts_F: Int64Array,
    result: VerifyResult,
    logits_TV: torch.Tensor,
    transformed_TV: torch.Tensor,
) -> Decision:
    return Decision(
        index_F=index_F,
        token_id_FK1=result.token_ids_BK1.numpy(force=True),
        num_accepted_F=result.num_accepted_B.numpy(force=True),
        drawable_F=result.drawable_B.numpy(force=True),
        logits_TV=logits_TV,
        transformed_TV=transformed_TV,
        first_row_F=np.cumsum(num_drafts_F + 1) - (num_drafts_F + 1),
    )


def _undrawable(request: Request, *, num_output: int) -> SpecdecError:
    return RequestError(
        f"request {request.request_id}: no token can be drawn after {num_output} output tokens: its bans "
        "leave none, or the model's logits are not finite; allow more tokens, or check the checkpoint"
    )
