"""Run one set of prompts over one rank and over many, speculation off and on, and compare everything that should agree.

What is compared: tokens with those of one rank without speculation, and those with drafts with those of the same ranks
without; logits and selected positions of every row of the same sequences; each rank's own decisions before the ranks
agree; the collectives that each rank took part in.

Where rounds stay on the device, in graphs, the ranks draw without agreeing first: what each of them drew is compared
round by round, and the same prompts then run in passes, for all that only passes tell. The kernels of a GPU give no
selected positions, and logits are compared in the rows that tokens were drawn from.

T = rows, K = selected slots, V = vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.engine import Engine
from specdec.kernel_set import KernelSet
from specdec.models.glm.trace import ForwardTrace
from specdec.sampling.sampling_params import SamplingParams
from specdec.slot_table import Int64Array

TIE_GAP = 1e-4  # a first difference between geometries is excused only where the choice hung on less than this
# Of a row's logits, on kernels: rounding to bfloat16 and to FP8 moves them by a few percent. Up to there a choice is
# excused that hung on less than the logits of that very row moved.
ROW_ERROR = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where the tokens of a configuration first leave those of one rank without speculation.

    Attributes:
        prompt: Number of the prompt.
        position: Output token, from 0.
        expected: Token of the reference; None where the reference had ended.
        found: Token instead; None where the output had ended.
        gap: How narrow the reference's choice was at that step: the lesser of its top-2 logit gap, and of the margin by
            which the last selected position of any layer beat the next, where that is known.
        limit: What it would be excused below: `TIE_GAP`; on kernels twice the distance of the row's logits, if more.
        is_excused: The geometry differs from the reference's, and the gap is below the limit.
    """

    prompt: int
    position: int
    expected: int | None
    found: int | None
    gap: float
    limit: float
    is_excused: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRounds:
    """What the rounds of a configuration did that stayed on the device.

    Attributes:
        num_rounds: Rounds.
        num_decisions: Decisions compared, one for each request and round.
        disagreements_per_rank: Those of each rank that were not the first rank's.
        other_texts: Numbers of the prompts whose tokens are not those of passes.
    """

    num_rounds: int
    num_decisions: int
    disagreements_per_rank: tuple[int, ...]
    other_texts: tuple[int, ...]

    @property
    def is_consistent(self) -> bool:
        """Whether all ranks drew the same, and what passes draw."""
        return not any(self.disagreements_per_rank) and not self.other_texts


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedRun:
    """What one configuration did.

    Attributes:
        tp_size: Tensor-parallel ranks.
        dcp_size: Ranks of these that share pages.
        num_draft_tokens: K.
        num_tokens: Tokens generated.
        differences: First differences, one a prompt at most.
        changed_by_drafts: Numbers of the prompts whose tokens are not those of the same ranks without drafts, which
            nothing excuses.
        max_logit_distance: Largest difference of a logit from one rank's, same sequences.
        max_row_error: Largest norm of the difference of a row's logits, by the norm of one rank's.
        num_selections: (row, layer) pairs whose selected sets were compared; None where the kernels give none.
        num_selection_differences: Those whose sets differ.
        disagreements_per_rank: Decisions of each rank that were not the first rank's.
        num_decisions: Decisions compared.
        acceptance_length: Mean tokens a round; None without drafts.
        num_rounds: Rounds that drew tokens.
        collectives_per_rank: Collectives that each rank took part in.
        is_sequence_equal: Whether all ranks took part in the same ones in the same order.
        on_device: Of rounds that stay on the device; None where none do.
    """

    tp_size: int
    dcp_size: int
    num_draft_tokens: int
    num_tokens: int
    differences: tuple[Difference, ...]
    changed_by_drafts: tuple[int, ...]
    max_logit_distance: float
    max_row_error: float
    num_selections: int | None
    num_selection_differences: int
    disagreements_per_rank: tuple[int, ...]
    num_decisions: int
    acceptance_length: float | None
    num_rounds: int
    collectives_per_rank: tuple[int, ...]
    is_sequence_equal: bool
    on_device: DeviceRounds | None = None

    @property
    def is_consistent(self) -> bool:
        """Whether nothing is left that has no excuse."""
        return (
            all(difference.is_excused for difference in self.differences)
            and not self.changed_by_drafts
            and not any(self.disagreements_per_rank)
            and self.is_sequence_equal
            and self.max_row_error < ROW_ERROR
            and (self.on_device is None or self.on_device.is_consistent)
        )


