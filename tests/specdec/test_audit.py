"""The audit is quiet where ranks agree, and sees every kind of difference that is put in."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import specdec.audit
from specdec.audit import AuditedRun, audit
from specdec.dcp.communicator import Collective, CollectiveRecord
from specdec.engine import Engine
from tests.support.engines import Checkpoints, drawn, greedy, prompt_of
from tests.support.thread_engine import ThreadEngine, ThreadEngines

PROMPTS = [prompt_of(length) for length in (1, 4, 9, 33)]
Change = Callable[[ThreadEngine], object]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def run(
    stack: ExitStack,
    checkpoints: Checkpoints,
    *,
    change: Change = lambda _running: None,
    params: Any = None,
    **settings: Any,
) -> list[AuditedRun]:
    """Audit engines of thread ranks; `change` may break the ones with more than one rank."""
    engines = ThreadEngines(checkpoints)

    def start(**each: Any) -> Engine:
        running = stack.enter_context(engines.open(**each))
        if each["tp_size"] > 1:
            change(running)
        return running.engine()

    return audit(
        start, PROMPTS, params or greedy(12), settings={"tp_size": 2, "dcp_size": 2, "num_draft_tokens": 3, **settings}
    )


@pytest.mark.parametrize(("tp_size", "dcp_size"), [(2, 2), (4, 2), (2, 1)])
def test_ranks_that_agree_are_consistent(
    tp_size: int, dcp_size: int, stack: ExitStack, checkpoints: Checkpoints
) -> None:
    runs = run(stack, checkpoints, tp_size=tp_size, dcp_size=dcp_size)
    sizes = [(each.tp_size, each.dcp_size, each.num_draft_tokens) for each in runs]
    assert sizes == [(1, 1, 0), (1, 1, 3), (tp_size, dcp_size, 0), (tp_size, dcp_size, 3)]
    for each in runs:
        assert each.is_consistent
        assert each.num_tokens == 12 * len(PROMPTS)
        assert each.max_logit_distance < 1e-4
        assert each.num_selections > 0
        assert each.num_selection_differences == 0
        assert each.on_device is None
        assert each.changed_by_drafts == ()
        assert len(each.disagreements_per_rank) == each.tp_size
        assert each.num_decisions > 0
    alone, alone_on, many, many_on = runs
    assert alone.acceptance_length is None
    assert alone_on.acceptance_length == many_on.acceptance_length > 1
    assert len(set(many_on.collectives_per_rank)) == 1
    assert many_on.num_rounds < many.num_rounds


def test_sampled_output_is_audited_too(stack: ExitStack, checkpoints: Checkpoints) -> None:
    assert all(each.is_consistent for each in run(stack, checkpoints, params=drawn(5, 12)))


def test_ranks_that_see_other_logits_are_noticed(stack: ExitStack, checkpoints: Checkpoints) -> None:
    alone, alone_on, many, many_on = run(stack, checkpoints, logits_noise=1.0)
    assert alone.is_consistent
    assert alone_on.is_consistent
    for each in (many, many_on):
        assert not each.is_consistent
        assert each.disagreements_per_rank[0] == 0
        assert each.disagreements_per_rank[1] > 0


def test_a_rank_with_other_weights_is_noticed(stack: ExitStack, checkpoints: Checkpoints) -> None:
    def scale(running: ThreadEngine) -> None:
        layer = running.workers[1].target.layers[0].attention
        layer.o_proj = layer.o_proj * 3

    runs = run(stack, checkpoints, change=scale)
    for each in runs[2:]:
        assert not each.is_consistent
        assert each.max_logit_distance > 1e-2
        assert each.differences
        for difference in each.differences:
            assert difference.expected != difference.found
            assert not difference.is_excused
        assert not any(each.disagreements_per_rank)  # all ranks are equally wrong: agreement alone proves nothing


def test_a_rank_that_chooses_other_slots_is_noticed(stack: ExitStack, checkpoints: Checkpoints) -> None:
    def invert(running: ThreadEngine) -> None:
        for worker in running.workers:
            indexer = worker.target.layers[0].attention.indexer
            assert indexer is not None
            indexer.weights_proj = -indexer.weights_proj

    assert all(each.num_selection_differences > 0 for each in run(stack, checkpoints, change=invert)[2:])


def test_another_sequence_of_collectives_is_noticed(
    stack: ExitStack, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[CollectiveRecord] = []
    take = CollectiveRecord.take

    def take_more(record: CollectiveRecord) -> list[Collective]:
        more = any(record is each for each in changed)
        return take(record) + [Collective("dcp", "all_gather", 8)] * more

    monkeypatch.setattr(CollectiveRecord, "take", take_more)
    runs = run(stack, checkpoints, change=lambda running: changed.append(running.workers[1].groups.record))
    assert [each.is_sequence_equal for each in runs] == [True, True, False, False]
    assert [each.is_consistent for each in runs] == [True, True, False, False]


def test_only_a_narrow_choice_is_an_excuse(
    stack: ExitStack, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specdec.audit, "TIE_GAP", 1e9)  # every choice is narrow now
    runs = run(stack, checkpoints, logits_noise=1.0)
    differences = [difference for each in runs for difference in each.differences]
    assert differences
    for difference in differences:
        assert difference.is_excused
        assert 0 <= difference.gap < 1e9
    assert not runs[2].is_consistent  # there is no excuse for ranks that decide differently


def test_drafts_that_change_a_text_have_no_excuse(
    stack: ExitStack, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specdec.audit, "TIE_GAP", 1e9)  # every choice is narrow now

    def scale(running: ThreadEngine) -> None:
        if running.config.num_draft_tokens:
            for worker in running.workers:
                layer = worker.target.layers[0].attention
                layer.o_proj = layer.o_proj * 3

    many, many_on = run(stack, checkpoints, change=scale)[2:]
    assert many.is_consistent
    assert many_on.changed_by_drafts
    assert all(difference.is_excused for difference in many_on.differences)
    assert not many_on.is_consistent


def test_a_logit_that_is_no_number_is_noticed_whichever_prompt_has_it(
    stack: ExitStack, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = specdec.audit._observed

    def without_a_number(engine: Engine, *arguments: Any) -> Any:
        observed = observe(engine, *arguments)
        if engine.config.tp_size > 1:
            observed.logits[1] = observed.logits[1].index_fill(1, torch.tensor(0), math.nan)
        return observed

    monkeypatch.setattr(specdec.audit, "_observed", without_a_number)
    runs = run(stack, checkpoints)
    assert [math.isnan(each.max_row_error) for each in runs] == [False, False, True, True]
    assert [each.is_consistent for each in runs] == [True, True, False, False]
