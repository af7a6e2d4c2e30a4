"""Plans and descriptors against moving one token at a time, every byte of both sides compared."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from specdec.transfer.descriptors import Descriptors, RegionMemory, expand_path, repeat_path
from specdec.transfer.plan_check import check_plan
from specdec.transfer.reshard_plan import Path, Span, plan_reshard
from tests.support.reshard_cases import ReshardCase, moved_by_definition, random_case

NUM_CASES = 250
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 80))]


Expand = Callable[[Path, RegionMemory, RegionMemory], Descriptors]


def repeat_once(path: Path, source: RegionMemory, destination: RegionMemory) -> Descriptors:
    return repeat_path(path, source, destination).once()


def move_by_plan(case: ReshardCase, spans: list[Span], expand: Expand = expand_path) -> list[np.ndarray]:
    memory = [rank.copy() for rank in case.destination_memory]
    for span in spans:
        plan = plan_reshard({"entry": span})
        check_plan(plan)
        for path in plan.paths:
            source, destination = path.source_rank, path.destination_rank
            copies = expand(path, case.source_regions[source], case.destination_regions[destination])
            for at, to, size in zip(copies.source_offset_X, copies.destination_offset_X, copies.length_X, strict=True):
                memory[destination][to : to + size] = case.source_memory[source][at : at + size]
    return memory


def part_of(span: Span, begin: int, end: int) -> Span:
    return Span(
        source=span.source,
        destination=span.destination,
        source_pages=span.source_pages,
        destination_pages=span.destination_pages,
        begin=begin,
        end=end,
    )


@pytest.mark.parametrize("expand", [expand_path, repeat_once])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_moves_every_byte_that_the_definition_moves_and_no_other(seed: int, expand: Expand) -> None:
    for number in range(NUM_CASES):
        case = random_case(seed * NUM_CASES + number)
        expected = moved_by_definition(case)
        for rank, (memory, right) in enumerate(zip(move_by_plan(case, [case.span], expand), expected, strict=True)):
            np.testing.assert_array_equal(memory, right, err_msg=f"case {seed * NUM_CASES + number}, rank {rank}")


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_together_move_what_the_whole_moves(seed: int) -> None:
    for number in range(NUM_CASES // 5):
        case = random_case(1_000_000 + seed * NUM_CASES + number)
        cuts = np.random.default_rng(number).integers(case.span.begin, case.span.end + 1, 2).tolist()
        borders = [case.span.begin, *sorted(cuts), case.span.end]
        spans = [part_of(case.span, a, b) for a, b in pairwise(borders)]
        for memory, right in zip(move_by_plan(case, spans), moved_by_definition(case), strict=True):
            np.testing.assert_array_equal(memory, right)
