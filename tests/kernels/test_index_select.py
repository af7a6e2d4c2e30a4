"""The chosen set is exactly that of `top_positions`, whatever the order of the scores and however many tie."""

import pytest
import torch

from specdec.kernels.errors import ConfigError
from specdec.kernels.index_key_pages import IndexKeyPages
from specdec.kernels.index_select import CandidateMemory, IndexSelect, check_chosen, index_select_ref, top_macros
from specdec.kernels.paged_index_scores import paged_index_scores_ref
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


@pytest.mark.parametrize("max_positions", [1, 500_000, 1 << 20])
def test_the_kernel_compiles_for_hopper_and_spills_nothing(max_positions: int) -> None:
    assert most_bytes_spilled("top_candidates.cu", top_macros(max_positions)) == 0


def test_wrong_settings_and_outputs_are_refused() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"k must be 1..2048, got 2049"):
        IndexSelect(num_rows=1, max_requests=1, max_positions=64, k=2049)
    with pytest.raises(ConfigError, match="must lie below 1048576"):
        top_macros((1 << 20) + 1)
    with pytest.raises(ValueError, match=r"out_position must be torch\.int32"):
        check_chosen(torch.zeros(2, 8, dtype=torch.int64), None, (2, 8), device=cpu)
    with pytest.raises(ValueError, match=r"out_score must be torch\.float32"):
        check_chosen(torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 7), (2, 8), device=cpu)
    with pytest.raises(ValueError, match="out_position must be on cpu, got meta"):
        check_chosen(torch.zeros(2, 8, dtype=torch.int32, device="meta"), None, (2, 8), device=cpu)


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
def test_a_gpu_reads_a_damaged_key_and_ignores_one_that_no_row_may_see() -> None:
    case = make_index_case([40000, 2100], num_rows=6)
    first, last = case.queries.page_table_RP[0, 5].long(), case.queries.page_table_RP[1, 32].long()
    case.pages_PX[first, :300] = 0x7F  # keys 0 and 1, and a part of 2
    case.pages_PX[last, 60 * 128 : 64 * 128] = 0x7F  # behind position 2099
    check_choice(case, num_rows=6, k=2048)


@needs_gpu
def test_layers_that_share_the_memory_choose_as_layers_apart() -> None:
    cases = [make_index_case([30000, 0, 5000, 700], num_rows=6, seed=seed).to("cuda") for seed in range(4)]
    memory = CandidateMemory(num_lists=50, max_positions=1 << 16)
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


def check_choice(case: IndexCase, *, num_rows: int, k: int) -> None:
    """Compare positions and scores, twice: the kernels must leave their memory as they found it."""
    there = case.to("cuda")
    scores_TS = paged_index_scores_ref(there.queries, there.pages_PX)
    expected_TK = index_select_ref(there.queries, there.pages_PX, k=k, dtype=torch.float32)
    num_requests, num_pages = there.queries.page_table_RP.shape
    select = IndexSelect(num_rows=num_rows, max_requests=num_requests, max_positions=num_pages * 64, k=k)
    keys = IndexKeyPages.of(there.pages_PX)
    for _ in range(2):
        position_TK = torch.full(expected_TK.shape, -7, dtype=torch.int32, device="cuda")
        score_TK = torch.full(expected_TK.shape, torch.nan, device="cuda")
        select(there.queries, keys, out_position_TK=position_TK, out_score_TK=score_TK)
        assert torch.equal(position_TK.long(), expected_TK)
        expected_score_TK = scores_TS.gather(1, expected_TK.clamp(min=0)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        assert torch.equal(score_TK, expected_score_TK.masked_fill(expected_TK < 0, -torch.inf))
