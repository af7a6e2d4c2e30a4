"""Run the sessions of a workload: start them as arrivals say, let their requests wait for each other."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from specdec.bench.arrivals import Arrivals
from specdec.bench.prompt_writer import ReplyContent
from specdec.bench.request_record import Outcome, RequestRecord
from specdec.bench.sender import LOST_CONNECTION, Exchange
from specdec.bench.workload import PlannedRequest, Session, Workload

_NUM_LOOKS = 3  # for a server that may be gone
_LOOK_AGAIN_S = 1.0


class End(StrEnum):
    """How a run ended."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    SERVER_GONE = "server gone"


class Send(Protocol):
    """Sends one request and waits for its end, as `Sender.send` does."""

    def __call__(
        self,
        request: PlannedRequest,
        *,
        session: str,
        replies: Mapping[int, ReplyContent],
        due_s: float,
        on_record: Callable[[RequestRecord], None],
    ) -> Awaitable[Exchange]:
        """Send it."""


class LoadRun:
    """One run. Times are those of the running event loop.

    Args:
        workload: What to send.
        arrivals: When sessions start.
        seed: Of arrivals by chance.
        send: Sends a request.
        server_fault: Says why the server cannot be reached, "" while it can; asked when a connection was lost.
        on_record: Receives the record of every request when it has ended, also of those that the end of the run ended.
    """

    def __init__(
        self,
        workload: Workload,
        arrivals: Arrivals,
        *,
        seed: int,
        send: Send,
        server_fault: Callable[[], Awaitable[str]],
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self._workload = workload
        self._arrivals = arrivals
        self._starts_s = arrivals.start_times_s(workload, seed=seed)
        self._send = send
        self._server_fault = server_fault
        self._on_record = on_record
        self._look = asyncio.Lock()
        self._gone = asyncio.Event()
        self.fault = ""
        self.num_skipped = 0  # requests that waited for one that failed

    async def run(self) -> End:
        """Run to the end of the workload, to a lost server, or to the cancellation of this task, which is used up."""
        loop = self._closed_loop() if self._starts_s is None else self._open_loop(self._starts_s)
        work = asyncio.ensure_future(loop)
        gone = asyncio.ensure_future(self._gone.wait())
        end = End.COMPLETE
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            end = End.INTERRUPTED
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        if end is End.COMPLETE and self._gone.is_set():
            end = End.SERVER_GONE
        gone.cancel()
        work.cancel()
        await asyncio.wait((work, gone))
        if not work.cancelled():
            work.result()  # raises what was our own mistake
        return end

    async def _open_loop(self, starts_s: Sequence[float]) -> None:
        begin_s = _now_s()
        async with asyncio.TaskGroup() as group:
            order = sorted(range(len(starts_s)), key=starts_s.__getitem__)
            for place in order:
                start_s = begin_s + starts_s[place]
                await _sleep_until(start_s)
                group.create_task(self._run_session(self._workload.sessions[place], start_s))

    async def _closed_loop(self) -> None:
        waiting = iter(self._workload.sessions)
        assert self._arrivals.concurrency is not None, self._arrivals
        async with asyncio.TaskGroup() as group:
            for _ in range(self._arrivals.concurrency):
                group.create_task(self._run_one_by_one(waiting))

    async def _run_one_by_one(self, waiting: Iterator[Session]) -> None:
        for session in waiting:
            await self._run_session(session, _now_s())

    async def _run_session(self, session: Session, start_s: float) -> None:
        replies: dict[int, ReplyContent] = {}
        ends: dict[int, asyncio.Task[float | None]] = {}
        async with asyncio.TaskGroup() as group:
            for request in session.requests:
                awaited = [ends[index] for index in request.after]
                ends[request.index] = group.create_task(
                    self._run_request(request, session.name, start_s, awaited, replies)
                )

    async def _run_request(
        self,
        request: PlannedRequest,
        session: str,
        start_s: float,
        awaited: Sequence[asyncio.Task[float | None]],
        replies: dict[int, ReplyContent],
    ) -> float | None:
        """Wait, send, and give when the reply ended; None where there is none that others could build on."""
        ready_s = start_s
        for task in awaited:
            end_s = await task
            if end_s is None:
                self.num_skipped += 1
                return None
            ready_s = max(ready_s, end_s)
        due_s = ready_s + self._arrivals.think_time_s(request.think_time_s)
        await _sleep_until(due_s)
        if self._gone.is_set():  # this task is about to be cancelled
            return None
        exchange = await self._send(request, session=session, replies=replies, due_s=due_s, on_record=self._on_record)
        if exchange.record.outcome is not Outcome.COMPLETED:
            if exchange.record.error_kind in LOST_CONNECTION:
                await self._look_for_server()
            return None
        replies[request.index] = exchange.content
        return exchange.record.ended_s

    async def _look_for_server(self) -> None:
        async with self._look:
            if self._gone.is_set():
                return
            fault = await self._server_fault()
            for _ in range(_NUM_LOOKS - 1):
                if not fault:
                    return
                await asyncio.sleep(_LOOK_AGAIN_S)
                fault = await self._server_fault()
            if fault:
                self.fault = fault
                self._gone.set()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _sleep_until(time_s: float) -> None:
    await asyncio.sleep(max(0.0, time_s - _now_s()))