Texts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Observed:
    """What is read off an engine.

    Attributes:
        token_ids: Outputs by prompt.
        logits: Of passes over the reference's sequences, f32 [T, V]; the last row is the sequence's.
        traces: Of the same; none where the kernels give none.
    """

    token_ids: Texts
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
        plain: Texts | None = None
        for num_draft_tokens in dict.fromkeys((0, int(settings["num_draft_tokens"]))):
            with start(**{**sizes, "num_draft_tokens": num_draft_tokens}) as engine:
                run, observed = _run(engine, prompts, params, reference, plain)
            del engine  # its memory goes before that of the next comes
            runs.append(run)
            reference, plain = reference or observed, plain or observed.token_ids
    return runs


def _run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    reference: _Observed | None,
    plain: Texts | None,
) -> tuple[AuditedRun, _Observed]:
    config = engine.config
    recorded = _rounds_on_device(engine, prompts, params)  # first: an audit keeps rounds off the device
    decisions = engine.start_audit(rate=1.0)
    engine.record_collectives(True)
    results = engine.generate([list(prompt) for prompt in prompts], params)
    collectives = engine.record_collectives(False)
    outputs = tuple(result.token_ids for result in results)
    compared = outputs if reference is None else reference.token_ids
    observed = _observed(engine, prompts, outputs, compared)
    expected = observed if reference is None else reference
    distances, errors = zip(*map(_logit_distances, observed.logits, expected.logits), strict=True)
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
            differences=tuple(_differences(observed, expected, excuses=config.tp_size > 1)),
            changed_by_drafts=_other_texts(outputs, outputs if plain is None else plain),
            max_logit_distance=float(torch.cat(distances).max()),  # unlike Python's, torch's largest is NaN if one is
            max_row_error=float(torch.cat(errors).max()),
            num_selections=sum(num for num, _ in selections) if observed.traces else None,
            num_selection_differences=sum(num for _, num in selections),
            disagreements_per_rank=tuple(decisions.disagreements_N.tolist()),
            num_decisions=decisions.num_decisions,
            acceptance_length=1 + sum(each.num_accepted_tokens for each in stats) / num_drafting
            if num_drafting
            else None,
            num_rounds=decisions.num_rounds,
            collectives_per_rank=tuple(map(len, collectives)),
            is_sequence_equal=all(sequence == collectives[0] for sequence in collectives),
            on_device=None if recorded is None else _compared_rounds(*recorded, passes=outputs),
        ),
        observed,
    )


