"""Any number of threads may generate, stream and cancel on one engine at once."""

import contextlib
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specdec.engine import Engine
from specdec.errors import OutOfPagesError
from specdec.result import GenerationResult
from tests.support.engines import Ask, Checkpoints, drawn, greedy, prompt_of, serve, tokens

LONG = Ask(prompt_of(21), greedy(40))


def assert_idle(engine: Engine) -> None:
    """Nothing waits or runs, and every page is free or only cached."""
    assert not engine.step()
    num_free, num_pages = engine.kv_pages()
    assert num_free == num_pages


def test_threads_that_generate_stream_score_and_cancel_get_what_they_would_alone(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(
        num_draft_tokens=3, max_num_requests=4, num_pages=16, max_model_len=64, prefill_chunk_tokens=16
    )
    asks = [Ask(prompt_of(1 + 3 * index), drawn(index, 6 + index)) for index in range(10)]
    expected = {ask.key: checkpoints.plain(ask) for ask in asks}
    logprobs = checkpoints.engine(num_draft_tokens=0).score(asks[5].prompt).logprobs

    def generate(worker: int) -> None:
        for batch in (asks[worker::4], asks[worker::3]):
            assert tokens(serve(engine, batch)) == [expected[ask.key] for ask in batch]

    def stream(worker: int) -> None:
        for ask in asks[worker::4]:
            with engine.stream(ask.prompt, ask.params) as running:
                streamed = [token for delta in running for token in delta.token_ids]
            assert tuple(streamed) == expected[ask.key]

    def cancel(worker: int) -> None:
        for num_deltas, ask in enumerate(asks[worker::4]):
            with engine.stream(ask.prompt, ask.params) as running:
                for _ in zip(range(num_deltas), running, strict=False):
                    pass
            result = running.result()
            assert expected[ask.key][: len(result.token_ids)] == result.token_ids

    def score(worker: int) -> None:
        for _ in range(3 + worker):
            with contextlib.suppress(OutOfPagesError):  # it does not wait for pages
                assert engine.score(asks[5].prompt).logprobs == logprobs

    with ThreadPoolExecutor(max_workers=8) as threads:
        jobs: list[Callable[[int], None]] = [generate, stream, cancel, score] * 2
        for job in [threads.submit(job, worker) for worker, job in enumerate(jobs)]:
            job.result()
    assert_idle(engine)
    assert tokens(serve(engine, asks)) == list(expected.values())


def test_request_that_waits_for_a_slot_can_be_cancelled(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3, max_num_requests=1)
    with engine.stream(LONG.prompt, LONG.params) as running:
        next(running)
        waiting = engine.stream(prompt_of(5), greedy(5))
        waiting.close()
        result = waiting.result()
        assert (result.token_ids, result.finish_reason) == ((), "cancelled")
        assert running.result().token_ids == checkpoints.plain(LONG)
    assert_idle(engine)


@pytest.mark.parametrize("num_rounds", [0, 1, 2, 5, 6, 7, 9])
def test_request_can_be_cancelled_before_any_round(num_rounds: int, checkpoints: Checkpoints) -> None:
    """While it waits, in the middle of its prompt, and between the tokens of its output."""
    engine = checkpoints.engine(num_draft_tokens=3, prefill_chunk_tokens=4, max_model_len=96)
    pages = engine.kv_pages()
    stream = engine.stream(LONG.prompt, LONG.params)
    for _ in range(num_rounds):
        assert engine.step()
    stream.close()
    result = stream.result()
    assert result.finish_reason == "cancelled"
    assert checkpoints.plain(LONG)[: len(result.token_ids)] == result.token_ids
    assert (len(result.token_ids) > 0) == (num_rounds >= 6)
    assert result.text == checkpoints.tokenizer().decode(result.token_ids, skip_special_tokens=True)
    assert engine.kv_pages() == pages
    assert_idle(engine)
    assert serve(engine, [LONG])[0].token_ids == checkpoints.plain(LONG)


def test_closing_twice_or_after_the_end_changes_nothing(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)
    stream = engine.stream(prompt_of(5), greedy(5))
    result = stream.result()
    stream.close()
    stream.close()
    assert stream.result() == result
    assert result.finish_reason == "length"
    assert_idle(engine)


def test_dropped_stream_frees_what_it_held(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)
    stream: Any = engine.stream(LONG.prompt, LONG.params)
    del stream  # never read
    assert_idle(engine)
    stream = engine.stream(LONG.prompt, LONG.params)
    next(stream)
    assert engine.kv_pages()[0] < engine.kv_pages()[1]
    del stream
    gc.collect()
    assert_idle(engine)
    for delta in engine.stream(LONG.prompt, LONG.params):  # only the loop holds it
        if delta.token_ids:
            break
    del delta
    gc.collect()
    assert_idle(engine)


def test_whole_stream_may_be_read_without_keeping_a_name_for_it(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)
    streamed = [token for delta in engine.stream(LONG.prompt, LONG.params) for token in delta.token_ids]
    assert tuple(streamed) == checkpoints.plain(LONG)


def test_error_of_the_reader_frees_what_the_stream_held(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)

    def read_badly() -> None:
        with engine.stream(LONG.prompt, LONG.params) as stream:
            next(stream)
            raise KeyError("the reader's own")

    with pytest.raises(KeyError, match="own"):
        read_badly()
    assert_idle(engine)


def test_one_thread_can_close_what_another_reads(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)
    stream = engine.stream(LONG.prompt, LONG.params)
    first_delta = threading.Event()
    results: list[GenerationResult] = []

    def read() -> None:
        for _ in stream:
            first_delta.set()
            closed.wait()
        results.append(stream.result())

    closed = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    first_delta.wait()
    stream.close()
    closed.set()
    reader.join(timeout=60)
    assert not reader.is_alive()
    assert results[0].finish_reason == "cancelled"
    assert checkpoints.plain(LONG)[: len(results[0].token_ids)] == results[0].token_ids
    assert_idle(engine)


def test_pages_of_running_requests_are_not_counted_as_available(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3, num_pages=40)
    serve(engine, [Ask(LONG.prompt, greedy(8))])
    assert engine.kv_pages() == (40, 40)
    with engine.stream(LONG.prompt, LONG.params) as first, engine.stream(LONG.prompt, LONG.params) as second:
        next(first)
        next(second)
        # Of 21 prompt tokens five pages are shared with the tree; each request has one or two more for itself.
        assert 40 - 5 - 4 <= engine.kv_pages()[0] <= 40 - 5 - 2
    assert_idle(engine)


def test_stream_of_several_choices_tells_them_apart(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3, max_num_requests=2)
    params = drawn(3, 12, n=3)
    (expected,) = engine.generate([LONG.prompt], params)
    with engine.stream(LONG.prompt, params) as stream:
        streamed: dict[int, tuple[int, ...]] = {0: (), 1: (), 2: ()}
        for delta in stream:
            streamed[delta.index] += delta.token_ids
        assert list(streamed.values()) == [choice.token_ids for choice in expected.choices]
        assert stream.result().choices == expected.choices
    assert_idle(engine)
