"""A rank that is lost takes the engine with it, and nothing hangs: real processes, killed, stopped and broken."""

import gc
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specdec.engine import Engine
from specdec.errors import RankLostError
from specdec.sampling.sampling_params import SamplingParams
from tests.support.engines import Ask, Checkpoints, greedy, prompt_of, serve
from tests.support.faulty_ranks import open_engine
from tests.support.processes import await_end, children_of, torch_threads

PROBE = Ask(prompt_of(9), greedy(10))
SETTINGS = {"tp_size": 2, "dcp_size": 2, "page_size": 4, "max_model_len": 128, "num_draft_tokens": 2}
TIMEOUT_S = 4.0
LONG_S = 90.0  # far above anything that ends, on whatever machine


def lose(
    checkpoints: Checkpoints, tmp_path: Path, *, rank: int, where: str, what: str, tp_size: int = 2
) -> RankLostError:
    """Lose a rank while two requests run and two wait; gives the error, after checking all that must be so."""
    before = children_of(os.getpid())
    settings = {**SETTINGS, "tp_size": tp_size, "dcp_size": tp_size, "max_num_requests": 2, "rank_timeout_s": TIMEOUT_S}
    with open_engine(checkpoints.path("parallel"), tmp_path, **settings) as faulty:
        engine = faulty.engine
        followers = children_of(os.getpid()) - before
        asks = [Ask(prompt_of(length), greedy(80)) for length in (9, 5, 7, 30)]
        streams = [engine.stream(ask.prompt, ask.params) for ask in asks]
        next(streams[0])
        faulty.faults.plan(rank, where=where, what=what)
        begin = time.monotonic()
        with ThreadPoolExecutor(len(streams)) as pool:
            causes = [pool.submit(_failure, stream.result) for stream in streams]
            failures = [cause.result(LONG_S) for cause in causes]
        assert time.monotonic() - begin < LONG_S
        if what == "KeyboardInterrupt":
            failures = [failure for failure in failures if not isinstance(failure, KeyboardInterrupt)]
            assert len(failures) == len(streams) - 1
        _assert_lost(engine, failures)
        assert await_end(followers, timeout_s=LONG_S) == set()
        lost = failures[0]
        assert isinstance(lost, RankLostError)
    assert children_of(os.getpid()) == before
    return lost


def _failure(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("it did not fail")


def _assert_lost(engine: Engine, failures: list[BaseException]) -> None:
    """All failed for one cause, nothing is held, and whatever comes later fails at once with that cause."""
    message = str(failures[0])
    assert message.endswith("; start the engine again")
    assert {type(failure) for failure in failures} == {RankLostError}
    assert {str(failure) for failure in failures} == {message}
    assert not engine.step()
    num_free, num_pages = engine.kv_pages()
    assert num_free == num_pages
    for call in (engine.check, lambda: serve(engine, [PROBE]), lambda: engine.score(PROBE.prompt)):
        later = _failure(call)
        assert isinstance(later, RankLostError)
        assert str(later) == message


def test_rank_that_stops_inside_a_step_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    lost = lose(checkpoints, tmp_path, rank=1, where="run verify", what="stop")
    assert "rank 1 is gone: no sign of life for 4 s" in str(lost)


@pytest.mark.full
def test_rank_that_fails_inside_a_step_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    lost = lose(checkpoints, tmp_path, rank=1, where="run verify", what="OutOfMemoryError")
    assert "rank 1 is gone: OutOfMemoryError: out of memory, as the test wants it" in str(lost)


@pytest.mark.full
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("where", ["run propose", "run verify", "run observe", "end verify", "end observe"])
@pytest.mark.parametrize(
    "fault",
    [
        ("kill", "was killed by signal SIGKILL"),
        ("stop", "no sign of life for 4 s"),
        ("RuntimeError", "RuntimeError: a fault, as the test wants it"),
        ("MemoryError", "MemoryError: out of memory, as the test wants it"),
    ],
)
def test_rank_that_is_lost_inside_a_step_is_named(
    fault: tuple[str, str], where: str, tp_size: int, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    what, cause = fault
    rank = tp_size - 1
    lost = lose(checkpoints, tmp_path, rank=rank, where=where, what=what, tp_size=tp_size)
    assert str(lost).startswith(f"rank {rank} is gone: ")
    assert cause in str(lost)


@pytest.mark.full
def test_rank_that_lives_but_does_not_come_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    lost = lose(checkpoints, tmp_path, rank=2, where="run verify", what="hang", tp_size=4)
    assert "rank 2 is gone: it did not leave a collective as the others did" in str(lost)


@pytest.mark.full
@pytest.mark.parametrize("what", ["RuntimeError", "OutOfMemoryError", "KeyboardInterrupt"])
@pytest.mark.parametrize("where", ["run propose", "run verify", "end observe"])
def test_leader_that_fails_inside_a_step_ends_the_others(
    what: str, where: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    lost = lose(checkpoints, tmp_path, rank=0, where=where, what=what)
    assert f"rank 0 is gone: {what}" in str(lost)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_that_is_lost_while_the_engine_is_idle_is_noticed(
    number: signal.Signals, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    before = children_of(os.getpid())
    settings = {**SETTINGS, "rank_timeout_s": TIMEOUT_S}
    with open_engine(checkpoints.path("parallel"), tmp_path, **settings) as faulty:
        followers = children_of(os.getpid()) - before
        serve(faulty.engine, [PROBE])
        for pid in followers:
            os.kill(pid, number)
        deadline = time.monotonic() + LONG_S
        while (lost := _lost(faulty.engine)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert lost is not None
        assert "rank 1 is gone: " in str(lost)
        _assert_lost(faulty.engine, [lost])
    assert children_of(os.getpid()) == before


def _lost(engine: Engine) -> RankLostError | None:
    try:
        engine.check()
    except RankLostError as lost:
        return lost
    return None


@pytest.mark.full
def test_engines_may_follow_each_other_and_a_dropped_one_ends_its_ranks(checkpoints: Checkpoints) -> None:
    before = children_of(os.getpid())
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        engine = Engine.from_pretrained(checkpoints.path("parallel"), rank_timeout_s=TIMEOUT_S, **SETTINGS)
        assert serve(engine, [PROBE])[0].token_ids == checkpoints.plain(PROBE, "parallel")
        del engine
        assert children_of(os.getpid()) == before
    engine = Engine.from_pretrained(checkpoints.path("parallel"), rank_timeout_s=TIMEOUT_S, **SETTINGS)
    assert torch_threads() != []
    engine.close()
    engine.close()
    assert children_of(os.getpid()) == before
    assert torch_threads() == []  # one that outlives the interpreter may abort the process
    with pytest.raises(RankLostError, match="the engine was closed"):
        engine.generate([PROBE.prompt], SamplingParams(max_tokens=1))
    del engine
    gc.collect()  # the traceback of the error above held the last engine
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4  # torch keeps a pipe or two


@pytest.mark.full
def test_close_ends_what_another_thread_runs_between_two_passes(checkpoints: Checkpoints) -> None:
    before = children_of(os.getpid())
    engine = Engine.from_pretrained(checkpoints.path("parallel"), rank_timeout_s=TIMEOUT_S, **SETTINGS)
    with ThreadPoolExecutor() as pool, engine.stream(PROBE.prompt, greedy(100)) as stream:
        next(stream)
        running = pool.submit(_failure, stream.result)
        engine.close()
        failure = running.result(LONG_S)
    assert isinstance(failure, RankLostError)
    assert "the engine was closed" in str(failure)
    assert children_of(os.getpid()) == before
