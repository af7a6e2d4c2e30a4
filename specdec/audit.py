"""Run one set of prompts over one rank and over many, speculation off and on, and compare everything that should agree.

What is compared: tokens with those of one rank without speculation; logits and selected positions of every row of the
same sequences; each rank's own decisions before the ranks agree; the collectives that each rank took part in.

T = rows, K = selected slots.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.engine import Engine
from specdec.models.glm.trace import ForwardTrace
from specdec.sampling.sampling_params import SamplingParams

TIE_GAP = 1e-4  # a first difference between geometries is excused only where the choice hung on less than this


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where the tokens of a configuration first leave those of one rank without speculation.

    Attributes:
        prompt: Number of the prompt.
        position: Output token, from 0.
        expected: Token of the reference; None where the reference had ended.
        found: Token instead; None where the output had ended.
        gap: How narrow the reference's choice was at that step: the lesser of its top-2 logit gap, and of the margin by
            which the last selected position of any layer beat the next.
        is_excused: The geometry differs from the reference's, and the gap is below the limit.
    """

    prompt: int
    position: int
    expected: int | None
    found: int | None
    gap: float
    is_excused: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedRun:
    """What one configuration did.

    Attributes:
        tp_size: Tensor-parallel ranks.
        dcp_size: Ranks of these that share pages.
        num_draft_tokens: K.
        num_tokens: Tokens generated.
        differences: First differences, one a prompt at most.
        max_logit_distance: Largest difference of a logit from one rank's, same sequences.
        num_selections: (row, layer) pairs whose selected sets were compared.
        num_selection_differences: Those whose sets differ.
        disagreements_per_rank: Decisions of each rank that were not the first rank's.
        num_decisions: Decisions compared.
        acceptance_length: Mean tokens a round; None without drafts.
        num_rounds: Rounds that drew tokens.
        collectives_per_rank: Collectives that each rank took part in.
        is_sequence_equal: Whether all ranks took part in the same ones in the same order.
    """

    tp_size: int
    dcp_size: int
    num_draft_tokens: int
    num_tokens: int
    differences: tuple[Difference, ...]
    max_logit_distance: float
    num_selections: int
    num_selection_differences: int
    disagreements_per_rank: tuple[int, ...]
    num_decisions: int
    acceptance_length: float | None
    num_rounds: int
    collectives_per_rank: tuple[int, ...]
    is_sequence_equal: bool

    @property
    def is_consistent(self) -> bool:
        """Whether nothing is left that has no excuse."""
        return (
            all(difference.is_excused for difference in self.differences)
            and not any(self.disagreements_per_rank)
            and self.is_sequence_equal
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Observed:
    """What is read off an engine: outputs by prompt, and traced passes over the reference's sequences."""

    token_ids: tuple[tuple[int, ...], ...]
    logits: list[torch.Tensor]
    traces: list[ForwardTrace]


def audit(
    start: Callable[..., Engine],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    settings: Mapping[str, Any],
) -> list[AuditedRun]:
    """Run the prompts as one batch under four configurations, and compare them with the first.

    Args:
        start: Starts an engine of the model with the settings it is given.
        prompts: Token ids.
        params: With a seed unless greedy.
        settings: Of every engine, with `tp_size`, `dcp_size` and `num_draft_tokens`; noise on the logits is added where
            there is more than one rank.

    Returns:
        One rank without drafts (the reference), one rank with, all ranks without, all ranks with.
    """
    alone = {**settings, "tp_size": 1, "dcp_size": 1, "logits_noise": 0.0}
    runs: list[AuditedRun] = []
    reference: _Observed | None = None
    for sizes in (alone, dict(settings)):
        for num_draft_tokens in dict.fromkeys((0, int(settings["num_draft_tokens"]))):
            with start(**{**sizes, "num_draft_tokens": num_draft_tokens}) as engine:
                run, observed = _run(engine, prompts, params, reference)
            runs.append(run)
            reference = reference or observed
    return runs


def _run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, reference: _Observed | None
) -> tuple[AuditedRun, _Observed]:
    config = engine.config
    decisions = engine.start_audit(rate=1.0)
    engine.record_collectives(True)
    results = engine.generate([list(prompt) for prompt in prompts], params)
    collectives = engine.record_collectives(False)
    outputs = tuple(result.token_ids for result in results)
    compared = outputs if reference is None else reference.token_ids
    traced = [engine.trace([*prompt, *output]) for prompt, output in zip(prompts, compared, strict=True)]
    observed = _Observed(
        token_ids=outputs, logits=[logits for logits, _ in traced], traces=[trace for _, trace in traced]
    )
    expected = observed if reference is None else reference
    selections = [
        _selection_differences(mine, theirs) for mine, theirs in zip(observed.traces, expected.traces, strict=True)
    ]
    stats = [result.speculation for result in results]
    num_tokens, num_drafting = sum(map(len, outputs)), sum(each.num_drafts for each in stats)
    return (
        AuditedRun(
            tp_size=config.tp_size,
            dcp_size=config.dcp_size,
            num_draft_tokens=config.num_draft_tokens,
            num_tokens=num_tokens,
            differences=tuple(_differences(observed, expected, prompts, excuses=config.tp_size > 1)),
            max_logit_distance=max(
                float((mine - theirs).abs().max())
                for mine, theirs in zip(observed.logits, expected.logits, strict=True)
            ),
            num_selections=sum(num for num, _ in selections),
            num_selection_differences=sum(num for _, num in selections),
            disagreements_per_rank=tuple(decisions.disagreements_N.tolist()),
            num_decisions=decisions.num_decisions,
            acceptance_length=1 + sum(each.num_accepted_tokens for each in stats) / num_drafting
            if num_drafting
            else None,
            num_rounds=decisions.num_rounds,
            collectives_per_rank=tuple(map(len, collectives)),
            is_sequence_equal=all(sequence == collectives[0] for sequence in collectives),
        ),
        observed,
    )


