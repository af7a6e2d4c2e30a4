"""The ranks of an engine as the leading one sees them: a pass here is a pass on every rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from specdec.dcp.communicator import Collective
from specdec.device.decode_task import Decoded, DecodeTask
from specdec.device.started_round import StartedRound
from specdec.drafting.draft import DraftBatch, Drafts, ObservedRows
from specdec.errors import RankError, RankLostError
from specdec.kernel_set import KernelSet
from specdec.ranks.control_messages import Task
from specdec.ranks.leader_channel import LeaderChannel
from specdec.ranks.rank_transfer import Moves, OrderReport
from specdec.ranks.worker import Verified, VerifyTask, Worker
from specdec.sampling.sampling_rows import SamplingBatch
from specdec.slot_table import Int64Array
from specdec.transfer.address import ProcessRecord

_ELSEWHERE: Any = None  # a field that travels in the task instead
_UNBOUNDED = frozenset({"warm_up", "reopen"})  # they compile, load and capture, each rank at its own pace


class Ranks:
    """Runs each pass on this rank and, through the control channel, on the others.

    Args:
        worker: This rank's models and pools.
        channel: To the other ranks; None where there are none.
        on_close: Ends their processes; called once.
    """

    def __init__(
        self,
        worker: Worker,
        channel: LeaderChannel | None = None,
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.worker = worker
        self._channel = channel
        self._on_close = on_close
        self._sent_sampling: SamplingBatch | None = None
        self._is_ending = False
        self._is_closed = False

    def propose(self, batch: DraftBatch) -> Drafts:
        """Draft with the MTP layer."""
        told = replace(batch, requests=(), sampling=_ELSEWHERE)
        drafts: Drafts = self._run("propose", batch, told, sampling=batch.sampling)
        return drafts

    def verify(self, task: VerifyTask) -> Verified:
        """Run the target over the rows, judge the drafts, agree."""
        told = task if task.sampling is None else replace(task, sampling=_ELSEWHERE)
        verified: Verified = self._run("verify", task, told, sampling=task.sampling)
        return verified

    def warm_up(self) -> None:
        """Let the first request find kernels and graphs made. Once every rank has loaded: they wait for each other."""
        if self.worker.kernels.kernels is KernelSet.HOPPER:
            self._run("warm_up", None, None)

    def decode(self, task: DecodeTask) -> StartedRound:
        """Start a round that stays on the device; at most two may be started and not yet awaited."""
        started: StartedRound = self._run("decode", task, task)
        return started

    def await_decoded(self, started: StartedRound) -> Decoded:
        """Wait for a round, on this rank: all draw the same."""
        with self._ending_with_faults():
            return started.decoded()

    def await_device(self) -> None:
        """Wait until no rank writes to the pools.

        Where there are several, the last collective of every pass is behind all that the pass writes on any of them.
        """
        with self._ending_with_faults():
            self.worker.await_device()

    def observe(self, rows: ObservedRows) -> None:
        """Refresh the MTP draft with rows of the last target pass."""
        self._run("observe", rows, replace(rows, hidden_TH=rows.hidden_TH[:0]))

    def check(self) -> None:
        """Raise `RankLostError` when a rank is gone, or the others have been ended; does not wait."""
        if self._channel is not None:
            self._channel.check()
            if self._is_ending:
                raise RankLostError("the engine was closed, and its other ranks with it: make a new one")

    @property
    def lost(self) -> RankLostError | None:
        """Why no pass can run any more; None while one can."""
        try:
            self.check()
        except RankLostError as lost:
            return lost
        return None

    def refuse(self) -> None:
        """Let no further pass begin, where there are other ranks; `close` is next, once the one that runs has ended."""
        self._is_ending = True

    def close(self) -> None:
        """End the other ranks; passes are not possible any more."""
        self.refuse()
        if self._is_closed:
            return
        self._is_closed = True
        if self._channel is not None:
            self._channel.close()
        try:
            self.worker.close()  # first: groups cannot end before the graphs that hold their collectives
        finally:
            self._on_close()

    def record_collectives(self, is_recording: bool) -> list[list[Collective]]:
        """Begin or end the record of collectives; gives what every rank recorded so far."""
        recorded: list[list[Collective]] = self._run("record_collectives", is_recording, is_recording)
        return recorded

    def record_decoded(self, is_recording: bool) -> list[list[Int64Array]]:
        """Begin or end the record of what rounds on the device drew; gives the rounds of every rank so far."""
        recorded: list[list[Int64Array]] = self._run("record_decoded", is_recording, is_recording)
        return recorded

    def addresses(self) -> list[bytes]:
        """Give where other engines write to, by rank."""
        addresses: list[bytes] = self._run("addresses", None, None)
        return addresses

    def processes(self) -> list[ProcessRecord]:
        """Give the processes of all ranks."""
        processes: list[ProcessRecord] = self._run("processes", None, None)
        return processes

    def reopen(self) -> list[bytes]:
        """Have every rank take other memory for its pools, whose contents are lost, and give its new address."""
        addresses: list[bytes] = self._run("reopen", None, None)
        return addresses

    def move(self, moves: Moves) -> list[list[OrderReport]]:
        """Have every rank post its share of what is sent; gives what has ended since the last call, by rank."""
        reports: list[list[OrderReport]] = self._run("move", moves, moves)
        return reports

    def _run(self, method: str, argument: Any, told: Any, *, sampling: SamplingBatch | None = None) -> Any:
        """Run a pass; `told` is the argument as the other ranks get it.

        Raises:
            RankError: The pass failed before any rank began it, on every rank alike.
            RankLostError: A rank is gone, and the group with it.
        """
        if self._channel is None:
            return self.worker.run(method, argument, told=told)
        try:
            self.check()
        except RankLostError:  # noticed between passes: the ranks that are left end too
            self.close()
            raise
        sent = None if sampling is self._sent_sampling else sampling
        with self._ending_with_faults(is_bounded=method not in _UNBOUNDED):
            self._channel.broadcast(Task(method, told, reads_sampling=sampling is not None, sampling=sent))
            if sampling is not None:
                # Histories of penalties grow with every round: then it is always sent anew.
                self._sent_sampling = None if sampling.has_history else sampling
            return self.worker.run(method, argument, told=told)

    @contextmanager
    def _ending_with_faults(self, *, is_bounded: bool = True) -> Iterator[None]:
        """End the engine with a fault, where there are other ranks, unless every rank dropped the pass.

        Args:
            is_bounded: Whether what is done ends soon. On GPUs, where ranks may wait for each other in kernels that
                nothing times, it is a fault when it does not.
        """
        channel = self._channel
        if channel is None:
            yield
            return
        bound = channel.ending_soon() if is_bounded and self.worker.device.type == "cuda" else nullcontext()
        try:
            with bound:
                yield
            channel.check()  # what a broken collective left in memory must not pass for a result
        except BaseException as error:  # the others may be waiting for this rank: nothing but the end frees them
            # What a lost rank left in memory may look like a pass that all dropped.
            if isinstance(error, RankError) and channel.loss is None:
                raise
            if not isinstance(error, RankLostError):
                channel.lose(0, f"{type(error).__name__}: {error}")
            lost = channel.cause_of(error)
            self.close()
            if isinstance(error, Exception):
                raise lost from error
            raise
