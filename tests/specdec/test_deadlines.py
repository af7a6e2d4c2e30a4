"""A request that is late ends within one round, wherever it is, and leaves nothing behind."""

from collections.abc import Sequence
from typing import Any

import pytest

import specdec.core
from specdec.errors import DeadlineError, RequestError
from specdec.handoff.intake import LostPrompt, ReceivedPrompt
from specdec.request import Request
from specdec.result import StreamDelta
from tests.support.engines import Ask, Checkpoints, CoreRun, drawn, greedy, prompt_of

LONG = Ask(prompt_of(21), greedy(40))
GIVEN_S = 5.0


class Clock:
    """Stands for the module `time` in the core."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(specdec.core, "time", clock)
    return clock


def add_with_deadline(run: CoreRun, ask: Ask, clock: Clock) -> Request:
    return run.add(ask, arrived_at=clock.now, deadline=clock.now + GIVEN_S)


def assert_ended_late(run: CoreRun, request: Request, *, tells: str) -> None:
    last = run.updates[request.request_id][-1]
    assert last.finish_reason == "error"
    assert isinstance(last.error, DeadlineError)
    assert tells in str(last.error)
    assert request.finished
    assert request.slot is None
    assert request not in run.core.scheduler.waiting


def assert_all_pages_are_free(run: CoreRun) -> None:
    scheduler = run.core.scheduler
    assert scheduler.num_available_pages() == scheduler.allocator.num_pages
    assert scheduler.late_requests(1e18) == []


def test_waiting_request_ends(checkpoints: Checkpoints, clock: Clock) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=3, max_num_requests=1)
    run.add(LONG)
    run.step()
    late = add_with_deadline(run, Ask(prompt_of(4), greedy(9)), clock)
    run.step()
    assert not run.updates[late.request_id]
    clock.now += GIVEN_S
    run.step()
    assert_ended_late(run, late, tells="request 1 still waited for a slot after 5 s")
    assert run.finish()[0] == checkpoints.plain(LONG)
    assert_all_pages_are_free(run)


@pytest.mark.parametrize("num_rounds", [1, 3, 6])  # within its prompt, at its end, between its tokens
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_running_request_ends(num_rounds: int, prefix_cache: bool, checkpoints: Checkpoints, clock: Clock) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=3, prefill_chunk_tokens=8, prefix_cache=prefix_cache)
    neighbour = Ask(prompt_of(4), drawn(1, 20))
    late = add_with_deadline(run, LONG, clock)
    run.add(neighbour)
    for _ in range(num_rounds):
        run.step()
    clock.now += GIVEN_S
    run.step()
    assert_ended_late(run, late, tells=f"{len(late.output_ids)} of at most 40 output tokens")
    output, neighbours_output = run.finish()
    assert output == checkpoints.plain(LONG)[: len(output)]
    assert neighbours_output == checkpoints.plain(neighbour)
    assert_all_pages_are_free(run)


def test_preempted_request_ends_while_it_waits(checkpoints: Checkpoints, clock: Clock) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=3, max_num_requests=1)
    late = add_with_deadline(run, LONG, clock)
    run.step_until_decoding(late)
    run.step()
    assert late.slot is not None
    run.core.scheduler.preempt(late.slot)
    clock.now += GIVEN_S
    assert not run.step()
    assert_ended_late(run, late, tells="waited for a slot")
    assert late.output_ids == run.delivered()[0] == checkpoints.plain(LONG)[: len(late.output_ids)]
    assert_all_pages_are_free(run)


class SilentIntake:
    """A prefill that never answers."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.is_waiting = self.holds_pages = False

    def start(self, request: Request, **_prompt: Any) -> None:
        self.asked.append(request)
        self.is_waiting = True

    def abandon(self, request: Request) -> None:
        self.asked.remove(request)
        self.is_waiting = False

    def take(self, *, wait_s: float = 0.0) -> Sequence[ReceivedPrompt | LostPrompt]:
        return []

    def has_kept_waiting(self, request: Request) -> bool:
        raise AssertionError

    def forget_held_pages(self) -> None:
        raise AssertionError

    def reopen(self, addresses: list[bytes]) -> None:
        raise AssertionError


def test_request_whose_prompt_is_computed_elsewhere_ends_and_is_given_up_there(
    checkpoints: Checkpoints, clock: Clock
) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=3)
    intake = SilentIntake()
    run.core.intake = run.core.scheduler.prompt_source = intake
    late = add_with_deadline(run, LONG, clock)
    assert run.step()
    assert intake.asked == [late]
    clock.now += GIVEN_S
    assert not run.step()
    assert intake.asked == []
    assert_ended_late(run, late, tells="request 0 still ran after 5 s")
    assert_all_pages_are_free(run)


def test_request_that_ended_in_time_is_not_looked_at_again(checkpoints: Checkpoints, clock: Clock) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=3)
    request = add_with_deadline(run, Ask(prompt_of(4), greedy(9)), clock)
    cancelled = add_with_deadline(run, LONG, clock)
    run.core.cancel(cancelled)
    run.finish()
    clock.now += GIVEN_S
    assert not run.step()
    assert [updates[-1].finish_reason for updates in run.updates] == ["length", "cancelled"]
    assert request.finished
    assert_all_pages_are_free(run)


def test_submission_with_a_deadline_ends_with_its_error(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)
    pages = engine.kv_pages()
    pieces: list[StreamDelta] = []
    in_time = engine.prepare(LONG.prompt, LONG.params, on_delta=lambda _piece: None, deadline_s=3600)
    late = engine.prepare(LONG.prompt, greedy(5, n=2), on_delta=pieces.append, deadline_s=0)
    for submission in in_time, late:
        submission.start()
    while engine.step():
        pass
    assert [piece.finish_reason for piece in pieces] == ["error", "error"]
    assert all(isinstance(piece.error, DeadlineError) for piece in pieces)
    with pytest.raises(DeadlineError, match="after 0 s, all the time it was given, with 0 of at most 5 output tokens"):
        late.result()
    assert in_time.result().token_ids == checkpoints.plain(LONG)
    assert engine.kv_pages() == pages


@pytest.mark.parametrize("deadline_s", [-1, float("nan"), "soon", True])
def test_what_is_no_deadline_is_refused(deadline_s: object, checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine()
    with pytest.raises(RequestError, match="deadline_s must be a number of seconds") as refusal:
        engine.prepare([1], on_delta=lambda _piece: None, deadline_s=deadline_s)  # type: ignore[arg-type]
    assert refusal.value.parameter == "deadline_s"
