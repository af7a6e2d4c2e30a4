"""Allocation, holders and release, against a model that counts with a dictionary."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.dcp.allocator import PageAllocator
from specdec.kernels.errors import ConfigError, OutOfPagesError

DCP_SIZES = st.integers(1, 8)


def owners(page_ids: list[int], dcp_size: int) -> list[int]:
    return [page_id % dcp_size for page_id in page_ids]


@given(num_pages=st.integers(1, 20), dcp_size=DCP_SIZES)
def test_every_page_is_handed_out_once(num_pages: int, dcp_size: int) -> None:
    allocator = PageAllocator(num_pages, dcp_size)
    page_ids = allocator.allocate(num_pages * dcp_size)
    assert sorted(page_ids) == list(range(num_pages * dcp_size))
    assert allocator.num_free == 0
    assert allocator.num_pages == num_pages * dcp_size


@given(dcp_size=DCP_SIZES, count=st.integers(1, 40), start=st.integers(0, 7))
def test_the_next_page_goes_to_the_next_rank(dcp_size: int, count: int, start: int) -> None:
    allocator = PageAllocator(100, dcp_size)
    (first,) = allocator.allocate(1, after=start % dcp_size)
    page_ids = [first, *allocator.allocate(count, after=first)]
    expected = [(start % dcp_size + 1 + i) % dcp_size for i in range(count + 1)]
    assert owners(page_ids, dcp_size) == expected


@given(dcp_size=DCP_SIZES, count=st.integers(0, 60))
def test_one_request_is_spread_evenly(dcp_size: int, count: int) -> None:
    allocator = PageAllocator(100, dcp_size)
    per_rank = Counter(owners(allocator.allocate(count), dcp_size))
    assert max(per_rank.values(), default=0) - min(per_rank[rank] for rank in range(dcp_size)) <= 1


@given(dcp_size=DCP_SIZES, count=st.integers(0, 60))
def test_requests_of_one_page_are_spread_evenly(dcp_size: int, count: int) -> None:
    allocator = PageAllocator(100, dcp_size)
    per_rank = Counter(rank for _ in range(count) for rank in owners(allocator.allocate(1), dcp_size))
    assert max(per_rank.values(), default=0) - min(per_rank[rank] for rank in range(dcp_size)) <= 1


def test_a_first_page_goes_to_the_rank_with_most_free_pages() -> None:
    allocator = PageAllocator(4, 4)
    page_ids = allocator.allocate(16)
    allocator.release([page_id for page_id in page_ids if page_id % 4 == 2])
    allocator.release([page_id for page_id in page_ids if page_id in (3, 7)])
    assert owners(allocator.allocate(1), 4) == [2]


def test_a_full_rank_is_passed_over() -> None:
    allocator = PageAllocator(2, 3)
    page_ids = allocator.allocate(6)
    allocator.release([page_id for page_id in page_ids if page_id % 3 != 1])
    assert owners(allocator.allocate(2, after=0), 3) == [0, 2]  # rank 1 is full, rank 0 and 2 have two each
    allocator.allocate(2)
    with pytest.raises(OutOfPagesError):
        allocator.allocate(1, after=0)


def test_allocation_is_all_or_nothing() -> None:
    allocator = PageAllocator(2, 2)
    allocator.allocate(1)
    with pytest.raises(OutOfPagesError, match="4 KV pages wanted, 3 of 4 free"):
        allocator.allocate(4)
    assert allocator.num_free == 3
    assert len(allocator.allocate(3)) == 3


def test_a_page_is_free_when_its_last_holder_leaves() -> None:
    allocator = PageAllocator(2, 1)
    (page_id,) = allocator.allocate(1)
    allocator.retain([page_id])
    assert allocator.num_holders(page_id) == 2
    allocator.release([page_id])
    assert (allocator.num_holders(page_id), allocator.num_free) == (1, 1)
    allocator.release([page_id])
    assert (allocator.num_holders(page_id), allocator.num_free) == (0, 2)


def test_an_id_may_be_released_as_often_as_it_is_held() -> None:
    allocator = PageAllocator(1, 1)
    (page_id,) = allocator.allocate(1)
    allocator.retain([page_id])
    allocator.release([page_id, page_id])
    assert allocator.num_free == 1
    assert allocator.allocate(1) == [page_id]


@pytest.mark.parametrize("bad", [[0, 0, 0], [1], [0, 1], [-1], [0, -1], [4], [0, 4]])
def test_a_refused_release_changes_nothing(bad: list[int]) -> None:
    allocator = PageAllocator(2, 2)
    assert allocator.allocate(1) == [0]
    allocator.retain([0])
    with pytest.raises(ValueError, match="page"):
        allocator.release(bad)
    assert allocator.num_holders(0) == 2
    assert allocator.num_free == 3
    allocator.release([0, 0])
    assert sorted(allocator.allocate(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [[1], [0, 1], [-1], [4]])
def test_a_refused_retain_changes_nothing(bad: list[int]) -> None:
    allocator = PageAllocator(2, 2)
    assert allocator.allocate(1) == [0]
    with pytest.raises(ValueError, match="page"):
        allocator.retain(bad)
    assert allocator.num_holders(0) == 1


def test_ids_of_numpy_come_back_as_python_ints() -> None:
    allocator = PageAllocator(1, 1)
    allocator.release(np.array(allocator.allocate(1)))
    assert type(allocator.allocate(1)[0]) is int
    with pytest.raises(TypeError):
        allocator.release([0.0])  # type: ignore[list-item]


@pytest.mark.parametrize(("num_pages", "dcp_size"), [(0, 1), (1, 0), (-1, 1)])
def test_a_pool_without_pages_or_ranks_is_refused(num_pages: int, dcp_size: int) -> None:
    with pytest.raises(ConfigError, match=">= 1"):
        PageAllocator(num_pages, dcp_size)


@given(dcp_size=DCP_SIZES, num_pages=st.integers(1, 6), data=st.data())
def test_any_sequence_of_calls_keeps_the_count_of_holders(dcp_size: int, num_pages: int, data: st.DataObject) -> None:
    allocator = PageAllocator(num_pages, dcp_size)
    holds: Counter[int] = Counter()
    for _ in range(data.draw(st.integers(0, 40))):
        num_free = allocator.num_pages - len(+holds)
        action = data.draw(st.sampled_from(["allocate", "retain", "release"]))
        if action == "allocate":
            count = data.draw(st.integers(0, allocator.num_pages))
            after = data.draw(st.none() | st.integers(0, allocator.num_pages - 1))
            if count > num_free:
                with pytest.raises(OutOfPagesError):
                    allocator.allocate(count, after)
            else:
                page_ids = allocator.allocate(count, after)
                assert len(set(page_ids)) == count
                assert not any(holds[page_id] for page_id in page_ids)
                holds.update(page_ids)
        elif +holds:
            page_id = data.draw(st.sampled_from(sorted(+holds)))
            (allocator.retain if action == "retain" else allocator.release)([page_id])
            holds[page_id] += 1 if action == "retain" else -1
        assert allocator.num_free == allocator.num_pages - len(+holds)
    allocator.release(list(holds.elements()))
    assert allocator.num_free == allocator.num_pages
    assert sorted(allocator.allocate(allocator.num_pages)) == list(range(allocator.num_pages))
