"""How the prompts of a round share its tokens: none starves, and a short one does not wait for a long one."""

from dataclasses import dataclass
from itertools import accumulate
from operator import and_

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.prompt_chunks import share_chunk


def share(num_left: list[int], num_tokens: int, priority: list[int] | None = None) -> list[int]:
    shares: list[int] = share_chunk(
        np.array(num_left), np.array(priority or [0] * len(num_left)), num_tokens=num_tokens
    ).tolist()
    return shares


@pytest.mark.parametrize(
    ("num_left", "num_tokens", "expected"),
    [
        ([100], 8, [8]),
        ([3], 8, [3]),
        ([100, 100], 8, [4, 4]),
        ([100, 2], 8, [6, 2]),  # what the short one does not need
        ([2, 100], 8, [2, 6]),
        ([2, 3], 8, [2, 3]),
        ([100, 50, 3, 50], 8, [4, 1, 3, 0]),  # shortest first, the earlier one of two that are equal
        ([100, 50], 1, [1, 0]),
        ([100, 50], 3, [2, 1]),
    ],
)
def test_half_is_for_the_earliest_and_half_for_the_shortest(
    num_left: list[int], num_tokens: int, expected: list[int]
) -> None:
    assert share(num_left, num_tokens) == expected


def test_shortest_of_the_highest_priority_comes_before_shorter_ones_of_lower_priority() -> None:
    assert share([100, 3, 50, 40], 8, [5, 5, 0, 0]) == [4, 0, 0, 4]


@given(
    num_left=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    num_tokens=st.integers(1, 40),
    data=st.data(),
)
def test_every_token_of_the_round_is_used_where_there_is_work(
    num_left: list[int], num_tokens: int, data: st.DataObject
) -> None:
    priority = data.draw(st.lists(st.integers(-1, 1), min_size=len(num_left), max_size=len(num_left)))
    shares = share(num_left, num_tokens, priority)
    assert sum(shares) == min(num_tokens, sum(num_left))
    assert all(0 <= given <= left for given, left in zip(shares, num_left, strict=True))
    assert shares[0] >= min(num_left[0], -(-num_tokens // 2))
    others = sorted(range(1, len(num_left)), key=lambda place: (priority[place], num_left[place], place))
    is_served = [shares[place] == num_left[place] for place in others]
    for place, ahead in zip(others[1:], accumulate(is_served, and_), strict=False):
        assert ahead or not shares[place]  # nobody gets a token before those that come first have all they need


@dataclass
class Prompt:
    arrives: int
    num_left: int
    bound: int = 0


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 90)), min_size=1, max_size=12),
    num_tokens=st.integers(2, 24),
)
def test_every_prompt_is_done_in_a_number_of_rounds_that_later_ones_cannot_change(
    arrivals: list[tuple[int, int]], num_tokens: int
) -> None:
    half = -(-num_tokens // 2)
    prompts = [Prompt(arrives, length) for arrives, length in sorted(arrivals)]
    running: list[Prompt] = []
    for now in range(200):
        for prompt in prompts:
            if prompt.arrives == now:
                running.append(prompt)
                prompt.bound = now + sum(-(-ahead.num_left // half) for ahead in running)
        shares = share([prompt.num_left for prompt in running], num_tokens) if running else []
        for prompt, num_computed in zip(running, shares, strict=True):
            prompt.num_left -= num_computed
        running = [prompt for prompt in running if prompt.num_left]
        assert all(now < prompt.bound for prompt in running)
    assert all(prompt.num_left == 0 for prompt in prompts if prompt.bound and prompt.bound < 200)
