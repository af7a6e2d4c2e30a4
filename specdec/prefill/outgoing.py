"""Prompts that a prefill computes for decode groups: what has been computed, ordered, written, and told.

The thread that runs the rounds owns an `Outgoing`. After every chunk of a prompt the pages that are complete are
ordered from the ranks, so that they are written while the next chunk is computed; a page that the chunk ended inside
of goes with the next one, and the last order carries what is left. Source pages stay held until their writes ended.

Ids of transfers ascend within the epoch of a decode group. So the newest id seen says of any other id whether it is to
come or is over, and a `Start` that was delayed past its own `Abort` cannot bring a transfer back to life.
"""

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from specdec.core import EngineCore
from specdec.errors import RankError, TransferError
from specdec.handoff.facts import check_facts
from specdec.ranks.kv_sides import KvSide
from specdec.ranks.rank_transfer import Moves, Order, OrderReport, PathCounts, plan_order
from specdec.request import Request
from specdec.sampling.finish import FinishRule, OutputJudge
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.sampling_rows import RequestSampling
from specdec.slot_table import Int64Array
from specdec.transfer.messages import (
    Destination,
    Done,
    Drained,
    Failed,
    Message,
    PoolFacts,
    Progress,
    Start,
    Transfer,
    Unknown,
    clip,
    start_digest,
)
from specdec.transfer.plan_check import check_plan

_LOG = logging.getLogger("specdec.prefill")
_KEPT_EPOCHS = 1024


