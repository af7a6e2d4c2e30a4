"""What ranks decide together is the same on every rank, whatever each computed alone."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.dcp.agreement import (
    AgreedAcceptance,
    LostPrefixError,
    agree_acceptance,
    agree_drafts,
    agree_prefix,
    agree_ready,
    arrays_in,
    digest_of,
    gather_objects,
)
from specdec.dcp.communicator import ParallelGroups
from specdec.errors import RankError
from tests.support.thread_ranks import run_ranks

CPU = torch.device("cpu")


def run_tp(function: Any, *, size: int) -> list[Any]:
    return run_ranks(function, tp_size=size, dcp_size=1)


def emitted(ids: list[int], num_accepted: int) -> list[int]:
    return [token_id if k <= num_accepted else -1 for k, token_id in enumerate(ids)]


@settings(max_examples=40)
@given(size=st.sampled_from([2, 4, 8]), num_requests=st.integers(1, 4), num_drafts=st.integers(0, 4), data=st.data())
def test_all_leave_with_the_fewest_kept_and_the_first_ranks_ids(
    size: int, num_requests: int, num_drafts: int, data: st.DataObject
) -> None:
    draw = data.draw
    accepted_NF = np.array(
        [[draw(st.integers(0, num_drafts)) for _ in range(num_requests)] for _ in range(size)], dtype=np.int64
    )
    ids_NFK1 = np.array(
        [
            [emitted(draw(st.lists(st.integers(0, 3), min_size=num_drafts + 1, max_size=num_drafts + 1)), kept)]
            for kept_F in accepted_NF
            for kept in kept_F
        ]
    ).reshape(size, num_requests, num_drafts + 1)
    drawable_NF = np.array([[draw(st.booleans()) for _ in range(num_requests)] for _ in range(size)])

    def decide(groups: ParallelGroups) -> AgreedAcceptance:
        rank = groups.tp.rank
        return agree_acceptance(
            groups.tp,
            digest=bytes(range(8)),
            token_id_FK1=torch.from_numpy(ids_NFK1[rank]),
            num_accepted_F=torch.from_numpy(accepted_NF[rank]),
            drawable_F=torch.from_numpy(drawable_NF[rank]),
        )

    decisions = run_tp(decide, size=size)
    for f in range(num_requests):
        fewest = min(accepted_NF[:, f])
        expected = [ids_NFK1[0, f, k] if k <= fewest else -1 for k in range(num_drafts + 1)]
        for decision in decisions:
            assert decision.num_accepted_F[f] == fewest
            assert decision.token_id_FK1[f].tolist() == expected
            assert decision.drawable_F[f] == all(drawable_NF[:, f])
            for rank in range(size):
                own, first = ids_NFK1[rank, f], ids_NFK1[0, f]
                is_same = (own == first).all() and accepted_NF[rank, f] == accepted_NF[0, f]
                assert decision.agrees_NF[rank, f] == (is_same and drawable_NF[rank, f] == drawable_NF[0, f])


def test_other_inputs_on_one_rank_fail_the_round_on_all() -> None:
    def decide(groups: ParallelGroups) -> str:
        inputs = np.array([1, 2, 3 + (groups.tp.rank == 2)])
        with pytest.raises(RankError) as raised:
            agree_acceptance(
                groups.tp,
                digest=digest_of([inputs]),
                token_id_FK1=torch.zeros((1, 2), dtype=torch.int64),
                num_accepted_F=torch.ones(1, dtype=torch.int64),
                drawable_F=torch.ones(1, dtype=torch.bool),
            )
        return str(raised.value)

    messages = run_tp(decide, size=4)
    assert len(set(messages)) == 1
    assert "tp ranks [2] verified other inputs than rank 0" in messages[0]


@settings(max_examples=40)
@given(
    size=st.sampled_from([2, 4, 8]),
    drafts=st.lists(
        st.lists(
            st.tuples(st.sampled_from([0.0, 1.0, 1.0 + 2**-20, -torch.inf, torch.nan]), st.integers(0, 154_879)),
            min_size=8,
            max_size=8,
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_drafts_go_by_value_then_by_the_lower_id(size: int, drafts: list[list[tuple[float, int]]]) -> None:
    def choose(groups: ParallelGroups) -> list[int]:
        own = [by_rank[groups.tp.rank] for by_rank in drafts]
        value_B = torch.tensor([value for value, _ in own])
        chosen: list[int] = agree_drafts(groups.tp, value_B, torch.tensor([token_id for _, token_id in own])).tolist()
        return chosen

    expected = []
    for by_rank in drafts:
        ranked = [(-torch.inf if math.isnan(value) else value, -token_id) for value, token_id in by_rank[:size]]
        expected.append(-max(ranked)[1])
    assert run_tp(choose, size=size) == [expected] * size


@pytest.mark.parametrize("failing", [[1], [0, 3], [3]])
def test_an_error_of_one_rank_is_an_error_of_all_and_names_it(failing: list[int]) -> None:
    def begin(groups: ParallelGroups) -> str:
        rank = groups.tp.rank
        error = MemoryError(f"no room on {rank} " + "x" * 1000) if rank in failing else None
        with pytest.raises(RankError) as raised:
            agree_ready(groups.tp, error, digest=bytes(8), device=CPU)
        assert raised.value.__cause__ is error
        # Nobody is left in a collective: the next one meets.
        assert groups.tp.all_gather(torch.tensor(rank)).tolist() == [0, 1, 2, 3]
        return str(raised.value)

    messages = run_tp(begin, size=4)
    assert len(set(messages)) == 1
    assert f"tp rank {failing[0]} cannot run this pass: MemoryError: no room on {failing[0]}" in messages[0]


def test_ready_ranks_go_on() -> None:
    assert run_tp(lambda groups: agree_ready(groups.tp, None, digest=bytes(8), device=CPU), size=2) == [None, None]


def test_ranks_that_were_told_something_else_do_not_begin() -> None:
    def begin(groups: ParallelGroups) -> str:
        with pytest.raises(RankError) as raised:
            agree_ready(groups.tp, None, digest=bytes([groups.tp.rank % 2]) * 8, device=CPU)
        return str(raised.value)

    messages = run_tp(begin, size=4)
    assert len(set(messages)) == 1
    assert "tp ranks [1, 3] were told another pass than rank 0" in messages[0]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_agree_on_the_shortest_prefix(size: int) -> None:
    wanted_B = np.array([9, 4, 0])

    def agree(groups: ParallelGroups, short_B: npt.NDArray[np.int64]) -> tuple[str, list[int]] | None:
        stored_B = short_B if groups.tp.rank == size - 1 else wanted_B
        try:
            agree_prefix(groups.tp, stored_B, wanted_B, device=CPU)
        except LostPrefixError as error:
            return str(error), error.num_rows_B.tolist()
        return None

    assert run_tp(lambda groups: agree(groups, wanted_B), size=size) == [None] * size
    outcomes = run_tp(lambda groups: agree(groups, np.array([9, 3, 0])), size=size)
    assert outcomes == [outcomes[0]] * size
    assert outcomes[0][1] == [9, 3, 0]
    assert f"tp rank {size - 1} has stored 3 rows of a prior context of 4" in outcomes[0][0]


def test_arrays_are_found_at_any_depth() -> None:
    @dataclass
    class Task:
        rows: tuple[object, ...]
        name: str
        counts: npt.NDArray[np.int64]

    task = Task(rows=(np.array([1]), (None, np.array([2.5]))), name="x", counts=np.array([3]))
    assert [array.tolist() for array in arrays_in(task)] == [[1], [2.5], [3]]


def test_objects_of_different_sizes_are_gathered() -> None:
    values = run_tp(lambda groups: gather_objects(groups.tp, ["x"] * groups.tp.rank**3, device=CPU), size=4)
    assert values == [[["x"] * rank**3 for rank in range(4)]] * 4


def test_a_digest_tells_shapes_and_dtypes_apart() -> None:
    arrays = [np.zeros(4), np.zeros((2, 2)), np.zeros(8, dtype=np.float32), np.zeros(4, dtype=np.int64), np.ones(4)]
    assert len({digest_of([array]) for array in arrays}) == len(arrays)
    assert digest_of([np.arange(6).reshape(2, 3).T]) == digest_of([np.arange(6).reshape(2, 3).T.copy()])
