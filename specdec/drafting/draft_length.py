"""How many drafts a round asks for, where it is not fixed: the number that promises most tokens a second.

Let p_i be the share of drafts at place i that are kept once those before them are. A round of K drafts emits, for each
request that decodes, E(K) = 1 + p_1 + p_1 p_2 + .. + p_1 .. p_K tokens and takes t(K) seconds. Both are measured while
rounds run; the next round takes the K for which E(K) / t(K) is largest.

- p_i is counted over all requests, about the last 256 trials of each place. A place that was tried little is taken to
  be like the one before it.
- t(K) is taken from the last 8 rounds of K drafts and of the same kind: as many decoding requests, in steps of a factor
  sqrt(2), beside as many prompt tokens (none, up to half of a chunk, more). It is their lower quartile, since what else
  runs on a machine only makes rounds slower.
- Rounds of a kind that is new try every K three times, the longest first. After that every 16th round of a kind tries
  the K below the best one or the K above it, in turn.

The choice follows the clock, so it is another one in every run. What is emitted is not: under the `sampled` rule no
text depends on K. Under `rejection` its distribution does not, but a seed gives another text each time. One process
chooses for all ranks. A round of no drafts refreshes the draft KV as any other does, which an engine that never drafts
is spared.

F = requests that draw, K = drafts.
"""

import math
from collections import deque
from itertools import accumulate

import numpy as np

from specdec.slot_table import Int64Array

_MOST_TRIALS = 256
_ASSUMED_TRIALS = 4  # of a place, kept as often as those of the place before it
_ASSUMED_ACCEPTANCE = 0.75  # of the place before the first
_NUM_TIMES = 8
_NUM_FIRST_TIMES = 3
_TRY_INTERVAL = 16

Kind = tuple[int, int]


class DraftLength:
    """Chooses K and learns from how the round went.

    Args:
        most: Largest K, >= 1.
        prefill_chunk_tokens: Most prompt tokens of a round.
    """

    def __init__(self, most: int, *, prefill_chunk_tokens: int) -> None:
        self.most = most
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._acceptance = _Acceptance(most)
        self._times_by_kind: dict[Kind, _RoundTimes] = {}
        self._chosen: tuple[_RoundTimes, int] | None = None

    def choose(self, num_requests: int, *, num_prompt_tokens: int) -> int:
        """Give K for a round.

        Args:
            num_requests: Requests that decode, >= 1.
            num_prompt_tokens: Prompt tokens that are computed beside them.
        """
        num_halves = math.ceil(2 * num_prompt_tokens / self._prefill_chunk_tokens)
        kind = round(2 * math.log2(num_requests)), num_halves
        times = self._times_by_kind.setdefault(kind, _RoundTimes(self.most))
        num_drafts = times.choose(self._acceptance.emitted_by_length())
        self._chosen = times, num_drafts
        return num_drafts

    def observe(self, num_drafts_F: Int64Array, num_accepted_F: Int64Array, *, round_s: float) -> None:
        """Take in how the round went that was chosen for last.

        Args:
            num_drafts_F: Drafts judged, i64 [F].
            num_accepted_F: Drafts kept, i64 [F].
            round_s: Seconds it took.
        """
        assert self._chosen is not None
        times, num_drafts = self._chosen
        times.seconds_K1[num_drafts].append(round_s)
        self._acceptance.count(num_drafts_F, num_accepted_F)


class _Acceptance:
    """Shares of drafts that are kept, by place."""

    def __init__(self, most: int) -> None:
        self._place_K = np.arange(1, most + 1)
        self._num_tried_K = np.zeros(most)
        self._num_kept_K = np.zeros(most)

    def count(self, num_drafts_F: Int64Array, num_accepted_F: Int64Array) -> None:
        """Count a round; what is older weighs less."""
        is_kept_FK = self._place_K <= num_accepted_F[:, None]
        is_tried_FK = self._place_K <= np.minimum(num_drafts_F, num_accepted_F + 1)[:, None]
        self._num_tried_K += is_tried_FK.sum(axis=0)
        self._num_kept_K += is_kept_FK.sum(axis=0)
        excess_K = np.maximum(self._num_tried_K / _MOST_TRIALS, 1)
        self._num_tried_K /= excess_K
        self._num_kept_K /= excess_K

    def emitted_by_length(self) -> list[float]:
        """Tokens that a request is expected to get of a round with 0, 1, .. K drafts."""
        share, shares = _ASSUMED_ACCEPTANCE, []
        for num_tried, num_kept in zip(self._num_tried_K.tolist(), self._num_kept_K.tolist(), strict=True):
            share = (num_kept + _ASSUMED_TRIALS * share) / (num_tried + _ASSUMED_TRIALS)
            shares.append(share)
        return list(accumulate(accumulate(shares, initial=1.0, func=lambda all_kept, share: all_kept * share)))


class _RoundTimes:
    """Seconds of the latest rounds of one kind, by K."""

    def __init__(self, most: int) -> None:
        self.seconds_K1: list[deque[float]] = [deque(maxlen=_NUM_TIMES) for _ in range(most + 1)]
        self._num_chosen = 0

    def choose(self, emitted_by_length: list[float]) -> int:
        """Give K for the next round."""
        self._num_chosen += 1
        most = len(self.seconds_K1) - 1
        num_times, num_drafts = min((len(seconds), -k) for k, seconds in enumerate(self.seconds_K1))
        if num_times < _NUM_FIRST_TIMES:
            return -num_drafts
        per_second = [
            emitted / sorted(seconds)[len(seconds) // 4]
            for emitted, seconds in zip(emitted_by_length, self.seconds_K1, strict=True)
        ]
        best = per_second.index(max(per_second))
        num_tries, is_between = divmod(self._num_chosen, _TRY_INTERVAL)
        if is_between:
            return best
        neighbours = [k for k in (best - 1, best + 1) if 0 <= k <= most]
        return neighbours[num_tries % len(neighbours)]
