"""Rows of ten layers gathered into one buffer to be sent, as a rank's share of a prompt."""

from functools import partial

import torch

from benchmarks.gpu_timing import graph_us, num_sets
from benchmarks.kernel_cases.rates import memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.pack_rows import launch_pack_rows

_LAYERS, _PAGE = 10, 64
_WORD = 4
_VECTOR = 16  # bytes that move at once where rows allow it


def run() -> list[CaseResult]:
    """Gather the share of one of n ranks: every n-th page, which is one long row, or every n-th row."""
    short = [
        _measure(row, 8192, stride, level) for row in (576, 656, 132) for stride in (2, 4, 8) for level in (_PAGE, 1)
    ]
    long = [_measure(row, 125_000, 4, level) for row in (576, 656, 132) for level in (_PAGE, 1)]
    return short + long


def _measure(row_bytes: int, num_rows: int, stride: int, level: int) -> CaseResult:
    """Time `num_rows` rows of each layer, in runs of `level` rows, from memory with `stride` times as many."""
    run_bytes, num_runs = row_bytes * level, _LAYERS * (num_rows // level)
    num_bytes = num_runs * run_bytes
    words = run_bytes // _WORD
    vector = _VECTOR // _WORD if run_bytes % _VECTOR == 0 else 1
    run_R = torch.arange(num_runs, device="cuda")
    offset_R, out_offset_R = run_R * stride * words, run_R * words
    calls, selects, copies = [], [], []
    for _ in range(num_sets(2 * num_bytes)):
        source = torch.randint(-(1 << 31), (1 << 31) - 1, (num_runs * stride, words), device="cuda", dtype=torch.int32)
        out = torch.zeros(num_runs, words, dtype=torch.int32, device="cuda")
        memory = source.view(-1), offset_R, out.view(-1), out_offset_R
        calls.append(partial(launch_pack_rows, *memory, num_words=words, vector=vector))
        # A kernel that reads and writes as many bytes:
        copies.append(partial(torch.add, out.clone(), 1, out=out.clone()))
        selects.append(partial(torch.index_select, source, 0, run_R * stride, out=out.clone()))
    ours_us = graph_us(calls)
    return CaseResult(
        case="pack_gather",
        shape=f"{_LAYERS} x {num_rows} rows of {row_bytes}, every {stride}th {'row' if level == 1 else 'page'}",
        ours_us=ours_us,
        floor_us=memory_us(2 * num_bytes),
        error=float((out != source[::stride]).sum()),
        peers_us={"a copy": graph_us(copies), "index_select": graph_us(selects)},
    )
