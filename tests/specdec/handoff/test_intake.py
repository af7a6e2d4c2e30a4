"""The pages of a prompt that is computed elsewhere belong to its writer until that has let go, once.

The links are scripts; the allocator is the real one. Tags such as B47 are explained in `tests/INVARIANTS.md`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.dcp.allocator import PageAllocator
from specdec.errors import ConfigError
from specdec.handoff import intake as intake_module
from specdec.handoff.intake import Intake, LostPrompt, ReceivedPrompt
from specdec.handoff.prefill_link import Arrived, Ended, Freed, LinkEvent, LinkState
from specdec.transfer.messages import Destination, Done, start_digest
from tests.support.scripted_prefill import FACTS, WAIT_S, ScriptedPrefill

HIDDEN_SIZE = 3
TIMEOUT_S = 5.0
NUM_PAGES = 12
PAGE_SIZE = FACTS.page_size
PLACE = Destination(facts=FACTS, tp_size=1, dcp_size=1, num_pages=NUM_PAGES, page_ids=b"", addresses=[b"here"])
TARGET_ONLY = {"target.latent": 6, "target.index_keys": 6}


class ScriptedLink:
    """A link that remembers what it was given and says what the test says."""

    made: list["ScriptedLink"]

    def __init__(self, address: str, *, epoch: str, on_event: Callable[[LinkEvent], None], **_settings: object) -> None:
        self.address, self.epoch = address, epoch
        self.state = LinkState.READY
        self.why = ""
        self.num_tokens = 0
        self.prefill_epoch = "p" * 32
        self.say = on_event
        self.given: dict[int, dict[str, Any]] = {}
        self.aborted: list[int] = []
        self.is_closed = False
        ScriptedLink.made.append(self)

    def await_first_answer(self, timeout_s: float) -> None:
        pass

    def start(self, transfer_id: int, **told: Any) -> None:
        self.given[transfer_id] = told

    def abort(self, transfer_id: int) -> None:
        self.aborted.append(transfer_id)

    def close(self) -> None:
        self.is_closed = True


class Clock:
    """The intake's clock, which a test moves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(intake_module, "time", self)

    def monotonic(self) -> float:
        return self.now


class Asker:
    """Stands for a request."""

    def __init__(self, request_id: int, cache_salt: bytes = b"") -> None:
        self.request_id = request_id
        self.cache_salt = cache_salt
        self.priority = 3


