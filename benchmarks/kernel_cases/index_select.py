"""Scores of index keys, the choice of the best 2,048 positions, and the merge of owners' choices."""

from collections.abc import Callable

import torch

from benchmarks.gpu_timing import graph_us, num_sets, relative_error
from benchmarks.kernel_cases.peers import flashinfer_top_k
from benchmarks.kernel_cases.rates import FP8_FLOPS_PER_US, memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.index_key_pages import INDEX_DIM, PAGE_BYTES, PAGE_SIZE, IndexKeyPages
from specdec.kernels.index_select import IndexSelect
from specdec.kernels.latent_formats import to_e4m3
from specdec.kernels.owner_top_k import owner_top_k, owner_top_k_ref
from specdec.kernels.paged_index_scores import (
    NUM_HEADS,
    IndexQueries,
    paged_index_scores,
    paged_index_scores_ref,
)
from specdec.kernels.top_positions import top_positions

_ROWS = 6  # verified of each request
_K = 2048
_SHAPES = ((1, 131072), (16, 32768), (16, 131072), (4, 500032))
_CHECKED = (1, 16384)
_DEEP_GEMM_US = {(1, 131072): 17.6, (16, 32768): 58.5, (16, 131072): 215.5}  # three calls of two rows


def run() -> list[CaseResult]:
    """Check on a small shape against float64, then time; waits for the device."""
    error = _error()
    results = []
    for num_requests, length in _SHAPES:
        results += _scan_results(num_requests, length, error)
    for num_rows in (6, 96, 192):
        for num_owners in (2, 4, 8):
            results.append(_merge_result(num_owners, num_rows))
    return results


def _scan_results(num_requests: int, length: int, error: float) -> list[CaseResult]:
    key_bytes = num_requests * length * (INDEX_DIM + 4)
    flops = 2.0 * num_requests * length * _ROWS * NUM_HEADS * INDEX_DIM
    floor_us = max(memory_us(key_bytes), flops / FP8_FLOPS_PER_US)
    inputs = [_inputs(num_requests, length) for _ in range(num_sets(key_bytes))]
    scores_TS = torch.empty((num_requests * _ROWS, length), device="cuda")
    select = IndexSelect(num_rows=_ROWS, max_requests=num_requests, max_positions=length, k=_K)
    chosen_TK = torch.empty((num_requests * _ROWS, _K), dtype=torch.int32, device="cuda")

    def score(queries: IndexQueries, keys: IndexKeyPages) -> Callable[[], object]:
        return lambda: paged_index_scores(queries, keys, out_TS=scores_TS)

    def choose(queries: IndexQueries, keys: IndexKeyPages) -> Callable[[], object]:
        return lambda: select(queries, keys, out_position_TK=chosen_TK)

    score_us = graph_us([score(*each) for each in inputs])
    select_us = graph_us([choose(*each) for each in inputs])
    topk_us = graph_us([lambda: torch.topk(scores_TS, _K, dim=1)] * 2)
    shape = f"{num_requests} x {length}, {_ROWS} rows, 32 heads"
    deep_gemm_us = _DEEP_GEMM_US.get((num_requests, length))
    scoring = {} if deep_gemm_us is None else {"DeepGEMM, 3 x 2 rows": deep_gemm_us}
    choosing = {f"{name} + torch.topk": us + topk_us for name, us in scoring.items()}
    choosing["our scores + torch.topk"] = score_us + topk_us
    place_1S = torch.arange(length, dtype=torch.int32, device="cuda")[None]
    if top_k := flashinfer_top_k(scores_TS, place_1S, _K):
        choosing["our scores + FlashInfer's top-k"] = score_us + graph_us([top_k] * 2)
    note = "the peer was measured in an earlier run" if scoring else ""
    return [
        CaseResult(
            case="indexer_q6",
            shape=shape,
            ours_us=score_us,
            floor_us=floor_us,
            error=error,
            peers_us=scoring,
            note=note,
        ),
        CaseResult(
            case="index_select",
            shape=shape,
            ours_us=select_us,
            floor_us=floor_us,
            error=error,
            peers_us=choosing,
            note="the set equals that of our own scores, which are not written",
        ),
    ]


