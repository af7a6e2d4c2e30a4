"""How the ranks of one engine find each other: started here on one host, or by `torchrun` on one or many.

Rank 0 leads. It serves the store where the ranks meet (`torchrun` brings its own), opens the control channel, and forms
the process groups: gloo on the CPU, NCCL on GPUs. The dcp groups are runs of consecutive tensor-parallel ranks.
"""

import contextlib
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from specdec.control_channel import FollowerChannel, LeaderChannel, connect, listen
from specdec.dcp.communicator import CollectiveRecord, ParallelGroups, ProcessCommunicator, SingleRank
from specdec.errors import ConfigError, RankLostError

_STORE_PREFIX = "specdec"
_CONTROL_KEY = f"{_STORE_PREFIX}/control"
_START_TIMEOUT_S = 300.0  # importing torch on every rank at once takes a while on few cores
_EXIT_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where this process stands among the ranks.

    Attributes:
        rank: Rank of the process, 0..size - 1.
        size: Number of ranks.
        local_rank: Rank on this host, which chooses the GPU.
        host: Where the store is.
        port: Its port; 0 has rank 0 choose one.
        has_store: A launcher serves the store already.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    has_store: bool


def launched_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Read the place that `torchrun` gave this process; None where it was not launched as one of several ranks."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return Place(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
        host=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def device_of(device: str, place: Place) -> str:
    """Give the device of a rank: "cuda" means the GPU of its local rank."""
    return f"cuda:{place.local_rank}" if device == "cuda" else device


class RankGroup:
    """The other ranks of an engine, from the leader's side.

    Args:
        tp_size: Number of ranks.
        dcp_size: Ranks of a dcp group; divides `tp_size`.
        device: "cpu", or "cuda" for one GPU a rank.
        timeout_s: Silence, or wait in a collective, after which a rank counts as lost.

    Attributes:
        place: Of the leader.
        channel: To the followers.

    Raises:
        ConfigError: The launcher started another number of ranks, or the process already uses torch.distributed.
        RankLostError: A rank did not come.
    """

    def __init__(self, *, tp_size: int, dcp_size: int, device: str, timeout_s: float) -> None:
        launched = launched_place()
        if launched is not None and launched.size != tp_size:
            raise ConfigError(
                f"tp_size is {tp_size}, but the launcher started {launched.size} processes (WORLD_SIZE): start "
                f"{tp_size}, or set tp_size (--tp-size) to {launched.size}"
            )
        if dist.is_initialized():
            raise ConfigError(
                "this process already uses torch.distributed: close the engine that does (Engine.close), or start "
                "this one in its own process"
            )
        self._timeout_s = timeout_s
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.place = launched or Place(rank=0, size=tp_size, local_rank=0, host="127.0.0.1", port=0, has_store=False)
        self._store = _store_of(self.place)
        key = secrets.token_bytes(32)
        with listen(self.place.host, key, num_followers=tp_size - 1) as listener:
            self._store.set(_CONTROL_KEY, pickle.dumps((listener.address, key, timeout_s)).hex())
            try:
                if launched is None:
                    self._start_followers()
                self._await_followers()
                connections: dict[int, Connection] = {}
                for _ in range(1, tp_size):
                    connection = listener.accept()
                    connections[connection.recv()] = connection
            except BaseException:
                self._end_processes(grace_s=0)
                raise
        self.channel = LeaderChannel(connections, timeout_s=timeout_s, describe_end=self._describe_end)
        self._groups: ParallelGroups | None = None
        self._sizes = tp_size, dcp_size, device

    def form(self) -> ParallelGroups:
        """Form the process groups, with every follower."""
        tp_size, dcp_size, device = self._sizes
        return _form_groups(
            self.place, self._store, tp_size=tp_size, dcp_size=dcp_size, device=device, timeout_s=self._timeout_s
        )

    def close(self) -> None:
        """Wait for the followers to end, end what does not, and leave the process groups."""
        self._end_processes(grace_s=_EXIT_GRACE_S if self.channel.loss is None else 0)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _start_followers(self) -> None:
        for rank in range(1, self.place.size):
            environ = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.place.size),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": self.place.host,
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "specdec.follower"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                # An interrupt of the terminal goes to the leader, which then ends the followers in order.
                start_new_session=True,
            )

    def _await_followers(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        missing = set(range(1, self.place.size))
        while missing:
            missing = {rank for rank in missing if not self._store.check([_ready_key(rank)])}
            for rank in sorted(missing):
                if (end := self._describe_end(rank, wait_s=0)) is not None:
                    raise RankLostError(f"rank {rank} did not start: {end}; its messages stand above")
            if time.monotonic() > deadline:
                raise RankLostError(f"ranks {sorted(missing)} did not start within {_START_TIMEOUT_S:g} s")
            time.sleep(0.02)

    def _describe_end(self, rank: int, *, wait_s: float = 1.0) -> str | None:
        process = self._processes.get(rank)
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(wait_s)
            how = f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"its process {process.pid} was {how}" if code < 0 else f"its process {process.pid} {how}"
        return None

    def _end_processes(self, *, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()  # also ends a stopped one
                process.wait()


def join_group(place: Place) -> tuple[FollowerChannel, Store, float]:
    """Come to the leader as a follower: gives the channel, the store and the timeout."""
    store = _store_of(place)
    address, key, timeout_s = pickle.loads(bytes.fromhex(store.get(_CONTROL_KEY).decode()))
    store.set(_ready_key(place.rank), "here")
    return FollowerChannel(connect(address, key, rank=place.rank), timeout_s=timeout_s), store, timeout_s


def form_followers_groups(
    place: Place, store: Store, *, dcp_size: int, device: str, timeout_s: float
) -> ParallelGroups:
    """Form the process groups as a follower; returns once every rank has come."""
    return _form_groups(place, store, tp_size=place.size, dcp_size=dcp_size, device=device, timeout_s=timeout_s)


def _form_groups(
    place: Place, store: Store, *, tp_size: int, dcp_size: int, device: str, timeout_s: float
) -> ParallelGroups:
    is_cuda = device.startswith("cuda")
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=PrefixStore(_STORE_PREFIX, store),
        rank=place.rank,
        world_size=tp_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device(device_of(device, place)) if is_cuda else None,
    )
    record = CollectiveRecord()
    world = dist.group.WORLD
    assert world is not None
    tp = ProcessCommunicator("tp", world, record)
    if dcp_size == 1:
        return ParallelGroups(tp=tp, dcp=SingleRank("dcp"))
    for first in range(0, tp_size, dcp_size):
        ranks = list(range(first, first + dcp_size))
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        if place.rank in ranks:
            dcp = ProcessCommunicator("dcp", group, record)
    return ParallelGroups(tp=tp, dcp=dcp)


def _store_of(place: Place) -> TCPStore:
    return TCPStore(
        place.host,
        place.port,
        is_master=place.rank == 0 and not place.has_store,
        wait_for_workers=False,
        timeout=timedelta(seconds=_START_TIMEOUT_S),
    )


def _ready_key(rank: int) -> str:
    return f"{_STORE_PREFIX}/ready/{rank}"


def _has_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError):
        return False
