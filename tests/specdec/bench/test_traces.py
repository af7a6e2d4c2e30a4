"""Every format is read from a sample; what is wrong with a line is said with its number."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.bench.length_scale import LengthScale
from specdec.bench.synthetic import SyntheticLengths, make_synthetic
from specdec.bench.traces.read_workload import read_workload
from specdec.errors import ConfigError, RequestError
from tests.specdec.bench.conftest import SAMPLES, ReadLines, read_sample

ROW = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}
REQUEST = {"t": 0.0, "type": "n", "in": 130, "out": 9, "hash_ids": [1, 2], "think_time": 0.0, "api_time": 3.0}
ROUND = {"session_id": 4, "round_idx": 0, "prefix_len": 0, "input_len": 5, "output_len": 6}


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def agent(*requests: dict[str, Any], block_size: int = 64) -> str:
    return json.dumps({"id": "s", "block_size": block_size, "requests": requests})


@pytest.mark.parametrize(
    ("name", "kind", "num_sessions", "num_requests", "has_times"),
    [
        ("mooncake_conversation", "mooncake", 60, 60, True),
        ("azure_llm_2023_conv", "mooncake", 60, 60, True),
        ("agent_sessions", "agent-sessions", 2, 13, True),
        ("tracelab_sessions", "tracelab", 7, 40, True),
        ("mt_bench_questions", "questions", 16, 32, False),
    ],
)
def test_samples_are_read(name: str, kind: str, num_sessions: int, num_requests: int, has_times: bool) -> None:
    workload = read_sample(name)
    requests = list(workload.requests)
    assert (workload.kind, len(workload.sessions), len(requests)) == (kind, num_sessions, num_requests)
    assert workload.has_times is has_times
    assert [request.index for request in requests] == list(range(num_requests))
    for session in workload.sessions:
        indexes = [request.index for request in session.requests]
        for request in session.requests:
            assert set(request.after) <= set(indexes[: indexes.index(request.index)])


def test_lengths_and_times_are_those_of_the_trace() -> None:
    rows = [json.loads(line) for line in (SAMPLES / "azure_llm_2023_conv.jsonl").read_text().splitlines()]
    workload = read_sample("azure_llm_2023_conv")
    assert [request.num_prompt_tokens for request in workload.requests] == [row["input_length"] for row in rows]
    assert [request.num_output_tokens for request in workload.requests] == [row["output_length"] for row in rows]
    assert [session.start_s for session in workload.sessions] == [row["timestamp"] / 1000 for row in rows]
    rounds = [json.loads(line) for line in (SAMPLES / "tracelab_sessions.jsonl").read_text().splitlines()]
    requests = list(read_sample("tracelab_sessions").requests)
    assert [request.num_prompt_tokens for request in requests] == [r["prefix_len"] + r["input_len"] for r in rounds]
    assert [request.think_time_s for request in requests[:3]] == [0.0, 0.3, 0.154]
    assert [request.after for request in requests[:4]] == [(), (0,), (1,), ()]


def test_a_request_waits_for_the_reply_before_it_and_for_the_subagents_that_had_ended() -> None:
    requests = read_sample("agent_sessions").sessions[1].requests
    waits = {request.index: (request.after, round(request.think_time_s, 3)) for request in requests}
    assert waits == {
        3: ((), 0.0),
        4: ((3,), 0.694),  # three sub-agents start with the reply at 18.78 s of the trace
        5: ((4,), 3.84),
        6: ((3,), 0.681),
        7: ((6,), 10.69),
        8: ((3,), 0.694),
        9: ((8,), 3.9),
        10: ((3, 5, 7, 9), 16.653),  # the last of them ended at 211.347 s, the request is from 228 s
        11: ((10,), 7.76),
        12: ((11,), 8.0),
    }


def test_a_think_time_from_an_older_reply_is_cut_to_the_time_between_requests(read: ReadLines) -> None:
    untimed = without({**REQUEST, "t": 18.0, "think_time": 15.0}, "api_time")
    workload = read(agent(REQUEST, untimed, {**REQUEST, "t": 30.0, "think_time": 27.0}))
    assert [request.think_time_s for request in workload.requests] == [0.0, 15.0, 12.0]


def test_an_agent_does_not_wait_for_a_subagent_that_still_ran(read: ReadLines) -> None:
    subagent = {"t": 50.0, "type": "subagent", "duration_ms": 46_000, "requests": [REQUEST, {**REQUEST, "t": 5.0}]}
    later = ({**REQUEST, "t": 20.0}, {**REQUEST, "t": 60.0, "think_time": None})
    first, *_, second, third = read(agent(REQUEST, subagent, *later)).requests
    assert second.after == (first.index,)
    assert third.after == (2, second.index)
    assert third.think_time_s == 10.0


def test_scaling_shrinks_blocks_as_a_whole(read: ReadLines) -> None:
    (request,) = read(json.dumps(ROW), scale=100).requests
    assert request.num_prompt_tokens == 5 + 1
    assert request.num_output_tokens == 1
    (request,) = read(agent({**REQUEST, "in": 160}), scale=8).requests
    assert request.num_prompt_tokens == 8 + 8 + 4
    assert sum(r.num_prompt_tokens or 0 for r in read_sample("tracelab_sessions", scale=10).requests) == pytest.approx(
        sum(r.num_prompt_tokens or 0 for r in read_sample("tracelab_sessions").requests) / 10, rel=0.01
    )
    with pytest.raises(ConfigError, match=r"--scale-length must be at least 1.*got 0.5"):
        LengthScale(0.5)


def test_limits_leave_out_what_is_too_long_and_what_waits_for_it() -> None:
    workload = read_sample("tracelab_sessions")
    assert len(list(workload.limited(max_requests=8).requests)) == 8
    limited = workload.limited(max_context=3500)
    kept = [len(session.requests) for session in limited.sessions]
    assert kept == [
        sum((r.num_prompt_tokens or 0) + r.num_output_tokens <= 3500 for r in session.requests)
        for session in workload.sessions
        if (session.requests[0].num_prompt_tokens or 0) + session.requests[0].num_output_tokens <= 3500
    ]
    assert sum(kept) < 40
    agents = read_sample("agent_sessions").limited(max_context=14_000)
    assert [request.index for request in agents.requests] == [0, 1, 2]  # the sub-agents of 3 wait for it


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1,', "truncated"),
        ("[1, 2]", "Expected `object`, got `array`"),
        (json.dumps(without(ROW, "output_length")), "missing required field `output_length`"),
        (json.dumps({**ROW, "input_length": "600"}), r"Expected `int`, got `str` - at `\$.input_length`"),
        (json.dumps({**ROW, "input_length": 0}), r"`int` >= 1 - at `\$.input_length`"),
        (json.dumps({**ROW, "timestamp": -1}), r">= 0.0 - at `\$.timestamp`"),
        (json.dumps({**ROW, "hash_ids": [0]}), None),  # the end of a prompt needs no id
        (json.dumps({**ROW, "hash_ids": [0, 1, 2]}), "600 tokens are 2 blocks of 512, but there are 3 hash_ids"),
        (json.dumps({**ROW, "hash_ids": []}), "but there are 0 hash_ids"),
    ],
)
def test_a_wrong_line_is_named(read: ReadLines, line: str, message: str | None) -> None:
    lines = (json.dumps(ROW), "", line)
    if message is None:
        assert len(list(read(*lines).requests)) == 2
        return
    with pytest.raises(RequestError, match=rf"trace.jsonl line 3: .*{message}"):
        read(*lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            (agent(REQUEST), agent({**REQUEST, "hash_ids": [1]})),
            r"line 2: requests\[0\]: 130 tokens are 3 blocks of 64",
        ),
        ((agent({**REQUEST, "type": "x"}),), r"line 1: Invalid value 'x' - at `\$.requests\[.*\].type`"),
        ((agent(REQUEST, block_size=0),), r"line 1: .*block_size"),
        ((json.dumps(ROUND), json.dumps({**ROUND, "round_idx": 2})), r"line 2: round_idx must be 1, .*; got 2"),
        ((json.dumps({**ROUND, "round_idx": 1}),), r"line 1: round_idx must be 0, the next of session 4; got 1"),
        (('{"question_id": 1, "turns": []}',), r"line 1: .*length >= 1 - at `\$.turns`"),
        (('{"question_id": 1, "turns": [1]}',), r"line 1: Expected `str`, got `int` - at `\$.turns\[.*\]`"),
        (('{"messages": []}',), "line 1: no known format has the fields messages; known are"),
        (("",), "holds no line"),
        (("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),), "line 1: "),
    ],
)
def test_every_format_names_the_line(read: ReadLines, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(*lines)


def test_a_subagent_names_the_place_in_its_line(read: ReadLines) -> None:
    subagent = {"t": 9.0, "type": "subagent", "requests": [{**REQUEST, "hash_ids": []}]}
    with pytest.raises(RequestError, match=r"line 1: requests\[1\].requests\[0\]: 130 tokens"):
        read(agent(REQUEST, subagent))


def test_settings_that_a_format_has_no_use_for_are_refused(read: ReadLines, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--output-tokens is for questions and synthetic prompts"):
        read(json.dumps(ROW), num_output_tokens=5)
    with pytest.raises(ConfigError, match="--scale-length divides the lengths of a trace"):
        read('{"question_id": 1, "turns": ["a"]}', scale=2)
    with pytest.raises(ConfigError, match=r"nowhere.jsonl: cannot be read: No such file"):
        read_workload(tmp_path / "nowhere.jsonl", scale=LengthScale(), num_output_tokens=None)


def test_synthetic_lengths_vary_around_what_was_asked_for() -> None:
    lengths = SyntheticLengths(num_requests=200, input_tokens=100, output_tokens=40, shared_tokens=60, spread=0.5)
    requests = list(make_synthetic(lengths, seed=1).requests)
    inputs = [request.num_prompt_tokens or 0 for request in requests]
    assert min(inputs) >= 60
    assert max(inputs) <= 150
    assert len(set(inputs)) > 30
    assert 20 <= min(request.num_output_tokens for request in requests) < 30
    assert [request.num_prompt_tokens for request in make_synthetic(lengths, seed=1).requests] == inputs
    assert [request.num_prompt_tokens for request in make_synthetic(lengths, seed=2).requests] != inputs
    same = SyntheticLengths(num_requests=3, input_tokens=100, output_tokens=40, shared_tokens=100)
    assert {request.prompt for request in make_synthetic(same, seed=1).requests} == {
        next(iter(make_synthetic(same, seed=2).requests)).prompt
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_requests": 0}, "--num-requests must be at least 1, got 0"),
        ({"spread": 1.5}, "--length-spread must be between 0 and 1, got 1.5"),
        ({"shared_tokens": 11}, "at most --input-tokens 10; got 11"),
    ],
)
def test_lengths_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticLengths(**{"num_requests": 1, "input_tokens": 10, "output_tokens": 5, **fields})
