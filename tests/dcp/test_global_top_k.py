"""The exchange of candidates against the choice one rank makes from all scores."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.dcp.communicator import Collective, ParallelGroups
from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.global_top_k import candidate_bytes, global_top_positions
from specdec.dcp.metadata import BatchMetadata, build_metadata
from specdec.kernels.top_positions import top_positions
from tests.support.thread_ranks import run_ranks

TIES_AND_SIGNS = (-3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 2.0)
DAMAGED = (*TIES_AND_SIGNS, -torch.inf, torch.inf, torch.nan)


class Case(NamedTuple):
    """Requests with pages of any owners, and scores of every position for every row."""

    page_size: int
    num_pages: int  # a rank's
    page_table: np.ndarray
    request_index: np.ndarray
    position: np.ndarray
    score_TS: torch.Tensor

    def metadata(self, size: int, rank: int) -> BatchMetadata:
        return build_metadata(
            geometry=Geometry(size, rank, PoolRole.TARGET),
            page_size=self.page_size,
            num_pages=self.num_pages,
            request_index=self.request_index,
            position=self.position,
            page_table=self.page_table,
        )


def make_case(
    size: int, lengths: list[int], *, values: tuple[float, ...] | None, page_size: int = 4, seed: int = 0
) -> Case:
    """Up to four query rows a request, at its last positions, as a verification has them."""
    generator = np.random.default_rng(seed)
    num_pages_R = [-(-length // page_size) for length in lengths]
    num_pages = sum(num_pages_R) + 1
    ids = generator.permutation(size * num_pages).astype(np.int64)
    page_table = np.full((len(lengths), max(num_pages_R)), -1, dtype=np.int64)
    for request, count in enumerate(num_pages_R):
        page_table[request, :count], ids = ids[:count], ids[count:]
    rows = [(request, p) for request, length in enumerate(lengths) for p in range(max(0, length - 4), length)]
    request_index, position = np.array(rows, dtype=np.int64).T
    shape = len(rows), page_table.shape[1] * page_size
    score = generator.standard_normal(shape) if values is None else generator.choice(np.array(values), shape)
    return Case(page_size, num_pages, page_table, request_index, position, torch.from_numpy(score).float())


def owned_scores(case: Case, metadata: BatchMetadata) -> torch.Tensor:
    """What a rank computes: the scores of the positions it owns, side by side, -inf where a row may not look."""
    num_live, num_columns = metadata.num_tokens, metadata.pages.owned_page_RO.shape[1] * case.page_size
    column_TS = torch.arange(num_columns).expand(num_live, -1)
    is_seen_TS = column_TS < metadata.owned_length_T[:num_live, None]
    position_TS = metadata.owned_positions(torch.where(is_seen_TS, column_TS, -1))
    return case.score_TS.gather(1, position_TS.clamp(min=0)).masked_fill_(~is_seen_TS, -torch.inf)


def choose(case: Case, size: int, k: int) -> tuple[list[torch.Tensor], list[list[Collective]]]:
    def on_rank(groups: ParallelGroups) -> tuple[torch.Tensor, list[Collective]]:
        metadata = case.metadata(size, groups.dcp.rank)
        groups.record.is_recording = True
        chosen = global_top_positions(owned_scores(case, metadata), k, metadata=metadata, dcp=groups.dcp)
        return chosen, groups.record.take()

    chosen, records = zip(*run_ranks(on_rank, tp_size=size, dcp_size=size), strict=True)
    return list(chosen), list(records)


def choose_on_one_rank(case: Case, k: int) -> torch.Tensor:
    is_later_TS = torch.arange(case.score_TS.shape[1]) > torch.from_numpy(case.position)[:, None]
    return top_positions(case.score_TS.masked_fill(is_later_TS, -torch.inf), k)


@settings(max_examples=60)
@given(
    size=st.sampled_from([2, 4, 8]),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    values=st.sampled_from([None, TIES_AND_SIGNS, (-1.0,), DAMAGED]),
    page_size=st.sampled_from([1, 4, 8]),
    k=st.integers(1, 20),
    seed=st.integers(0, 10_000),
)
@example(size=8, lengths=[1], values=None, page_size=4, k=8, seed=0)  # fewer tokens than ranks
@example(size=8, lengths=[3, 65], values=(-1.0,), page_size=1, k=8, seed=0)  # negative ties only
def test_every_rank_chooses_what_one_rank_would(
    *, size: int, lengths: list[int], values: tuple[float, ...] | None, page_size: int, k: int, seed: int
) -> None:
    case = make_case(size, lengths, values=values, page_size=page_size, seed=seed)
    expected_TK = choose_on_one_rank(case, k)
    for chosen_TK in choose(case, size, k)[0]:
        assert torch.equal(chosen_TK, expected_TK)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_pads_do_not_win_over_negative_scores_of_a_longer_shard(size: int) -> None:
    case = make_case(size, [4 * size + 1], values=(-7.0, -8.0), page_size=1)
    chosen_TK = choose(case, size, 4 * size)[0][0]
    assert (chosen_TK >= 0).sum(dim=1).tolist() == [4 * size - 2, 4 * size - 1, 4 * size, 4 * size]
    assert torch.equal(chosen_TK, choose_on_one_rank(case, 4 * size))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("k", [3, 200])
def test_one_collective_of_the_formulas_bytes_whatever_a_rank_owns(size: int, k: int) -> None:
    case = make_case(size, [1, 37], values=None, seed=3)
    _, records = choose(case, size, k)
    columns = case.metadata(size, 0).pages.owned_page_RO.shape[1] * case.page_size
    num_bytes = len(case.position) * candidate_bytes(dcp_size=size, num_candidates=min(k, columns))
    assert records == [[Collective("dcp", "all_gather", num_bytes)]] * size


@settings(max_examples=40)
@given(
    size=st.sampled_from([1, 2, 4, 8]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 4, 8]),
    seed=st.integers(0, 10_000),
)
def test_each_position_is_one_ranks_and_local_lengths_add_up(
    size: int, lengths: list[int], page_size: int, seed: int
) -> None:
    case = make_case(size, lengths, values=None, page_size=page_size, seed=seed)
    ranks = [case.metadata(size, rank) for rank in range(size)]
    num_live = len(case.position)
    total_T = sum(metadata.owned_length_T for metadata in ranks)
    assert total_T.shape == ranks[0].position_T.shape  # a vector over rows on each rank, not a matrix over ranks
    assert torch.equal(total_T, ranks[0].position_T + 1)
    assert {metadata.pages.owned_page_RO.shape for metadata in ranks} == {ranks[0].pages.owned_page_RO.shape}
    seen: list[set[int]] = [set() for _ in range(num_live)]
    for metadata in ranks:
        for t, length in enumerate(metadata.owned_length_T[:num_live].tolist()):
            columns = torch.full((num_live, length), -1)
            columns[t] = torch.arange(length)
            positions = metadata.owned_positions(columns)[t].tolist()
            assert positions == sorted(positions)
            assert not seen[t] & set(positions)
            seen[t] |= set(positions)
    assert seen == [set(range(position + 1)) for position in case.position]
