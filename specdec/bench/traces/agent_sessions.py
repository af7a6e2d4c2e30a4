"""Traces of coding agents, one session a line, as kv-cache-tester publishes them.

A request tells its prompt by an id for each block, ids of a session alone, and when it was sent: `t` seconds from the
session's start. `think_time` counts from the last reply whose end is known, which may lie before the previous request;
so the wait behind a reply is the shorter of it and the time between the two requests that the trace shows.

A sub-agent is a list of requests with times of its own. Its `t` is when it had ended, `duration_ms` later than it
began: it starts with the reply before it, beside other sub-agents, and the agent's next request waits for those that
had ended when that request was sent.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from specdec.bench.length_scale import LengthScale
from specdec.bench.traces.trace_lines import Count, Duration, PositiveCount, TraceLine
from specdec.bench.workload import BlockNumbering, PlannedRequest, Session, Workload
from specdec.errors import RequestError


class AgentRequest(msgspec.Struct, tag_field="type", tag="n"):
    """One request of an agent: tokens in and out, times in seconds."""

    t: Duration
    num_input_tokens: PositiveCount = msgspec.field(name="in")
    num_output_tokens: Count = msgspec.field(name="out")
    hash_ids: list[int]
    think_time: Duration | None = None
    api_time: Duration | None = None


class StreamedAgentRequest(AgentRequest, tag_field="type", tag="s"):
    """The same, streamed by its client."""


class Subagent(msgspec.Struct, tag_field="type", tag="subagent"):
    """An agent that another one started."""

    t: Duration
    requests: list[AgentRequest | StreamedAgentRequest]
    duration_ms: Duration = 0.0


class AgentSession(msgspec.Struct):
    """One line of the trace."""

    id: str
    block_size: PositiveCount
    requests: list[AgentRequest | StreamedAgentRequest | Subagent]


def read_agent_sessions(lines: Iterable[TraceLine], scale: LengthScale) -> Workload:
    """Read sessions of agents; all start at once, unless arrivals say otherwise.

    Raises:
        RequestError: A line is not as the format says.
    """
    numbering = BlockNumbering()
    sessions: list[Session] = []
    num_requests = 0
    for line in lines:
        row = line.read(AgentSession)
        scope = f"{line.origin}: {row.id}"  # ids of one session mean nothing in another, though it may be named alike
        planner = _SessionPlanner(line.origin, scope, row.block_size, scale, numbering, num_requests)
        planner.add_agent(row.requests)
        num_requests += len(planner.planned)
        if planner.planned:
            sessions.append(Session(name=row.id, start_s=0.0, requests=tuple(planner.planned)))
    return Workload(kind="agent-sessions", sessions=tuple(sessions), num_blocks=numbering.num_blocks)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request or a sub-agent that may be waited for: its last request, and when the trace saw it begin and end."""

    request_index: int
    begin_s: float
    end_s: float


@dataclass(slots=True)
class _SessionPlanner:
    origin: str
    scope: str
    block_size: int
    scale: LengthScale
    numbering: BlockNumbering
    first_index: int
    planned: list[PlannedRequest] = field(default_factory=list)

    def add_agent(
        self,
        entries: Iterable[AgentRequest | Subagent],
        *,
        after: tuple[int, ...] = (),
        delay_s: float = 0.0,
        path: str = "requests",
    ) -> int | None:
        """Plan the requests of an agent, and of those that it starts; gives its last request, None for an empty one.

        Args:
            entries: What it did, in order.
            after: What its first request waits for.
            delay_s: How long the first request waits then.
            path: Where the entries stand in the line, for messages.
        """
        previous: _Ended | None = None
        running: list[_Ended] = []  # sub-agents that nothing has waited for yet
        for place, entry in enumerate(entries):
            if isinstance(entry, Subagent):
                start_s = entry.t - entry.duration_ms / 1000
                last_index = self.add_agent(
                    entry.requests,
                    after=after if previous is None else (previous.request_index,),
                    delay_s=delay_s if previous is None else max(0.0, start_s - previous.end_s),
                    path=f"{path}[{place}].requests",
                )
                if last_index is not None:
                    running.append(_Ended(last_index, start_s, entry.t))
                continue
            awaited = [subagent for subagent in running if subagent.end_s <= entry.t]
            running = [subagent for subagent in running if subagent.end_s > entry.t]
            if previous is not None:
                awaited.append(previous)
            if awaited:
                after = tuple(sorted(each.request_index for each in awaited))
                delay_s = max(0.0, entry.t - max(each.end_s for each in awaited))
                if entry.think_time is not None:
                    delay_s = min(delay_s, entry.think_time)
            index = self._add_request(entry, after=after, delay_s=delay_s, path=f"{path}[{place}]")
            previous = _Ended(index, entry.t, entry.t + (entry.api_time or 0.0))
        return None if previous is None else previous.request_index

    def _add_request(self, entry: AgentRequest, *, after: tuple[int, ...], delay_s: float, path: str) -> int:
        try:
            prompt = self.scale.blocks(
                entry.hash_ids,
                scope=self.scope,
                block_size=self.block_size,
                num_tokens=entry.num_input_tokens,
                numbering=self.numbering,
            )
        except ValueError as error:
            raise RequestError(f"{self.origin}: {path}: {error}") from error
        index = self.first_index + len(self.planned)
        self.planned.append(
            PlannedRequest(
                index=index,
                prompt=prompt,
                num_output_tokens=self.scale.tokens(entry.num_output_tokens),
                after=after,
                think_time_s=delay_s,
            )
        )
        return index
