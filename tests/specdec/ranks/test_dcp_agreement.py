"""Ranks that see different numbers decide alike; ranks that were told different things fail the round, and live on.

Tags such as B41 are explained in `tests/INVARIANTS.md`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.errors import RankError
from specdec.ranks.leader_channel import Task
from specdec.ranks.worker import Worker
from tests.support.engines import Ask, drawn, greedy, prompt_of, serve, tokens
from tests.support.matrix import asks_of, source_of
from tests.support.thread_engine import ThreadEngine, ThreadEngines, ThreadTasks


@pytest.mark.parametrize("ranks", [(2, 1), (2, 2), (4, 4)])
def test_noise_that_differs_between_ranks_leaves_the_first_ranks_output(
    ranks: tuple[int, int], thread_engines: ThreadEngines
) -> None:
    """B41: without drafts, the output is what the first rank's noisy logits give it alone."""
    asks = asks_of("both", num_drafts=0)
    outputs = []
    for tp_size, dcp_size in ((1, 1), ranks):
        with thread_engines.open(
            tp_size=tp_size, dcp_size=dcp_size, num_draft_tokens=0, logits_noise=1.0, prefix_cache=False
        ) as running:
            engine = running.engine()
            audit = engine.start_audit(rate=1.0)
            outputs.append(tokens(serve(engine, asks)))
            disagreements = audit.disagreements_N.tolist()
    assert outputs[0] == outputs[1]
    assert outputs[0] != tokens(thread_engines.plain(asks, tp_size=1, dcp_size=1))
    assert disagreements[0] == 0
    assert all(disagreements[1:])  # every other rank would have emitted something else


@pytest.mark.parametrize("draft", ["mtp", "oracle"])
@pytest.mark.parametrize("ranks", [(2, 2), (4, 4)])
def test_noise_cannot_split_what_ranks_accept(
    ranks: tuple[int, int], draft: str, thread_engines: ThreadEngines
) -> None:
    """B41: draft KV holds the accepted tokens; it stays the same on all ranks, and no round fails."""
    asks = asks_of("both", num_drafts=3)
    plain = tokens(thread_engines.plain(asks, tp_size=1, dcp_size=1))
    with thread_engines.open(
        tp_size=ranks[0], dcp_size=ranks[1], num_draft_tokens=3, logits_noise=0.2, with_draft=True
    ) as running:
        source = source_of(draft, asks, plain, num_drafts=3) if draft == "oracle" else None
        run = running.core_run(draft_source=source)
        audit = run.core.start_audit(rate=1.0)
        for ask in asks:
            run.add(ask)
        outputs = run.finish()
        assert all(updates[-1].error is None for updates in run.updates)
        assert audit.num_disagreements > 0
        assert run.core.scheduler.num_available_pages() == run.core.scheduler.allocator.num_pages
        first, *others = [worker.draft.pool for worker in running.workers if worker.draft is not None]
        for pool in others:
            for entry in pool.layout.entries:
                assert torch.equal(pool.buffer(entry.kind)[:-1], first.buffer(entry.kind)[:-1])
    # Without stop ids a request ends by its length, whatever was drawn.
    assert [len(output) for output in outputs[:3]] == [len(output) for output in plain[:3]]


def tell_otherwise(tasks: ThreadTasks, change: Callable[[Any], Any], *, method: str, at: int) -> None:
    """Have one follower be told something else in one pass."""
    next_task, passes = tasks.next_task, [0]

    def told() -> Task | None:
        task = next_task()
        if task is not None and task.method == method:
            passes[0] += 1
            if passes[0] == at:
                return replace(task, argument=change(task.argument))
        return task

    tasks.next_task = told  # type: ignore[method-assign]


def with_other_token(task: Any) -> Any:
    token_id_T = task.rows.token_id_T.copy()
    token_id_T[-1] += 1
    return replace(task, rows=task.rows._replace(token_id_T=token_id_T))


