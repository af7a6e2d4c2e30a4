"""How the ranks of one engine find each other: started here on one host, or by `torchrun` on one or many.

Rank 0 leads. It starts the followers or meets those of the launcher, opens the control channel, and forms the process
groups: gloo on the CPU, NCCL on GPUs, which write into each other's memory where they can. The dcp groups are runs of
consecutive tensor-parallel ranks.
"""

import contextlib
import functools
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from specdec.dcp.communicator import CollectiveRecord, Communicator, ParallelGroups, ProcessCommunicator, SingleRank
from specdec.dcp.peer_communicator import PeerCommunicator, over_peer_memory
from specdec.errors import CollectiveError, ConfigError, RankLostError
from specdec.ranks.control_messages import END_GRACE_S
from specdec.ranks.follower_channel import LEADER_LOST_EXIT_CODE, FollowerChannel
from specdec.ranks.leader_channel import PASS_TIMEOUTS, LeaderChannel
from specdec.ranks.place import Place, launched_place
from specdec.ranks.rendezvous import Dismissal, Door, Invitation, answer, decode_summons, encode_summons

# -P: the working directory may hold another specdec
FOLLOWER_COMMAND = (sys.executable, "-P", "-m", "specdec.ranks.follower")
_START_TIMEOUT_S = 300.0  # importing torch on every rank at once takes a while on few cores
_THREADS = "OMP_NUM_THREADS"


