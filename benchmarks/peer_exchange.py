"""Exchanges between the GPUs of one host, in one kernel over their memory, beside NCCL: checked before they are timed.

    gather_queries     queries of all heads before attention               all_gather of T x A x 576 bfloat16
    gather_choices     best positions of every rank, with their scores     all_gather of 2 x T x 2048 of 4 bytes
    exchange_outputs   outputs and LSEs behind attention                   all_to_all of T x A x 1040 bytes a rank
    add_norm           sum over the ranks, residual and norm               T x 6144 bfloat16

A process a GPU, A = 64 / ranks; graphs of one exchange over and over, medians of replays. The floor counts the bytes
that a rank sends at what a copy to a peer reaches.

    python benchmarks/peer_exchange.py [--ranks 2] [--json FILE]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.bench_kernels import machine, show
from benchmarks.kernel_cases.result import CaseResult
from specdec.dcp.communicator import CollectiveRecord, Communicator, ProcessCommunicator, ordered_sum
from specdec.dcp.peer_communicator import PeerCommunicator, over_peer_memory
from specdec.kernels.add_rms_norm import add_rms_norm
from specdec.kernels.peer_add_norm import peer_add_norm, takes_rows

_NUM_HEADS, _FEATURES, _EPS = 64, 6144, 1e-5
_NUM_ROWS = (1, 6, 96, 192)
_PEER_COPY_BYTES_PER_US = 373e3  # two H200, measured
_CALLS, _REPLAYS = 20, 20

Calls = dict[str, Callable[[], object]]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        print(f"{torch.cuda.device_count()} GPUs for {arguments.ranks} ranks: nothing to measure")
        return
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run, (arguments.ranks, Path(folder)), arguments.ranks)
        results = json.loads((Path(folder) / "results").read_text())
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    show(results)


def _run(rank: int, size: int, folder: Path) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(rank)
    timeout = timedelta(seconds=120)
    store = dist.FileStore(str(folder / "group"), size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device, timeout=timeout)
    assert dist.group.WORLD is not None
    nccl = ProcessCommunicator("tp", dist.group.WORLD, CollectiveRecord())
    peers = over_peer_memory(nccl, store=dist.FileStore(str(folder / "peers"), size), timeout=timeout, device=device)
    if not isinstance(peers, PeerCommunicator):
        raise SystemExit("the GPUs do not reach each other's memory")
    results = []
    for num_rows in _NUM_ROWS:
        results += _exchanges(num_rows, peers, nccl, device)
        results.append(_add_norm(num_rows, peers, nccl, device))
    if rank == 0:
        (folder / "results").write_text(json.dumps([asdict(result) for result in results]))
    dist.barrier()
    peers.close()
    dist.destroy_process_group()


def _exchanges(
    num_rows: int, peers: PeerCommunicator, nccl: ProcessCommunicator, device: torch.device
) -> list[CaseResult]:
    num_heads = _NUM_HEADS // peers.size
    queries = torch.randn(num_rows, num_heads, 576, device=device).bfloat16()
    choices = torch.randint(0, 1 << 20, (2, num_rows, 2048), device=device, dtype=torch.int32)
    outputs = torch.randint(0, 256, (peers.size, num_rows, num_heads, 1040), device=device, dtype=torch.uint8)
    results = []
    for case, kind, message, row_bytes in (
        ("gather_queries", "all_gather", queries, queries.nbytes),
        ("gather_choices", "all_gather", choices, choices.nbytes),
        ("exchange_outputs", "all_to_all", outputs, outputs[0].nbytes),
    ):
        ours, theirs = (partial(getattr(each, kind), message) for each in (peers, nccl))
        assert torch.equal(ours().view(torch.uint8), theirs().view(torch.uint8))
        shape = f"T={num_rows}, {peers.size} ranks, {num_heads} heads"
        results.append(_timed(case, shape, ours, {"NCCL": theirs}, sent=row_bytes * (peers.size - 1)))
    return results


def _add_norm(num_rows: int, peers: PeerCommunicator, nccl: ProcessCommunicator, device: torch.device) -> CaseResult:
    def rows() -> torch.Tensor:
        return torch.randn(num_rows, _FEATURES, device=device).bfloat16()

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
    if takes_rows(peers.slabs.layout, num_rows, _FEATURES):
        others["our gather, sum, norm"] = ours
        ours = partial(peer_add_norm, x_TH, delta_TH, weight_H, peers.slabs, eps=_EPS, normed_TH=normed_TH)
    in_steps(nccl, x_TH.clone(), expected_TH)
    ours()
    assert torch.equal(normed_TH, expected_TH)
    return _timed("add_norm", f"T={num_rows}, {peers.size} ranks", ours, others, sent=x_TH.nbytes * (peers.size - 1))


def _timed(case: str, shape: str, ours: Callable[[], object], others: Calls, *, sent: int) -> CaseResult:
    return CaseResult(
        case=case,
        shape=shape,
        ours_us=_graph_us(ours),
        floor_us=sent / _PEER_COPY_BYTES_PER_US,
        error=0.0,  # the bits are the same
        peers_us={name: _graph_us(call) for name, call in others.items()},
    )


def _graph_us(call: Callable[[], object]) -> float:
    """Microseconds of a call: the median over replays of a graph of calls. All ranks take as many."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads go on meanwhile
        for _ in range(_CALLS):
            call()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_REPLAYS)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    graph.reset()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3 / _CALLS


if __name__ == "__main__":
    main()
