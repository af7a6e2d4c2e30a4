"""The draft length that promises most tokens a second is found, kept, and left when it no longer is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from specdec.drafting.draft_length import DraftLength

MOST = 5
CHUNK = 256
FIRST_ROUNDS = 3 * (MOST + 1)

RoundTime = Callable[[int, int], float]  # seconds of a round of B requests and K drafts


@dataclass
class Rounds:
    """Rounds that take a known time and keep drafts at known rates."""

    rate_K: Sequence[float]
    round_s: RoundTime
    length: DraftLength = field(default_factory=lambda: DraftLength(MOST, prefill_chunk_tokens=CHUNK))
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def run(self, num_rounds: int, *, num_requests: int, num_prompt_tokens: int = 0, noise: float = 0.05) -> list[int]:
        """Give the lengths that were chosen."""
        chosen = []
        for _ in range(num_rounds):
            num_drafts = self.length.choose(num_requests, num_prompt_tokens=num_prompt_tokens)
            is_right_FK = self.generator.random((num_requests, num_drafts)) < np.array(self.rate_K[:num_drafts])
            num_accepted_F = np.cumprod(is_right_FK, axis=1).sum(axis=1)
            seconds = self.round_s(num_requests, num_drafts) * self.generator.uniform(1 - noise, 1 + noise)
            if self.generator.random() < noise:
                seconds *= 20  # now and then something else runs
            self.length.observe(np.full(num_requests, num_drafts), num_accepted_F, round_s=seconds)
            chosen.append(num_drafts)
        return chosen

    def efficiency(self, chosen: Sequence[int], *, num_requests: int) -> float:
        """Tokens a second that these lengths are worth, as a share of what the best one is."""
        emitted_K1 = np.cumsum(np.cumprod([1.0, *self.rate_K]))
        seconds_K1 = np.array([self.round_s(num_requests, num_drafts) for num_drafts in range(MOST + 1)])
        index = np.array(chosen)
        return float(emitted_K1[index].sum() / seconds_K1[index].sum() / (emitted_K1 / seconds_K1).max())


def by_rows(base_ms: float, row_ms: float, draft_ms: float) -> RoundTime:
    return lambda num_requests, num_drafts: base_ms + row_ms * num_requests * (num_drafts + 1) + draft_ms * num_drafts


GOOD, FAIR, BAD = (0.9, 0.9, 0.85, 0.85, 0.8), (0.7, 0.6, 0.6, 0.5, 0.5), (0.1, 0.1, 0.1, 0.1, 0.1)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize(
    ("rates", "round_s", "num_requests", "best"),
    [
        (GOOD, by_rows(20, 0.1, 0.5), 1, 5),
        (FAIR, by_rows(20, 0.5, 2.5), 1, 3),
        (FAIR, by_rows(20, 1.5, 2.5), 32, 0),
        (BAD, by_rows(20, 0.5, 2.5), 4, 0),
        # The first draft is dear and the others are cheap: no draft is better than one, but worse than many.
        (GOOD, lambda _requests, num_drafts: 10 + 12 * (num_drafts > 0) + 0.2 * num_drafts, 2, 5),
    ],
)
def test_best_length_is_found_and_kept(
    rates: Sequence[float], round_s: RoundTime, num_requests: int, best: int, noise: float
) -> None:
    rounds = Rounds(rates, round_s)
    assert rounds.efficiency([best], num_requests=num_requests) == 1
    first = rounds.run(FIRST_ROUNDS, num_requests=num_requests, noise=noise)
    assert first == 3 * list(range(MOST, -1, -1))
    chosen = rounds.run(400, num_requests=num_requests, noise=noise)
    assert rounds.efficiency(chosen, num_requests=num_requests) > (0.9 if noise == 0.2 else 0.98)


def test_only_neighbours_are_tried_once_every_length_was() -> None:
    rounds = Rounds((0.8, 0.8, 0.1, 0.1, 0.1), by_rows(20, 0.5, 0.5))
    rounds.run(FIRST_ROUNDS, num_requests=8, noise=0)
    chosen = rounds.run(320, num_requests=8, noise=0)
    assert {num_drafts: chosen.count(num_drafts) for num_drafts in set(chosen)} == {1: 10, 2: 300, 3: 10}


def test_each_number_of_requests_has_its_own_length() -> None:
    rounds = Rounds(FAIR, by_rows(20, 1.0, 1.0))
    for num_requests in (1, 8, 64):
        rounds.run(FIRST_ROUNDS, num_requests=num_requests)
    chosen = {num_requests: rounds.run(100, num_requests=num_requests) for num_requests in (64, 1, 8)}
    for num_requests, lengths in chosen.items():
        assert rounds.efficiency(lengths, num_requests=num_requests) > 0.97
    assert np.mean(chosen[1]) > np.mean(chosen[8]) > np.mean(chosen[64])


def test_rounds_with_prompts_are_measured_by_themselves() -> None:
    alone, beside_a_chunk = by_rows(10, 9.0, 6.0), by_rows(10 + 600, 9.0, 6.0)  # beside it drafts hardly matter
    rounds = Rounds(GOOD, alone)
    rounds.run(FIRST_ROUNDS, num_requests=2)
    assert np.median(rounds.run(100, num_requests=2)) <= 1
    rounds.round_s = beside_a_chunk
    rounds.run(FIRST_ROUNDS, num_requests=2, num_prompt_tokens=CHUNK)
    assert np.median(rounds.run(100, num_requests=2, num_prompt_tokens=CHUNK)) == MOST
    rounds.round_s = alone
    assert np.median(rounds.run(10, num_requests=2)) <= 1


def test_length_follows_when_acceptance_or_costs_change() -> None:
    rounds = Rounds(GOOD, by_rows(20, 0.5, 2.5))
    for rates, round_s, num_rounds in (
        (GOOD, by_rows(20, 0.5, 2.5), FIRST_ROUNDS),
        (BAD, by_rows(20, 0.5, 2.5), 400),
        (GOOD, by_rows(20, 0.5, 2.5), 3000),  # of which only every 16th round can tell
        (GOOD, by_rows(10, 5.0, 20.0), 1000),
        (GOOD, by_rows(40, 0.1, 0.5), 1000),
    ):
        rounds.rate_K, rounds.round_s = rates, round_s
        rounds.run(num_rounds, num_requests=4)
        assert rounds.efficiency(rounds.run(160, num_requests=4), num_requests=4) > 0.97


def test_requests_without_drafts_say_nothing_about_them() -> None:
    length = DraftLength(1, prefill_chunk_tokens=CHUNK)
    for _ in range(100):  # drafts are always kept, but half of the requests have none: at their limit, or just begun
        num_drafts = length.choose(8, num_prompt_tokens=0)
        num_drafts_F = np.array([0, num_drafts] * 4)
        length.observe(num_drafts_F, num_drafts_F, round_s=1.0 + 0.9 * num_drafts)
    assert [length.choose(8, num_prompt_tokens=0) for _ in range(10)].count(1) >= 9