class RankGroup:
    """The other ranks of an engine, from the leader's side.

    Args:
        num_ranks: Number of ranks.
        dcp_size: Ranks of a dcp group; divides the tensor-parallel ones.
        cp_size: Ranks of a layer split: all of them, or 1.
        device: "cpu", or "cuda" for one GPU a rank.
        timeout_s: Silence, or wait in a collective, after which a rank counts as lost.
        peer_memory: Whether GPUs write into each other's memory where they can.
        follower_command: What to start as each follower, where no launcher has.

    Attributes:
        place: Of the leader.
        channel: To the followers.

    Raises:
        ConfigError: The launcher started another number of ranks, the ranks run different versions, there are too few
            GPUs, or the process already uses torch.distributed.
        RankLostError: A rank did not come.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        dcp_size: int,
        cp_size: int,
        device: str,
        timeout_s: float,
        peer_memory: bool = True,
        follower_command: Sequence[str] = FOLLOWER_COMMAND,
    ) -> None:
        launched = launched_place()
        _check_sizes(launched, num_ranks=num_ranks, device=device)
        self._dcp_size, self._cp_size, self._device, self._peer_memory = dcp_size, cp_size, device, peer_memory
        self._num_threads = torch.get_num_threads()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._groups: ParallelGroups | None = None
        self._aborts: list[threading.Thread] = []
        if launched is None:
            place = Place(rank=0, size=num_ranks, local_rank=0, host="127.0.0.1", port=0, has_store=False)
            self._store = _open_store(place)
            self.place = replace(place, port=self._store.port)
        else:
            self.place, self._store = launched, _launchers_store(launched)
        door = Door("" if launched else self.place.host)
        self._invitation = Invitation(
            host=self.place.host,
            port=door.port,
            key=secrets.token_bytes(32),
            timeout_s=timeout_s,
            group=f"specdec/{secrets.token_hex(8)}",
        )
        try:
            if launched is None:
                self._start_followers(follower_command)
            else:
                self._store.set(_summons_key(self.place), encode_summons(self._invitation))
            connections = door.admit(
                range(1, num_ranks),
                key=self._invitation.key,
                start_timeout_s=_START_TIMEOUT_S,
                watch=self._check_processes,
            )
        except BaseException:
            self._end_processes(grace_s=0)
            torch.set_num_threads(self._num_threads)
            raise
        finally:
            door.close()
            if launched is not None:
                self._store.delete_key(_summons_key(self.place))  # the next engine of this process writes another
        self.channel = LeaderChannel(
            connections, timeout_s=timeout_s, describe_end=self._describe_end, on_loss=self._leave_collectives
        )

    def form(self) -> ParallelGroups:
        """Form the process groups, with every follower.

        Raises:
            CollectiveError: A rank did not come.
        """
        self._groups = form_groups(
            self.place,
            self._store,
            self._invitation,
            dcp_size=self._dcp_size,
            cp_size=self._cp_size,
            device=self._device,
            peer_memory=self._peer_memory,
        )
        return self._groups

    def close(self) -> None:
        """See that the followers end, once the channel is closed, and leave the process groups."""
        self._end_processes(grace_s=END_GRACE_S if self.channel.loss is None else 0)
        for abort in self._aborts:
            abort.join()
        leave_groups(self._groups)
        self._groups = None
        del self._store  # ends the thread that serves it, where this process does
        torch.set_num_threads(self._num_threads)

    def _start_followers(self, command: Sequence[str]) -> None:
        environ = dict(os.environ) | {"PYTHONPATH": _python_path(os.environ.get("PYTHONPATH"))}
        if self._device == "cpu" and _THREADS not in environ:  # the ranks share the cores of this host
            torch.set_num_threads(max(1, self._num_threads // self.place.size))
            environ[_THREADS] = str(torch.get_num_threads())
        for rank in range(1, self.place.size):
            place = replace(self.place, rank=rank, local_rank=rank)
            process = subprocess.Popen(
                [*command, "-"],
                env=environ | place.environ(),
                stdin=subprocess.PIPE,
                stdout=2,  # only the leader writes to standard output
                # An interrupt of the terminal goes to the leader, which then ends the followers.
                start_new_session=True,
            )
            self._processes[rank] = process
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # one that has ended is noticed below
                process.stdin.write(encode_summons(self._invitation).encode())

    def _check_processes(self, missing: Collection[int]) -> None:
        for rank in missing:
            if (end := self._describe_end(rank, wait_s=0)) is not None:
                raise RankLostError(f"rank {rank} did not start: {end}; its messages stand above")

    def _describe_end(self, rank: int, wait_s: float = 1.0) -> str | None:
        process = self._processes.get(rank)
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(wait_s)
            if code == LEADER_LOST_EXIT_CODE:
                return f"its process {process.pid} left, since it heard nothing from rank 0"
            if code >= 0:
                return f"its process {process.pid} ended with exit code {code}"
            name = {each.value: each.name for each in signal.Signals}.get(-code, str(-code))
            hint = " (by the kernel, if memory ran out)" if -code == signal.SIGKILL else ""
            return f"its process {process.pid} was killed by signal {name}{hint}"
        return None

    def _leave_collectives(self) -> None:
        """Lead this rank out of what it waits for; gloo's collectives end by themselves after the timeout."""
        if self._device == "cpu" or self._groups is None or self._aborts:
            return
        for communicator in (self._groups.all_ranks, self._groups.dcp):
            if isinstance(communicator, ProcessCommunicator | PeerCommunicator):
                # All at once: before NCCL gives one up it waits for the GPU, where a kernel of the other may be stuck.
                abort = threading.Thread(target=communicator.abort, name="specdec-abort", daemon=True)
                abort.start()
                self._aborts.append(abort)

    def _end_processes(self, *, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()  # also ends a stopped one
                process.wait()


def await_summons(place: Place) -> Invitation | Dismissal:
    """Wait, however long, until the leader wants the rank that a launcher started at `place`, or wants it no more."""
    store, key = _launchers_store(place), _summons_key(place)
    while not store.check([key]):
        time.sleep(0.1)
    summons = decode_summons(store.get(key))
    if isinstance(summons, Dismissal):
        store.add(_heard_key(place), 1)
    return summons


def dismiss_followers(place: Place, *, exit_code: int) -> None:
    """Let the ranks that a launcher started end, once they serve no engine; `place` is the leader's.

    Where this process serves the store, it waits a moment until they have heard: the store ends with it.
    """
    store = _launchers_store(place)
    store.set(_summons_key(place), encode_summons(Dismissal(exit_code=exit_code)))
    deadline = time.monotonic() + END_GRACE_S
    while not place.has_store and store.add(_heard_key(place), 0) < place.size - 1 and time.monotonic() < deadline:
        time.sleep(0.05)


def join_group(place: Place, invitation: Invitation) -> tuple[FollowerChannel, Store]:
    """Come to the leader as a follower.

    Raises:
        RankLostError: The leader is gone, or turned this rank away.
    """
    channel = FollowerChannel(answer(invitation, rank=place.rank), timeout_s=invitation.timeout_s)
    return channel, _open_store(place)


def form_groups(
    place: Place,
    store: Store,
    invitation: Invitation,
    *,
    dcp_size: int,
    cp_size: int,
    device: str,
    peer_memory: bool,
) -> ParallelGroups:
    """Form the process groups; returns once every rank has come.

    Raises:
        CollectiveError: A rank did not come.
    """
    is_cuda = device != "cpu"
    # NCCL's own watchdog ends the whole process, so the control channel must be the first to notice.
    timeout = timedelta(seconds=invitation.timeout_s * (PASS_TIMEOUTS if is_cuda else 1))
    record = CollectiveRecord()
    try:
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=PrefixStore(invitation.group, store),
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            device_id=torch.device(place.device(device)) if is_cuda else None,
        )
        world = dist.group.WORLD
        assert world is not None
        if cp_size > 1:
            cp = ProcessCommunicator("cp", world, record)
            return ParallelGroups(tp=SingleRank("tp"), dcp=SingleRank("dcp"), cp=cp)
        gpu = torch.device(place.device(device)) if is_cuda and peer_memory else None
        peers = PrefixStore(f"{invitation.group}/peers", store)
        tp = _connected(ProcessCommunicator("tp", world, record), PrefixStore("tp", peers), timeout, gpu)
        if dcp_size == 1:
            return ParallelGroups(tp=tp, dcp=SingleRank("dcp"))
        for first in range(0, place.size, dcp_size):
            ranks = list(range(first, first + dcp_size))
            group = dist.new_group(ranks, timeout=timeout)
            if place.rank in ranks:
                alone = ProcessCommunicator("dcp", group, record)
                dcp = _connected(alone, PrefixStore(f"dcp{first}", peers), timeout, gpu)
    except RuntimeError as error:
        raise CollectiveError(f"the process groups could not be formed: {error}") from error
    return ParallelGroups(tp=tp, dcp=dcp)


