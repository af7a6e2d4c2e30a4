"""What a prefill says of a transfer is true of its ranks, and its pages come back, whatever happens in whatever order.

The ranks are a script; allocator, plans and messages are the real ones. Tags such as B48 are explained in
`tests/INVARIANTS.md`.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.dcp.allocator import PageAllocator
from specdec.dcp.geometry import PoolRole
from specdec.dcp.layout import KvFormat, PoolLayout
from specdec.errors import RankError, RoundError
from specdec.prefill.outgoing import Outgoing
from specdec.ranks.kv_sides import KvSide
from specdec.ranks.rank_transfer import Moves, Order, OrderReport
from specdec.request import Request, RequestUpdate
from specdec.transfer.messages import (
    Abort,
    Ask,
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
    start_digest,
)
from specdec.waiting_queue import WaitingQueue

NUM_RANKS, NUM_PAGES, PAGE_SIZE = 2, 20, 4
EPOCH, GROUP = "p" * 32, "d" * 32
FACTS = PoolFacts(
    target="layout", draft="layout", page_size=PAGE_SIZE, kv_format="float32", model="weights", memory="cpu"
)


def layout(role: PoolRole, num_layers: int) -> PoolLayout:
    return PoolLayout(
        role=role,
        page_size=PAGE_SIZE,
        kv_format=KvFormat.FLOAT32,
        kv_lora_rank=4,
        rope_head_dim=2,
        index_head_dim=4,
        num_latent_layers=num_layers,
        index_layers=(0,),
    )


class ScriptedRanks:
    """Ranks that report what a test says.

    Attributes:
        open: By order and rank what may still be written: "writing", or "landing" after a failure.
        transfer_of: By order the address that it goes to.
    """

    def __init__(self) -> None:
        self.open: dict[tuple[int, int], str] = {}
        self.transfer_of: dict[int, bytes] = {}
        self.cancelled: list[int] = []
        self.refusal: RankError | None = None
        self._reports: list[list[OrderReport]] = [[] for _ in range(NUM_RANKS)]

    def take(self, orders: Iterable[Order]) -> None:
        for order in orders:
            self.transfer_of[order.order_id] = order.addresses[0]
            self.open.update({(order.order_id, rank): "writing" for rank in range(NUM_RANKS)})

    def move(self, moves: Moves) -> list[list[OrderReport]]:
        if self.refusal is not None:
            raise self.refusal
        self.take(moves.orders)
        self.cancelled += moves.cancelled
        reports, self._reports = self._reports, [[] for _ in range(NUM_RANKS)]
        return reports

    def report(
        self, order_id: int, rank: int, *, error: str | None = None, may_land: bool = False, was_dropped: bool = False
    ) -> None:
        if may_land:
            self.open[order_id, rank] = "landing"
        else:
            del self.open[order_id, rank]
        self._reports[rank].append(
            OrderReport(
                order_id=order_id,
                error=error,
                may_land=may_land,
                was_dropped=was_dropped,
                num_bytes={(0, "target.latent"): 8},
                num_descriptors={(0, "target.latent"): 1},
                times={0: (0.25, 0.5)},
            )
        )

    def unknown(self, order_id: int, rank: int) -> None:
        """Say that no such order is open here."""
        self.open.pop((order_id, rank), None)
        self._reports[rank].append(OrderReport.of_unknown(order_id))

    def finish(self) -> None:
        """Let everything that is on its way arrive."""
        for order_id, rank in list(self.open):
            self.report(order_id, rank)


class Rig:
    """Transfers over scripted ranks, with the part of a core that they touch."""

    def __init__(self) -> None:
        self.allocator = PageAllocator(NUM_PAGES, NUM_RANKS)
        self.ranks = ScriptedRanks()
        self.waiting = WaitingQueue()
        self.running: dict[int, Request] = {}
        self.pages_of: dict[int, list[int]] = {}
        self.sent: list[Message] = []
        self.scheduler, self.slots, self.sink = self, self, None
        self._slots = itertools.count()
        core: Any = self
        self.outgoing = Outgoing(
            core,
            side=KvSide(
                target=layout(PoolRole.TARGET, 2),
                draft=layout(PoolRole.DRAFT, 1),
                num_pages=NUM_PAGES,
                tp_size=NUM_RANKS,
                dcp_size=NUM_RANKS,
            ),
            facts=FACTS,
            epoch=EPOCH,
            vocab_size=100,
            max_model_len=64,
            request_ids=itertools.count(),
        )

    # What the transfers ask of a core.

    def pages(self, slot: int) -> list[int]:
        return self.pages_of[slot]

    def cancel(self, request: Request) -> None:
        if not request.finished:
            self._leave(request)
            request.on_update(RequestUpdate(finish_reason="cancelled"))
            request.finished = True

    def _leave(self, request: Request) -> None:
        self.waiting.remove(request)
        if request.slot is not None:
            del self.running[request.slot]
            self.allocator.release(self.pages_of.pop(request.slot))
            request.slot = None

    # What a test does.

    def start(self, transfer_id: int = 0, **asked: Any) -> Start:
        message = start_message(transfer_id, **asked)
        self.outgoing.start(message, self.sent.append)
        return message

    def admit(self) -> bool:
        """Give the oldest prompt a slot."""
        if not self.waiting or self.allocator.num_free < 16:
            return False
        request = self.waiting.first
        self.waiting.remove(request)
        request.slot = next(self._slots)
        self.running[request.slot] = request
        self.pages_of[request.slot] = self.allocator.allocate(-(-len(request.prompt_ids) // PAGE_SIZE))
        return True

    def round(self, request: Request, num_computed: int, *, fails: bool = False) -> None:
        """Compute a prompt up to a token, as the core does."""
        is_last = num_computed == len(request.prompt_ids)
        order = self.outgoing.announce(request, num_computed=num_computed, is_last=is_last)
        self.ranks.take([order] if order is not None else [])
        if fails:
            self._leave(request)
            request.on_update(RequestUpdate(finish_reason="error", error=RoundError("the round broke")))
            request.finished = True
            return
        hidden_H = torch.arange(3, dtype=torch.float32) if is_last else None
        self.outgoing.take(request, num_computed=num_computed, hidden_H=hidden_H)
        if is_last and not request.finished:
            self._leave(request)
            request.finished = True

    def compute(self, *chunks: int) -> None:
        """Compute the oldest prompt in chunks that end at these tokens."""
        assert self.admit()
        request = next(reversed(self.running.values()))
        for num_computed in chunks:
            self.round(request, num_computed)
            self.outgoing.step()

    def settle(self) -> None:
        """Let the ranks report, and take it in."""
        self.outgoing.step()
        self.outgoing.step()

    def take_sent(self) -> list[Message]:
        sent, self.sent[:] = list(self.sent), []
        return [message for message in sent if not isinstance(message, Progress)]

    @property
    def is_at_start(self) -> bool:
        return self.allocator.num_free == self.allocator.num_pages


def start_message(transfer_id: int, *, num_tokens: int = 10, deadline_s: float = 600.0, priority: int = 0) -> Start:
    num_pages = -(-num_tokens // PAGE_SIZE)
    return Start(
        **names(transfer_id),
        token_ids=np.arange(num_tokens, dtype=np.int32).tobytes(),
        num_cached=0,
        cache_salt=b"",
        priority=priority,
        destination=Destination(
            facts=FACTS,
            tp_size=1,
            dcp_size=1,
            num_pages=30,
            page_ids=np.arange(num_pages).tobytes(),
            addresses=[str(transfer_id).encode()],
        ),
        deadline_s=deadline_s,
    )


def names(transfer_id: int) -> dict[str, Any]:
    return {"transfer_id": transfer_id, "decode_epoch": GROUP, "prefill_epoch": EPOCH}


def kinds(messages: Iterable[Message]) -> list[type]:
    return [type(message) for message in messages]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_prompt_is_done_once_every_rank_has_written_every_chunk(rig: Rig) -> None:
    told = rig.start()
    rig.compute(4, 9, 10)
    assert rig.take_sent() == []
    rig.ranks.finish()
    rig.settle()
    [done] = rig.take_sent()
    assert isinstance(done, Done)
    digest = start_digest(told.token_ids, num_cached=0, cache_salt=b"", destination=told.destination)
    assert (done.start_digest, done.hidden) == (digest, np.arange(3, dtype=np.float32).tobytes())
    assert done.num_tokens == {
        "target.latent": 10,
        "target.index_keys": 10,
        "draft.latent": 9,
        "draft.index_keys": 9,
    }
    assert rig.is_at_start
    assert not rig.outgoing.is_sending


def test_prompts_are_computed_in_the_turns_that_their_groups_give_them(rig: Rig) -> None:
    for transfer_id, priority in enumerate((0, 1, -1)):
        rig.start(transfer_id, priority=priority)
    assert [request.priority for request in rig.waiting] == [-1, 0, 1]


def test_a_prefill_that_drains_sends_new_prompts_elsewhere_and_goes_on_with_the_others(rig: Rig) -> None:
    rig.start(0)
    rig.compute(10)
    rig.outgoing.is_draining = True
    rig.start(1)
    failed, drained = rig.take_sent()
    assert isinstance(failed, Failed)
    assert (failed.transfer_id, failed.is_retryable) == (1, True)
    assert (drained.transfer_id, type(drained)) == (1, Drained)
    assert (rig.outgoing.num_running, rig.outgoing.counts.num_started) == (1, 1)
    rig.ranks.finish()
    rig.settle()
    assert kinds(rig.take_sent()) == [Done]
    assert rig.outgoing.num_running == 0


def test_an_abort_is_answered_when_the_last_rank_has_let_go_and_not_before(rig: Rig) -> None:
    """B48, A50: the answer is tied to the writes, not to the transfer."""
    rig.start()
    rig.compute(4, 8)
    rig.outgoing.abort(Abort(**names(0)), rig.sent.append)
    rig.outgoing.abort(Abort(**names(0)), rig.sent.append)
    rig.settle()
    open_orders = {order_id for order_id, _ in rig.ranks.open}
    assert open_orders <= set(rig.ranks.cancelled)
    while rig.ranks.open:
        assert rig.take_sent() == []
        assert not rig.is_at_start
        order_id, rank = next(iter(rig.ranks.open))
        rig.ranks.report(order_id, rank, error="cancelled")
        rig.settle()
    assert kinds(rig.take_sent()) == [Drained]
    assert rig.is_at_start
    rig.outgoing.abort(Abort(**names(0)), rig.sent.append)
    assert kinds(rig.take_sent()) == [Drained]


def test_what_may_still_land_keeps_the_answer_and_the_pages_back(rig: Rig) -> None:
    """B47, A50: on one of two ranks is enough."""
    rig.start()
    rig.compute(8)
    landing, *others = list(rig.ranks.open)
    rig.ranks.report(*landing, error="timed out", may_land=True)
    for other in others:
        rig.ranks.report(*other)
    rig.settle()
    [failed] = rig.take_sent()
    assert isinstance(failed, Failed)
    assert "timed out" in failed.reason
    assert not rig.is_at_start
    assert not rig.outgoing.is_sending  # nothing that would be waited for without a pause
    rig.ranks.report(*landing, error="timed out")
    rig.settle()
    assert kinds(rig.take_sent()) == [Drained]
    assert rig.is_at_start


def test_pages_that_a_write_never_lets_go_of_come_back_after_the_deadline_and_the_group_is_not_told(rig: Rig) -> None:
    """B49: the destination stays held there, so that what is read here late is taken for KV by nobody."""
    rig.start(deadline_s=0.2)
    rig.compute(8)
    for order_id, rank in list(rig.ranks.open):
        rig.ranks.report(order_id, rank, error="timed out", may_land=True)
    rig.settle()
    assert kinds(rig.take_sent()) == [Failed]
    while not rig.is_at_start:
        rig.outgoing.step()
    rig.outgoing.abort(Abort(**names(0)), rig.sent.append)
    rig.settle()
    assert rig.take_sent() == []


def test_a_round_that_fails_is_told_and_settled(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A51: what the ranks had prepared for it is dropped by each of them; both sides can read why."""
    rig.start()
    assert rig.admit()
    [request] = rig.running.values()
    rig.round(request, 4, fails=True)
    rig.settle()
    [failed] = rig.take_sent()
    assert isinstance(failed, Failed)
    assert (failed.is_retryable, "the round broke" in failed.reason) == (True, True)
    [logged] = caplog.records
    assert (logged.name, logged.levelname) == ("specdec.prefill", "WARNING")
    assert logged.getMessage() == f"prompt 0 of decode group {failed.decode_epoch} failed: {failed.reason}"
    for order_id, rank in list(rig.ranks.open):
        rig.ranks.report(order_id, rank, was_dropped=True)
    rig.settle()
    assert kinds(rig.take_sent()) == [Drained]
    assert rig.is_at_start


