"""The attention of N shards merged in one launch."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_timing import graph_us, num_sets, relative_error
from benchmarks.kernel_cases.rates import memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.lse_merge import AttentionState, merge_states_ref
from specdec.kernels.shard_merge import merge_shards, merge_shards_ref

_HEADS, _VALUES = 8, 512


def run() -> list[CaseResult]:
    """Time bfloat16 outputs of 8 heads a rank."""
    return [_measure(shards, rows) for rows in (6, 192, 768) for shards in (2, 4, 8)]


def _measure(num_shards: int, num_rows: int) -> CaseResult:
    num_states = num_rows * _HEADS
    num_bytes = (num_shards + 1) * num_states * (2 * _VALUES + 4)
    ours: list[Callable[[], object]] = []
    chained: list[Callable[[], object]] = []
    torches: list[Callable[[], object]] = []
    for _ in range(num_sets(num_bytes)):
        out_NTAL = torch.randn(num_shards, num_rows, _HEADS, _VALUES, device="cuda").bfloat16()
        lse_NTA = 3 * torch.randn(num_shards, num_rows, _HEADS, device="cuda")
        lse_NTA[torch.rand_like(lse_NTA) < 0.1] = -torch.inf
        out_NTAL.masked_fill_((lse_NTA == -torch.inf)[..., None], torch.nan)
        first_owner_B = torch.randint(num_shards, (num_rows,), device="cuda")
        target = AttentionState(torch.empty_like(out_NTAL[0]), torch.empty_like(lse_NTA[0]))
        ours.append(partial(merge_shards, out_NTAL, lse_NTA, **target._asdict(), first_owner_B=first_owner_B))
        chained.append(partial(_chain, out_NTAL.clone(), lse_NTA.clone()))
        torches.append(partial(merge_shards_ref, out_NTAL, lse_NTA, first_owner_B=first_owner_B))
    ours_us = graph_us(ours)
    expected = merge_states_ref(out_NTAL.double(), lse_NTA.double())
    live_TA = expected.lse_TA > -torch.inf
    return CaseResult(
        case="lse_merge",
        shape=f"N={num_shards} T={num_rows}",
        ours_us=ours_us,
        floor_us=memory_us(num_bytes),
        error=relative_error(target.out_TAL[live_TA], expected.out_TAL[live_TA]),
        peers_us={"pairwise": graph_us(chained), "torch": graph_us(torches)},
        note="pairwise: N - 1 launches of our kernel on two shards each",
    )


def _chain(out_NTAL: torch.Tensor, lse_NTA: torch.Tensor) -> None:
    """Merge shards 0 and 1 into 1, then 1 and 2 into 2, and so on."""
    for n in range(len(out_NTAL) - 1):
        merge_shards(out_NTAL[n : n + 2], lse_NTA[n : n + 2], out_TAL=out_NTAL[n + 1], lse_TA=lse_NTA[n + 1])
