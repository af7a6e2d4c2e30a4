"""When requests are sent, on a clock that jumps."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from specdec.bench.arrivals import ArrivalKind, Arrivals
from specdec.bench.load_run import End, LoadRun
from specdec.bench.prompt_writer import ReplyContent
from specdec.bench.request_record import Outcome, RequestRecord
from specdec.bench.sender import Exchange
from specdec.bench.workload import Blocks, PlannedRequest, Session, Workload
from specdec.errors import ConfigError
from tests.specdec.bench.conftest import read_sample
from tests.support.virtual_time import run_virtually


def request(index: int, *, after: tuple[int, ...] = (), think_time_s: float = 0.0) -> PlannedRequest:
    prompt = (Blocks(block_numbers=(index,), block_tokens=4, num_tokens=4),)
    return PlannedRequest(index=index, prompt=prompt, num_output_tokens=1, after=after, think_time_s=think_time_s)


def workload(*sessions: Sequence[PlannedRequest], starts_s: Sequence[float | None] | None = None) -> Workload:
    starts_s = starts_s or [None] * len(sessions)
    return Workload(
        kind="synthetic",
        sessions=tuple(
            Session(name=str(place), start_s=start_s, requests=tuple(requests))
            for place, (requests, start_s) in enumerate(zip(sessions, starts_s, strict=True))
        ),
        num_blocks=100,
    )


@dataclass
class Server:
    """Replies after a time that depends on the request, and notes when each came."""

    service_s: Mapping[int, float] = field(default_factory=dict)
    failing: Mapping[int, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    sent_s: dict[int, float] = field(default_factory=dict)
    due_s: dict[int, float] = field(default_factory=dict)
    replies: dict[int, Mapping[int, ReplyContent]] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)
    begin_s: float = 0.0

    async def send(
        self,
        request: PlannedRequest,
        *,
        session: str,
        replies: Mapping[int, ReplyContent],
        due_s: float,
        on_record: Any,
    ) -> Exchange:
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        self.sent_s[request.index] = sent_s - self.begin_s
        self.due_s[request.index] = due_s - self.begin_s
        self.replies[request.index] = dict(replies)
        kind = self.failing.get(request.index, "")
        outcome = Outcome.UNFINISHED
        try:
            await asyncio.sleep(self.service_s.get(request.index, 1.0))
            outcome = Outcome.FAILED if kind else Outcome.COMPLETED
        finally:
            record = RequestRecord(
                request_index=request.index,
                session=session,
                category="",
                outcome=outcome,
                error_kind=kind,
                num_planned_prompt=4,
                num_planned_output=1,
                due_s=due_s,
                sent_s=sent_s,
                ended_s=clock(),
            )
            on_record(record)
        return Exchange(record=record, content=ReplyContent(text=f"reply {request.index}", token_ids=None))

    async def fault(self) -> str:
        return self.faults.pop(0) if self.faults else ""


def run(
    server: Server, planned: Workload, *, stop_after_s: float | None = None, seed: int = 0, **arrivals: Any
) -> tuple[End, LoadRun]:
    async def run_it() -> tuple[End, LoadRun]:
        load = LoadRun(
            planned,
            Arrivals(**arrivals),
            seed=seed,
            send=server.send,
            server_fault=server.fault,
            on_record=server.records.append,
        )
        loop = asyncio.get_running_loop()
        server.begin_s = loop.time()
        task = asyncio.current_task()
        assert task is not None
        if stop_after_s is not None:
            loop.call_later(stop_after_s, task.cancel)
        end = await load.run()
        assert task.cancelling() == 0
        assert len(asyncio.all_tasks()) == 1
        return end, load

    return run_virtually(run_it())


def test_trace_times_pass_at_a_chosen_speed() -> None:
    server = Server(service_s={0: 100.0})
    planned = workload([request(0)], [request(1)], [request(2)], starts_s=[3.0, 9.0, 6.0])
    end, _ = run(server, planned, kind=ArrivalKind.TRACE, speed=3.0)
    assert end is End.COMPLETE
    assert server.sent_s == {0: 1.0, 2: 2.0, 1: 3.0}  # the server is slow, and they do not wait for it
    assert [record.request_index for record in server.records] == [2, 1, 0]


def test_fixed_and_poisson_rates() -> None:
    planned = workload(*([request(index)] for index in range(400)))
    server = Server()
    run(server, planned, kind=ArrivalKind.FIXED, rate_per_s=8.0)
    assert [server.sent_s[index] for index in range(400)] == pytest.approx([index / 8 for index in range(400)])
    first, again, other = Server(), Server(), Server()
    for each, seed in ((first, 5), (again, 5), (other, 6)):
        run(each, planned, kind=ArrivalKind.POISSON, rate_per_s=8.0, seed=seed)
    times = [first.sent_s[index] for index in range(400)]
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert sum(gaps) / 400 == pytest.approx(1 / 8, rel=0.15)
    assert sum(gap < 1 / 8 for gap in gaps) / 400 == pytest.approx(0.632, abs=0.07)  # 1 - 1/e: no memory
    assert again.sent_s == first.sent_s != other.sent_s


def test_a_closed_loop_keeps_as_many_sessions_running() -> None:
    server = Server(service_s={0: 5.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 1.0})
    run(server, workload(*([request(index)] for index in range(5))), kind=ArrivalKind.CLOSED, concurrency=2)
    assert server.sent_s == {0: 0.0, 1: 0.0, 2: 1.0, 3: 2.0, 4: 4.0}


def test_a_request_waits_for_the_replies_it_needs_and_then_thinks() -> None:
    planned = workload(
        [
            request(0),
            request(1, after=(0,), think_time_s=2.0),  # a sub-agent
            request(2, after=(1,), think_time_s=1.0),
            request(3, after=(0,), think_time_s=4.0),  # another, at the same time
            request(4, after=(0, 2, 3), think_time_s=3.0),
        ],
    )
    server = Server(service_s={0: 10.0, 1: 5.0, 2: 1.0, 3: 1.0, 4: 1.0})
    run(server, planned, kind=ArrivalKind.CLOSED, concurrency=1)
    assert server.sent_s == {0: 0.0, 1: 12.0, 2: 18.0, 3: 14.0, 4: 22.0}
    assert server.sent_s == server.due_s
    assert {index: set(replies) for index, replies in server.replies.items()} == {
        0: set(),
        1: {0},
        3: {0},
        2: {0, 1, 3},
        4: {0, 1, 2, 3},
    }
    assert server.replies[4][3].text == "reply 3"


def test_think_times_are_cut_and_then_sped_up() -> None:
    planned = workload([request(0), request(1, after=(0,), think_time_s=100.0), request(2, after=(1,), think_time_s=4)])
    server = Server()
    run(server, planned, kind=ArrivalKind.CLOSED, concurrency=1, max_think_time_s=10.0, speed=2.0)
    assert server.sent_s == {0: 0.0, 1: 6.0, 2: 9.0}


def test_what_waits_for_a_failed_reply_is_skipped_and_the_rest_goes_on() -> None:
    planned = workload(
        [request(0), request(1, after=(0,)), request(2, after=(1,)), request(3, after=(0,))], [request(4)]
    )
    server = Server(failing={1: "http_500"})
    end, load = run(server, planned, kind=ArrivalKind.CLOSED, concurrency=1)
    assert end is End.COMPLETE
    assert load.num_skipped == 1
    assert sorted(server.sent_s) == [0, 1, 3, 4]


def test_cancelling_ends_the_run_and_keeps_what_there_is() -> None:
    planned = workload([request(0)], [request(1), request(2, after=(1,))], [request(3)])
    server = Server(service_s={1: 50.0})
    end, _ = run(server, planned, kind=ArrivalKind.CLOSED, concurrency=2, stop_after_s=7.0)
    assert end is End.INTERRUPTED
    outcomes = {record.request_index: (record.outcome, record.ended_s - record.sent_s) for record in server.records}
    assert outcomes == {0: (Outcome.COMPLETED, 1.0), 3: (Outcome.COMPLETED, 1.0), 1: (Outcome.UNFINISHED, 7.0)}


def test_a_lost_connection_to_a_server_that_answers_is_one_failed_request() -> None:
    server = Server(failing={0: "connection", 1: "cut_stream"}, faults=["busy", "", "busy", "busy", ""])
    end, _ = run(server, workload(*([request(index)] for index in range(4))), kind=ArrivalKind.CLOSED, concurrency=1)
    assert end is End.COMPLETE
    assert len(server.records) == 4
    assert server.faults == []


@pytest.mark.parametrize("kind", ["connection", "cut_stream"])
def test_a_server_that_is_gone_ends_the_run(kind: str) -> None:
    server = Server(failing={1: kind}, faults=["refused"] * 3, service_s={0: 100.0, 1: 1.25})
    planned = workload(*([request(index)] for index in range(9)))
    end, load = run(server, planned, kind=ArrivalKind.FIXED, rate_per_s=1.0)
    assert end is End.SERVER_GONE
    assert load.fault == "refused"
    last = max(server.sent_s)
    assert {record.request_index for record in server.records} == set(range(last + 1))
    assert last == 4  # the connection broke at 2.25 s, and the server was looked for 2 s longer
    assert server.records[-1].outcome is Outcome.UNFINISHED


def test_a_server_that_is_gone_with_the_last_request_is_gone() -> None:
    server = Server(failing={0: "connection"}, faults=["refused"] * 3)
    end, _ = run(server, workload([request(0)]), kind=ArrivalKind.CLOSED, concurrency=1)
    assert end is End.SERVER_GONE


def test_other_errors_do_not_ask_for_the_server() -> None:
    server = Server(failing={0: "http_503"}, faults=["refused"] * 3)
    end, _ = run(server, workload([request(0)]), kind=ArrivalKind.CLOSED, concurrency=1)
    assert end is End.COMPLETE
    assert len(server.faults) == 3


def test_our_own_mistake_is_not_taken_for_an_end() -> None:
    class Broken(Server):
        async def send(self, *arguments: Any, **fields: Any) -> Exchange:
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        run(Broken(), workload([request(0)]), kind=ArrivalKind.CLOSED, concurrency=1)
    assert caught.group_contains(ZeroDivisionError)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": ArrivalKind.POISSON}, "--arrivals poisson needs --rate; got None"),
        ({"kind": ArrivalKind.CLOSED, "rate_per_s": 2.0}, "--arrivals closed takes no --rate; got 2.0"),
        ({"kind": ArrivalKind.CLOSED}, "--arrivals closed needs --concurrency; got None"),
        ({"kind": ArrivalKind.TRACE, "concurrency": 2}, "--arrivals trace takes no --concurrency; got 2"),
        ({"kind": ArrivalKind.FIXED, "rate_per_s": 0.0}, "--rate must be above 0, got 0.0"),
        ({"kind": ArrivalKind.CLOSED, "concurrency": 0}, "--concurrency must be above 0, got 0"),
        ({"kind": ArrivalKind.TRACE, "speed": float("inf")}, "--speed must be above 0, got inf"),
        ({"kind": ArrivalKind.TRACE, "max_think_time_s": -1.0}, "--max-think-time must be at least 0, got -1.0"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Arrivals(**fields)


def test_questions_have_no_times() -> None:
    with pytest.raises(ConfigError, match="--arrivals trace needs a trace with times, a questions workload has none"):
        Arrivals(kind=ArrivalKind.TRACE).start_times_s(read_sample("mt_bench_questions"), seed=0)