def _connected(
    wrapped: ProcessCommunicator, peers: Store, timeout: timedelta, gpu: torch.device | None
) -> Communicator:
    """Let the GPUs of a group write into each other's memory, where that is wanted and all can."""
    if gpu is None:
        return wrapped
    return over_peer_memory(wrapped, store=peers, timeout=timeout, device=gpu)


def leave_groups(groups: ParallelGroups | None) -> None:
    """Leave the process groups, where there are any.

    Their threads end here, not with the interpreter: one that still lets go of a tensor then aborts the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if groups is not None:
        for communicator in (groups.tp, groups.dcp, groups.cp):
            if isinstance(communicator, ProcessCommunicator | PeerCommunicator):
                communicator.close()


def _check_sizes(launched: Place | None, *, num_ranks: int, device: str) -> None:
    if launched is not None and launched.size != num_ranks:
        raise ConfigError(
            f"tp_size or cp_size is {num_ranks}, but the launcher started {launched.size} processes (WORLD_SIZE): "
            f"start {num_ranks}, or set tp_size (--tp-size) to {launched.size}"
        )
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f'device must be "cpu", or "cuda" for a GPU each, with {num_ranks} ranks, got {device!r}: '
            "CUDA_VISIBLE_DEVICES chooses the GPUs"
        )
    if launched is None and device == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks need as many GPUs, this host has {torch.cuda.device_count()}: lower tp_size "
            "(--tp-size) or cp_size (--cp-size), or start ranks on several hosts with torchrun"
        )
    if dist.is_initialized():
        raise ConfigError(
            "this process already uses torch.distributed: close the engine that does (Engine.close), or start "
            "this one in its own process"
        )


def _python_path(inherited: str | None) -> str:
    """Where a follower looks for modules: first where this specdec is, which the leader may have found in its own way.

    A program that changed `sys.path` cannot pass that on otherwise.
    """
    here = str(Path(__file__).absolute().parents[2])
    return here if not inherited else os.pathsep.join((here, inherited))


def _open_store(place: Place) -> TCPStore:
    return TCPStore(
        place.host,
        place.port,
        is_master=place.rank == 0 and not place.has_store,
        wait_for_workers=False,
        timeout=timedelta(seconds=_START_TIMEOUT_S),
    )


@functools.cache  # rank 0 may have to serve it, for as long as its process lives
def _launchers_store(place: Place) -> TCPStore:
    return _open_store(place)


def _summons_key(place: Place) -> str:
    return f"specdec/{place.attempt}/summons"


def _heard_key(place: Place) -> str:
    return f"specdec/{place.attempt}/heard"
