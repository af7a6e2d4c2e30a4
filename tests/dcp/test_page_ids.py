"""The arithmetic of page ids, for ints, numpy arrays and tensors alike."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.dcp.page_ids import num_page_ids, owned_local_page, owner, page_id_of, scratch_page

DCP_SIZES = range(1, 9)


@given(num_pages=st.integers(1, 50), dcp_size=st.integers(1, 8))
def test_owner_and_local_page_are_a_bijection_of_the_id_space(num_pages: int, dcp_size: int) -> None:
    ids = np.arange(num_page_ids(num_pages, dcp_size))
    ranks = owner(ids, dcp_size).tolist()
    pages = [owned_local_page(page_id, dcp_size, rank) for page_id, rank in zip(ids.tolist(), ranks, strict=True)]
    assert sorted(zip(ranks, pages, strict=True)) == [
        (rank, page) for rank in range(dcp_size) for page in range(num_pages)
    ]
    assert page_id_of(np.array(pages), np.array(ranks), dcp_size).tolist() == ids.tolist()


@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_padding_is_owned_by_nobody(dcp_size: int) -> None:
    assert owner(-1, dcp_size) == -1
    assert [owned_local_page(-1, dcp_size, rank) for rank in range(dcp_size)] == [-1] * dcp_size


@given(ids=st.lists(st.integers(-1, 10**9), max_size=20), dcp_size=st.integers(1, 8))
def test_ints_arrays_and_tensors_agree(ids: list[int], dcp_size: int) -> None:
    array, tensor = np.array(ids, dtype=np.int64), torch.tensor(ids, dtype=torch.int64)
    for rank in range(dcp_size):
        expected = [owned_local_page(page_id, dcp_size, rank) for page_id in ids]
        assert owned_local_page(array, dcp_size, rank).tolist() == expected
        assert owned_local_page(tensor, dcp_size, rank).tolist() == expected
    expected = [owner(page_id, dcp_size) for page_id in ids]
    assert owner(array, dcp_size).tolist() == expected
    assert owner(tensor, dcp_size).tolist() == expected


@given(table=st.lists(st.integers(-1, 63), max_size=40), dcp_size=st.integers(1, 8))
def test_local_page_counts_of_all_ranks_sum_to_the_global_count(table: list[int], dcp_size: int) -> None:
    ids = np.array(table, dtype=np.int64)
    counts = [int((owned_local_page(ids, dcp_size, rank) >= 0).sum()) for rank in range(dcp_size)]
    assert sum(counts) == sum(page_id >= 0 for page_id in table)


@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_the_owner_alone_sees_a_page(dcp_size: int) -> None:
    for page_id in range(3 * dcp_size):
        seen = [owned_local_page(page_id, dcp_size, rank) for rank in range(dcp_size)]
        assert seen == [page_id // dcp_size if rank == page_id % dcp_size else -1 for rank in range(dcp_size)]


@given(num_pages=st.integers(1, 50), dcp_size=st.integers(1, 8))
def test_the_scratch_page_is_no_page_of_the_id_space(num_pages: int, dcp_size: int) -> None:
    ids = np.arange(num_page_ids(num_pages, dcp_size))
    for rank in range(dcp_size):
        assert scratch_page(num_pages) not in owned_local_page(ids, dcp_size, rank)
    assert scratch_page(len(ids)) not in owned_local_page(ids, 1, 0)