class Rig:
    """An intake over scripted links."""

    def __init__(self, patch: pytest.MonkeyPatch, *, num_links: int = 1) -> None:
        ScriptedLink.made = []
        self.waits: list[int] = []  # for the device, by what had been started
        patch.setattr(intake_module, "PrefillLink", ScriptedLink)
        self.allocator = PageAllocator(NUM_PAGES, 1)
        self.intake = Intake(
            [f"host:{port}" for port in range(num_links)],
            allocator=self.allocator,
            facts=FACTS,
            destination=PLACE,
            transport="local",
            hidden_size=HIDDEN_SIZE,
            timeout_s=TIMEOUT_S,
            peer_timeout_s=5.0,
            await_device=lambda: self.waits.append(len(self.link.given)),
        )
        self.links = list(ScriptedLink.made)
        self.requests: list[Any] = []

    @property
    def link(self) -> ScriptedLink:
        return self.links[0]

    def start(
        self, num_tokens: int = 6, *, num_cached: int = 0, request: Any = None, first_id: int = 0, salt: bytes = b""
    ) -> tuple[Any, list[int]]:
        """Have a prompt computed as the scheduler does; gives the request and its pages."""
        if request is None:
            request = Asker(len(self.requests), salt)
            self.requests.append(request)
        pages = self.allocator.allocate(-(-num_tokens // PAGE_SIZE))
        token_ids = np.arange(first_id, first_id + num_tokens, dtype=np.int64)
        self.intake.start(request, token_ids=token_ids, page_ids=pages, num_cached=num_cached)
        return request, pages

    def leave(self, request: Any, pages: Sequence[int]) -> None:
        """End a request that waits, as the scheduler does."""
        self.intake.abandon(request)
        self.allocator.release(pages)

    def done(self, transfer_id: int = 0, *, link: int = 0, **changed: Any) -> Done:
        told = self.links[link].given[transfer_id]
        num_tokens = len(told["token_ids"]) // 4
        digest = start_digest(
            told["token_ids"],
            num_cached=told["num_cached"],
            cache_salt=told["cache_salt"],
            destination=told["destination"],
        )
        fields: dict[str, Any] = {
            "start_digest": digest,
            "num_tokens": dict.fromkeys(TARGET_ONLY, num_tokens),
            "hidden": np.arange(HIDDEN_SIZE, dtype=np.float32).tobytes(),
            "num_cached": 0,
        }
        names = {"transfer_id": transfer_id, "decode_epoch": "d" * 32, "prefill_epoch": "p" * 32}
        return Done(**{**names, **fields, **changed})

    def arrive(self, transfer_id: int = 0, **changed: Any) -> None:
        self.link.say(Arrived(transfer_id, self.done(transfer_id, **changed)))

    def serve(self, num_tokens: int, *, num_found: int = 0, epoch: str = "p" * 32, **asked: Any) -> int:
        """Have a prompt computed to the end; gives the number of the prefill that did it."""
        _, pages = self.start(num_tokens, **asked)
        transfer_id, place = next((max(link.given), i) for i, link in enumerate(self.links) if self._is_newest(link))
        done = self.done(transfer_id, link=place, num_cached=num_found, prefill_epoch=epoch)
        self.links[place].say(Arrived(transfer_id, done))
        assert isinstance(self.only(), ReceivedPrompt)
        self.allocator.release(pages)
        return place

    def _is_newest(self, link: ScriptedLink) -> bool:
        return max(link.given, default=-1) == self.intake.counts.num_started - 1

    def only(self) -> ReceivedPrompt | LostPrompt:
        [news] = self.intake.take()
        return news

    @property
    def is_at_start(self) -> bool:
        counts = self.intake.counts
        return self.allocator.num_free == NUM_PAGES and counts.num_held_pages == 0 and not self.intake.is_waiting


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


@pytest.fixture
def rig_of_two(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch, num_links=2)


def test_an_arrived_prompt_is_given_with_its_hidden_state(rig: Rig) -> None:
    request, pages = rig.start()
    assert rig.intake.is_waiting
    assert rig.intake.take() == []
    rig.arrive()
    news = rig.only()
    assert isinstance(news, ReceivedPrompt)
    assert news.request is request
    assert news.hidden_H.tolist() == [0.0, 1.0, 2.0]
    rig.allocator.release(pages)
    assert rig.is_at_start


def test_the_device_has_ended_what_it_writes_before_a_prefill_is_told_of_pages(rig: Rig) -> None:
    rig.start()
    rig.start()
    assert rig.waits == [0, 1]


def test_pages_of_a_request_that_left_are_nobodys_until_freed(rig: Rig) -> None:
    """B47, A49: the writer has not let go."""
    request, pages = rig.start()
    rig.leave(request, pages)
    assert rig.link.aborted == [0]
    assert (rig.intake.counts.num_held_pages, rig.intake.holds_pages) == (2, True)
    assert not set(rig.allocator.allocate(NUM_PAGES - 2)) & set(pages)
    assert rig.allocator.num_free == 0
    rig.link.say(Freed(0))
    assert rig.intake.take() == []
    assert sorted(rig.allocator.allocate(2)) == sorted(pages)
    assert not rig.intake.holds_pages


def test_pages_of_a_prompt_that_was_lost_are_nobodys_until_freed(rig: Rig) -> None:
    """B49: they come back once the writer is known to be gone."""
    request, pages = rig.start()
    rig.link.say(Ended(0, "it broke", is_retryable=True))
    news = rig.only()
    assert isinstance(news, LostPrompt)
    assert (news.request, news.is_retryable, str(news.error)) == (request, False, "it broke")
    rig.leave(request, pages)
    assert rig.link.aborted == []
    assert rig.allocator.num_free == NUM_PAGES - 2
    rig.link.say(Freed(0))
    rig.intake.take()
    assert rig.is_at_start


def test_pages_are_freed_once_whatever_is_said_again(rig: Rig) -> None:
    request, pages = rig.start()
    rig.leave(request, pages)
    for event in (Freed(0), Freed(0), Ended(0, "again", is_retryable=True), Arrived(0, rig.done()), Freed(5)):
        rig.link.say(event)
    assert rig.intake.take() == []
    assert rig.is_at_start


def test_cached_pages_are_not_the_writers(rig: Rig) -> None:
    """What the group holds already is written by nobody, and shared with others meanwhile."""
    request, pages = rig.start(12, num_cached=8)
    assert (rig.link.given[0]["num_cached"], rig.link.given[0]["priority"]) == (8, 3)
    assert rig.link.given[0]["destination"].page_ids == np.array(pages).tobytes()
    rig.leave(request, pages)
    assert rig.allocator.num_free == NUM_PAGES - 1
    assert rig.allocator.num_holders(pages[2]) == 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"start_digest": bytes(16)}, "another prompt, or to other pages"),
        ({"num_tokens": {**TARGET_ONLY, "target.latent": 5}}, "wanted were"),
        ({"num_tokens": {"target.latent": 6}}, "wanted were"),
        ({"num_tokens": {**TARGET_ONLY, "draft.latent": 5, "draft.index_keys": 5}}, "wanted were"),
        ({"hidden": bytes(8)}, "hidden state of 8 bytes"),
        ({"hidden": np.array([0, math.nan, 0], dtype=np.float32).tobytes()}, "not finite"),
        ({"hidden": np.array([0, math.inf, 0], dtype=np.float32).tobytes()}, "not finite"),
    ],
)
def test_a_delivery_that_is_not_what_was_wanted_fails_its_request(
    rig: Rig, changed: dict[str, Any], reason: str
) -> None:
    """B52: stale, partial or broken deliveries are failures, never text."""
    request, pages = rig.start()
    rig.arrive(**changed)
    news = rig.only()
    assert isinstance(news, LostPrompt)
    assert reason in str(news.error)
    assert not news.is_retryable
    rig.leave(request, pages)
    assert rig.is_at_start


