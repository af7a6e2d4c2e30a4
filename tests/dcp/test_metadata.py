"""Metadata of a pass against loops over rows, for every rank of every group size."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.metadata import BatchMetadata, build_metadata, place_rows
from specdec.dcp.page_table import build_page_table


@dataclass
class Batch:
    dcp_size: int
    page_size: int
    num_pages: int  # per rank
    page_table: npt.NDArray[np.int64]
    request_index: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]

    def metadata(self, rank: int) -> BatchMetadata:
        return build_metadata(
            geometry=Geometry(self.dcp_size, rank, PoolRole.TARGET),
            page_size=self.page_size,
            num_pages=self.num_pages,
            request_index=self.request_index,
            position=self.position,
            page_table=self.page_table,
        )

    def row(self, request: int, position: int, rank: int) -> int:
        """Physical token row of a position on a rank, -1 where the rank does not own it."""
        page_id = int(self.page_table[request, position // self.page_size])
        if page_id == -1 or page_id % self.dcp_size != rank:
            return -1
        return page_id // self.dcp_size * self.page_size + position % self.page_size


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Requests whose pages lie anywhere in the id space, one page left over at least."""
    dcp_size, page_size = draw(st.integers(1, 8)), draw(st.sampled_from([1, 4, 64]))
    pages_of = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    num_pages = -(-(sum(pages_of) + 1) // dcp_size)
    ids = draw(st.permutations(range(num_pages * dcp_size)))
    page_table = np.full((len(pages_of), max(pages_of) + draw(st.integers(0, 1))), -1, dtype=np.int64)
    for request, count in enumerate(pages_of):
        page_table[request, :count], ids = ids[:count], ids[count:]
    rows = [
        (request, draw(st.integers(0, pages_of[request] * page_size - 1)))
        for request in draw(st.lists(st.integers(0, len(pages_of) - 1), max_size=17))
    ]
    request_index, position = np.array(rows, dtype=np.int64).reshape(-1, 2).T.copy()
    return Batch(dcp_size, page_size, num_pages, page_table, request_index, position)


def small_batch(dcp_size: int = 1) -> Batch:
    page_table = np.array([[3, 0, -1], [5, -1, -1]])
    return Batch(dcp_size, 4, 8 // dcp_size, page_table, np.array([0, 0, 1]), np.array([6, 7, 1]))


@given(batch=batches())
def test_rows_are_written_by_their_owner_and_to_scratch_elsewhere(batch: Batch) -> None:
    for rank in range(batch.dcp_size):
        meta = batch.metadata(rank)
        scratch_rows = range(batch.num_pages * batch.page_size, (batch.num_pages + 1) * batch.page_size)
        for t, row in enumerate(meta.write_row_T.tolist()):
            expected = -1
            if t < meta.num_tokens:
                expected = batch.row(int(batch.request_index[t]), int(batch.position[t]), rank)
            assert row == expected if expected >= 0 else row in scratch_rows


@given(batch=batches())
def test_padding_rows_are_canonical(batch: Batch) -> None:
    meta = batch.metadata(0)
    num_tokens = len(batch.position)
    assert meta.num_tokens == num_tokens
    assert len(meta.position_T) % 8 == 0
    assert max(num_tokens, 1) <= len(meta.position_T) < num_tokens + 9
    assert meta.position_T[:num_tokens].tolist() == batch.position.tolist()
    assert meta.request_index_T[:num_tokens].tolist() == batch.request_index.tolist()
    assert set(meta.position_T[num_tokens:].tolist()) <= {-1}
    assert set(meta.request_index_T[num_tokens:].tolist()) <= {0}
    assert set(meta.write_row_T[num_tokens:].tolist()) <= {batch.num_pages * batch.page_size}
    assert meta.max_context == max(batch.position.tolist(), default=-1) + 1


@given(batch=batches())
def test_pages_of_all_ranks_together_are_the_page_table(batch: Batch) -> None:
    found = np.full_like(batch.page_table, -1)
    for rank in range(batch.dcp_size):
        meta = batch.metadata(rank)
        assert meta.local_page_RP.shape == batch.page_table.shape
        local_page_RP = meta.local_page_RP.numpy()
        assert (found[local_page_RP >= 0] == -1).all()
        assert local_page_RP.max() < batch.num_pages
        found = np.where(local_page_RP >= 0, local_page_RP * batch.dcp_size + rank, found)
    assert found.tolist() == batch.page_table.tolist()


@settings(max_examples=50)
@given(batch=batches(), data=st.data())
def test_selected_positions_become_rows_on_their_owner_alone(batch: Batch, data: st.DataObject) -> None:
    context = batch.page_table.shape[1] * batch.page_size
    num_rows = len(batch.metadata(0).position_T)
    selected_TK = torch.full((num_rows, 5), -1)
    for t in range(len(batch.position)):
        for k in range(data.draw(st.integers(0, 5))):
            selected_TK[t, k] = data.draw(st.integers(0, context - 1))
    for rank in range(batch.dcp_size):
        rows = batch.metadata(rank).rows_of(selected_TK)
        for t in range(num_rows):
            for k in range(5):
                position = int(selected_TK[t, k])
                expected = -1
                if position >= 0:
                    expected = batch.row(int(batch.request_index[t]), position, rank)
                assert rows[t, k] == expected


def test_selections_may_be_strided() -> None:
    meta = small_batch().metadata(0)
    selected_TK = torch.full((8, 3), -1)
    selected_TK[:3] = torch.tensor([[0, 5, -1], [3, 4, 7], [0, 3, -1]])
    assert meta.rows_of(selected_TK.T.contiguous().T).tolist() == meta.rows_of(selected_TK).tolist()
    assert meta.rows_of(selected_TK)[:3].tolist() == [[12, 1, -1], [15, 0, 3], [20, 23, -1]]


def test_a_replicated_pool_is_addressed_by_the_page_id_itself() -> None:
    batch = small_batch(dcp_size=4)
    meta = build_metadata(
        geometry=Geometry(1, 0, PoolRole.DRAFT),
        page_size=4,
        num_pages=batch.num_pages * 4,
        request_index=batch.request_index,
        position=batch.position,
        page_table=batch.page_table,
    )
    assert meta.local_page_RP.tolist() == batch.page_table.tolist()
    assert meta.write_row_T[:3].tolist() == [2, 3, 21]


def test_passes_that_share_a_page_table_equal_passes_built_alone() -> None:
    batch = small_batch()
    pages = build_page_table(
        batch.page_table, geometry=Geometry(1, 0, PoolRole.TARGET), page_size=4, num_pages=batch.num_pages
    )
    for step in range(2):
        batch.position = np.array([4 + step, 5 + step, step])
        shared = place_rows(pages, request_index=batch.request_index, position=batch.position)
        alone = batch.metadata(0)
        assert shared.geometry == alone.geometry
        assert shared.write_row_T.tolist() == alone.write_row_T.tolist()
        assert shared.position_T.tolist() == alone.position_T.tolist()


def test_metadata_keeps_its_own_copy_of_the_arrays() -> None:
    batch = small_batch()
    meta, before = batch.metadata(0), batch.metadata(0)
    for array in (batch.page_table, batch.request_index, batch.position):
        array[:] = 0
    assert meta.local_page_RP.tolist() == before.local_page_RP.tolist() == [[3, 0, -1], [5, -1, -1]]
    assert meta.position_T[:3].tolist() == [6, 7, 1]
    assert meta.request_index_T[:3].tolist() == [0, 0, 1]


def test_a_batch_of_nothing_has_padding_rows_only() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    meta = Batch(1, 4, 3, np.zeros((0, 0), dtype=np.int64), nothing, nothing).metadata(0)
    assert meta.num_tokens == meta.max_context == 0
    assert meta.local_page_RP.shape == (0, 0)
    assert meta.rows_of(torch.full((8, 2), -1)).tolist() == [[-1, -1]] * 8


@pytest.mark.parametrize(
    ("request_index", "position", "message"),
    [
        ([0], [-1], "positions must lie in 0..11"),
        ([0], [12], "positions must lie in 0..11"),
        ([-1], [0], "request_index must lie in 0..1"),
        ([2], [0], "request_index must lie in 0..1"),
        ([1], [4], "needs a page"),
        ([0], [8], "needs a page"),
    ],
)
def test_rows_outside_the_page_table_are_refused(request_index: list[int], position: list[int], message: str) -> None:
    batch = small_batch()
    batch.request_index, batch.position = np.array(request_index), np.array(position)
    with pytest.raises(ValueError, match=message):
        batch.metadata(0)


@pytest.mark.parametrize("dcp_size", [1, 2, 4])
def test_an_id_outside_the_id_space_is_refused_even_when_it_is_only_read(dcp_size: int) -> None:
    batch = small_batch(dcp_size)
    batch.page_table[0, 2] = 8
    with pytest.raises(ValueError, match=r"page ids must lie in 0\.\.7, got 8"):
        batch.metadata(0)
