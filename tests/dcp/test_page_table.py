"""A page table that is kept from pass to pass is always the table of the page ids it is asked about."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.metadata import BatchMetadata, place_rows
from specdec.dcp.page_table import KeptPageTable, PageTable, build_page_table

PAGE_SIZE = 4
NUM_IDS = 240


def kept_table(dcp_size: int = 1, rank: int = 0) -> KeptPageTable:
    geometry = Geometry(dcp_size, rank, PoolRole.TARGET)
    return KeptPageTable(geometry=geometry, page_size=PAGE_SIZE, num_pages=-(-NUM_IDS // dcp_size))


def fresh_table(page_id_RP: npt.NDArray[np.int64], dcp_size: int = 1, rank: int = 0) -> PageTable:
    geometry = Geometry(dcp_size, rank, PoolRole.TARGET)
    return build_page_table(page_id_RP, geometry=geometry, page_size=PAGE_SIZE, num_pages=-(-NUM_IDS // dcp_size))


def facts_of(table: PageTable) -> list[object]:
    """What passes read of a table, but for what stands behind the last owned page of a request."""
    owned_page_RO = table.owned_page_RO
    return [
        table.max_pages,
        table.local_page_RP.tolist(),
        owned_page_RO.tolist(),
        torch.where(owned_page_RO >= 0, table.owned_index_RO, -1).tolist(),
    ]


def all_rows(pages: list[list[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Request and position of every row that the pages have room for."""
    rows = [(r, position) for r, held in enumerate(pages) for position in range(len(held) * PAGE_SIZE)]
    request_index, position = np.array(rows, dtype=np.int64).reshape(-1, 2).T.copy()
    return request_index, position


def rows_of(metadata: BatchMetadata) -> list[object]:
    tensors = (
        metadata.request_index_T,
        metadata.position_T,
        metadata.write_page_T,
        metadata.write_offset_T,
        metadata.owned_length_T,
        metadata.rows_of(metadata.position_T[:, None]),
    )
    return [metadata.num_tokens, metadata.max_context, *(tensor.tolist() for tensor in tensors)]


@dataclass
class Requests:
    """Requests that come, grow and go in any way; ids are drawn without regard to who held them before."""

    pages: list[list[int]] = field(default_factory=list)

    def change(self, data: st.DataObject) -> None:
        match data.draw(st.sampled_from(["grow", "grow", "grow", "join", "leave", "replace", "shrink", "permute"])):
            case "grow":
                for held in self.pages:
                    if data.draw(st.booleans()):
                        held.extend(self.ids(data, data.draw(st.integers(1, 12))))
            case "join":
                self.pages.append(self.ids(data, data.draw(st.integers(1, 4))))
            case "leave" if self.pages:
                self.pages.pop(data.draw(st.integers(0, len(self.pages) - 1)))
            case "replace" if self.pages:
                index = data.draw(st.integers(0, len(self.pages) - 1))
                self.pages[index] = self.ids(data, len(self.pages[index]))
            case "shrink" if self.pages:
                held = self.pages[data.draw(st.integers(0, len(self.pages) - 1))]
                del held[1:]
            case "permute":
                self.pages = data.draw(st.permutations(self.pages))

    def ids(self, data: st.DataObject, count: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, NUM_IDS - 1), min_size=count, max_size=count))

    @property
    def page_id_RP(self) -> npt.NDArray[np.int64]:
        page_id_RP = np.full((len(self.pages), max(map(len, self.pages), default=0)), -1, dtype=np.int64)
        for row, held in zip(page_id_RP, self.pages, strict=True):
            row[: len(held)] = held
        return page_id_RP


@settings(max_examples=60)
@given(dcp_size=st.integers(1, 8), data=st.data())
def test_a_kept_table_equals_one_built_anew_whatever_came_before(dcp_size: int, data: st.DataObject) -> None:
    ranks = data.draw(st.sets(st.integers(0, dcp_size - 1), min_size=1, max_size=2))
    kept = {rank: kept_table(dcp_size, rank) for rank in ranks}
    requests = Requests()
    for _ in range(data.draw(st.integers(1, 8))):
        requests.change(data)
        page_id_RP = requests.page_id_RP
        page_id_RP.setflags(write=data.draw(st.booleans()))
        request_index, position = all_rows(requests.pages)
        for rank in ranks:
            table, fresh = kept[rank].of(page_id_RP), fresh_table(page_id_RP, dcp_size, rank)
            assert facts_of(table) == facts_of(fresh)
            placed = place_rows(table, request_index=request_index, position=position)
            assert rows_of(placed) == rows_of(place_rows(fresh, request_index=request_index, position=position))


