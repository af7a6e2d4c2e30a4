"""Ctrl-C may come at any moment: the caller gets it, what it asked for ends, and the engine serves on."""

import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

import specdec.core
import specdec.engine
from specdec.engine import Engine
from specdec.errors import RoundError
from specdec.request import Request
from specdec.scheduler import ScheduledBatch, Scheduler
from specdec.waiting_queue import WaitingQueue
from tests.support.engines import Ask, Checkpoints, greedy, prompt_of, serve

PROBE = Ask(prompt_of(9), greedy(2))
ASKS = [Ask(prompt_of(length), greedy(3)) for length in (3, 6)]
FILES = {specdec.core.__file__, specdec.engine.__file__}
GIVING_BACK = "_end_turn"  # what gives the turn back is the one thing that must be left alone

Line = tuple[str, int]


class Interrupter:
    """Notes which lines of the engine's own files run, and raises KeyboardInterrupt before the target."""

    def __init__(self, target: Line | None = None) -> None:
        self.target = target
        self.lines: dict[Line, None] = {}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> "Interrupter | None":
        name = frame.f_code.co_filename
        if name not in FILES or frame.f_code.co_name in {GIVING_BACK, "__init__"}:  # half an object cannot be closed
            return None
        line = (name, frame.f_lineno)
        if event == "line" and GIVING_BACK not in linecache.getline(*line) and not _drops_an_object(frame):
            self.lines[line] = None
            if line == self.target:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def _drops_an_object(frame: FrameType | None) -> bool:
    """Whether Python would swallow what is raised here."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@contextmanager
def traced(interrupter: Interrupter) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(interrupter)
    try:
        yield
    finally:
        sys.settrace(before)


def assert_idle(engine: Engine) -> None:
    """Nothing waits or runs, nobody drives, and no page is lost."""
    steps: list[bool] = []
    other = threading.Thread(target=lambda: steps.append(engine.step()), daemon=True)
    other.start()
    other.join(timeout=60)  # it would wait forever for a turn that nobody gives back
    assert steps == [False]
    num_free, num_pages = engine.kv_pages()
    assert num_free == num_pages


def assert_whole(engine: Engine, checkpoints: Checkpoints) -> None:
    """The engine is idle, and the next request is served."""
    assert_idle(engine)
    assert serve(engine, [PROBE])[0].token_ids == checkpoints.plain(PROBE)


def generate(engine: Engine) -> None:
    serve(engine, ASKS)


def stream(engine: Engine) -> None:
    with engine.stream(ASKS[1].prompt, ASKS[1].params) as running:
        for _ in running:
            pass


def score(engine: Engine) -> None:
    engine.score(ASKS[1].prompt)


@pytest.mark.parametrize("call", [generate, stream, score, Engine.step])
def test_interrupt_at_any_line_leaves_nothing_behind(call: Callable[[Engine], Any], checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=1, max_num_requests=2, prefix_cache=False)
    undisturbed = Interrupter()
    with traced(undisturbed):
        call(engine)
    assert len(undisturbed.lines) > 5
    for line in undisturbed.lines:
        was_interrupted = False
        try:
            with traced(Interrupter(line)):
                call(engine)
        except KeyboardInterrupt:  # not kept, so that what its traceback names is dropped
            was_interrupted = True
        assert was_interrupted
        assert_idle(engine)
    assert_whole(engine, checkpoints)


def test_interrupt_between_two_submissions_ends_the_first(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = checkpoints.engine(num_draft_tokens=2)

    class FullQueue(WaitingQueue):
        def add(self, *requests: Request) -> None:
            if self:
                raise KeyboardInterrupt
            super().add(*requests)

    monkeypatch.setattr(engine.core.scheduler, "waiting", FullQueue())
    with pytest.raises(KeyboardInterrupt):
        serve(engine, ASKS)
    assert_whole(engine, checkpoints)


def test_error_while_a_round_is_scheduled_fails_who_runs_and_who_is_next(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = checkpoints.engine(num_draft_tokens=2, max_num_requests=2)
    streams = [engine.stream(ask.prompt, ask.params) for ask in (PROBE, *ASKS, PROBE)]
    next(streams[0])
    schedule = Scheduler.schedule

    def fail_once(self: Scheduler) -> ScheduledBatch | None:
        monkeypatch.setattr(Scheduler, "schedule", schedule)
        raise ValueError("no page of that name")

    monkeypatch.setattr(Scheduler, "schedule", fail_once)
    for failed in streams[:3]:
        with pytest.raises(RoundError, match=r"failed in a round.*no page of that name"):
            failed.result()
    assert streams[3].result().token_ids == checkpoints.plain(PROBE)
    assert_whole(engine, checkpoints)
