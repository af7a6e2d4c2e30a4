"""Processes with a GPU each, that exchange through their GPUs' memory and by NCCL, and what they time."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.gpu_timing import replay_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.dcp.communicator import CollectiveRecord, ProcessCommunicator
from specdec.dcp.peer_communicator import PeerCommunicator, over_peer_memory

_PEER_COPY_BYTES_PER_US = 373e3  # two H200, measured
_CALLS = 20


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of the processes.

    Attributes:
        peers: All of them, through their GPUs' memory.
        nccl: The same by NCCL.
        device: GPU of this one.
    """

    peers: PeerCommunicator
    nccl: ProcessCommunicator
    device: torch.device

    @property
    def rank(self) -> int:
        """Of this one."""
        return self.peers.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.peers.size

    def all_equal(self, tensor: torch.Tensor) -> bool:
        """Whether all ranks have the same values; on every rank alike."""
        gathered = self.nccl.all_gather(tensor)
        return bool((gathered == gathered[0]).all())


Case = Callable[[Ranks], list[CaseResult]]


def run_on_ranks(case: Case, num_ranks: int) -> list[dict[str, Any]]:
    """Run a function of a module on all ranks; gives the results of the first."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run, (case, num_ranks, Path(folder)), num_ranks)
        results: list[dict[str, Any]] = json.loads((Path(folder) / "results").read_text())
    return results


def _run(rank: int, case: Case, size: int, folder: Path) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    timeout = timedelta(seconds=120)
    store = dist.FileStore(str(folder / "group"), size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device, timeout=timeout)
    assert dist.group.WORLD is not None
    nccl = ProcessCommunicator("tp", dist.group.WORLD, CollectiveRecord())
    peers = over_peer_memory(nccl, store=dist.FileStore(str(folder / "peers"), size), timeout=timeout, device=device)
    if not isinstance(peers, PeerCommunicator):
        raise SystemExit("the GPUs do not reach each other's memory")
    with torch.inference_mode():
        results = case(Ranks(peers, nccl, device))
    if rank == 0:
        (folder / "results").write_text(json.dumps([asdict(result) for result in results]))
    torch.cuda.synchronize()
    dist.barrier()
    peers.close()
    dist.destroy_process_group()


def link_us(num_bytes: float) -> float:
    """Microseconds in which a rank sends so many bytes, at the rate of a copy to a peer."""
    return num_bytes / _PEER_COPY_BYTES_PER_US


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of a call: the median over replays of a graph of calls in turn. All ranks take as many."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in (*calls, *calls[:1]):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    turns = -(-_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads go on meanwhile
        for _ in range(turns):
            for call in calls:
                call()
    graph.replay()
    microseconds = replay_us(graph.replay)
    graph.reset()
    return microseconds / (turns * len(calls))