def _rounds_on_device(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[Texts, list[list[Int64Array]]] | None:
    """Give the outputs of rounds on the device, and what each rank drew; None where rounds do not stay there."""
    ranks = engine.core.ranks
    if ranks.worker.device_rounds is None:
        return None
    engine.between_rounds(lambda: ranks.record_decoded(True))
    results = engine.generate([list(prompt) for prompt in prompts], params)
    rounds = engine.between_rounds(lambda: ranks.record_decoded(False))
    return tuple(result.token_ids for result in results), rounds


def _compared_rounds(outputs: Texts, rounds: list[list[Int64Array]], *, passes: Texts) -> DeviceRounds:
    """Compare what the ranks drew; a round that a rank did not have counts as other decisions of all its requests."""
    first = rounds[0]
    disagreements = [
        sum(
            len(expected_BQ)
            if number >= len(mine) or mine[number].shape != expected_BQ.shape
            else int((mine[number] != expected_BQ).any(axis=1).sum())
            for number, expected_BQ in enumerate(first)
        )
        for mine in rounds
    ]
    return DeviceRounds(
        num_rounds=len(first),
        num_decisions=sum(map(len, first)),
        disagreements_per_rank=tuple(disagreements),
        other_texts=_other_texts(outputs, passes),
    )


def _other_texts(outputs: Texts, expected: Texts) -> tuple[int, ...]:
    return tuple(prompt for prompt, pair in enumerate(zip(outputs, expected, strict=True)) if pair[0] != pair[1])


def _observed(engine: Engine, prompts: Sequence[Sequence[int]], outputs: Texts, compared: Texts) -> _Observed:
    """Run passes over the prompts and the outputs that are compared."""
    logits, traces = [], []
    for prompt, output in zip(prompts, compared, strict=True):
        if engine.core.ranks.worker.kernels.kernels is KernelSet.TORCH:
            logits_TV, trace = engine.trace([*prompt, *output])
            traces.append(trace)
        else:
            scored_TV = engine.score([*prompt, *output], with_logits=True).logits_TV
            assert scored_TV is not None
            logits_TV = torch.from_numpy(scored_TV[len(prompt) - 1 :].copy())
        logits.append(logits_TV)
    return _Observed(token_ids=outputs, logits=logits, traces=traces)


def _logit_distances(mine_TV: torch.Tensor, theirs_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give each row's largest difference of a logit, and the norm of all by the norm of theirs, [T]."""
    distance_TV = mine_TV - theirs_TV
    norm_T = theirs_TV.norm(dim=1).clamp(min=torch.finfo(theirs_TV.dtype).tiny)
    return distance_TV.abs().amax(dim=1), distance_TV.norm(dim=1) / norm_T


def _differences(observed: _Observed, expected: _Observed, *, excuses: bool) -> list[Difference]:
    found = []
    for prompt, (mine, theirs) in enumerate(zip(observed.token_ids, expected.token_ids, strict=True)):
        if mine == theirs:
            continue
        longest = max(len(mine), len(theirs))
        position = next(i for i in range(longest) if mine[i : i + 1] != theirs[i : i + 1])
        row = position - 1 - len(theirs)  # from the sequence's end: the row that it was drawn from
        trace = expected.traces[prompt] if expected.traces else None
        gap, limit = _narrowest_choice(expected.logits[prompt], trace, row=row), TIE_GAP
        if trace is None:
            moved = float((observed.logits[prompt][row] - expected.logits[prompt][row]).abs().max())
            limit = max(limit, 2 * moved)
        found.append(
            Difference(
                prompt=prompt,
                position=position,
                expected=theirs[position] if position < len(theirs) else None,
                found=mine[position] if position < len(mine) else None,
                gap=gap,
                limit=limit,
                is_excused=excuses and gap < limit,
            )
        )
    return found


def _narrowest_choice(logits_TV: torch.Tensor, trace: ForwardTrace | None, *, row: int) -> float:
    """Give the least margin of the choices that the token after `row` hung on: its top two logits, and its slots.

    Args:
        logits_TV: Of a sequence.
        trace: Of the same.
        row: Counted from the end, -1 is the last.
    """
    first, second = logits_TV[row].topk(2).values.tolist()
    # Rows in front of those with a margin had too few positions for a choice.
    margins_by_layer = () if trace is None else trace.index_margin_T.values()
    margins = [float(margin_T[row]) for margin_T in margins_by_layer if -row <= len(margin_T)]
    return float(min([first - second, *margins]))


def _selection_differences(mine: ForwardTrace, theirs: ForwardTrace) -> tuple[int, int]:
    """Count the (row, layer) pairs, and those whose selected sets differ; both are ascending lists."""
    num_pairs = num_different = 0
    for layer, selected_TK in theirs.selected_TK.items():
        is_different_T = (selected_TK != mine.selected_TK[layer]).any(dim=1)
        num_pairs += len(is_different_T)
        num_different += int(is_different_T.sum())
    return num_pairs, num_different
