"""Ranks that write into each other's memory: as streams of one process on one GPU, and as processes."""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore

from specdec.dcp.communicator import CollectiveRecord, ProcessCommunicator
from specdec.dcp.peer_communicator import PeerCommunicator, over_peer_memory
from specdec.kernels.peer_slab import PeerSlabs, SlabLayout

T = TypeVar("T")
_TIMEOUT_S = 300  # ranks that share a GPU take turns on it: some milliseconds for each time that they meet


class StreamRanks:
    """Ranks of one process whose slabs are tensors of one GPU.

    Attributes:
        slabs: What each rank's kernels are given.
    """

    def __init__(self, size: int) -> None:
        self._memory = torch.zeros(size, SlabLayout(size).num_bytes, dtype=torch.uint8, device="cuda")
        addresses = [slab.data_ptr() for slab in self._memory]
        self.slabs = [PeerSlabs(addresses, rank=rank, device=self._memory.device) for rank in range(size)]

    def only(self, last: int, launch: Callable[[PeerSlabs], T]) -> T:
        """Launch for all ranks, one after the other; gives what the last one does, for whom all others have come.

        They do not wait for it: they were given up.
        """
        for slabs in self.slabs:
            if slabs.rank != last:
                slabs.give_up()
                launch(slabs)
        result = launch(self.slabs[last])
        torch.cuda.synchronize()
        return result

    def replayed(self, launch: Callable[[PeerSlabs], T], *, times: int) -> list[T]:
        """Replay graphs of what each rank launches, all at once on streams of their own; gives what each holds then.

        They run without waiting first: what the driver sets up for them might wait for a rank that is not there yet.
        """
        graphs, results = [], []
        for slabs in self.slabs:
            slabs.give_up()
            launch(slabs)
        torch.cuda.synchronize()
        for slabs in self.slabs:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                results.append(launch(slabs))
        streams = [torch.cuda.Stream() for _ in graphs]
        for replay in range(1 + times):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            if replay == 0:
                torch.cuda.synchronize()
                for slabs in self.slabs:
                    slabs.given_up.zero_()
                    slabs.seen.zero_()
        torch.cuda.synchronize()
        return results


@dataclass(frozen=True, slots=True)
class GpuRank:
    """One of several processes.

    Attributes:
        alone: The group without memory of peers, on the CPU: what is expected.
        device: GPU of this rank.
        folder: Of the test.
    """

    alone: ProcessCommunicator
    device: torch.device
    folder: Path

    def connect(self, name: str = "peers") -> PeerCommunicator:
        """Give the group with its memory; each time under another name."""
        store = FileStore(str(self.folder / name), self.alone.size)
        timeout = timedelta(seconds=_TIMEOUT_S)
        connected = over_peer_memory(self.alone, store=store, timeout=timeout, device=self.device)
        assert isinstance(connected, PeerCommunicator)
        return connected

    def meet(self) -> None:
        """Wait for all ranks, on the CPU."""
        self.alone.all_gather(torch.zeros(1))


def run_gpu_ranks(function: Callable[[GpuRank], None], folder: Path, *, size: int, num_gpus: int) -> None:
    """Call a function of a module in a process for each rank, whose GPUs are dealt out in turn; none may fail."""
    context = multiprocessing.get_context("spawn")
    processes, reports = [], {}
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        place = {"rank": rank, "size": size, "gpu": rank % num_gpus}
        process = context.Process(target=_run, args=(function, folder, sender), kwargs=place, daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        reports[receiver] = rank
    failures = {}
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        while reports and not failures and (left_s := deadline - time.monotonic()) > 0:
            for receiver in wait(list(reports), timeout=left_s):
                assert isinstance(receiver, Connection)
                rank = reports.pop(receiver)
                try:
                    message = receiver.recv()
                except EOFError:
                    message = "its process ended"
                if message is not None:
                    failures[rank] = message
        assert not failures, failures
        assert not reports, f"ranks {sorted(reports.values())} are not done after {_TIMEOUT_S} s"
    finally:
        for process in processes:
            process.join(0 if failures or reports else 30)
            process.kill()
            process.join()


def _run(
    function: Callable[[GpuRank], None], folder: Path, report: Connection, *, rank: int, size: int, gpu: int
) -> None:
    try:
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
        store = FileStore(str(folder / "group"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        assert dist.group.WORLD is not None
        function(GpuRank(ProcessCommunicator("tp", dist.group.WORLD, CollectiveRecord()), device, folder))
        torch.cuda.synchronize(device)
        report.send(None)
    except BaseException as error:
        report.send(f"{type(error).__name__}: {error}")
        raise
