"""Requests wait in the order of their turns, and those that are late are found."""

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.request import PRIORITY_STEP_S, Request
from specdec.sampling.finish import FinishRule, OutputJudge
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.sampling_rows import RequestSampling
from specdec.waiting_queue import WaitingQueue

PARAMS = SamplingParams(seed=0)
RULE = FinishRule.of(PARAMS, eos_token_ids=(), max_tokens=8)
SAMPLING = RequestSampling(PARAMS, choice=0, prompt_ids=[1], stop_ids=(), vocab_size=100)


def request_of(request_id: int, *, priority: int = 0, arrived_at: float = 0.0, deadline: float = 1e9) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=np.array([1]),
        params=PARAMS,
        choice_index=0,
        limit=9,
        stop_ids=frozenset(),
        sampling=SAMPLING,
        judge=OutputJudge(PARAMS, RULE, None),
        on_update=lambda _update: None,
        priority=priority,
        arrived_at=arrived_at,
        deadline=deadline,
    )


def test_lower_numbers_go_first_and_equal_ones_in_order_of_arrival() -> None:
    queue = WaitingQueue()
    for request_id, priority in enumerate((0, 1, 0, -1, 1, -1)):
        queue.add(request_of(request_id, priority=priority, arrived_at=float(request_id)))
    assert [request.request_id for request in queue] == [3, 5, 0, 2, 1, 4]
    assert queue.first.request_id == 3


def test_nobody_overtakes_who_has_waited_a_minute_longer_for_each_step() -> None:
    queue = WaitingQueue()
    low = request_of(0, priority=5)
    just_before, just_after = (
        request_of(request_id, arrived_at=5 * PRIORITY_STEP_S + late) for request_id, late in ((1, -1.0), (2, 1.0))
    )
    queue.add(just_after, low, just_before)
    assert list(queue) == [just_before, low, just_after]


def test_late_ones_are_found_whatever_their_turn_until_they_are_removed() -> None:
    queue = WaitingQueue()
    requests = [request_of(place, deadline=deadline) for place, deadline in enumerate((7.0, 3.0, 5.0, 3.0))]
    queue.add(*requests, request_of(9, deadline=float("inf")))
    assert queue.late(2.9) == []
    assert queue.late(5.0) == [requests[1], requests[3], requests[2]]
    queue.remove(requests[3])
    assert queue.late(5.0) == [requests[1], requests[2]]
    assert len(queue) == 4


@given(st.data())
def test_it_is_a_sorted_list_whatever_comes_and_goes(data: st.DataObject) -> None:
    queue = WaitingQueue()
    model: list[Request] = []
    for request_id in range(data.draw(st.integers(1, 30))):
        if model and data.draw(st.booleans()):
            request = data.draw(st.sampled_from(model))
            queue.remove(request)
            queue.remove(request)  # it is not there any more
            model.remove(request)
            assert request not in queue
        else:
            times = st.floats(0, 100)
            request = request_of(
                request_id,
                priority=data.draw(st.integers(-1, 1)),
                arrived_at=data.draw(times),
                deadline=data.draw(times),
            )
            queue.add(request)
            model.append(request)
            assert request in queue
        assert list(queue) == sorted(model, key=lambda each: (each.turn, each.request_id))
        assert len(queue) == len(model)
        now = data.draw(st.floats(0, 100))
        assert set(queue.late(now)) == {each for each in model if each.deadline <= now}


def test_requests_are_added_by_many_threads_while_others_leave() -> None:
    queue = WaitingQueue()
    requests = [[request_of(1000 * thread + place) for place in range(300)] for thread in range(4)]
    threads = [threading.Thread(target=lambda mine=mine: [queue.add(each) for each in mine]) for mine in requests]
    for thread in threads:
        thread.start()
    taken: list[Request] = []
    while len(taken) < 1200:
        if queue:
            taken.append(queue.first)
            queue.late(0.0)
            queue.remove(taken[-1])
    for thread in threads:
        thread.join()
    assert len(queue) == 0
    assert sorted(each.request_id for each in taken) == sorted(each.request_id for mine in requests for each in mine)
