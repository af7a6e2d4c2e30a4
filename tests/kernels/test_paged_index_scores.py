"""Scores from pages are the formula's: the definition by loops, the kernel by exact inputs and against float64."""

from typing import Any

import pytest
import torch

from specdec.kernels.cuda_program import compile_cuda
from specdec.kernels.errors import ConfigError
from specdec.kernels.index_key_format import decode_index_keys
from specdec.kernels.index_key_pages import INDEX_DIM, PAGE_BYTES, PAGE_SIZE, IndexKeyPages, check_pages
from specdec.kernels.latent_formats import from_e4m3, to_e4m3
from specdec.kernels.paged_index_scores import (
    NUM_HEADS,
    IndexQueries,
    paged_index_scores,
    paged_index_scores_ref,
    scan_macros,
)
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu
from tests.support.index_cases import make_index_case
from tests.support.misaligned import misaligned


def test_the_definition_is_the_formula_key_by_key() -> None:
    case = make_index_case([70, 0, 3], num_rows=2)
    queries = case.queries
    scores_TS = paged_index_scores_ref(queries, case.pages_PX)
    query_TJD = from_e4m3(queries.query_TJD)
    for row, position in enumerate(queries.position_T.tolist()):
        for place in range(scores_TS.shape[1]):
            if place > position:
                assert scores_TS[row, place] == -torch.inf
                continue
            page_X = case.pages_PX[queries.page_table_RP[row // 2, place // PAGE_SIZE].long()]
            key_PD = page_X[: PAGE_SIZE * INDEX_DIM].view(PAGE_SIZE, INDEX_DIM)
            scale_P = page_X[PAGE_SIZE * INDEX_DIM :].view(torch.float32)
            key_D = decode_index_keys(key_PD, scale_P)[place % PAGE_SIZE]
            expected = sum(
                float(queries.weight_TJ[row, head]) * max(0.0, float(query_TJD[row, head] @ key_D))
                for head in range(NUM_HEADS)
            )
            assert scores_TS[row, place] == expected


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8])
def test_the_kernel_compiles_for_hopper_and_spills_nothing(num_rows: int, scores: bool) -> None:
    macros = scan_macros(num_rows, 256, scores=scores)
    assert most_bytes_spilled("index_scan.cu", macros) == 0
    # Matrix instructions that wait for each other would be named so.
    assert "serialized" not in compile_cuda("index_scan.cu", macros, anew=True).log


@pytest.mark.parametrize("num_rows", [0, 9])
def test_other_numbers_of_rows_are_refused(num_rows: int) -> None:
    with pytest.raises(ConfigError, match=f"1..8 query rows, got {num_rows}"):
        scan_macros(num_rows, 1, scores=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_TJD": torch.zeros(2, 32, 64, dtype=torch.uint8)}, "query_TJD must be torch.uint8"),
        ({"query_TJD": misaligned(torch.zeros(2, 32, 128, dtype=torch.uint8))}, "query_TJD must begin"),
        ({"weight_TJ": torch.zeros(2, 32, device="meta")}, "weight_TJ must be on cpu"),
        ({"weight_TJ": torch.zeros(2, 32, dtype=torch.float64)}, "weight_TJ must be torch.float32"),
        ({"page_table_RP": torch.zeros(1, 4, dtype=torch.int64)}, "page_table_RP must be torch.int32"),
        ({"page_table_RP": torch.zeros(1, 4, dtype=torch.int32)[:, ::2]}, "and contiguous"),
        ({"page_table_RP": torch.zeros(4, 1, dtype=torch.int32)}, "2 rows of 4 requests"),
    ],
)
def test_queries_of_another_kind_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "query_TJD": torch.zeros(2, 32, 128, dtype=torch.uint8),
        "weight_TJ": torch.zeros(2, 32),
        "position_T": torch.zeros(2, dtype=torch.int32),
        "page_table_RP": torch.zeros(1, 1, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        IndexQueries(**(arguments | changes))


@pytest.mark.parametrize(
    ("pages_PX", "message"),
    [
        (torch.zeros(2, PAGE_BYTES, dtype=torch.int8), "pages must be uint8"),
        (torch.zeros(2, PAGE_BYTES - 4, dtype=torch.uint8), "pages must be uint8"),
        (torch.zeros(2, PAGE_BYTES + 4, dtype=torch.uint8)[:, :PAGE_BYTES], "multiples of 16 bytes"),
        (torch.zeros(2, PAGE_BYTES + 16, dtype=torch.uint8)[:, 4 : PAGE_BYTES + 4], "multiples of 16 bytes"),
    ],
)
def test_pages_that_the_copy_engine_does_not_take_are_refused(pages_PX: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_pages(pages_PX)


@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 7, 8])
def test_a_gpu_computes_exact_scores_exactly(num_rows: int) -> None:
    case = make_index_case([1, 0, 64, 65, 3000], num_rows=num_rows)
    expected_TS = paged_index_scores_ref(case.queries, case.pages_PX)
    there = case.to("cuda")
    got_TS = torch.full(expected_TS.shape, -torch.inf, device="cuda")
    paged_index_scores(there.queries, IndexKeyPages.of(there.pages_PX), out_TS=got_TS)
    torch.testing.assert_close(got_TS.cpu(), expected_TS, rtol=0, atol=0)


@needs_gpu
def test_a_gpu_is_close_to_float64() -> None:
    case = make_index_case([5000], num_rows=6)
    queries = case.queries
    queries.query_TJD.copy_(to_e4m3(torch.randn(queries.query_TJD.shape)).view(torch.uint8))
    expected_TS = paged_index_scores_ref(queries, case.pages_PX, dtype=torch.float64)
    there = case.to("cuda")
    got_TS = torch.full(expected_TS.shape, -torch.inf, device="cuda")
    paged_index_scores(there.queries, IndexKeyPages.of(there.pages_PX), out_TS=got_TS)
    seen_TS = expected_TS > -torch.inf
    error = got_TS.cpu().double()[seen_TS] - expected_TS[seen_TS]
    assert error.norm() < 1e-3 * expected_TS[seen_TS].norm()  # measured 1.4e-4: sums of 14 bits
