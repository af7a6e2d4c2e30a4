"""Whether a first difference between two numbers of ranks is excused: only where the choice hung on rounding.

Partial sums are added in another order on another number of ranks, so their logits and index scores differ by rounding.
A first different token is excused if, at that step, one rank's score of the one token beats its score of the other by
less than 1e-4, or the last position that an indexer chose beats the best it left out by less. Nothing else is.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.kernels.gumbel_noise import NoiseStream, gumbel_argmax
from specdec.kernels.logits_transform import transform_logits
from specdec.models.glm.checkpoint import LoadedCheckpoint
from specdec.result import GenerationResult
from specdec.sampling.sampling_rows import RequestSampling, SamplingBatch
from tests.support.engines import Ask

NARROW = 1e-4
tally: Counter[str] = Counter()  # outputs "compared" and "excused" by the test that runs


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """Where two outputs of one ask part.

    Attributes:
        place: Output token, from 0.
        token_gap: By how much one rank prefers the right token to ours, noise included; inf where an output just ended.
        index_margin: Least margin of an indexer's choice at that step.
    """

    place: int
    token_gap: float
    index_margin: float

    @property
    def is_excused(self) -> bool:
        return min(abs(self.token_gap), self.index_margin) < NARROW


def assert_equal_but_for_narrow_choices(
    checkpoint: LoadedCheckpoint,
    asks: Sequence[Ask],
    ours: Sequence[tuple[int, ...]],
    theirs: Sequence[tuple[int, ...]],
) -> None:
    """B15, A16: equal tokens; a first difference must hang on a choice narrower than rounding, and is counted."""
    for ask, output, expected in zip(asks, ours, theirs, strict=True):
        difference = first_difference(checkpoint, ask, output, expected)
        assert difference is None or difference.is_excused, difference
        tally.update(compared=1, excused=difference is not None)


def logprob_distance(results: Sequence[GenerationResult], expected: Sequence[GenerationResult]) -> float:
    """Largest difference of the log-probability of an emitted token, up to where outputs part."""
    most = 0.0
    for ours, theirs in zip(results, expected, strict=True):
        pairs = zip(ours.choices[0].logprobs or (), theirs.choices[0].logprobs or (), strict=False)
        for mine, other in itertools.takewhile(lambda pair: pair[0].token_id == pair[1].token_id, pairs):
            most = max(most, abs(mine.raw_logprob - other.raw_logprob))
    return most


def first_difference(
    checkpoint: LoadedCheckpoint, ask: Ask, ours: tuple[int, ...], theirs: tuple[int, ...]
) -> FirstDifference | None:
    """Compare two outputs; None where they are equal.

    Args:
        checkpoint: The whole model, for what one rank sees.
        ask: What both were asked.
        ours: The output in question.
        theirs: The right one.
    """
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    place = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    known = (*ask.prompt, *ours[:place])
    logits_TV, trace = Engine(checkpoint, EngineConfig(num_draft_tokens=0, max_model_len=len(known) + 1)).trace(known)
    margins = [float(margin_T[-1]) for margin_T in trace.index_margin_T.values()]
    gap = float("inf")
    if place < shorter:
        gap = draw_value(ask, logits_TV, theirs, place) - draw_value(ask, logits_TV, ours, place)
    return FirstDifference(place=place, token_gap=gap, index_margin=min(margins, default=float("inf")))


def draw_value(ask: Ask, logits_TV: torch.Tensor, output: tuple[int, ...], place: int) -> float:
    """What the token at `place` scores to be drawn after the output before it: its logit, and noise where drawn."""
    sampling = RequestSampling(
        ask.params,
        choice=0,
        prompt_ids=ask.prompt,
        stop_ids=ask.params.stop_token_ids,
        vocab_size=logits_TV.shape[1],
    )
    sampling.observe(output[:place])
    rows = SamplingBatch([sampling], device=torch.device("cpu")).verify_rows(np.array([len(ask.prompt) + place]), [()])
    transformed_1V = transform_logits(logits_TV[-1:].clone(), rows.rules)
    only_1V = torch.full_like(transformed_1V, -torch.inf)
    only_1V[0, output[place]] = transformed_1V[0, output[place]]
    if rows.all_greedy:
        return float(only_1V.max())
    return float(gumbel_argmax(only_1V, rows.keys(NoiseStream.TARGET))[1])