def _merge_result(num_owners: int, num_rows: int) -> CaseResult:
    shape = (num_owners, num_rows, _K)
    place_NTW = torch.rand((num_owners, num_rows, 2 * _K), device="cuda").argsort(dim=2)[..., :_K].sort(dim=2).values
    position_NTW = (place_NTW * num_owners + torch.arange(num_owners, device="cuda")[:, None, None]).int()
    num_bytes = position_NTW.numel() * 8
    sets = [(torch.randn(shape, device="cuda"), position_NTW.clone()) for _ in range(num_sets(num_bytes))]
    out_TK = torch.empty((num_rows, _K), dtype=torch.int32, device="cuda")
    owner_top_k(*sets[0], max_positions=1 << 17, out_position_TK=out_TK)
    num_wrong = int((out_TK.long() != owner_top_k_ref(*sets[0], _K)).sum())

    def merge(score_NTW: torch.Tensor, position_NTW: torch.Tensor) -> Callable[[], object]:
        return lambda: owner_top_k(score_NTW, position_NTW, max_positions=1 << 17, out_position_TK=out_TK)

    def peer(score_NTW: torch.Tensor, position_NTW: torch.Tensor) -> Callable[[], object]:
        def call() -> torch.Tensor:
            best = torch.topk(score_NTW.transpose(0, 1).flatten(1), _K, dim=1)
            return position_NTW.transpose(0, 1).flatten(1).gather(1, best.indices)

        return call

    peers: dict[str, list[Callable[[], object]]] = {}
    for score_NTW, of_score_NTW in sets:
        peers.setdefault("torch.topk + gather, ties in no order", []).append(peer(score_NTW, of_score_NTW))
        score_TS, position_TS = (each.transpose(0, 1).flatten(1) for each in (score_NTW, of_score_NTW))
        if top_k := flashinfer_top_k(score_TS, position_TS, _K):
            peers.setdefault("FlashInfer's top-k, ties in no order", []).append(top_k)
    return CaseResult(
        case="owner_topk_merge",
        shape=f"T={num_rows}, N={num_owners}",
        ours_us=graph_us([merge(*each) for each in sets]),
        floor_us=memory_us(num_bytes + out_TK.numel() * 4),
        error=float(num_wrong),
        peers_us={name: graph_us(calls) for name, calls in peers.items()},
        note="error: positions that differ; FlashInfer's: unsorted, the owners' lists side by side before",
    )


def _error() -> float:
    """Relative error of the scores; raises AssertionError where the choice is not that of the kernel's own scores."""
    queries, keys = _inputs(*_CHECKED)
    expected_TS = paged_index_scores_ref(queries, keys.pages_PX, dtype=torch.float64)
    scores_TS = torch.full(expected_TS.shape, -torch.inf, device="cuda")
    paged_index_scores(queries, keys, out_TS=scores_TS)
    chosen_TK = torch.empty((len(scores_TS), _K), dtype=torch.int32, device="cuda")
    select = IndexSelect(num_rows=_ROWS, max_requests=1, max_positions=scores_TS.shape[1], k=_K)
    select(queries, keys, out_position_TK=chosen_TK)
    assert torch.equal(chosen_TK.long(), top_positions(scores_TS, _K))
    seen_TS = expected_TS > -torch.inf
    return relative_error(scores_TS[seen_TS], expected_TS[seen_TS])


def _inputs(num_requests: int, length: int) -> tuple[IndexQueries, IndexKeyPages]:
    """Make random queries and keys; the pages of a request lie anywhere."""
    num_pages = num_requests * length // PAGE_SIZE
    pages_PX = torch.empty((num_pages, PAGE_BYTES), dtype=torch.uint8, device="cuda")
    for part_PX in pages_PX.split(4096):  # the float32 values of all keys would fill the memory
        values = torch.randn((len(part_PX), PAGE_SIZE * INDEX_DIM), device="cuda")
        part_PX[:, : values.shape[1]] = to_e4m3(values).view(torch.uint8)
        part_PX[:, values.shape[1] :] = torch.full((len(part_PX), PAGE_SIZE), 0.5, device="cuda").view(torch.uint8)
    num_rows = num_requests * _ROWS
    queries = IndexQueries(
        query_TJD=to_e4m3(torch.randn((num_rows, NUM_HEADS, INDEX_DIM), device="cuda")).view(torch.uint8),
        weight_TJ=torch.randn((num_rows, NUM_HEADS), device="cuda") * 0.05,
        position_T=(torch.arange(num_rows, device="cuda") % _ROWS + length - _ROWS).int(),
        page_table_RP=torch.randperm(num_pages, device="cuda").int().view(num_requests, -1),
    )
    return queries, IndexKeyPages.of(pages_PX)