def test_a_group_that_drafts_wants_draft_kv_but_for_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = msgspec.structs.replace(FACTS, draft="layout")
    monkeypatch.setattr(f"{__name__}.PLACE", msgspec.structs.replace(PLACE, facts=facts))
    rig = Rig(monkeypatch)
    for place, (draft, is_right) in enumerate(((5, True), (6, False), (4, False))):
        rig.start()
        rig.arrive(place, num_tokens={**TARGET_ONLY, "draft.latent": draft, "draft.index_keys": draft})
        assert isinstance(rig.only(), ReceivedPrompt) == is_right


def test_a_lost_prompt_goes_to_a_prefill_that_was_not_asked_and_then_ends_with_all_reasons(rig_of_two: Rig) -> None:
    """A51: retried where nothing was emitted; in the end every prefill's reason is told."""
    rig = rig_of_two
    request, pages = rig.start()
    rig.links[0].say(Ended(0, "prefill host:0: first reason", is_retryable=True))
    news = rig.only()
    assert isinstance(news, LostPrompt)
    assert news.is_retryable
    rig.leave(request, pages)
    _, pages = rig.start(request=request)
    assert list(rig.links[1].given) == [1]
    rig.links[1].say(Ended(1, "prefill host:1: second reason", is_retryable=True))
    news = rig.only()
    assert isinstance(news, LostPrompt)
    assert not news.is_retryable
    rig.leave(request, pages)
    rig.start(request=request)
    news = rig.only()
    assert isinstance(news, LostPrompt)
    assert "first reason; " in str(news.error)
    assert "second reason" in str(news.error)


def test_where_no_prefill_is_ready_the_request_fails_at_once_and_holds_nothing(rig_of_two: Rig) -> None:
    rig = rig_of_two
    for link, state in zip(rig.links, (LinkState.DOWN, LinkState.SILENT), strict=True):
        link.state, link.why = state, f"it is {state}"
    request, pages = rig.start()
    assert rig.intake.is_waiting
    news = rig.only()
    assert isinstance(news, LostPrompt)
    assert "host:0 is down: it is down; prefill host:1 is silent: it is silent" in str(news.error)
    rig.leave(request, pages)
    assert rig.is_at_start


def test_a_request_that_left_before_its_loss_was_taken_is_not_told(rig: Rig) -> None:
    rig.link.state = LinkState.DOWN
    request, pages = rig.start()
    rig.leave(request, pages)
    assert rig.intake.take() == []
    assert rig.is_at_start