class _State(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class _Outgoing:
    """A transfer and how far it is.

    Attributes:
        start: What was asked for.
        send: Tells its decode group.
        token_ids: The prompt, i64.
        destination: The decode group.
        page_ids: Its pages.
        deadline: When it is given up.
        request: As the engine computes it.
        num_target: Tokens whose target KV was ordered or was there before.
        num_draft: Tokens whose draft KV was ordered or was there before.
        orders: Orders of which some rank has not reported, with the ranks left and the pages held.
        num_computed: Leading tokens of the prompt whose KV is computed.
        hidden: The last hidden state, once the prompt is complete.
        state: How it stands.
        is_drained: Whether the group was told that nothing can arrive any more.
    """

    start: Start
    send: Callable[[Message], None]
    token_ids: Int64Array
    destination: KvSide
    page_ids: Int64Array
    deadline: float
    request: Request
    num_target: int
    num_draft: int
    orders: dict[int, "_Ordered"] = field(default_factory=dict)
    num_computed: int = 0
    hidden: bytes | None = None
    state: _State = _State.RUNNING
    reason: str = ""
    is_retryable: bool = True
    is_drained: bool = False

    def forget_prompt(self) -> None:
        """Keep of a transfer whose end may never be known only what its group may ask about."""
        nowhere = msgspec.structs.replace(self.start.destination, page_ids=b"", addresses=[])
        self.start = msgspec.structs.replace(self.start, token_ids=b"", destination=nowhere)
        self.token_ids = self.page_ids = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class _Ordered:
    """An order that some rank may still be writing.

    Attributes:
        ranks_left: Ranks that may.
        held_pages: The pages it is read from.
        span: Tokens that it sends, begin and end.
        is_target: Whether it sends their target KV, else their draft KV.
        may_land: Whether a write of it has failed of which bytes may still arrive.
    """

    ranks_left: set[int]
    held_pages: list[int]
    span: tuple[int, int]
    is_target: bool
    may_land: bool = False


class _Failure(NamedTuple):
    reason: str
    is_retryable: bool


@dataclass(slots=True)
class OutgoingCounts:
    """What was sent.

    Attributes:
        num_started: Transfers begun.
        num_done: Complete ones.
        num_failed: Failed or aborted ones.
        num_stale: Messages of another epoch, or for a transfer that was over.
        num_prompt_tokens: Tokens of the complete ones.
        num_cached_tokens: Of these, tokens whose KV was here from earlier prompts.
        paths: By source rank, destination rank and kind of entry.
    """

    num_started: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_stale: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    paths: dict[tuple[int, int, str], PathCounts] = field(default_factory=dict)


class Outgoing:
    """All transfers of one prefill. Not thread-safe; a `PromptSink`.

    Args:
        core: Computes the prompts.
        side: The ranks of this prefill.
        facts: Of its pools.
        epoch: Of this process.
        vocab_size: Ids that prompts are made of.
        max_model_len: Most tokens of a prompt.
        request_ids: Gives ids to requests, unique in the engine.

    Attributes:
        counts: What was sent.
        is_draining: Whether groups are sent elsewhere with new prompts.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        side: KvSide,
        facts: PoolFacts,
        epoch: str,
        vocab_size: int,
        max_model_len: int,
        request_ids: Iterator[int],
    ) -> None:
        self.counts = OutgoingCounts()
        self.is_draining = False
        self._core = core
        self._side = side
        self._facts = facts
        self._epoch = epoch
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._page_size = side.target.page_size
        self._transfers: dict[tuple[str, int], _Outgoing] = {}
        self._by_request: dict[int, _Outgoing] = {}
        self._by_order: dict[int, _Outgoing] = {}
        self._newest_id: OrderedDict[str, int] = OrderedDict()
        self._to_order: list[Order] = []
        self._to_cancel: list[int] = []
        self._to_forget: list[bytes] = []
        self._failures: dict[int, _Failure] = {}  # by request id: seen inside of a round, acted on after it
        self._request_ids = request_ids
        self._order_ids = itertools.count()
        core.sink = self

    @property
    def is_sending(self) -> bool:
        """Whether writes are under way, or about to be."""
        return bool(self._to_order or self._to_cancel) or any(
            not transfer.orders[order_id].may_land for order_id, transfer in self._by_order.items()
        )

    @property
    def num_running(self) -> int:
        """Transfers that are neither complete nor failed; may be read by any thread."""
        return len(self._by_request)

    def start(self, message: Start, send: Callable[[Message], None]) -> None:
        """Begin a transfer; one that is known is answered with how it stands."""
        key = message.decode_epoch, message.transfer_id
        if message.prefill_epoch != self._epoch:
            self.counts.num_stale += 1
            send(self._reply(Failed, message, reason="it was meant for an earlier process here", is_retryable=True))
            send(self._reply(Drained, message))
            return
        if key in self._transfers:
            self.ask(message, send)
            return
        if message.transfer_id <= self._newest_id.get(message.decode_epoch, -1):
            self.counts.num_stale += 1
            send(self._reply(Drained, message))
            return
        self._note_id(message)
        if self.is_draining:
            send(self._reply(Failed, message, reason="it is being shut down", is_retryable=True))
            send(self._reply(Drained, message))
            return
        self.counts.num_started += 1
        try:
            transfer = self._open(message, send)
        except TransferError as error:
            self.counts.num_failed += 1
            _LOG.warning("prompt %d of decode group %s was refused: %s", *reversed(key), error)
            send(self._reply(Failed, message, reason=clip(str(error)), is_retryable=False))
            send(self._reply(Drained, message))
            return
        self._transfers[key] = transfer
        self._by_request[transfer.request.request_id] = transfer
        self._core.scheduler.waiting.add(transfer.request)

    def abort(self, message: Transfer, send: Callable[[Message], None]) -> None:
        """Write nothing more of a transfer; it is told when nothing can arrive any more."""
        transfer = self._transfers.get((message.decode_epoch, message.transfer_id))
        if message.prefill_epoch != self._epoch or transfer is None:
            self.counts.num_stale += 1
            self._note_id(message)
            send(self._reply(Unknown, message))
            return
        transfer.send = send
        if transfer.is_drained or transfer.state is _State.DONE:
            send(self._reply(Drained, message))
            return
        self._fail(transfer, "the decode group gave it up", is_retryable=False, tells=False)
        self._settle(transfer)

    def ask(self, message: Transfer, send: Callable[[Message], None]) -> None:
        """Say how a transfer stands."""
        transfer = self._transfers.get((message.decode_epoch, message.transfer_id))
        if message.prefill_epoch != self._epoch or transfer is None:
            self.counts.num_stale += 1
            is_over = message.transfer_id <= self._newest_id.get(message.decode_epoch, -1)
            send(self._reply(Drained if is_over else Unknown, message))
            return
        transfer.send = send
        self._tell(transfer)

    def drop(self, send: Callable[[Message], None]) -> None:
        """End all transfers of a line that is over."""
        for transfer in list(self._transfers.values()):
            if transfer.send == send:
                self._fail(transfer, "its line broke off", is_retryable=True, tells=False)
                self._settle(transfer)

    def fail_all(self, reason: str) -> None:
        """Fail what runs; another prefill may do it."""
        for transfer in list(self._transfers.values()):
            self._fail(transfer, reason, is_retryable=True)
            self._settle(transfer)

    def forget(self, addresses: list[bytes]) -> None:
        """Write to these addresses no more: their process is gone."""
        self._to_forget += addresses

    def announce(self, request: Request, *, num_computed: int, is_last: bool) -> Order | None:
        """Order the target KV that the pass that is about to run will complete."""
        transfer = self._by_request.get(request.request_id)
        if transfer is None or transfer.state is not _State.RUNNING:
            return None
        num_target = len(transfer.token_ids) if is_last else self._whole_pages(num_computed)
        if num_target <= transfer.num_target:
            return None
        order = self._order(transfer, target=(transfer.num_target, num_target), draft=None)
        if order is not None:
            transfer.num_target = num_target
        return order

    def take(self, request: Request, *, num_computed: int, hidden_H: torch.Tensor | None) -> None:
        """Order the draft KV that a round completed; the target KV went within its pass."""
        transfer = self._by_request.get(request.request_id)
        if transfer is None or transfer.state is not _State.RUNNING:
            return
        transfer.num_computed = num_computed
        num_draft = self._whole_pages(num_computed)
        if hidden_H is not None:
            transfer.hidden = hidden_H.float().cpu().numpy().tobytes()
            num_draft = len(transfer.token_ids) - 1
        if num_draft > transfer.num_draft:
            if transfer.destination.draft is not None:
                order = self._order(transfer, target=None, draft=(transfer.num_draft, num_draft))
                self._to_order += [] if order is None else [order]
            transfer.num_draft = num_draft
        if transfer.state is _State.RUNNING:
            self._tell(transfer)

    def step(self) -> None:
        """Have the ranks post what was ordered, and take in what they report."""
        self._take_failures()
        self._look_at_clock()
        if not (self._by_order or self._to_order or self._to_cancel or self._to_forget):
            return
        moves = Moves(tuple(self._to_order), tuple(self._to_cancel), tuple(self._to_forget))
        try:
            reports_by_rank = self._core.ranks.move(moves)
        except RankError as error:  # no rank has begun it, and all go on
            for order in moves.orders:
                self._fail(self._by_order[order.order_id], f"it could not be sent: {error}", is_retryable=True)
            return
        self._to_order, self._to_cancel, self._to_forget = [], [], []
        for rank, reports in enumerate(reports_by_rank):
            for report in reports:
                self._take_report(rank, report)

    def _take_failures(self) -> None:
        while self._failures:
            request_id, failure = self._failures.popitem()
            transfer = self._by_request.get(request_id)
            if transfer is not None:
                self._fail(transfer, failure.reason, is_retryable=failure.is_retryable)
                self._settle(transfer)

    def _look_at_clock(self) -> None:
        """Fail what is late, and forget what is over and nobody asks about any more."""
        now = time.monotonic()
        for key, transfer in list(self._transfers.items()):
            if now <= transfer.deadline:
                continue
            if transfer.state is _State.RUNNING:
                self._fail(transfer, "it was not complete in time", is_retryable=False)
                self._settle(transfer)
            for ordered in transfer.orders.values():
                if ordered.may_land:
                    # The group holds its pages until it is told that nothing can arrive, and it is not: what is read
                    # here from now on, should it be read at all, is taken for KV by nobody.
                    self._core.scheduler.allocator.release(ordered.held_pages)
                    ordered.held_pages = []
                    transfer.forget_prompt()
            if transfer.is_drained or transfer.state is _State.DONE:
                del self._transfers[key]

    def _open(self, message: Start, send: Callable[[Message], None]) -> _Outgoing:
        destination, page_size = message.destination, self._page_size
        check_facts(destination.facts, self._facts)
        side = destination_side(destination, self._side)
        token_ids = _integers(message.token_ids, np.int32, "token ids").astype(np.int64)
        page_ids = _integers(destination.page_ids, np.int64, "page ids").astype(np.int64)
        num_tokens = len(token_ids)
        if not 1 <= num_tokens <= self._max_model_len:
            raise TransferError(
                f"the prompt has {num_tokens} tokens, this prefill computes 1 to {self._max_model_len} "
                "(--max-model-len)"
            )
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            raise TransferError(f"token ids must lie in 0..{self._vocab_size - 1}")
        if message.num_cached % page_size or message.num_cached >= num_tokens:
            raise TransferError(
                f"num_cached must be whole pages of {page_size} tokens and less than the {num_tokens} of the prompt, "
                f"got {message.num_cached}"
            )
        if len(destination.addresses) != side.num_ranks:
            raise TransferError(f"{side.num_ranks} ranks have an address each, got {len(destination.addresses)}")
        if len(page_ids) * page_size < num_tokens:
            raise TransferError(f"{num_tokens} tokens do not fit into {len(page_ids)} pages of {page_size}")
        if len(np.unique(page_ids)) != len(page_ids) or page_ids.min() < 0:
            raise TransferError("page ids must be different from each other and >= 0")
        if page_ids.max() >= side.num_pages * side.dcp_size:
            raise TransferError(
                f"page ids must be below {side.num_pages * side.dcp_size}, the ids of {side.dcp_size} dcp ranks with "
                f"{side.num_pages} pages each, got {page_ids.max()}"
            )
        return _Outgoing(
            start=message,
            send=send,
            token_ids=token_ids,
            destination=side,
            page_ids=page_ids,
            deadline=time.monotonic() + message.deadline_s,
            request=self._request(token_ids, message),
            num_target=message.num_cached,
            num_draft=message.num_cached,
        )

    def _request(self, token_ids: Int64Array, message: Start) -> Request:
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
        rule = FinishRule.of(params, eos_token_ids=(), max_tokens=1)
        request_id = next(self._request_ids)
        return Request(
            request_id=request_id,
            prompt_ids=token_ids,
            params=params,
            choice_index=0,
            limit=len(token_ids) + 1,
            stop_ids=frozenset(),
            sampling=RequestSampling(
                params, choice=0, prompt_ids=token_ids.tolist(), stop_ids=(), vocab_size=self._vocab_size
            ),
            judge=OutputJudge(params, rule, None),
            on_update=lambda update: self._note_end(request_id, update.error),
            cache_salt=message.cache_salt,
            priority=message.priority,
            is_prefill_only=True,
        )

    def _note_end(self, request_id: int, error: BaseException | None) -> None:
        if error is not None:
            self._failures[request_id] = _Failure(f"it could not be computed: {error}", is_retryable=True)

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self._page_size * self._page_size

    def _order(
        self, transfer: _Outgoing, *, target: tuple[int, int] | None, draft: tuple[int, int] | None
    ) -> Order | None:
        """Plan what is to be sent and hold its pages; None where that cannot be, and the transfer fails."""
        slot, span = transfer.request.slot, target or draft
        assert slot is not None
        assert span is not None
        page_ids = self._core.slots.pages(slot)
        order = Order(
            order_id=next(self._order_ids),
            destination=transfer.destination,
            addresses=tuple(transfer.start.destination.addresses),
            source_page_ids=np.array(page_ids, dtype=np.int64),
            destination_page_ids=transfer.page_ids,
            target=target,
            draft=draft,
            digest="",
        )
        try:
            plan = plan_order(order, self._side)
            check_plan(plan)
        except Exception as error:  # whatever its destination is, the other requests of the round go on
            reason = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
            self._failures[transfer.request.request_id] = _Failure(reason, is_retryable=False)
            return None
        held = page_ids[span[0] // self._page_size : -(-span[1] // self._page_size)]
        self._core.scheduler.allocator.retain(held)
        transfer.orders[order.order_id] = _Ordered(
            set(range(self._side.num_ranks)), held, span, is_target=target is not None
        )
        self._by_order[order.order_id] = transfer
        return order._replace(digest=plan.digest)

    def _take_report(self, rank: int, report: OrderReport) -> None:
        for (destination_rank, kind), num_bytes in report.num_bytes.items():
            path = rank, destination_rank, kind
            counts = self.counts.paths.setdefault(path, PathCounts())
            counts.num_bytes += num_bytes
            counts.num_descriptors += report.num_descriptors[destination_rank, kind]
            queued_s, sending_s = report.times.get(destination_rank, (0.0, 0.0))
            counts.queued_s += queued_s
            counts.sending_s += sending_s
        transfer = self._by_order.get(report.order_id)
        if transfer is None:  # cancelled when all ranks had just reported
            return
        ordered = transfer.orders[report.order_id]
        if report.error is not None:
            self._fail(transfer, f"rank {rank}: {report.error}", is_retryable=True)
        if report.may_land:
            ordered.may_land = True
            return
        ordered.ranks_left.discard(rank)
        if not ordered.ranks_left:
            del transfer.orders[report.order_id], self._by_order[report.order_id]
            self._core.scheduler.allocator.release(ordered.held_pages)
            if report.was_dropped and ordered.is_target:  # on every rank: the pass that computes it is to come again
                transfer.num_target = min(transfer.num_target, ordered.span[0])
            self._settle(transfer)

    def _fail(self, transfer: _Outgoing, reason: str, *, is_retryable: bool, tells: bool = True) -> None:
        """End a transfer that runs; writes that were posted still end."""
        if transfer.state is not _State.RUNNING:
            return
        transfer.state, transfer.reason, transfer.is_retryable = _State.FAILED, reason, is_retryable
        self.counts.num_failed += 1
        level = logging.WARNING if tells else logging.INFO  # a group that left has its own reasons
        name = transfer.start.transfer_id, transfer.start.decode_epoch
        _LOG.log(level, "prompt %d of decode group %s failed: %s", *name, reason)
        self._core.cancel(transfer.request)
        self._by_request.pop(transfer.request.request_id, None)
        ordered_now = {order.order_id for order in self._to_order}
        self._to_order = [order for order in self._to_order if order.order_id not in transfer.orders]
        for order_id in list(transfer.orders):
            if order_id in ordered_now:  # no rank has heard of it
                self._core.scheduler.allocator.release(transfer.orders.pop(order_id).held_pages)
                del self._by_order[order_id]
            else:
                self._to_cancel.append(order_id)
        if tells:
            self._tell(transfer)

    def _settle(self, transfer: _Outgoing) -> None:
        """Note what the end of the last write means."""
        if transfer.orders:
            return
        if transfer.state is _State.RUNNING and transfer.hidden is not None:
            transfer.state = _State.DONE
            self.counts.num_done += 1
            self.counts.num_prompt_tokens += len(transfer.token_ids)
            self.counts.num_cached_tokens += max(0, transfer.request.num_cached_tokens)
            self._by_request.pop(transfer.request.request_id, None)
            self._tell(transfer)
        elif transfer.state is _State.FAILED and not transfer.is_drained:
            transfer.is_drained = True
            transfer.send(self._reply(Drained, transfer.start))

    def _tell(self, transfer: _Outgoing) -> None:
        start = transfer.start
        match transfer.state:
            case _State.RUNNING:
                message = self._reply(Progress, start, num_computed=transfer.num_computed)
            case _State.FAILED if transfer.is_drained:
                message = self._reply(Drained, start)
            case _State.FAILED:
                message = self._reply(Failed, start, reason=clip(transfer.reason), is_retryable=transfer.is_retryable)
            case _State.DONE:
                assert transfer.hidden is not None
                num_tokens = {
                    kind: transfer.num_target if kind.startswith("target.") else transfer.num_draft
                    for kind in transfer.destination.entries
                }
                message = self._reply(
                    Done,
                    start,
                    start_digest=start_digest(
                        start.token_ids,
                        num_cached=start.num_cached,
                        cache_salt=start.cache_salt,
                        destination=start.destination,
                    ),
                    num_tokens=num_tokens,
                    hidden=transfer.hidden,
                    num_cached=max(0, transfer.request.num_cached_tokens),
                )
        transfer.send(message)

    def _reply(self, kind: type[Any], message: Transfer, **fields: object) -> Message:
        """Answer about the transfer that `message` names."""
        reply: Message = kind(
            transfer_id=message.transfer_id,
            decode_epoch=message.decode_epoch,
            prefill_epoch=message.prefill_epoch,
            **fields,
        )
        return reply

    def _note_id(self, message: Transfer) -> None:
        epoch = message.decode_epoch
        self._newest_id[epoch] = max(message.transfer_id, self._newest_id.get(epoch, -1))
        self._newest_id.move_to_end(epoch)
        if len(self._newest_id) > _KEPT_EPOCHS:
            self._newest_id.popitem(last=False)


def destination_side(destination: Destination, here: KvSide) -> KvSide:
    """Give the ranks of a decode group, whose layouts are known to be those of this side.

    Raises:
        TransferError: Its sizes do not fit each other.
    """
    if destination.tp_size % destination.dcp_size:
        raise TransferError(
            f"dcp_size must divide tp_size, got dcp_size {destination.dcp_size} and tp_size {destination.tp_size}"
        )
    return KvSide(
        target=here.target,
        draft=here.draft if destination.facts.draft is not None else None,
        num_pages=destination.num_pages,
        tp_size=destination.tp_size,
        dcp_size=destination.dcp_size,
    )


def _integers(data: bytes, dtype: type, what: str) -> "np.ndarray[tuple[int], np.dtype[np.integer]]":
    if len(data) % np.dtype(dtype).itemsize:
        raise TransferError(f"{what} of {len(data)} bytes are no whole number of {np.dtype(dtype).name} values")
    return np.frombuffer(data, dtype=dtype)
