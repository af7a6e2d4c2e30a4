"""The decode round: schedule, propose, verify, commit, deliver, refresh.

One thread at a time may call an `EngineCore`; `specdec.engine.Engine` adds threads, text and files around it.

B = scheduled requests, F = those of them that draw a token, T = rows, K = drafts, K1 = K + 1, V = vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import nvtx
import torch

from specdec.commit import Committed, commit
from specdec.dcp.agreement import LostPrefixError
from specdec.device_decoding import DeviceDecoding
from specdec.drafting.draft import DraftBatch, Drafts, DraftSource, ObservedRows
from specdec.drafting.draft_check import check_drafts
from specdec.engine_config import EngineConfig
from specdec.errors import DeadlineError, RequestError, RoundError, SpecdecError
from specdec.grammar.grammar_rows import GrammarRows, grammar_rows
from specdec.handoff.intake import LostPrompt, ReceivedPrompt
from specdec.ranks.decision_audit import DecisionAudit
from specdec.ranks.passes import Ranks
from specdec.ranks.rank_transfer import Order
from specdec.ranks.worker import VerifyTask
from specdec.request import Request, RequestUpdate
from specdec.round_rows import RoundRows, lay_out_rows
from specdec.sampling.accept import AcceptanceRule
from specdec.sampling.sampling_rows import SamplingBatch
from specdec.sampling.token_logprobs import TokenLogprobs, token_logprobs
from specdec.scheduler import PromptSource, ScheduledBatch, Scheduler
from specdec.slot_table import BoolArray, Int64Array, SlotTable

_PROMPT_WAIT_S = 0.02  # in which nobody else drives the rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the round decided for the F requests that draw.

    Attributes:
        index_F: Their places in the batch, i64 [F].
        token_id_FK1: Emitted ids, i64 [F, K1]; -1 beyond `num_accepted_F` + 1.
        num_accepted_F: Drafts kept, i64 [F]; the token after them is not counted.
        drawable_F: False where no token could be drawn and the request must fail.
        rows: What it was drawn from; None where that stayed on the device.
    """

    index_F: Int64Array
    token_id_FK1: Int64Array
    num_accepted_F: Int64Array
    drawable_F: BoolArray
    rows: "DrawnRows | None" = None


class DrawnRows(NamedTuple):
    """The rows that requests drew from.

    Attributes:
        logits_TV: The target's logits, f32.
        transformed_TV: The same as drawn from.
        first_row_F: First row of each request, i64 [F].
    """

    logits_TV: torch.Tensor
    transformed_TV: torch.Tensor
    first_row_F: Int64Array