def test_what_no_rank_has_begun_is_neither_lost_nor_held(rig: Rig) -> None:
    """A move that fails on every rank before it begins fails its orders alone; what was to be cancelled still is."""
    rig.start()
    rig.compute(4)
    first = {order_id for order_id, _ in rig.ranks.open}
    rig.outgoing.abort(Abort(**names(0)), rig.sent.append)
    rig.start(1)
    assert rig.admit()
    rig.ranks.refusal = RankError("rank 1 could not")
    rig.round(next(reversed(rig.running.values())), 4)  # the draft's order is for the ranks to come
    rig.outgoing.step()
    [failed] = rig.take_sent()
    assert isinstance(failed, Failed)
    assert (failed.transfer_id, failed.is_retryable, "rank 1 could not" in failed.reason) == (1, True, True)
    rig.ranks.refusal = None
    rig.settle()
    second = {order_id for order_id, _ in rig.ranks.open} - first
    assert len(second) == 1  # its target's order, which went with the pass
    assert set(rig.ranks.cancelled) == first | second
    rig.ranks.finish()
    rig.settle()
    assert kinds(rig.take_sent()) == [Drained, Drained]
    assert rig.is_at_start


def test_an_order_that_a_rank_never_heard_of_does_not_hold_its_pages(rig: Rig) -> None:
    """A rank that is told to cancel what it does not know says so, also where it has reported that order before."""
    rig.start()
    rig.compute(4)
    orders = sorted({order_id for order_id, _ in rig.ranks.open})
    for order_id in orders:
        rig.ranks.report(order_id, 0)
    rig.settle()
    rig.outgoing.abort(Abort(**names(0)), rig.sent.append)
    for order_id in orders:
        rig.ranks.unknown(order_id, 0)
    rig.settle()
    assert rig.take_sent() == []
    assert not rig.is_at_start
    for order_id in orders:
        rig.ranks.unknown(order_id, 1)
    rig.settle()
    assert kinds(rig.take_sent()) == [Drained]
    assert rig.is_at_start
    rig.ranks.unknown(orders[0], 1)  # once more, when all is over
    rig.settle()
    assert rig.is_at_start


