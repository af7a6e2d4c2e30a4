"""The chosen set is exactly that of `top_positions`, whatever the order of the scores and however many tie."""

import pytest
import torch

from specdec.kernels.errors import ConfigError
from specdec.kernels.index_key_pages import IndexKeyPages
from specdec.kernels.index_select import (
    CandidateMemory,
    IndexSelect,
    check_chosen,
    check_chosen_rows,
    cluster_size,
    index_select_ref,
    select_macros,
)
from specdec.kernels.paged_index_scores import IndexQueries, paged_index_scores_ref
from specdec.kernels.pool_rows import pool_rows_ref
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu
from tests.support.index_cases import IndexCase, in_order, make_index_case


def test_the_definition_chooses_the_best_scores() -> None:
    case = make_index_case([200, 5], num_rows=2)
    scores_TS = paged_index_scores_ref(case.queries, case.pages_PX)
    chosen_TK = index_select_ref(case.queries, case.pages_PX, k=9, dtype=torch.float64)
    for scores_S, chosen_K in zip(scores_TS.tolist(), chosen_TK.tolist(), strict=True):
        seen = [place for place, score in enumerate(scores_S) if score > -torch.inf]
        best = sorted(sorted(seen, key=lambda place: (-scores_S[place], place))[:9])
        assert chosen_K == best + [-1] * (9 - len(best))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("max_positions", [1, 500_000, 1 << 20])
def test_the_kernel_compiles_for_hopper_and_spills_nothing(max_positions: int, size: int) -> None:
    assert most_bytes_spilled("top_candidates.cu", select_macros(max_positions, cluster_size=size)) == 0


def test_blocks_of_all_rows_run_at_once_where_they_can() -> None:
    sizes = {num_lists: cluster_size(num_lists) for num_lists in (1, 16, 17, 33, 34, 66, 67, 132, 133, 400)}
    assert sizes == {1: 8, 16: 8, 17: 4, 33: 4, 34: 2, 66: 2, 67: 1, 132: 1, 133: 1, 400: 1}


