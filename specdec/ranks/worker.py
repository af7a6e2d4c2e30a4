"""What every rank does in a round: its part of drafting, verifying and refreshing.

The leading rank schedules and commits; all ranks, the leader included, run the passes here from the same tasks. A pass
comes in two parts. The first places its rows and may fail on this rank alone; the second meets the other ranks in
collectives. Between them the ranks learn whether all can go on, so that an error of one rank fails a pass on all of
them instead of leaving the others to wait.

B = scheduled requests, F = those of them that draw a token, T = rows, K = drafts, K1 = K + 1, V = vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import nvtx
import torch

from specdec.dcp.agreement import (
    AgreedAcceptance,
    agree_acceptance,
    agree_prefix,
    agree_ready,
    arrays_in,
    digest_of,
    gather_objects,
)
from specdec.dcp.communicator import Collective
from specdec.dcp.geometry import PoolRole, active_geometry
from specdec.dcp.layer_split_pool import LayerSplitPool
from specdec.dcp.page_table import KeptPageTable
from specdec.dcp.pool import KvPool
from specdec.device.decode_task import DecodeTask
from specdec.device.device_rounds import DeviceRounds
from specdec.device.started_round import StartedRound
from specdec.drafting.draft import DraftBatch, Drafts, ObservedRows
from specdec.drafting.mtp_draft import MtpDraft
from specdec.grammar.grammar_rows import GrammarRows
from specdec.kernels.cuda_program import as_current
from specdec.kernels.logits_transform import transform_logits
from specdec.memory.pools import Pools
from specdec.memory.rank_memory import RankMemory
from specdec.models.glm.kernel_target import KernelMtp, KernelTarget
from specdec.models.glm.target import GlmTarget
from specdec.models.glm.trace import ForwardTrace
from specdec.ranks.decoded_record import DecodedRecord
from specdec.ranks.kernel_choice import KernelChoice
from specdec.ranks.rank_transfer import Moves, Order, OrderReport, RankTransfer
from specdec.round_rows import RoundRows
from specdec.sampling.accept import AcceptanceRule, verify_by_rejection, verify_sampled
from specdec.sampling.sampling_rows import SamplingBatch, SamplingRows
from specdec.slot_table import Int64Array
from specdec.transfer.address import ProcessRecord
from specdec.verify import place_target_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyTask:
    """One target pass, and what is drawn from it.

    Attributes:
        rows: T rows with their pages.
        drawing_row_T: Rows whose logits judge drafts or draw a token, request by request, i64.
        prompt_row_T: Rows whose logits score prompt tokens, i64.
        length_F: Known tokens of the requests that draw, i64 [F].
        draft_ids: Their drafts.
        proposal_F: Their places in the last `propose`, i64 [F]; -1 without drafts.
        draft_probs_FKV: What drafts were drawn from that did not come from `propose`, f32; None where they are certain.
        sampling: How they are drawn; None where none draws.
        grammar: What grammars allow in the drawing rows; None where no request has one.
        is_traced: Whether the choices of the pass are wanted.
        orders: Pieces of prompts that are sent layer by layer, as a rank has stored what this pass adds to them.
        received_row_R: Rows whose KV is in the pools already, since it was computed elsewhere; i64, or None.
        received_hidden_RH: Their hidden states after the final norm, f32 [R, H].
    """

    rows: RoundRows
    drawing_row_T: Int64Array
    prompt_row_T: Int64Array
    length_F: Int64Array
    draft_ids: Sequence[Sequence[int]]
    proposal_F: Int64Array
    draft_probs_FKV: torch.Tensor | None
    sampling: SamplingBatch | None
    grammar: GrammarRows | None = None
    is_traced: bool = False
    orders: tuple[Order, ...] = ()
    received_row_R: Int64Array | None = None
    received_hidden_RH: npt.NDArray[np.float32] | None = None

    @classmethod
    def without_drawing(cls, rows: RoundRows, *, prompt_row_T: Int64Array, is_traced: bool = False) -> "VerifyTask":
        """Compute rows whose tokens are all known."""
        none = np.zeros(0, dtype=np.int64)
        return cls(
            rows=rows,
            drawing_row_T=none,
            prompt_row_T=prompt_row_T,
            length_F=none,
            draft_ids=(),
            proposal_F=none,
            draft_probs_FKV=None,
            sampling=None,
            is_traced=is_traced,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What the target pass gave on this rank.

    Attributes:
        acceptance: The agreed decision; None where no request draws.
        logits_TV: The target's logits of the drawing rows, f32.
        transformed_TV: The same as drawn from.
        prompt_logits_TV: Logits of `prompt_row_T`, f32.
        trace: The choices of the pass, where they were wanted.
    """

    acceptance: AgreedAcceptance | None
    logits_TV: torch.Tensor
    transformed_TV: torch.Tensor
    prompt_logits_TV: torch.Tensor
    trace: ForwardTrace | None