def test_what_is_late_fails(rig: Rig) -> None:
    rig.start(deadline_s=0.001)
    while not rig.sent:
        rig.outgoing.step()
    assert kinds(rig.take_sent()) == [Failed, Drained]
    assert not rig.waiting


def test_a_start_that_comes_again_says_how_it_stands(rig: Rig) -> None:
    """A53: duplicates and questions change nothing."""
    told = rig.start()
    rig.outgoing.start(told, rig.sent.append)
    rig.outgoing.ask(Ask(**names(0)), rig.sent.append)
    assert kinds(rig.sent) == [Progress, Progress]
    assert len(rig.waiting) == 1
    rig.compute(10)
    rig.ranks.finish()
    rig.settle()
    rig.take_sent()
    rig.outgoing.start(told, rig.sent.append)
    rig.outgoing.ask(Ask(**names(0)), rig.sent.append)
    assert kinds(rig.take_sent()) == [Done, Done]
    assert rig.outgoing.counts.num_started == 1


def test_an_id_below_the_newest_is_over_and_one_above_is_unknown(rig: Rig) -> None:
    """B52, A53: a start that its own abort has overtaken stays dead."""
    rig.outgoing.abort(Abort(**names(5)), rig.sent.append)
    rig.outgoing.start(start_message(5), rig.sent.append)
    rig.outgoing.start(start_message(4), rig.sent.append)
    rig.outgoing.ask(Ask(**names(3)), rig.sent.append)
    rig.outgoing.ask(Ask(**names(6)), rig.sent.append)
    assert kinds(rig.take_sent()) == [Unknown, Drained, Drained, Drained, Unknown]
    assert not rig.waiting
    rig.start(6)
    assert len(rig.waiting) == 1