class PromptIntake(PromptSource, Protocol):
    """Prompts whose KV is computed elsewhere, as the rounds see them; see `specdec.handoff.intake.Intake`."""

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for a prompt."""

    @property
    def holds_pages(self) -> bool:
        """Whether pages will come back that nobody waits for any more."""

    def take(self, *, wait_s: float = 0.0) -> Sequence[ReceivedPrompt | LostPrompt]:
        """Give what has become of prompts since the last call; waits up to `wait_s` for the first news."""

    def has_kept_waiting(self, request: Request) -> bool:
        """Tell whether the head of the queue has waited too long for pages that others hold."""

    def forget_held_pages(self) -> None:
        """Give back the pages that others hold: the memory behind them is about to be other memory."""

    def reopen(self, addresses: list[bytes]) -> None:
        """Go on with that memory."""


class PromptSink(Protocol):
    """Takes the KV of requests that are prefill only, chunk by chunk."""

    def announce(self, request: Request, *, num_computed: int, is_last: bool) -> Order | None:
        """Say what of a request's target KV is to be sent once the pass that is about to run has stored it.

        Args:
            request: Whose; it holds its slot.
            num_computed: Leading tokens with target KV by then.
            is_last: Whether the prompt is complete by then.
        """

    def take(self, request: Request, *, num_computed: int, hidden_H: torch.Tensor | None) -> None:
        """Take what is there of a request, which still holds its slot.

        Args:
            request: Whose.
            num_computed: Leading tokens with target KV; draft KV too, but for the last token of the prompt.
            hidden_H: The hidden state of the last token, once the prompt is complete.
        """


class EngineCore:
    """Runs rounds: decides what the ranks compute, and commits what they agree on.

    Args:
        ranks: Run the passes.
        scheduler: Owns the requests and their pages.
        draft: Where drafts come from; None for decoding without speculation.

    Attributes:
        audit: Counts of the ranks' own decisions; None until `start_audit`.
        intake: Where the KV of prompts comes from; None where it is computed here.
        sink: Takes the KV of requests that are prefill only; None where there are none.
    """

    def __init__(
        self,
        *,
        ranks: Ranks,
        scheduler: Scheduler,
        draft: DraftSource | None,
    ) -> None:
        self.ranks = ranks
        self.scheduler = scheduler
        self.draft = draft
        self.audit: DecisionAudit | None = None
        self.intake: PromptIntake | None = None
        self.sink: PromptSink | None = None
        self._sampling: tuple[tuple[int, ...], SamplingBatch] | None = None
        rounds = ranks.worker.device_rounds
        self._device: DeviceDecoding | None = None
        if rounds is not None and (draft is None or draft is ranks):  # they draft with the MTP layer
            self._device = DeviceDecoding(ranks, scheduler, rounds)
        self._rewound: set[int] = set()  # requests of which a rank lost rows since the last target pass that ran

    @property
    def slots(self) -> SlotTable:
        """The running requests."""
        return self.scheduler.slots

    def step(self) -> bool:
        """Run one round; False when there was nothing to run.

        An error inside a round fails the requests that took part in it, and no other. While the round is scheduled
        these are the running ones and the one at the head of the queue: one of them was looked at. Once a rank is lost
        all fail, those that wait too. Requests whose deadline has come end first.
        """
        started_at = time.perf_counter()
        requests: Sequence[Request] = ()
        try:
            self._end_late()
            if self.intake is not None:
                self.take_in()
            batch = self.scheduler.schedule()
            if batch is None:
                return self.intake is not None and self._await_prompts(self.intake)
            requests = self.slots.requests_at(batch.slot_B)
            is_on_device_B = self._decodes_on_device(batch)
            if self._device is not None and is_on_device_B.any():
                self._decode_on_device(self._device, batch.of(is_on_device_B), is_whole=bool(is_on_device_B.all()))
            if not is_on_device_B.all():
                self._run(batch if not is_on_device_B.any() else batch.of(~is_on_device_B), started_at=started_at)
        except LostPrefixError as error:
            self._rewind(requests, error)
        except BaseException as error:  # whatever it was, these requests end and the engine lives on
            if self._device is not None:
                self._device.forget()
            lost = self.ranks.lost
            if lost is None:
                self._fail(requests or self.scheduler.candidates(), error)
            else:  # no round can run any more
                self._fail([*requests, *self.scheduler.candidates(), *self.scheduler.waiting], lost)
            if not isinstance(error, Exception):
                raise
        return True

    def _run(self, batch: ScheduledBatch, *, started_at: float) -> None:
        """Draft, verify, commit, deliver and refresh, pass by pass."""
        drafts = self._propose(batch)
        rows = lay_out_rows(batch, drafts, self.slots)
        decision = self._verify(batch, drafts, rows)
        committed = self._commit(batch, drafts, decision)
        if decision is not None and committed is not None:
            self._deliver(decision, committed)
        self._refresh(batch, rows, decision)
        if self.sink is not None:
            self._pass_on(batch, rows, self.sink)
        if self.scheduler.draft_length is not None and decision is not None and not batch.prefill_B.all():
            self.scheduler.draft_length.observe(
                drafts.num_drafts_B[decision.index_F],
                decision.num_accepted_F,
                round_s=time.perf_counter() - started_at,
            )

    def _decodes_on_device(self, batch: ScheduledBatch) -> BoolArray:
        """Which requests of a round decode on the device, bool [B]."""
        none_B = np.zeros(len(batch.slot_B), dtype=np.bool_)
        if self._device is None or self.sink is not None:
            return none_B
        if self.audit is not None:  # it compares what only passes give
            self._device.forget()
            return none_B
        return self._device.choose(batch)

    def _decode_on_device(self, device: DeviceDecoding, batch: ScheduledBatch, *, is_whole: bool) -> None:
        """Run a round of requests that decode, as one pass that drafts for the next one too."""
        decoded, num_drafts_B = device.run(batch, is_whole=is_whole)
        num_emitted_B = (decoded.token_id_BQ >= 0).sum(axis=1)
        decision = Decision(
            index_F=np.arange(len(batch.slot_B)),
            token_id_FK1=decoded.token_id_BQ,
            num_accepted_F=num_emitted_B - 1,
            drawable_F=decoded.drawable_B,
        )
        committed = self._settle(batch, decision, num_drafts_B)
        self._deliver(decision, committed)

    def _await_prompts(self, intake: PromptIntake) -> bool:
        """Wait a moment for prompts, or for pages that prefills hold; False where there is nothing to wait for."""
        waiting = self.scheduler.waiting
        if not intake.is_waiting:
            if not (waiting and intake.holds_pages):
                return False
            if intake.has_kept_waiting(waiting.first):
                self._take_other_memory(intake)
                return True
        self.take_in(wait_s=_PROMPT_WAIT_S)
        return True

    def _take_other_memory(self, intake: PromptIntake) -> None:
        """Give the pools memory that no prefill was told of, so that no page has to be held any more.

        The last resort, for prefills that neither answer nor end. Nothing runs, so only cached prefixes are lost.
        """
        intake.forget_held_pages()
        self.scheduler.drop_cached_prefixes()
        allocator = self.scheduler.allocator
        assert allocator.num_free == allocator.num_pages
        intake.reopen(self.ranks.reopen())

    def take_in(self, *, wait_s: float = 0.0) -> None:
        """Let requests go on whose prompts have arrived, and those start over or end whose prompts are lost.

        Args:
            wait_s: Seconds to wait for the first news.
        """
        assert self.intake is not None
        with nvtx.annotate("receive"):
            prompts = self.intake.take(wait_s=wait_s)
        for prompt in prompts:
            slot = prompt.request.slot
            assert slot is not None
            if isinstance(prompt, ReceivedPrompt):
                self.slots.take_in(slot, prompt.hidden_H)
                if not prompt.request.output_ids:
                    prompt.request.num_cached_tokens = prompt.num_reused
            elif prompt.is_retryable:
                self.scheduler.start_over(slot)
            else:
                self._fail([prompt.request], prompt.error)

    def start_audit(self, *, rate: float) -> DecisionAudit:
        """Compare the ranks' own decisions in a share of the rounds from now on; gives the counts, which go on.

        Raises:
            ConfigError: The share is no number in 0..1.
        """
        checked = EngineConfig(audit_rate=rate).audit_rate
        self.audit = DecisionAudit(rate=checked, num_ranks=self.ranks.worker.groups.all_ranks.size)
        return self.audit

    def cancel(self, request: Request) -> None:
        """End a request, free what it holds and send its last update; nothing for one that ended.

        One that neither runs nor waits yet holds nothing and ends too.
        """
        if request.finished:
            return
        self.scheduler.drop(request, is_refreshed=True)
        self._end(request, RequestUpdate(text=request.judge.flush(), finish_reason="cancelled"))

    def _end_late(self) -> None:
        """End the requests whose deadline has come, as if they were cancelled, but with an error."""
        for request in self.scheduler.late_requests(time.monotonic()):
            state = "waited for a slot" if request.slot is None else "ran"
            self.scheduler.drop(request, is_refreshed=True)
            given_s = request.deadline - request.arrived_at
            error = DeadlineError(
                f"request {request.request_id} still {state} after {given_s:g} s, all the time it was given, with "
                f"{len(request.output_ids)} of at most {request.max_output_tokens} output tokens"
            )
            self._end(request, RequestUpdate(text=request.judge.flush(), finish_reason="error", error=error))

    def _propose(self, batch: ScheduledBatch) -> Drafts:
        """Ask the draft source for the drafts the schedule left room for.

        Raises:
            SpecdecError: It proposed what a draft source must not.
        """
        num_requests = len(batch.slot_B)
        wanting = np.flatnonzero(batch.num_drafts_B)
        if self.draft is None or len(wanting) == 0:
            no_drafts = np.zeros(num_requests, dtype=np.int64)
            return Drafts(token_id_BK=np.zeros((num_requests, 0), dtype=np.int64), num_drafts_B=no_drafts)
        slot_W = batch.slot_B[wanting]
        requests = self.slots.requests_at(slot_W)
        wanted = DraftBatch(
            slot_B=slot_W,
            length_B=self.slots.length_S[slot_W],
            num_drafts_B=batch.num_drafts_B[wanting],
            page_id_BP=self.slots.page_ids(slot_W),
            requests=requests,
            sampling=self._sampling_of(requests),
        )
        proposed = check_drafts(
            self.draft.propose(wanted),
            wanted,
            source=type(self.draft).__name__,
            vocab_size=self.ranks.worker.target.config.vocab_size,
            reads_probs=self.ranks.worker.rule is AcceptanceRule.REJECTION,
        )
        if self.ranks.worker.draft is not None:
            proposed = replace(proposed, draft_probs_BKV=None)  # every rank keeps its own
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

    def _verify(self, batch: ScheduledBatch, drafts: Drafts, rows: RoundRows) -> Decision | None:
        """Have the ranks compute the rows and decide; None when the round only computed parts of prompts."""
        is_drawing_B = batch.final_B if self.sink is None else batch.final_B & ~self._is_prefill_only(batch)
        index_F = np.flatnonzero(is_drawing_B)
        slot_F = batch.slot_B[index_F]
        num_drafts_F = drafts.num_drafts_B[index_F]
        proposal_B = np.full(len(batch.slot_B), -1)
        wanting = np.flatnonzero(batch.num_drafts_B)
        proposal_B[wanting] = np.arange(len(wanting))
        probs_BKV = drafts.draft_probs_BKV
        scored = self._prompt_rows(batch, rows)
        draft_ids = [row[:count].tolist() for row, count in zip(drafts.token_id_BK[index_F], num_drafts_F, strict=True)]
        verified = self.ranks.verify(
            VerifyTask(
                rows=rows,
                drawing_row_T=rows.from_place(np.where(is_drawing_B, batch.num_known_B - 1, rows.num_rows_B)),
                prompt_row_T=np.concatenate([row_T for _, row_T in scored]) if scored else np.zeros(0, dtype=np.int64),
                length_F=self.slots.length_S[slot_F],
                draft_ids=draft_ids,
                proposal_F=proposal_B[index_F],
                draft_probs_FKV=None if probs_BKV is None else probs_BKV[torch.from_numpy(index_F)],
                sampling=self._sampling_of(self.slots.requests_at(slot_F)) if len(index_F) else None,
                grammar=self._grammar_rows(slot_F, draft_ids),
                orders=self._announced(batch),
                **self._received(batch, rows),
            )
        )
        self._rewound.clear()
        self._score_prompts(scored, verified.prompt_logits_TV)
        if verified.acceptance is None:
            return None
        if self.audit is not None:
            self.audit.observe(verified.acceptance)
        return Decision(
            index_F=index_F,
            token_id_FK1=verified.acceptance.token_id_FK1,
            num_accepted_F=verified.acceptance.num_accepted_F,
            drawable_F=verified.acceptance.drawable_F,
            rows=DrawnRows(
                logits_TV=verified.logits_TV,
                transformed_TV=verified.transformed_TV,
                first_row_F=np.cumsum(num_drafts_F + 1) - (num_drafts_F + 1),
            ),
        )

    def _commit(self, batch: ScheduledBatch, drafts: Drafts, decision: Decision | None) -> Committed | None:
        """Move the lengths, judge stops token by token, free what ended."""
        if decision is None:
            self.slots.computed_S[batch.slot_B] += batch.num_known_B
            return None
        return self._settle(batch, decision, drafts.num_drafts_B[decision.index_F])

    def _settle(self, batch: ScheduledBatch, decision: Decision, num_drafts_F: Int64Array) -> Committed:
        """Append what was decided to the requests that drew, of which each had verified so many drafts."""
        self.slots.computed_S[batch.slot_B] += batch.num_known_B
        committed = commit(
            self.slots,
            slot_F=batch.slot_B[decision.index_F],
            token_id_FK1=decision.token_id_FK1,
            num_accepted_F=decision.num_accepted_F,
            num_drafts_F=num_drafts_F,
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
                error = _undrawable(request, num_output=num_output, is_finite=_has_finite_logits(decision, f))
                self._end(request, RequestUpdate(finish_reason="error", error=error))
                continue
            delivered = tuple(token_ids[f][: committed.num_delivered_F[f]])
            delivery = committed.delivery_by_index.get(f) or request.judge.push(delivered)
            update = RequestUpdate(
                token_ids=delivered,
                text=delivery.text,
                logprobs=self._logprobs(request, decision, f, delivered),
                finish_reason=delivery.finish.finish_reason,
                stop=delivery.finish.stop,
            )
            if update.finish_reason is None:
                request.on_update(update)
            else:
                self._end(request, update)

    def _refresh(self, batch: ScheduledBatch, rows: RoundRows, decision: Decision | None) -> None:
        """Let the draft source observe the rows that became final, then offer whole prompts to the prefix tree."""
        is_running_B = self.slots.active_S[batch.slot_B]
        if not is_running_B.any():
            return
        if self.draft is not None:
            num_final_B = batch.num_known_B.copy()
            if decision is not None:
                num_final_B[decision.index_F] += decision.num_accepted_F
            num_final_B[~is_running_B] = 0
            if self.sink is not None:  # of a prompt alone nobody knows the token after its last one
                num_final_B -= batch.final_B & self._is_prefill_only(batch)
            if num_final_B.any():
                self._observe(batch, rows, num_final_B)
        prompt_ended_B = batch.final_B & batch.prefill_B & is_running_B
        for slot in batch.slot_B[prompt_ended_B].tolist():
            self.scheduler.cache_prefix(slot, num_refreshed=int(self.slots.computed_S[slot]))

    def _observe(self, batch: ScheduledBatch, rows: RoundRows, num_final_B: Int64Array) -> None:
        """Let the draft source observe the first `num_final_B` rows of each request."""
        assert self.draft is not None
        observed = np.flatnonzero(num_final_B)
        slot_O = batch.slot_B[observed]
        row_T = rows.before_place(num_final_B)
        position_T = rows.position_T[row_T]
        slot_T = batch.slot_B[rows.request_index_T[row_T]]
        self.draft.observe(
            ObservedRows(
                slot_B=slot_O,
                num_rows_B=num_final_B[observed],
                position_T=position_T,
                next_token_id_T=self.slots.token_SX[slot_T, position_T + 1].astype(np.int64),
                row_T=row_T,
                hidden_TH=self.ranks.worker.hidden_of(row_T),
                page_id_BP=self.slots.page_ids(slot_O),
            )
        )

    def _grammar_rows(self, slot_F: Int64Array, draft_ids: Sequence[Sequence[int]]) -> GrammarRows | None:
        """Find what grammars allow in the drawing rows."""
        if not self.slots.num_grammars:
            return None
        with nvtx.annotate("grammar"):
            return grammar_rows([request.grammar for request in self.slots.requests_at(slot_F)], draft_ids)

    def _received(self, batch: ScheduledBatch, rows: RoundRows) -> dict[str, Any]:
        """Find the rows whose target KV was computed elsewhere, with the hidden states that came with it."""
        if self.intake is None:
            return {}
        hidden_by_b = {
            b: request.received_hidden_H
            for b, request in enumerate(self.slots.requests_at(batch.slot_B))
            if request.received_hidden_H is not None
        }
        for b in hidden_by_b:
            self.slots.request_at(int(batch.slot_B[b])).received_hidden_H = None
        if not hidden_by_b:
            return {}
        return {
            "received_row_R": rows.first_row_B[list(hidden_by_b)],
            "received_hidden_RH": np.stack(list(hidden_by_b.values())),
        }

    def _announced(self, batch: ScheduledBatch) -> tuple[Order, ...]:
        """Find what the ranks send within the pass."""
        if self.sink is None:
            return ()
        num_computed_B = batch.start_B + batch.num_known_B
        announced = [
            self.sink.announce(
                self.slots.request_at(int(batch.slot_B[b])),
                num_computed=int(num_computed_B[b]),
                is_last=bool(batch.final_B[b]),
            )
            for b in np.flatnonzero(self._is_prefill_only(batch)).tolist()
        ]
        return tuple(order for order in announced if order is not None)

    def _is_prefill_only(self, batch: ScheduledBatch) -> BoolArray:
        """Which requests of a round draw no token, bool [B]; also once some of them have left their slot."""
        return self.slots.prefill_only_S[batch.slot_B]

    def _pass_on(self, batch: ScheduledBatch, rows: RoundRows, sink: PromptSink) -> None:
        """Hand the sink what a round computed of requests that are prefill only, and end those that are complete."""
        for b in np.flatnonzero(self._is_prefill_only(batch)).tolist():
            slot = int(batch.slot_B[b])
            request, num_computed = self.slots.request_at(slot), int(self.slots.computed_S[slot])
            if not batch.final_B[b]:
                sink.take(request, num_computed=num_computed, hidden_H=None)
                continue
            last_row = rows.first_row_B[b] + rows.num_rows_B[b] - 1
            sink.take(request, num_computed=num_computed, hidden_H=self.ranks.worker.hidden_of(np.array([last_row]))[0])
            self.scheduler.finish(slot, num_refreshed=num_computed - 1)
            self._end(request, RequestUpdate(finish_reason="length"))

    def _prompt_rows(self, batch: ScheduledBatch, rows: RoundRows) -> list[tuple[Request, Int64Array]]:
        """Find the rows that predict prompt tokens whose log-probabilities are wanted and not there yet."""
        found = []
        for b in np.flatnonzero(self.slots.attended_S[batch.slot_B]).tolist():
            request = self.slots.request_at(int(batch.slot_B[b]))
            begin, done = int(batch.start_B[b]), len(request.prompt_logprobs)
            end = min(begin + int(batch.num_known_B[b]), len(request.prompt_ids) - 1)
            if request.params.prompt_logprobs is not None and end > done:
                found.append((request, int(rows.first_row_B[b]) - begin + np.arange(done, end)))
        return found

    def _score_prompts(self, scored: list[tuple[Request, Int64Array]], logits_TV: torch.Tensor) -> None:
        """Keep the log-probabilities of prompt tokens, once each."""
        for (request, row_T), rows_TV in zip(scored, logits_TV.split([len(row_T) for _, row_T in scored]), strict=True):
            done = len(request.prompt_logprobs)
            token_ids = request.prompt_ids[done + 1 : done + 1 + len(row_T)].tolist()
            num_top = request.params.prompt_logprobs
            assert num_top is not None
            request.prompt_logprobs += token_logprobs(rows_TV, rows_TV, token_ids, num_top=num_top)

    def _logprobs(
        self, request: Request, decision: Decision, f: int, token_ids: tuple[int, ...]
    ) -> tuple[TokenLogprobs, ...] | None:
        if request.params.logprobs is None:
            return None
        drawn = decision.rows
        assert drawn is not None
        rows = slice(int(drawn.first_row_F[f]), int(drawn.first_row_F[f]) + len(token_ids))
        return tuple(
            token_logprobs(
                drawn.logits_TV[rows],
                drawn.transformed_TV[rows],
                list(token_ids),
                num_top=request.params.logprobs,
            )
        )

    def _end(self, request: Request, update: RequestUpdate) -> None:
        request.on_update(update)
        request.finished = True  # not before: an interrupt between the two sends an update more, never one less

    def _rewind(self, requests: Sequence[Request], error: LostPrefixError) -> None:
        """Have rows that a rank lost computed again; a request that at once loses more is not to be helped and ends."""
        for request, num_rows in zip(requests, error.num_rows_B.tolist(), strict=True):
            assert request.slot is not None
            if num_rows == self.slots.computed_S[request.slot]:
                continue
            if request.request_id in self._rewound:
                self._fail([request], RoundError(f"request {request.request_id} lost its KV twice: {error}"))
            else:
                self._rewound.add(request.request_id)
                self.slots.rewind(request.slot, num_rows)

    def _fail(self, requests: Sequence[Request], error: BaseException) -> None:
        """End those requests of a round that have not ended; what the round wrote for them is not trusted."""
        for request in requests:
            self.scheduler.drop(request, is_refreshed=False)
            if not request.finished:
                self._end(request, RequestUpdate(finish_reason="error", error=error))

    def _sampling_of(self, requests: Sequence[Request]) -> SamplingBatch:
        """Return the sampling batch of these requests; kept from round to round while they stay the same."""
        key = tuple(request.request_id for request in requests)
        if self._sampling is None or self._sampling[0] != key:
            batch = SamplingBatch([request.sampling for request in requests], device=self.ranks.worker.device)
            self._sampling = key, batch
        return self._sampling[1]


def _has_finite_logits(decision: Decision, f: int) -> bool:
    """Whether the model's own logits are finite in the row that a request's first token is drawn from."""
    if decision.rows is None:
        return False  # nothing is banned of what stays on the device
    return bool(decision.rows.logits_TV[int(decision.rows.first_row_F[f])].isfinite().all())


def _undrawable(request: Request, *, num_output: int, is_finite: bool) -> SpecdecError:
    what = f"request {request.request_id}: no token can be drawn after {num_output} output tokens"
    if not is_finite:
        return RoundError(f"{what}: the model's logits are not finite; check the checkpoint")
    if request.grammar is None:
        return RequestError(f"{what}: its bans leave no token; allow more")
    if (fault := request.grammar.matcher.fault) is not None:
        return RequestError(f"{what}: its grammar cannot be followed further: {fault}")
    return RequestError(f"{what}: its grammar and its bans, min_tokens among them, leave no token; allow more")
