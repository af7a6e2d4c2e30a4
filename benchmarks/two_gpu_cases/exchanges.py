"""Single exchanges, in one kernel over the GPUs' memory and by NCCL; the results are the same bits.

    gather_queries     queries of all heads before attention               all_gather of T x A x 576 bfloat16
    gather_choices     best positions of every rank, with their scores     all_gather of 2 x T x 2048 of 4 bytes
    exchange_outputs   outputs and LSEs behind attention                   all_to_all of T x A x 1040 bytes a rank
    allreduce_norm     sum over the ranks, residual and norm               T x 6144 bfloat16

A = 64 / ranks. The floor counts the bytes that a rank sends.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.kernel_cases.result import CaseResult
from benchmarks.two_gpu_cases.ranks import Ranks, graph_us, link_us
from specdec.dcp.communicator import Communicator, ordered_sum
from specdec.kernels.add_rms_norm import add_rms_norm

_NUM_HEADS, _FEATURES, _EPS = 64, 6144, 1e-5
_NUM_ROWS = (1, 6, 96, 192)

Calls = dict[str, Callable[[], object]]


def run(ranks: Ranks) -> list[CaseResult]:
    """Check and time every exchange."""
    torch.manual_seed(ranks.rank)
    results = []
    for num_rows in _NUM_ROWS:
        results += _exchanges(num_rows, ranks)
        results.append(_allreduce_norm(num_rows, ranks))
    return results


def _exchanges(num_rows: int, ranks: Ranks) -> list[CaseResult]:
    num_heads, device = _NUM_HEADS // ranks.size, ranks.device
    queries = torch.randn(num_rows, num_heads, 576, device=device).bfloat16()
    choices = torch.randint(0, 1 << 20, (2, num_rows, 2048), device=device, dtype=torch.int32)
    outputs = torch.randint(0, 256, (ranks.size, num_rows, num_heads, 1040), device=device, dtype=torch.uint8)
    results = []
    for case, kind, message, row_bytes in (
        ("gather_queries", "all_gather", queries, queries.nbytes),
        ("gather_choices", "all_gather", choices, choices.nbytes),
        ("exchange_outputs", "all_to_all", outputs, outputs[0].nbytes),
    ):
        ours, theirs = (partial(getattr(each, kind), message) for each in (ranks.peers, ranks.nccl))
        assert torch.equal(ours().view(torch.uint8), theirs().view(torch.uint8))
        shape = f"T={num_rows}, {ranks.size} ranks, {num_heads} heads"
        results.append(_timed(case, shape, ours, {"NCCL": theirs}, sent=row_bytes * (ranks.size - 1)))
    return results


def _allreduce_norm(num_rows: int, ranks: Ranks) -> CaseResult:
    def rows() -> torch.Tensor:
        return torch.randn(num_rows, _FEATURES, device=ranks.device).bfloat16()

    peers, nccl = ranks.peers, ranks.nccl
    x_TH, weight_H = nccl.broadcast(rows(), source=0), nccl.broadcast(rows()[0].contiguous(), source=0)
    delta_TH, normed_TH, expected_TH = rows(), torch.empty_like(x_TH), torch.empty_like(x_TH)
    reduced_TH = torch.zeros_like(x_TH)

    def in_steps(communicator: Communicator, x_TH: torch.Tensor, out_TH: torch.Tensor) -> None:
        add_rms_norm(x_TH, ordered_sum(delta_TH, communicator), weight_H, eps=_EPS, normed_TH=out_TH)

    def all_reduce() -> None:
        dist.all_reduce(reduced_TH, group=nccl.group)
        add_rms_norm(x_TH, reduced_TH, weight_H, eps=_EPS, normed_TH=normed_TH)

    ours = partial(in_steps, peers, x_TH, normed_TH)
    others = {"NCCL gather, sum, norm": partial(in_steps, nccl, x_TH, normed_TH), "NCCL all-reduce, norm": all_reduce}
    if peers.adds_rows(x_TH):
        others["our gather, sum, norm"] = ours
        ours = partial(peers.add_norm, x_TH, delta_TH, weight_H, eps=_EPS, normed_TH=normed_TH)
    in_steps(nccl, x_TH.clone(), expected_TH)
    ours()
    assert torch.equal(normed_TH, expected_TH)
    shape = f"T={num_rows}, {ranks.size} ranks"
    return _timed("allreduce_norm", shape, ours, others, sent=x_TH.nbytes * (ranks.size - 1))


def _timed(case: str, shape: str, ours: Callable[[], object], others: Calls, *, sent: int) -> CaseResult:
    return CaseResult(
        case=case,
        shape=shape,
        ours_us=graph_us([ours]),
        floor_us=link_us(sent),
        error=0.0,  # the bits are the same
        peers_us={name: graph_us([call]) for name, call in others.items()},
    )