def test_a_line_that_breaks_takes_only_its_own_transfers_with_it(rig: Rig) -> None:
    other: list[Message] = []
    rig.start(0)
    rig.outgoing.start(start_message(1), other.append)
    rig.outgoing.drop(rig.sent.append)
    assert len(rig.waiting) == 1
    rig.outgoing.ask(Ask(**names(0)), other.append)  # it calls again
    assert kinds(other) == [Drained]


def test_what_is_shut_down_fails_everything_and_lets_others_do_it(rig: Rig) -> None:
    rig.start(0)
    rig.compute(4)
    rig.start(1)
    rig.outgoing.fail_all("it is being shut down")
    assert rig.outgoing.is_sending
    rig.ranks.finish()
    rig.settle()
    told = rig.take_sent()
    assert sorted(kinds(told), key=str) == [Drained, Drained, Failed, Failed]
    assert all(message.is_retryable for message in told if isinstance(message, Failed))
    assert rig.is_at_start
    assert not rig.outgoing.is_sending


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["start", "admit", "round", "round", "break", "ok", "ok", "fail", "land", "abort", "ask", "step"]
        ),
        st.integers(0, 50),
    ),
    max_size=80,
)


@given(STEPS)
def test_any_script_keeps_the_answers_true_and_brings_the_pool_back(steps: list[tuple[str, int]]) -> None:
    """B47, B48, B49: no transfer is called drained while a rank may write; none is done without all of its orders."""
    rig = Rig()
    num_started = 0
    failed_orders: set[int] = set()
    num_computed_of: dict[int, int] = {}
    told: list[Any] = []

    def listen() -> None:
        for message in rig.take_sent():
            told.append(message)
            assert isinstance(message, Transfer)
            address = str(message.transfer_id).encode()
            orders = {order_id for order_id, to in rig.ranks.transfer_of.items() if to == address}
            if isinstance(message, Drained | Done | Unknown):
                assert not {order_id for order_id, _ in rig.ranks.open} & orders
            if isinstance(message, Done):
                assert not failed_orders & orders

    for name, number in steps:
        chosen = sorted(rig.ranks.open)[number % len(rig.ranks.open)] if rig.ranks.open else None
        running = list(rig.running.values())
        request = running[number % len(running)] if running else None
        match name:
            case "start":
                rig.start(num_started, num_tokens=1 + number % 30)
                num_started += 1
            case "admit":
                rig.admit()
            case "round" | "break" if request is not None:
                num_computed = num_computed_of.get(request.request_id, 0) + 1 + number % 12
                num_computed = num_computed_of[request.request_id] = min(num_computed, len(request.prompt_ids))
                rig.round(request, num_computed, fails=name == "break")
            case "ok" if chosen is not None:
                was_landing = rig.ranks.open[chosen] == "landing"
                rig.ranks.report(*chosen, error="late" if was_landing else None)
            case "fail" | "land" if chosen is not None and rig.ranks.open[chosen] == "writing":
                failed_orders.add(chosen[0])
                rig.ranks.report(*chosen, error="it broke", may_land=name == "land")
            case "abort" if num_started:
                rig.outgoing.abort(Abort(**names(number % num_started)), rig.sent.append)
            case "ask" if num_started:
                rig.outgoing.ask(Ask(**names(number % num_started)), rig.sent.append)
            case "step":
                rig.outgoing.step()
        listen()
    rig.outgoing.fail_all("the end")
    for _ in range(3):
        rig.outgoing.step()
        rig.ranks.finish()
    rig.settle()
    listen()
    assert rig.is_at_start
    over = {message.transfer_id for message in told if isinstance(message, Drained | Done)}
    assert over == set(range(num_started))