def test_a_pass_keeps_its_rows_while_its_table_grows() -> None:
    kept = kept_table()
    metadata = place_rows(
        kept.of(np.array([[3, -1], [5, 6]])), request_index=np.array([0, 1, 1]), position=np.array([3, 0, 7])
    )
    before = rows_of(metadata)
    grown = kept.of(np.array([[3, 7, -1], [5, 6, 9]]))
    assert grown is metadata.pages
    assert rows_of(metadata) == before
    later = place_rows(grown, request_index=np.array([0, 1]), position=np.array([4, 11]))
    assert later.write_row_T[:2].tolist() == [28, 39]


def test_a_pass_keeps_its_rows_when_other_requests_come() -> None:
    kept = kept_table()
    metadata = place_rows(kept.of(np.array([[3], [5]])), request_index=np.array([0, 1]), position=np.array([3, 0]))
    before = rows_of(metadata)
    kept.of(np.array([[8], [5]]))
    assert rows_of(metadata) == before


def test_an_array_that_was_written_to_since_is_looked_at_again() -> None:
    kept, page_id_RP, request_index = kept_table(), np.array([[3], [5]]), np.array([0, 1])
    position = np.array([0, 0])
    assert place_rows(kept.of(page_id_RP), request_index=request_index, position=position).write_page_T[0] == 3
    page_id_RP[0], request_index[0] = 8, 1
    placed = place_rows(kept.of(page_id_RP), request_index=request_index, position=position)
    assert placed.write_page_T[:2].tolist() == [5, 5]
    assert placed.local_page_RP.tolist() == [[8], [5]]


def test_requests_of_rows_that_were_written_to_since_are_looked_at_again() -> None:
    table, request_index = fresh_table(np.array([[3], [5]])), np.array([0, 1])
    for request in (0, 1):
        request_index[0] = request
        placed = place_rows(table, request_index=request_index, position=np.array([0, 0]))
        assert placed.write_page_T[:2].tolist() == [(3, 5)[request], 5]
        assert placed.request_index_T[:2].tolist() == [request, 1]


@pytest.mark.parametrize("dcp_size", [1, 3])
def test_a_kept_table_grows_page_by_page_without_end(dcp_size: int) -> None:
    kept = kept_table(dcp_size)
    ids = np.random.default_rng(0).permutation(NUM_IDS)
    for num_pages in range(1, 60):
        page_id_RP = np.stack((ids[:num_pages], ids[100 : 100 + num_pages]))
        page_id_RP[1, 7:] = -1
        assert facts_of(kept.of(page_id_RP)) == facts_of(fresh_table(page_id_RP, dcp_size))


def test_passes_of_one_shape_share_what_depends_on_it_alone() -> None:
    table, request_index = fresh_table(np.array([[3], [5]])), np.array([0, 1, 1])
    request_index.setflags(write=False)
    first, second = (
        place_rows(table, request_index=request_index, position=np.array([0, 1, position])) for position in (2, 3)
    )
    assert first.request_index_T is second.request_index_T
    assert first.write_offset_T[:3].tolist() == [0, 1, 2]
    assert second.write_offset_T[:3].tolist() == [0, 1, 3]


@pytest.mark.parametrize("dcp_size", [1, 3])
def test_an_id_outside_the_id_space_is_refused_where_a_table_grows(dcp_size: int) -> None:
    kept = kept_table(dcp_size)
    kept.of(np.array([[3, -1]]))
    with pytest.raises(ValueError, match=r"page ids must lie in 0\.\.239, got 240"):
        kept.of(np.array([[3, 240]]))
    assert kept.of(np.array([[3, 7]])).max_pages == 2
