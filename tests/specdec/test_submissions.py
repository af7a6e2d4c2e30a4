"""Generations that are handed to a callback, for callers that run the rounds themselves."""

import gc
import threading
import weakref

import pytest

from specdec.errors import ContextLengthError, RequestError, RoundError
from specdec.result import StreamDelta
from specdec.sampling.sampling_params import SamplingParams
from tests.support.engines import Ask, Checkpoints, drawn, greedy, prompt_of, serve

LONG = Ask(prompt_of(21), greedy(40))


def test_pieces_and_result_are_those_of_a_stream(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)
    params = drawn(3, 12, n=2, logprobs=1)
    pieces: list[StreamDelta] = []
    submission = engine.prepare(LONG.prompt, params, on_delta=pieces.append)
    assert not engine.step()  # it takes part once it is started
    assert (pieces, submission.admitted_at) == ([], None)
    submission.start()
    while engine.step():
        pass
    with engine.stream(LONG.prompt, params) as stream:
        assert sorted(pieces, key=lambda piece: piece.index) == sorted(stream, key=lambda piece: piece.index)
        assert submission.result().choices == stream.result().choices
    assert submission.admitted_at is not None
    assert [piece.finish_reason for piece in pieces if piece.finish_reason is not None] == ["length", "length"]


def test_stop_is_told_with_the_last_piece(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)
    output = checkpoints.plain(LONG)
    (result,) = serve(engine, [LONG])
    for asked, stop in ({"stop_token_ids": [output[9]]}, output[9]), ({"stop": result.text[8:11]}, result.text[8:11]):
        pieces: list[StreamDelta] = []
        engine.prepare(LONG.prompt, greedy(40, **asked), on_delta=pieces.append).start()
        while engine.step():
            pass
        assert pieces[-1].finish_reason == "stop"
        assert pieces[-1].stop == stop
        assert all(piece.stop is None for piece in pieces[:-1])


@pytest.mark.parametrize("num_rounds", [None, 0, 1, 4])
def test_submission_can_be_cancelled_at_any_time(checkpoints: Checkpoints, num_rounds: int | None) -> None:
    engine = checkpoints.engine(num_draft_tokens=3, prefill_chunk_tokens=8)
    pages = engine.kv_pages()
    pieces: list[StreamDelta] = []
    submission = engine.prepare(LONG.prompt, LONG.params, on_delta=pieces.append)
    if num_rounds is not None:
        submission.start()
        for _ in range(num_rounds):
            assert engine.step()
    submission.cancel()
    assert pieces[-1].finish_reason == "cancelled"
    assert submission.result().finish_reason == "cancelled"
    assert not engine.step()
    assert engine.kv_pages() == pages


def test_cancellation_in_the_middle_of_a_round_takes_effect_behind_it(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)
    pieces: list[StreamDelta] = []

    def cancel_in_another_thread(piece: StreamDelta) -> None:
        pieces.append(piece)
        if len(pieces) == 1:
            thread = threading.Thread(target=submission.cancel)
            thread.start()
            thread.join(timeout=10)
            assert not thread.is_alive()  # it does not wait for the round

    submission = engine.prepare(LONG.prompt, LONG.params, on_delta=cancel_in_another_thread)
    submission.start()
    while engine.step():
        pass
    assert [piece.finish_reason for piece in pieces] == [None, "cancelled"]


def test_failure_is_told_with_the_last_piece_and_by_the_result(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=0)
    pieces: list[StreamDelta] = []
    submission = engine.prepare(LONG.prompt, greedy(5, n=2), on_delta=pieces.append)
    submission.start()

    def fail() -> None:
        raise ValueError("a fault of ours")

    engine.core.scheduler.schedule = fail  # type: ignore[assignment]
    engine.step()
    assert pieces[0].finish_reason == "error"
    assert isinstance(pieces[0].error, RoundError)
    submission.cancel()
    with pytest.raises(RoundError, match="a fault of ours"):
        submission.result()


def test_nothing_holds_what_has_ended(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)
    gc.collect()
    gc.disable()  # what is part of a cycle would stay
    try:
        finished = engine.prepare(LONG.prompt, greedy(5, n=2), on_delta=lambda _piece: None)
        cancelled = engine.prepare(LONG.prompt, greedy(40), on_delta=lambda _piece: None)
        for submission in (finished, cancelled):
            submission.start()
        for _ in range(12):
            engine.step()
        cancelled.cancel()
        assert finished.result().finish_reason == "length"
        left = [weakref.ref(finished), weakref.ref(cancelled)]
        del finished, cancelled, submission
        assert [reference() for reference in left] == [None, None]
    finally:
        gc.enable()


def test_what_cannot_be_served_is_refused_at_once(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=0)

    def never(_piece: StreamDelta) -> None:
        raise AssertionError

    with pytest.raises(ContextLengthError, match="128 tokens, at most 127"):
        engine.prepare([1] * 128, on_delta=never)
    with pytest.raises(ContextLengthError, match="at most 127"):
        engine.prepare("1" * 100_000, on_delta=never)
    with pytest.raises(RequestError, match="empty"):
        engine.prepare([], on_delta=never)
    with pytest.raises(RequestError) as refusal:
        SamplingParams(temperature=-1)
    assert refusal.value.parameter == "temperature"


def test_drafts_are_counted_over_all_requests(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3, max_num_requests=2)
    results = serve(engine, [Ask(prompt_of(5 + i), greedy(9)) for i in range(4)])
    each = [result.speculation for result in results]
    assert engine.core.slots.speculation() == each[0] + each[1] + each[2] + each[3]
    engine.prepare(LONG.prompt, LONG.params, on_delta=lambda _piece: None).start()
    for _ in range(4):
        engine.step()
    assert engine.core.slots.speculation().num_drafts > sum(stats.num_drafts for stats in each)
