"""A priority decides who gets a slot and who loses its pages; never what anybody is answered."""

import pytest

from specdec.errors import RequestError
from specdec.request import PRIORITY_STEP_S
from tests.support.engines import Ask, Checkpoints, CoreRun, drawn, greedy, prompt_of


def order_of_first_tokens(run: CoreRun) -> list[int]:
    order: list[int] = []
    while run.step():
        order += [index for index, updates in enumerate(run.updates) if updates and index not in order]
    return order


def test_slots_go_to_the_highest_priority_then_to_who_came_first(checkpoints: Checkpoints) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=2, max_num_requests=1)
    asks = [Ask(prompt_of(4 + place), greedy(4)) for place in range(6)]
    for ask, priority in zip(asks, (0, 1, 0, -1, 1, -1), strict=True):
        run.add(ask, priority=priority, arrived_at=0.0)
    assert order_of_first_tokens(run) == [3, 5, 0, 2, 1, 4]
    assert run.delivered() == [checkpoints.plain(ask) for ask in asks]


def test_low_priority_is_overtaken_for_a_bounded_time(checkpoints: Checkpoints) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=2, max_num_requests=1)
    low = run.add(Ask(prompt_of(3), greedy(2)), priority=2, arrived_at=0.0)
    for place in range(6):  # one of the highest priority twice in each step's time
        run.add(Ask(prompt_of(4 + place), greedy(2)), arrived_at=(1 + place) * PRIORITY_STEP_S / 2)
    order = order_of_first_tokens(run)
    assert order.index(low.request_id) == 3


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_are_taken_from_the_lowest_priority_then_from_who_came_last(
    page_size: int, checkpoints: Checkpoints
) -> None:
    asks = [Ask(prompt_of(8 + place), drawn(place, 24)) for place in range(4)]
    run = CoreRun(
        checkpoints.load(),
        num_draft_tokens=3,
        page_size=page_size,
        max_model_len=48,
        num_pages=72 // page_size,
        prefix_cache=False,
    )
    for ask, priority in zip(asks, (3, 0, -3, 3), strict=True):
        run.add(ask, priority=priority)
    taken_from: list[int] = []
    before = [0] * len(asks)
    while run.step():
        now = [request.num_preemptions for request in run.requests]
        taken_from += [index for index in range(len(asks)) for _ in range(now[index] - before[index])]
        before = now
    assert run.delivered() == [checkpoints.plain(ask) for ask in asks]
    assert taken_from[0] == 3
    assert before[2] == 0
    assert before[3] >= before[0] >= before[1]
    assert run.core.scheduler.allocator.num_free == run.core.scheduler.allocator.num_pages


def test_request_that_lost_its_pages_comes_back_before_those_of_lower_priority(checkpoints: Checkpoints) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=2, max_num_requests=1)
    high = run.add(Ask(prompt_of(5), greedy(8)))
    low = run.add(Ask(prompt_of(6), greedy(8)), priority=1)
    run.step_until_decoding(high)
    assert high.slot is not None
    run.core.scheduler.preempt(high.slot)
    run.step()
    assert high.slot is not None
    assert low.slot is None
    assert run.finish() == [checkpoints.plain(Ask(prompt_of(5 + place), greedy(8))) for place in range(2)]


@pytest.mark.parametrize("priority", [True, 1.0, "high", None, 10**7, -(10**7)])
def test_what_is_no_priority_is_refused(priority: object, checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine()
    with pytest.raises(RequestError, match="priority must be an integer") as refusal:
        engine.prepare([1], on_delta=lambda _piece: None, priority=priority)  # type: ignore[arg-type]
    assert refusal.value.parameter == "priority"


def test_priority_of_a_submission_counts(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=0, max_num_requests=1)
    order: list[int] = []
    for place, priority in enumerate((5, 0, -5)):
        engine.prepare(
            prompt_of(4 + place), greedy(2), on_delta=lambda _piece, place=place: order.append(place), priority=priority
        ).start()
    while engine.step():
        pass
    assert order == [2, 2, 1, 1, 0, 0]