def test_wrong_settings_and_outputs_are_refused() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"k must be 1..2048, got 2049"):
        IndexSelect(num_rows=1, max_requests=1, max_positions=64, k=2049)
    with pytest.raises(ConfigError, match="must lie below 1048576"):
        select_macros((1 << 20) + 1, cluster_size=8)
    with pytest.raises(ValueError, match=r"out_position must be torch\.int32"):
        check_chosen(torch.zeros(2, 8, dtype=torch.int64), None, (2, 8), device=cpu)
    with pytest.raises(ValueError, match=r"out_score must be torch\.float32"):
        check_chosen(torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 7), (2, 8), device=cpu)
    with pytest.raises(ValueError, match="out_position must be on cpu, got meta"):
        check_chosen(torch.zeros(2, 8, dtype=torch.int32, device="meta"), None, (2, 8), device=cpu)
    rows_TK, pages_RP = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(1, 5, dtype=torch.int32)
    for rows, pages, message in (
        (rows_TK.long(), pages_RP, r"out_row must be torch\.int32"),
        (rows_TK[:, :7], pages_RP, r"out_row must be .*\(2, 8\) and contiguous"),
        (rows_TK, pages_RP.long(), r"page_RP must be torch\.int32"),
        (rows_TK, pages_RP[:, :4], r"page_RP must be .*\(1, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            check_chosen_rows(rows, pages, (2, 8), pages_RP.shape, device=cpu)


@needs_gpu
@pytest.mark.parametrize("k", [1, 100, 2048])
@pytest.mark.parametrize("num_rows", [1, 3, 6, 8])
def test_a_gpu_chooses_the_same_set_among_many_ties(num_rows: int, k: int) -> None:
    check_choice(make_index_case([1, 0, 65, 2049, 30000], num_rows=num_rows), num_rows=num_rows, k=k)


@needs_gpu
@pytest.mark.parametrize("weight", ["negative", "zero"])
def test_a_gpu_chooses_the_same_set_of_scores_that_are_negative_or_all_equal(weight: str) -> None:
    check_choice(make_index_case([40000, 2100], num_rows=6, weight=weight), num_rows=6, k=2048)


@needs_gpu
@pytest.mark.parametrize("ascending", [False, True])
def test_a_gpu_chooses_the_same_set_of_scores_in_the_worst_order(ascending: bool) -> None:
    check_choice(in_order(make_index_case([131072], num_rows=6), ascending=ascending), num_rows=6, k=2048)


@needs_gpu
@pytest.mark.parametrize("weight", ["mixed", "zero"])
@pytest.mark.parametrize(("num_rows", "num_requests"), [(1, 1), (6, 1), (6, 4), (8, 5), (6, 16), (6, 32)])
def test_a_gpu_chooses_the_same_set_with_as_many_blocks_as_rows_leave_it(
    num_rows: int, num_requests: int, weight: str
) -> None:
    lengths = ([5000, 0, 4097, 65, 2049] * 7)[:num_requests]  # "zero": 4,096 that tie are put together, 4,097 are not
    check_choice(make_index_case(lengths, num_rows=num_rows, weight=weight), num_rows=num_rows, k=2048)


@needs_gpu
def test_a_gpu_chooses_the_same_set_where_the_bitmap_is_largest() -> None:
    case = make_index_case([40000], num_rows=6)
    check_choice(case, num_rows=6, k=2048, max_positions=1 << 20)


@needs_gpu
def test_calls_of_fewer_requests_choose_as_they_would_alone() -> None:
    case = make_index_case([3000, 5000] * 8, num_rows=6).to("cuda")
    expected_TK = index_select_ref(case.queries, case.pages_PX, k=2048, dtype=torch.float32)
    select = IndexSelect(num_rows=6, max_requests=16, max_positions=1 << 13)
    keys, queries = IndexKeyPages.of(case.pages_PX), case.queries
    for num_requests in (16, 1, 5, 11, 3, 16):  # clusters of 1, 8, 4, 2, 4, 1 blocks, one after the other
        rows = slice(6 * num_requests)
        part = IndexQueries(
            query_TJD=queries.query_TJD[rows],
            weight_TJ=queries.weight_TJ[rows],
            position_T=queries.position_T[rows],
            page_table_RP=queries.page_table_RP[:num_requests],
        )
        position_TK = torch.full((6 * num_requests, 2048), -7, dtype=torch.int32, device="cuda")
        select(part, keys, out_position_TK=position_TK)
        assert torch.equal(position_TK.long(), expected_TK[rows])


@needs_gpu
def test_a_gpu_reads_a_damaged_key_and_ignores_one_that_no_row_may_see() -> None:
    case = make_index_case([40000, 2100], num_rows=6)
    first, last = case.queries.page_table_RP[0, 5].long(), case.queries.page_table_RP[1, 32].long()
    case.pages_PX[first, :300] = 0x7F  # keys 0 and 1, and a part of 2
    case.pages_PX[last, 60 * 128 : 64 * 128] = 0x7F  # behind position 2099
    check_choice(case, num_rows=6, k=2048)


@needs_gpu
def test_layers_that_share_the_memory_choose_as_layers_apart() -> None:
    cases = [make_index_case([150_000, 0, 5000, 700], num_rows=6, seed=seed).to("cuda") for seed in range(4)]
    memory = CandidateMemory(num_lists=50, max_positions=1 << 18)  # for more positions than each was made for
    selects = [
        IndexSelect(num_rows=6, max_requests=requests, max_positions=1 << 15, memory=memory)
        for requests in (4, 7, 4, 8)
    ]
    keys = [IndexKeyPages.of(case.pages_PX) for case in cases]
    chosen = [torch.empty(24, 2048, dtype=torch.int32, device="cuda") for _ in cases]

    def layers() -> None:
        for select, case, pages, position_TK in zip(selects, cases, keys, chosen, strict=True):
            select(case.queries, pages, out_position_TK=position_TK)

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    expected = [index_select_ref(case.queries, case.pages_PX, k=2048, dtype=torch.float32) for case in cases]
    for _ in range(30):  # what the scan keeps depends on the timing, the choice does not
        for position_TK in chosen:
            position_TK.fill_(-7)
        graph.replay()
        for position_TK, expected_TK in zip(chosen, expected, strict=True):
            assert torch.equal(position_TK.long(), expected_TK)


@needs_gpu
@pytest.mark.parametrize(("num_rows", "num_requests", "k"), [(1, 1, 2048), (6, 1, 2048), (3, 5, 700), (6, 32, 2048)])
def test_a_gpu_gives_the_rows_of_the_pool_that_hold_the_chosen(num_rows: int, num_requests: int, k: int) -> None:
    lengths = ([5000, 0, 4097, 65, 2049] * 7)[:num_requests]
    case = make_index_case(lengths, num_rows=num_rows).to("cuda")
    keys, tables = IndexKeyPages.of(case.pages_PX), case.queries.page_table_RP
    other_RP = torch.randint(1 << 20, tables.shape, dtype=torch.int32, device="cuda")
    select = IndexSelect(num_rows=num_rows, max_requests=num_requests, max_positions=64 * tables.shape[1], k=k)
    position_TK = torch.full((len(case.queries.position_T), k), -7, dtype=torch.int32, device="cuda")
    for page_RP in (None, other_RP):
        row_TK = torch.full_like(position_TK, -7)
        select(case.queries, keys, out_position_TK=position_TK, out_row_TK=row_TK, page_RP=page_RP)
        pages_RP = tables if page_RP is None else page_RP
        assert torch.equal(row_TK, pool_rows_ref(position_TK, pages_RP, page_size=64).int())
    assert torch.equal(position_TK.long(), index_select_ref(case.queries, case.pages_PX, k=k, dtype=torch.float32))


def check_choice(case: IndexCase, *, num_rows: int, k: int, max_positions: int | None = None) -> None:
    """Compare positions and scores, twice: the kernels must leave their memory as they found it."""
    there = case.to("cuda")
    scores_TS = paged_index_scores_ref(there.queries, there.pages_PX)
    expected_TK = index_select_ref(there.queries, there.pages_PX, k=k, dtype=torch.float32)
    num_requests, num_pages = there.queries.page_table_RP.shape
    max_positions = max_positions or num_pages * 64
    select = IndexSelect(num_rows=num_rows, max_requests=num_requests, max_positions=max_positions, k=k)
    keys = IndexKeyPages.of(there.pages_PX)
    for _ in range(2):
        position_TK = torch.full(expected_TK.shape, -7, dtype=torch.int32, device="cuda")
        score_TK = torch.full(expected_TK.shape, torch.nan, device="cuda")
        select(there.queries, keys, out_position_TK=position_TK, out_score_TK=score_TK)
        assert torch.equal(position_TK.long(), expected_TK)
        expected_score_TK = scores_TS.gather(1, expected_TK.clamp(min=0)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        assert torch.equal(score_TK, expected_score_TK.masked_fill(expected_TK < 0, -torch.inf))
