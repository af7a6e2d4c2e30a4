"""An error of one rank before anything was exchanged fails that step on all ranks, and the engine serves on."""

import os
import time
from collections.abc import Iterator

import pytest

from specdec.engine import Engine
from specdec.errors import RoundError
from tests.support.engines import Ask, Checkpoints, greedy, prompt_of, serve
from tests.support.faulty_ranks import FaultyEngine, open_engine
from tests.support.processes import children_of

pytestmark = pytest.mark.xdist_group("surviving ranks")  # one worker, one group of processes
PROBE = Ask(prompt_of(9), greedy(10))
TIMEOUT_S = 4.0


@pytest.fixture(scope="module")
def surviving(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyEngine]:
    """Two ranks that every test leaves as it found them."""
    before = children_of(os.getpid())
    settings = {"tp_size": 2, "dcp_size": 2, "page_size": 4, "max_model_len": 128, "num_draft_tokens": 2}
    directory = tmp_path_factory.mktemp("faults")
    with open_engine(checkpoints.path("parallel"), directory, rank_timeout_s=TIMEOUT_S, **settings) as faulty:
        followers = children_of(os.getpid()) - before
        assert len(followers) == 1
        yield faulty
    assert children_of(os.getpid()) == before


def assert_whole(engine: Engine, checkpoints: Checkpoints) -> None:
    """Nothing runs or waits, no page is lost, and the next request is right."""
    assert not engine.step()
    num_free, num_pages = engine.kv_pages()
    assert num_free == num_pages
    engine.check()
    assert serve(engine, [PROBE])[0].token_ids == checkpoints.plain(PROBE, "parallel")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["propose", "verify", "observe"])
@pytest.mark.parametrize("error", ["RuntimeError", "MemoryError", "OutOfMemoryError"])
def test_error_before_anything_was_exchanged_fails_that_step_alone(
    rank: int, name: str, error: str, surviving: FaultyEngine, checkpoints: Checkpoints
) -> None:
    engine = surviving.engine
    surviving.faults.plan(rank, where=f"place {name}", what=error)
    with pytest.raises(RoundError, match=rf"tp rank {rank} cannot run this pass: {error}: .* as the test wants it"):
        serve(engine, [PROBE])
    assert_whole(engine, checkpoints)


def test_error_before_anything_was_exchanged_spares_the_requests_of_other_steps(
    surviving: FaultyEngine, checkpoints: Checkpoints
) -> None:
    engine = surviving.engine
    with engine.stream(PROBE.prompt, greedy(100)) as hit, engine.stream(PROBE.prompt, greedy(100)) as hit_too:
        next(hit)
        surviving.faults.plan(1, where="place verify", what="MemoryError")
        engine.step()
        waited = engine.stream(PROBE.prompt, PROBE.params)
        for stream in (hit, hit_too):
            with pytest.raises(RoundError, match="tp rank 1 cannot run this pass"):
                stream.result()
        assert waited.result().token_ids == checkpoints.plain(PROBE, "parallel")
    assert_whole(engine, checkpoints)


def test_idle_engine_stays_idle_for_many_timeouts(surviving: FaultyEngine, checkpoints: Checkpoints) -> None:
    time.sleep(3 * TIMEOUT_S)
    assert_whole(surviving.engine, checkpoints)


def test_interrupt_between_two_passes_leaves_the_ranks_together(
    surviving: FaultyEngine, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = surviving.engine
    with monkeypatch.context() as patched:
        patched.setattr(engine.core, "_commit", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            serve(engine, [PROBE])
    assert_whole(engine, checkpoints)


def _interrupt(*_arguments: object) -> None:
    raise KeyboardInterrupt