def test_one_deadline_holds_for_all_that_try_it(rig_of_two: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that goes from prefill to prefill does not get new time with each."""
    rig = rig_of_two
    clock = Clock(monkeypatch)
    request, pages = rig.start()
    assert rig.links[0].given[0]["deadline_s"] == TIMEOUT_S
    rig.links[0].say(Ended(0, "broken", is_retryable=True))
    news = rig.only()
    assert isinstance(news, LostPrompt)
    assert news.is_retryable
    rig.leave(request, pages)
    clock.now += 0.75 * TIMEOUT_S
    rig.start(request=request)
    assert rig.links[1].given[1]["deadline_s"] == pytest.approx(0.25 * TIMEOUT_S)
    rig.links[0].say(Freed(0))


def test_a_prompt_is_not_given_away_when_its_time_is_over(rig_of_two: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of_two
    clock = Clock(monkeypatch)
    request, pages = rig.start()
    rig.links[0].say(Ended(0, "broken", is_retryable=True))
    rig.only()
    rig.leave(request, pages)
    clock.now += TIMEOUT_S
    rig.start(request=request)
    news = rig.only()
    assert isinstance(news, LostPrompt)
    assert not news.is_retryable
    assert "no prefill delivered in 5 s to request 0; broken" in str(news.error)


def test_a_request_waits_no_longer_than_that_for_pages_that_are_held(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has its own time."""
    clock = Clock(monkeypatch)
    request, pages = rig.start()
    rig.leave(request, pages)
    head: Any = Asker(7)
    next_one: Any = Asker(8)
    assert not rig.intake.has_kept_waiting(head)
    clock.now += 0.75 * TIMEOUT_S
    assert not rig.intake.has_kept_waiting(head)
    assert not rig.intake.has_kept_waiting(next_one)
    clock.now += 0.75 * TIMEOUT_S
    assert not rig.intake.has_kept_waiting(head)
    clock.now += TIMEOUT_S
    assert rig.intake.has_kept_waiting(head)


def test_a_group_that_takes_other_memory_is_one_that_nobody_knows(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held pages come back, and what is said of the old transfers is not heard."""
    request, pages = rig.start(10)
    rig.leave(request, pages)
    old = rig.link
    assert rig.intake.counts.num_held_pages == 3
    old.say(Freed(0))  # not taken yet
    rig.intake.forget_held_pages()
    assert rig.is_at_start
    assert rig.intake.counts.num_held_pages == 0
    assert old.is_closed
    rig.intake.reopen([b"elsewhere"])
    [new] = rig.intake.links
    assert isinstance(new, ScriptedLink)
    assert new is not old
    assert new.epoch != old.epoch
    old.say(Freed(0))
    rig.start()
    assert new.given[1]["destination"].addresses == [b"elsewhere"]
    assert rig.intake.take() == []
    assert rig.intake.counts.num_reopened == 1


@pytest.mark.parametrize(("num_cached", "elsewhere", "num_reused"), [(0, 0, 0), (4, 0, 4), (0, 8, 8), (8, 4, 8)])
def test_tokens_that_nobody_computed_are_counted(rig: Rig, num_cached: int, elsewhere: int, num_reused: int) -> None:
    rig.start(10, num_cached=num_cached)
    rig.arrive(num_cached=elsewhere)
    news = rig.only()
    assert isinstance(news, ReceivedPrompt)
    assert news.num_reused == num_reused


def test_prompts_go_to_the_prefill_with_the_least_to_do(rig_of_two: Rig) -> None:
    rig_of_two.links[0].num_tokens = 10
    rig_of_two.start()
    assert [len(link.given) for link in rig_of_two.links] == [0, 1]


def test_a_prompt_goes_where_its_beginning_was_computed(rig_of_two: Rig) -> None:
    rig = rig_of_two
    first = rig.serve(20)
    other = rig.serve(20, first_id=100)
    assert {first, other} == {0, 1}  # nothing tells them apart but what they have
    for num_tokens in (24, 28, 9):
        assert rig.serve(num_tokens, num_found=4) == first
        assert rig.serve(num_tokens, first_id=100, num_found=4) == other
    assert rig.links[first].given[2]["num_computed"] == 16  # whole pages, each with the token after it


def test_a_prefill_with_more_to_do_than_it_has_is_passed_over(rig_of_two: Rig) -> None:
    """What it would have to compute, and what it has to compute before that, count alike."""
    rig = rig_of_two
    assert rig.serve(20) == 0
    rig.links[0].num_tokens = 16
    rig.links[1].num_tokens = 1
    assert rig.serve(20, num_found=16) == 0
    rig.links[1].num_tokens = 0
    rig.links[0].num_tokens = 17
    assert rig.serve(20) == 1


def test_a_prompt_under_another_salt_was_computed_nowhere(rig_of_two: Rig) -> None:
    rig = rig_of_two
    assert rig.serve(20, salt=b"one") == 0
    assert rig.serve(20, salt=b"another") == 1
    assert rig.links[0].given[0]["cache_salt"] == b"one"
    rig.links[1].num_tokens = 15
    assert rig.serve(20, salt=b"another", num_found=16) == 1
    rig.links[0].num_tokens = 15
    rig.links[1].num_tokens = 0
    assert rig.serve(20, salt=b"one", num_found=16) == 0


def test_what_a_process_had_computed_ends_with_it(rig_of_two: Rig) -> None:
    rig = rig_of_two
    assert rig.serve(20) == 0
    rig.links[0].prefill_epoch = "q" * 32
    rig.links[0].num_tokens = 1
    assert rig.serve(20) == 1


def test_ids_of_transfers_ascend_and_are_never_used_again(rig_of_two: Rig) -> None:
    for place in range(4):
        rig_of_two.links[0].num_tokens = place % 2
        rig_of_two.start()
    assert [sorted(link.given) for link in rig_of_two.links] == [[0, 2], [1, 3]]


def test_a_group_that_is_refused_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedLink, "await_first_answer", refuse)
    with pytest.raises(ConfigError, match="prefill host:0 refuses this decode group: not you"):
        Rig(monkeypatch, num_links=2)
    assert [link.is_closed for link in ScriptedLink.made] == [True, True]


def refuse(link: ScriptedLink, _timeout_s: float) -> None:
    link.state, link.why = LinkState.REFUSED, "not you"


def test_news_wake_whoever_waits() -> None:
    prefill = ScriptedPrefill()
    prefill.close()  # nobody listens any more
    allocator = PageAllocator(NUM_PAGES, 1)
    intake = Intake(
        [prefill.address],
        allocator=allocator,
        facts=FACTS,
        destination=PLACE,
        transport="local",
        hidden_size=HIDDEN_SIZE,
        timeout_s=5.0,
        peer_timeout_s=5.0,
        await_device=lambda: None,
    )
    request: Any = Asker(0)
    intake.start(request, token_ids=np.arange(4), page_ids=allocator.allocate(1), num_cached=0)
    [news] = intake.take(wait_s=WAIT_S)
    assert isinstance(news, LostPrompt)
    assert "is down: cannot be reached" in str(news.error)
    intake.close()


STEPS = st.lists(
    st.tuples(st.sampled_from(["start", "leave", "arrive", "bad", "end", "free", "take"]), st.integers(0, 30)),
    max_size=60,
)


@given(STEPS)
def test_any_script_brings_the_pool_back_to_its_start(steps: list[tuple[str, int]]) -> None:
    """B47, B49: no page has two owners at any time, and none is lost, whatever happens in whatever order."""
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(patch, num_links=2)
        run(rig, steps)


def run(rig: Rig, steps: list[tuple[str, int]]) -> None:
    waiting: dict[Any, list[int]] = {}  # requests in slots, with their pages
    running: dict[Any, list[int]] = {}
    told: dict[int, str] = {}  # what was last said of each transfer, by rules that links keep
    writers: dict[int, set[int]] = {}  # pages that each transfer may still be written to

    def take() -> None:
        for news in rig.intake.take():
            pages = waiting.pop(news.request)
            if isinstance(news, ReceivedPrompt):
                running[news.request] = pages
            else:
                rig.allocator.release(pages)

    for name, number in steps:
        open_ids = [each for each, said in told.items() if said in ("", "ended")]
        chosen = open_ids[number % len(open_ids)] if open_ids else None
        link = next((each for each in rig.links if chosen in each.given), rig.link)
        match name:
            case "start" if rig.allocator.num_free >= 4:
                request, pages = rig.start(1 + number % 16)
                assert not set(pages) & set().union(*writers.values()), "a page with a writer was given away"
                waiting[request] = pages
                told[len(told)] = ""
                writers[len(writers)] = set(pages)
            case "leave" if waiting or running:
                everyone = [*waiting, *running]
                request = everyone[number % len(everyone)]
                if request in waiting:
                    rig.leave(request, waiting.pop(request))
                else:
                    rig.allocator.release(running.pop(request))
            case "arrive" | "bad" if chosen is not None and told[chosen] == "":
                place = rig.links.index(link)
                changed = {"hidden": b""} if name == "bad" else {}
                link.say(
                    Freed(chosen)
                    if chosen in link.aborted
                    else Arrived(chosen, rig.done(chosen, link=place, **changed))
                )
                told[chosen], writers[chosen] = "over", set()
            case "end" if chosen is not None and told[chosen] == "" and chosen not in link.aborted:
                link.say(Ended(chosen, "it broke", is_retryable=bool(number % 2)))
                told[chosen] = "ended"
            case "free" if chosen is not None and (told[chosen] == "ended" or chosen in link.aborted):
                link.say(Freed(chosen))
                told[chosen], writers[chosen] = "over", set()
            case "take":
                take()
    take()
    for transfer_id, said in told.items():
        if said != "over":
            rig.link.say(Freed(transfer_id))
    for request, pages in list(waiting.items()):
        rig.leave(request, pages)
    for pages in running.values():
        rig.allocator.release(pages)
    assert rig.intake.take() == []
    assert rig.is_at_start
