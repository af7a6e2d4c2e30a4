"""A request whose pages were taken away is computed again and goes on as if nothing had happened."""

import numpy as np
import pytest

from specdec.dcp.prefix_tree import PrefixTree, TokenIds
from specdec.drafting.draft import DraftSource
from specdec.drafting.scripted_draft import ScriptedDraft
from tests.support.engines import VOCAB_SIZE, Ask, Checkpoints, CoreRun, drawn, greedy, prompt_of, script_of, serve


def asks_of_many_kinds() -> list[Ask]:
    return [
        Ask(prompt_of(12), greedy(14)),
        Ask(prompt_of(5), drawn(1, 14, repetition_penalty=1.4)),
        Ask(prompt_of(1), drawn(2, 14, presence_penalty=1.0, frequency_penalty=1.0)),
        Ask(prompt_of(20), drawn(3, 14, min_tokens=6, stop_token_ids=list(range(0, VOCAB_SIZE, 9)))),
        Ask(prompt_of(9), drawn(4, 14, logprobs=2, prompt_logprobs=1)),
        Ask(prompt_of(7), greedy(14, logit_bias={3: 2.0})),
    ]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("draft", ["mtp", "oracle", "none"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_output_is_unchanged_when_memory_holds_one_request(
    page_size: int, draft: str, prefix_cache: bool, checkpoints: Checkpoints
) -> None:
    asks = asks_of_many_kinds()
    expected = [checkpoints.plain(ask) for ask in asks]
    source: DraftSource | None = None
    if draft == "oracle":
        source = ScriptedDraft(script_of(asks, expected), vocab_size=VOCAB_SIZE, wrong_at=2)
    run = CoreRun(
        checkpoints.load(),
        draft_source=source,
        num_draft_tokens=0 if draft == "none" else 4,
        page_size=page_size,
        max_model_len=48,
        num_pages=48 // page_size,
        prefill_chunk_tokens=7,
        prefix_cache=prefix_cache,
    )
    for ask in asks:
        run.add(ask)
    assert run.finish() == expected
    assert sum(request.num_preemptions for request in run.requests) > 0
    assert run.requests[0].num_preemptions == 0  # the oldest always goes on
    if run.core.scheduler.prefix_tree is not None:
        run.core.scheduler.prefix_tree.evict(run.core.scheduler.prefix_tree.num_pages)
    assert run.core.scheduler.allocator.num_free == run.core.scheduler.allocator.num_pages


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_request_may_be_preempted_before_any_round(prefix_cache: bool, checkpoints: Checkpoints) -> None:
    ask = Ask(prompt_of(11), drawn(6, 14, repetition_penalty=1.3, logprobs=1, prompt_logprobs=0))
    alone = CoreRun(checkpoints.load(), num_draft_tokens=3, prefill_chunk_tokens=4)
    alone.add(ask)
    (expected,) = alone.finish()
    assert expected == checkpoints.plain(ask)
    num_rounds = len(alone.updates[0]) + 2
    for preempted_before in range(num_rounds):
        run = CoreRun(checkpoints.load(), num_draft_tokens=3, prefill_chunk_tokens=4, prefix_cache=prefix_cache)
        request = run.add(ask)
        for _ in range(preempted_before):
            run.step()
        if request.slot is not None:
            run.core.scheduler.preempt(request.slot)
        assert run.finish() == [expected]
        assert logprobs_of(run) == logprobs_of(alone)
        assert request.prompt_logprobs == alone.requests[0].prompt_logprobs


def logprobs_of(run: CoreRun) -> list[object]:
    return [entry for update in run.updates[0] for entry in update.logprobs or ()]


def test_statistics_of_a_preempted_request_cover_all_its_rounds(checkpoints: Checkpoints) -> None:
    ask = Ask(prompt_of(8), greedy(20))
    script = script_of([ask], [checkpoints.plain(ask)])
    run = CoreRun(
        checkpoints.load(), num_draft_tokens=3, draft_source=ScriptedDraft(script, vocab_size=VOCAB_SIZE, wrong_at=1)
    )
    request = run.add(ask)
    for _ in range(4):  # the prompt, then three runs of two tokens
        run.step()
    assert request.slot is not None
    run.core.scheduler.preempt(request.slot)
    run.finish()
    # The token drawn at the end of the second prefill came without drafts.
    num_runs = (20 - 1 - 1 + 1) // 2
    assert request.speculation.num_drafts == num_runs
    assert request.speculation.accepted_per_position[0] == num_runs - (20 - 1 - 1) % 2
    assert request.speculation.num_accepted_tokens + request.speculation.num_drafts + 2 == 20


def test_waiting_requests_are_served_in_order_of_arrival(checkpoints: Checkpoints) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=2, max_num_requests=2)
    for length in range(1, 7):
        run.add(Ask(prompt_of(length), greedy(6)))
    first_token_order: list[int] = []
    while run.step():
        for index, updates in enumerate(run.updates):
            if updates and index not in first_token_order:
                first_token_order.append(index)
    assert first_token_order == sorted(first_token_order)
    assert run.delivered() == [checkpoints.plain(Ask(prompt_of(length), greedy(6))) for length in range(1, 7)]


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_cancellations_and_preemptions_in_any_order_change_nothing(
    seed: int, checkpoints: Checkpoints
) -> None:
    generator = np.random.default_rng(seed)
    asks = [*asks_of_many_kinds(), *(Ask(prompt_of(17), drawn(20 + last, 8)) for last in range(3))]
    run = CoreRun(
        checkpoints.load(),
        num_draft_tokens=int(generator.choice([0, 1, 3, 5])),
        page_size=int(generator.choice([1, 4])),
        max_model_len=48,
        num_pages=int(generator.choice([48, 64, 90])),
        max_num_requests=int(generator.integers(1, 6)),
        prefill_chunk_tokens=int(generator.choice([3, 7, 30])),
        prefix_cache=bool(generator.integers(2)),
    )
    asked: list[Ask] = []
    cancelled: set[int] = set()
    for _ in range(60):
        event = generator.random()
        running = [request for request in run.requests if request.slot is not None]
        if event < 0.3:
            asked.append(asks[int(generator.integers(len(asks)))])
            run.add(asked[-1], priority=int(generator.integers(-2, 3)))
        elif event < 0.36 and run.requests:
            request = run.requests[int(generator.integers(len(run.requests)))]
            if not request.finished:
                cancelled.add(request.request_id)
            run.core.cancel(request)
        elif event < 0.42 and running:
            slot = running[int(generator.integers(len(running)))].slot
            assert slot is not None
            run.core.scheduler.preempt(slot)
        else:
            run.step()
    for index, (ask, output) in enumerate(zip(asked, run.finish(), strict=True)):
        expected = checkpoints.plain(ask)
        assert output == (expected[: len(output)] if index in cancelled else expected)
        assert run.requests[index].finished
    scheduler = run.core.scheduler
    assert scheduler.num_available_pages() == scheduler.allocator.num_pages
    if scheduler.prefix_tree is not None:
        scheduler.prefix_tree.evict(scheduler.prefix_tree.num_pages)
    assert scheduler.allocator.num_free == scheduler.allocator.num_pages


def test_usage_tells_how_often_a_request_was_preempted(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_pages=12, max_model_len=48, prefix_cache=False)
    oldest, *others = serve(engine, [Ask(prompt_of(length), greedy(20)) for length in (9, 10, 11)])
    assert oldest.usage.num_preemptions == 0
    assert sum(result.usage.num_preemptions for result in others) > 0
    (alone,) = serve(engine, [Ask(prompt_of(9), greedy(20))])
    assert alone.usage.num_preemptions == 0


def test_head_of_the_queue_without_room_is_looked_at_again_only_when_something_changed(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=2, max_model_len=80, num_pages=20)
    asks = [Ask(prompt_of(12, seed=1), greedy(8)), Ask(prompt_of(20, seed=2), greedy(40))]
    asks.append(Ask(prompt_of(40, seed=3), greedy(8)))
    expected = [checkpoints.plain(ask) for ask in asks]
    for ask in asks:
        run.add(ask)
    match = PrefixTree.match
    looked_up: list[int] = []

    def counted(self: PrefixTree, token_ids: TokenIds, *, salt: bytes = b"") -> list[int]:
        looked_up.append(run.core.slots.membership)
        return match(self, token_ids, salt=salt)

    monkeypatch.setattr(PrefixTree, "match", counted)
    num_blocked_rounds = 0
    while run.step():
        num_blocked_rounds += len(run.core.scheduler.waiting) > 0
    assert run.delivered() == expected
    assert num_blocked_rounds > 10
    assert len(looked_up) == len(set(looked_up)) < num_blocked_rounds