def with_other_pages(task: Any) -> Any:
    page_id_BP = task.rows.page_id_BP.copy()
    page_id_BP[0, [0, 1]] = page_id_BP[0, [1, 0]]
    return replace(task, rows=task.rows._replace(page_id_BP=page_id_BP))


def with_other_length(task: Any) -> Any:
    return replace(task, length_F=task.length_F + 1)


@pytest.mark.parametrize("change", [with_other_token, with_other_pages, with_other_length])
@pytest.mark.parametrize("ranks", [(2, 2), (4, 4)])
def test_rank_that_was_told_otherwise_fails_the_round_for_all_and_the_engine_lives_on(
    ranks: tuple[int, int], change: Callable[[Any], Any], thread_engines: ThreadEngines
) -> None:
    """A33: the verify inputs are digested; nothing of the round is emitted, and nothing of it is kept."""
    asks = [Ask(prompt_of(length), greedy(10)) for length in (9, 14, 23)]
    with thread_engines.open(tp_size=ranks[0], dcp_size=ranks[1], num_draft_tokens=3) as running:
        tell_otherwise(running.channel.followers[-1], change, method="verify", at=3)
        check_failed_round(running, asks, thread_engines, message="digests differ")


def test_rank_that_drafted_otherwise_fails_the_round(thread_engines: ThreadEngines) -> None:
    """A33, B36: each rank verifies with the drafts it embedded."""
    asks = [Ask(prompt_of(length), greedy(10)) for length in (9, 14, 23)]
    with thread_engines.open(tp_size=2, dcp_size=2, num_draft_tokens=3) as running:
        worker = running.workers[1]
        propose = worker.propose

        def other_drafts(batch: Any) -> Callable[[], Any]:
            run = propose(batch)
            worker.propose = propose  # type: ignore[method-assign]

            def drafted() -> Any:
                drafts = run()
                drafts.token_id_BK[0, 0] += 1
                return drafts

            return drafted

        worker.propose = other_drafts  # type: ignore[method-assign, assignment]
        check_failed_round(running, asks, thread_engines, message="digests differ")


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("method", ["propose", "verify", "observe"])
def test_error_before_the_first_collective_of_one_rank_fails_that_round_only(
    method: str, rank: int, thread_engines: ThreadEngines
) -> None:
    """A33, B60: every rank learns of it before it waits for that one; the requests fail with its name and cause."""
    asks = [Ask(prompt_of(length), greedy(10)) for length in (9, 14, 23)]
    with thread_engines.open(tp_size=4, dcp_size=2, num_draft_tokens=3) as running:
        fail_once(running.workers[rank], method, at=2)
        check_failed_round(running, asks, thread_engines, message=f"tp rank {rank} cannot run this pass: MemoryError")


def fail_once(worker: Worker, method: str, *, at: int) -> None:
    place, calls = getattr(worker, method), [0]

    def failing(argument: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise MemoryError("no memory to place this")
        return place(argument)

    setattr(worker, method, failing)


def check_failed_round(
    running: ThreadEngine, asks: Sequence[Ask], thread_engines: ThreadEngines, *, message: str
) -> None:
    """A round of some asks fails; those that join later, and the same asks again, get the plain output."""
    settings = {"tp_size": running.config.tp_size, "dcp_size": running.config.dcp_size}
    later = Ask(prompt_of(17), drawn(1, 10))
    expected = tokens(thread_engines.plain([*asks, later], **settings))
    run = running.core_run()
    failed = [run.add(ask) for ask in asks]
    while not all(request.finished for request in failed):
        assert run.step()
    errors = [run.updates[request.request_id][-1].error for request in failed]
    assert all(isinstance(error, RankError) for error in errors), errors
    assert all(message in str(error) for error in errors), errors
    emitted = run.delivered()
    assert all(output == right[: len(output)] for output, right in zip(emitted, expected, strict=False))
    assert any(len(output) < len(right) for output, right in zip(emitted, expected, strict=False))

    for ask in [*asks, later]:
        run.add(ask)
    assert run.finish()[len(asks) :] == expected
    assert run.core.scheduler.num_available_pages() == run.core.scheduler.allocator.num_pages