class Worker:
    """The models and pools of one rank.

    Args:
        target: The target model, with the groups of this rank.
        pool: The target pool.
        draft: The MTP draft; None without.
        rule: The acceptance rule.
        kernels: What computes the models.
        memory: What the rank holds, as it was planned.
        new_device_rounds: Makes the rounds that stay on the device, over the pools' memory; None where there are none.
        transfer: Moves KV from and to other engines; None where none moves.
        logits_noise: Standard deviation of noise on the logits that is different on every rank, after they were
            gathered: proves that ranks which see different numbers still decide alike.
    """

    def __init__(
        self,
        target: GlmTarget | KernelTarget,
        pool: KvPool | LayerSplitPool,
        draft: MtpDraft | None,
        *,
        rule: AcceptanceRule,
        kernels: KernelChoice,
        memory: RankMemory,
        new_device_rounds: Callable[[], DeviceRounds] | None = None,
        transfer: RankTransfer | None = None,
        logits_noise: float = 0.0,
    ) -> None:
        self.target = target
        self.pool = pool
        self.draft = draft
        self.rule = rule
        self.kernels = kernels
        self.memory = memory
        self._new_device_rounds = new_device_rounds
        self.device_rounds = None if new_device_rounds is None else new_device_rounds()
        self.transfer = transfer
        self.groups = target.parallel
        self._logits_noise = logits_noise
        self._page_table = KeptPageTable(
            geometry=active_geometry(size=pool.geometry.size, rank=pool.geometry.rank, role=PoolRole.TARGET),
            page_size=pool.layout.page_size,
            num_pages=pool.num_pages,
            device=pool.device,
        )
        self._generator = torch.Generator(device=pool.device).manual_seed(self.groups.all_ranks.rank)
        self._task_digest = bytes(8)  # of the pass that runs; stays as it is on one rank
        self._decoded = DecodedRecord()
        self._drafts: Drafts | None = None
        self._hidden_TH: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the rank's tensors live."""
        return self.pool.device

    def run(self, method: str, argument: Any, *, told: Any) -> Any:
        """Run one pass with the other ranks.

        Args:
            method: What the pass is.
            argument: Its argument on this rank.
            told: The argument as every rank is told it, which they compare.

        Raises:
            RankError: A rank could not begin it, or the ranks began it differently; on every rank alike.
        """
        with as_current(self.device):  # any thread may come
            if method == "decode":  # nothing of it can fail on one rank alone, and agreeing would wait for a GPU
                return self.decode(argument)
            error, second_part = None, None
            try:
                second_part = getattr(self, method)(argument)
            except Exception as failure:  # whatever it is, the others must hear of it before they wait
                error = failure
            if self.groups.all_ranks.size > 1:
                self._task_digest = digest_of(arrays_in(told))
            agree_ready(self.groups.all_ranks, error, digest=self._task_digest, device=self.device)
            assert second_part is not None
            return second_part()

    def close(self) -> None:
        """Stop moving KV and let go of graphs; passes are not possible any more."""
        if self.transfer is not None:
            self.transfer.close()
        if self.device_rounds is not None:
            self.device_rounds.close()

    def await_device(self) -> None:
        """Wait for all that this rank's device was told to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def propose(self, batch: DraftBatch) -> Callable[[], Drafts]:
        """Draft with the MTP layer."""
        draft = self._mtp_draft().propose(batch)

        def run() -> Drafts:
            with nvtx.annotate("draft"):
                self._drafts = draft()
            return self._drafts

        return run

    def warm_up(self, _nothing: None) -> Callable[[], None]:
        """Compile and load kernels, and make graphs of the rounds that stay on the device; all ranks run meanwhile."""
        return self._warm_up

    def decode(self, task: DecodeTask) -> StartedRound:
        """Start a round that stays on the device."""
        rounds = self.device_rounds
        if rounds is None:
            raise AssertionError("the ranks were asked for a round on the device, but have none")
        started = rounds.start(task)
        self._decoded.note(started)
        return started

    def verify(self, task: VerifyTask) -> Callable[[], Verified]:
        """Run the target over the rows, judge the drafts, agree."""
        if task.orders:
            self._transfer().prepare(task.orders)  # first: every rank must know of them, whatever comes after
        trace = ForwardTrace() if task.is_traced else None
        rows = task.rows if task.received_row_R is None else task.rows.without(task.received_row_R)
        forward = place_target_rows(
            rows,
            target=self.target,
            pool=self.pool,
            page_table=self._page_table,
            trace=trace,
            when_stored=self._transfer().post_stored if task.orders else None,
        )
        drawn_rows = None
        if task.sampling is not None:
            drawn_rows = task.sampling.verify_rows(task.length_F, task.draft_ids)
            if task.grammar is not None:
                rules = task.grammar.restrict(drawn_rows.rules, device=self.device)
                drawn_rows = replace(drawn_rows, rules=rules)
        logits_row_T = torch.from_numpy(np.concatenate((task.drawing_row_T, task.prompt_row_T))).to(self.device)

        def run() -> Verified:
            self._agree_prefix(rows)
            with nvtx.annotate("verify"):
                self._hidden_TH = forward() if task.received_row_R is None else self._with_received(task, forward)
            logits_TV = self._with_noise(self.target.logits(self._hidden_TH[logits_row_T]))
            drawing_TV, prompt_TV = logits_TV.split((len(task.drawing_row_T), len(task.prompt_row_T)))
            transformed_TV, acceptance = drawing_TV, None
            if drawn_rows is not None:
                transformed_TV = transform_logits(drawing_TV, drawn_rows.rules)
                acceptance = self._accept(task, transformed_TV, drawn_rows)
            return Verified(
                acceptance=acceptance,
                logits_TV=drawing_TV,
                transformed_TV=transformed_TV,
                prompt_logits_TV=prompt_TV,
                trace=trace,
            )

        return run

    def observe(self, rows: ObservedRows) -> Callable[[], None]:
        """Refresh the draft with rows of the last target pass; their hidden states are this rank's own."""
        return self._mtp_draft().observe(replace(rows, hidden_TH=self.hidden_of(rows.row_T)))

    def record_collectives(self, is_recording: bool) -> Callable[[], list[list[Collective]]]:
        """Begin or end the record of collectives; gives what every rank recorded so far."""

        def run() -> list[list[Collective]]:
            self.groups.record.is_recording = False
            gathered = gather_objects(self.groups.all_ranks, self.groups.record.take(), device=self.device)
            self.groups.record.is_recording = is_recording
            return gathered

        return run

    def record_decoded(self, is_recording: bool) -> Callable[[], list[list[Int64Array]]]:
        """Begin or end the record of what rounds on the device drew; gives what every rank recorded so far."""

        def run() -> list[list[Int64Array]]:
            gathered = gather_objects(self.groups.all_ranks, self._decoded.take(), device=self.device)
            if is_recording:
                self._decoded.begin()
            return gathered

        return run

    def addresses(self, _nothing: None) -> Callable[[], list[bytes]]:
        """Give where other engines write to, by rank."""
        own = self._transfer().address()
        return lambda: gather_objects(self.groups.all_ranks, own, device=self.device)

    def reopen(self, _nothing: None) -> Callable[[], list[bytes]]:
        """Take other memory that nobody was told of; gives where other engines write to from now on, by rank."""
        transfer = self._transfer()
        pools = Pools(target=self.pool, draft=None if self.draft is None else self.draft.pool)

        def run() -> list[bytes]:
            self.await_device()
            if self.device_rounds is not None:
                self.device_rounds.close()
            self.device_rounds = None  # the memory that they know goes before there is other
            transfer.reopen(pools)
            if self._new_device_rounds is not None:
                self.device_rounds = self._new_device_rounds()
                self._capture()
            return gather_objects(self.groups.all_ranks, transfer.address(), device=self.device)

        return run

    def move(self, moves: Moves) -> Callable[[], list[list[OrderReport]]]:
        """Post this rank's share of what is sent; gives what has ended, by rank."""
        transfer = self._transfer()
        # Not before every rank can: what one has reported is reported once.
        return lambda: gather_objects(self.groups.all_ranks, transfer.move(moves), device=self.device)

    def processes(self, _nothing: None) -> Callable[[], list[ProcessRecord]]:
        """Give the processes of all ranks."""
        return lambda: gather_objects(self.groups.all_ranks, ProcessRecord.of_this_process(), device=self.device)

    def hidden_of(self, row_T: Int64Array) -> torch.Tensor:
        """Give hidden states of rows of the last target pass, [T, H]."""
        assert self._hidden_TH is not None
        return self._hidden_TH[torch.from_numpy(row_T)]

    def _warm_up(self) -> None:
        if self.device.type == "cuda":
            if isinstance(self.target, KernelTarget):
                self.target.warm_up(self.pool)
            if self.draft is not None and isinstance(self.draft.mtp, KernelMtp):
                self.draft.mtp.warm_up(self.draft.pool)
        self._capture()

    def _capture(self) -> None:
        if self.device_rounds is not None and self.device.type == "cuda":
            self.device_rounds.capture()

    def _agree_prefix(self, rows: RoundRows) -> None:
        """Learn whether every rank of a layer split has stored what the rows attend to.

        Raises:
            LostPrefixError: One has not, on every rank alike.
        """
        if isinstance(self.pool, LayerSplitPool):
            start_B = rows.position_T[rows.first_row_B]
            stored_B = self.pool.committed_prefix(rows.page_id_BP, start_B)
            agree_prefix(self.pool.cp, stored_B, start_B, device=self.device)

    def _with_received(self, task: VerifyTask, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Give the hidden states of all rows, [T, H]: those computed now, and those that came with their KV."""
        assert task.received_row_R is not None
        received_RH = torch.from_numpy(task.received_hidden_RH).to(self.device, self.target.norm.dtype)
        row_C = np.delete(np.arange(len(task.rows.token_id_T)), task.received_row_R)
        hidden_TH = received_RH.new_empty((len(task.rows.token_id_T), received_RH.shape[1]))
        hidden_TH[torch.from_numpy(task.received_row_R)] = received_RH
        if len(row_C):
            hidden_TH[torch.from_numpy(row_C)] = forward()
        return hidden_TH

    def _accept(self, task: VerifyTask, transformed_TV: torch.Tensor, drawn_rows: SamplingRows) -> AgreedAcceptance:
        """Judge the drafts by this rank's numbers, then agree with the other ranks."""
        if self.rule is AcceptanceRule.SAMPLED:
            result = verify_sampled(transformed_TV, drawn_rows)
        else:
            result = verify_by_rejection(transformed_TV, drawn_rows, self._draft_probs(task))
        ranks = self.groups.all_ranks
        with nvtx.annotate("agree"):
            return agree_acceptance(
                ranks,
                digest=self._digest_of(task) if ranks.size > 1 else self._task_digest,
                token_id_FK1=result.token_ids_BK1,
                num_accepted_F=result.num_accepted_B,
                drawable_F=result.drawable_B,
            )

    def _draft_probs(self, task: VerifyTask) -> torch.Tensor | None:
        """Give what each draft was drawn from, f32 [F, K, V]."""
        if self.draft is None:
            return task.draft_probs_FKV
        if self._drafts is None or self._drafts.draft_probs_BKV is None:
            return None
        num_drafts = max(map(len, task.draft_ids), default=0)
        place_F = torch.from_numpy(task.proposal_F.clip(min=0)).to(self.device)  # without drafts nothing is read
        return self._drafts.draft_probs_BKV[place_F, :num_drafts]

    def _digest_of(self, task: VerifyTask) -> bytes:
        """Digest what this rank verifies: the task it was told, and the drafts it proposed itself."""
        arrays: list[npt.NDArray[np.generic]] = [np.frombuffer(self._task_digest, dtype=np.uint8)]
        if self._drafts is not None and (task.proposal_F >= 0).any():
            arrays.append(self._drafts.token_id_BK)
        return digest_of(arrays)

    def _with_noise(self, logits_TV: torch.Tensor) -> torch.Tensor:
        if not self._logits_noise:
            return logits_TV
        noise_TV = torch.randn(logits_TV.shape, generator=self._generator, device=logits_TV.device)
        return logits_TV + self._logits_noise * noise_TV

    def _transfer(self) -> RankTransfer:
        if self.transfer is None:
            raise AssertionError("the ranks were asked to move KV, but the engine was built without a transport")
        return self.transfer

    def _mtp_draft(self) -> MtpDraft:
        if self.draft is None:
            raise AssertionError("the ranks were asked to draft, but the engine was built without an MTP draft")
        return self.draft