def _differences(
    observed: _Observed, expected: _Observed, prompts: Sequence[Sequence[int]], *, excuses: bool
) -> list[Difference]:
    found = []
    for prompt, (mine, theirs) in enumerate(zip(observed.token_ids, expected.token_ids, strict=True)):
        if mine == theirs:
            continue
        longest = max(len(mine), len(theirs))
        position = next(i for i in range(longest) if mine[i : i + 1] != theirs[i : i + 1])
        gap = _narrowest_choice(
            expected.logits[prompt], expected.traces[prompt], row=len(prompts[prompt]) - 1 + position
        )
        found.append(
            Difference(
                prompt=prompt,
                position=position,
                expected=theirs[position] if position < len(theirs) else None,
                found=mine[position] if position < len(mine) else None,
                gap=gap,
                is_excused=excuses and gap < TIE_GAP,
            )
        )
    return found


def _narrowest_choice(logits_TV: torch.Tensor, trace: ForwardTrace, *, row: int) -> float:
    """Give the least margin of the choices that the token after `row` hung on: its top two logits, and its slots."""
    first, second = logits_TV[row].topk(2).values.tolist()
    # Rows in front of those with a margin had too few positions for a choice.
    margins = [
        float(margin_T[row - len(logits_TV)])
        for margin_T in trace.index_margin_T.values()
        if len(logits_TV) - row <= len(margin_T)
    ]
    return float(min([first - second, *margins]))


def _selection_differences(mine: ForwardTrace, theirs: ForwardTrace) -> tuple[int, int]:
    """Count the (row, layer) pairs, and those whose selected sets differ; both are ascending lists."""
    num_pairs = num_different = 0
    for layer, selected_TK in theirs.selected_TK.items():
        is_different_T = (selected_TK != mine.selected_TK[layer]).any(dim=1)
        num_pairs += len(is_different_T)
        num_different += int(is_different_T.sum())
    return num_pairs, num_different
