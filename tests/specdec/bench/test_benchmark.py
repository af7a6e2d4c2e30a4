"""Whole benchmarks against a scripted server: the report is the script's truth, to the float."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdec.bench.arrivals import ArrivalKind, Arrivals
from specdec.bench.benchmark import BenchResult, BenchSettings, run_benchmark
from specdec.bench.measure import Objectives
from specdec.bench.prompt_writer import PromptForm
from specdec.bench.record_file import write_records
from specdec.bench.report import Report, Summary, as_json
from specdec.bench.server import Server, ServerGoneError
from specdec.bench.server_facts import ServerFacts
from specdec.bench.synthetic import SyntheticLengths, make_synthetic
from specdec.bench.workload import Workload
from specdec.errors import ConfigError, SpecdecError
from tests.specdec.bench.conftest import ReadLines, read_sample
from tests.specdec.bench.test_measure import VLLM
from tests.support.scripted_server import Script, ScriptedServer, ScriptedTransport
from tests.support.virtual_time import run_virtually

CLOSED = Arrivals(kind=ArrivalKind.CLOSED, concurrency=1)
EXACT = 1e-9  # of times that are sums of floats


def benchmark(
    server: ScriptedServer,
    workload: Workload,
    *,
    arrivals: Arrivals = CLOSED,
    stop_after_s: float | None = None,
    on_facts: Callable[[ServerFacts], None] = lambda facts: None,
    **settings: Any,
) -> BenchResult:
    async def run() -> BenchResult:
        client = Server("http://scripted", transport=ScriptedTransport(server))
        if stop_after_s is not None:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(stop_after_s, task.cancel)
        wanted = BenchSettings(arrivals=arrivals, objectives=settings.pop("objectives", Objectives()), **settings)
        try:
            return await run_benchmark(client, workload, wanted, on_facts=on_facts, on_record=lambda record: None)
        finally:
            await client.close()

    return run_virtually(run())


def synthetic(num_requests: int, *, output_tokens: int = 9, input_tokens: int = 20, shared_tokens: int = 0) -> Workload:
    lengths = SyntheticLengths(
        num_requests=num_requests, input_tokens=input_tokens, output_tokens=output_tokens, shared_tokens=shared_tokens
    )
    return make_synthetic(lengths, seed=0)


def always(script: Script) -> Callable[[Mapping[str, Any]], Script]:
    return lambda body: script


def in_turn(*scripts: Script) -> Callable[[Mapping[str, Any]], Script]:
    waiting = iter(scripts)
    return lambda body: next(waiting)


def mean_ms(summary: Summary | None) -> float:
    assert summary is not None
    return summary.mean


RUNS = Script(runs=((0.5, 1), (0.02, 3), (0.04, 2), (0.1, 3)))  # 9 tokens, 660 ms


@pytest.mark.parametrize("tells", ["token_ids", "usage"])
@pytest.mark.parametrize("form", list(PromptForm))
def test_latencies_are_those_of_the_script(form: PromptForm, tells: str) -> None:
    report = benchmark(ScriptedServer(always(RUNS), tells=tells), synthetic(4), prompt_form=form).report
    latency = report.latency
    assert report.end == "complete"
    assert report.requests.completed == 4
    assert mean_ms(latency.ttft_ms) == pytest.approx(500, rel=EXACT)
    assert mean_ms(latency.tpot_ms) == pytest.approx(160 / 8, rel=EXACT)
    assert mean_ms(latency.e2e_ms) == pytest.approx(660, rel=EXACT)
    assert mean_ms(latency.start_delay_ms) == pytest.approx(0, abs=1e-6)
    assert latency.itl_chunk_ms is not None
    assert latency.itl_chunk_ms.num_samples == 12
    assert latency.itl_chunk_ms.p50 == pytest.approx(40, rel=EXACT)
    assert mean_ms(latency.itl_chunk_ms) == pytest.approx(160 / 3, rel=EXACT)
    assert latency.itl_token_ms is not None
    assert latency.itl_token_ms.num_samples == 32
    assert latency.itl_token_ms.max == pytest.approx(100 / 3, rel=EXACT)
    assert latency.itl_token_ms.p50 == pytest.approx(20, rel=EXACT)
    assert mean_ms(latency.itl_token_ms) == pytest.approx(mean_ms(latency.tpot_ms), rel=EXACT)
    assert report.duration_s == pytest.approx(4 * 0.66, rel=EXACT)
    assert report.throughput.requests_per_s == pytest.approx(1 / 0.66, rel=EXACT)
    assert report.throughput.output_tokens_per_s == pytest.approx(9 / 0.66, rel=EXACT)
    assert report.tokens.output == 36


def test_where_chunks_do_not_tell_their_tokens_only_token_latencies_are_missing() -> None:
    report = benchmark(ScriptedServer(always(RUNS), tells=""), synthetic(2)).report
    assert report.latency.itl_token_ms is None
    assert mean_ms(report.latency.tpot_ms) == pytest.approx(160 / 8, rel=EXACT)
    assert report.latency.itl_chunk_ms is not None
    single = Script(runs=((0.5, 1), (0.1, 1)))  # as many chunks as tokens: one each
    report = benchmark(ScriptedServer(always(single), tells=""), synthetic(2)).report
    assert mean_ms(report.latency.itl_token_ms) == pytest.approx(100, rel=EXACT)


def test_without_usage_tokens_are_those_of_the_chunks() -> None:
    report = benchmark(ScriptedServer(always(RUNS), tells="token_ids", has_usage=False), synthetic(2)).report
    assert (report.tokens.prompt, report.tokens.output) == (40, 18)
    report = benchmark(ScriptedServer(always(RUNS), tells="", has_usage=False), synthetic(2)).report
    assert report.tokens.output == 8


def test_errors_are_counted_by_kind_and_do_not_end_the_run() -> None:
    server = ScriptedServer(
        in_turn(
            Script(status=429, message="queue is full"),
            Script(status=500, message="oh"),
            Script(status=429, message="still full"),
            replace(RUNS, cut_after=2),
            replace(RUNS, cut_after=0),
            replace(RUNS, has_finish=False),
            replace(RUNS, error_after=1),
            Script(runs=((700.0, 1),)),
            Script(is_refused=True),
            RUNS,
        )
    )
    report = benchmark(server, synthetic(10)).report
    assert report.end == "complete"
    assert (report.requests.completed, report.requests.failed, report.requests.not_sent) == (1, 9, 0)
    errors = {kind: (error.count, error.example) for kind, error in report.requests.errors.items()}
    assert errors == {
        "connection": (1, "connection refused"),
        "cut_stream": (3, "connection reset"),
        "error_in_stream": (1, "out of luck"),
        "http_429": (2, "queue is full"),
        "http_500": (1, "oh"),
        "timeout": (1, "no end of the reply within 600 s"),
    }
    assert mean_ms(report.latency.ttft_ms) == pytest.approx(500, rel=EXACT)  # of the one that completed


def test_a_server_that_vanishes_ends_the_run_with_the_report_so_far() -> None:
    def script(body: Mapping[str, Any]) -> Script:
        server.is_down = len(server.bodies) == 3
        return replace(RUNS, cut_after=1) if server.is_down else RUNS

    server = ScriptedServer(script)
    report = benchmark(server, synthetic(8)).report
    assert report.end == "server gone"
    assert report.end_detail == ("http://scripted cannot be reached (connection refused): start it, or correct --url")
    assert (report.requests.completed, report.requests.failed, report.requests.not_sent) == (2, 1, 5)


def test_an_interrupt_gives_the_report_so_far() -> None:
    report = benchmark(ScriptedServer(always(RUNS)), synthetic(8), stop_after_s=2.0).report
    assert report.end == "interrupted"
    assert (report.requests.completed, report.requests.unfinished, report.requests.not_sent) == (3, 1, 4)
    assert report.duration_s == pytest.approx(2.0, rel=EXACT)


def test_warm_up_requests_are_sent_first_and_not_reported() -> None:
    server = ScriptedServer(in_turn(Script(runs=((60.0, 9),)), Script(status=500), *[RUNS] * 3))
    result = benchmark(server, synthetic(3, shared_tokens=20), num_warmup=2)
    assert len(server.bodies) == 5
    assert [record.request_index for record in result.records] == [0, 1, 2]
    assert result.report.num_warmup == 2
    assert result.report.requests.failed == 0
    assert mean_ms(result.report.latency.ttft_ms) == pytest.approx(500, rel=EXACT)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert [len(prompt) for prompt in prompts] == [20] * 5
    assert len(set(prompts)) == 3  # each warm-up prompt is its own, and nothing that is measured


def test_more_warm_up_requests_than_there_are() -> None:
    server = ScriptedServer(always(RUNS))
    assert benchmark(server, synthetic(1), num_warmup=3).report.requests.completed == 1
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 4


def test_prefix_hits_of_a_cache_are_what_the_workload_can_reuse() -> None:
    workload = read_sample("agent_sessions", scale=16)
    seen: list[Sequence[int]] = []

    def script(body: Mapping[str, Any]) -> Script:
        prompt = body["prompt"]
        matches = (
            next(
                (place for place, pair in enumerate(zip(prompt, earlier, strict=False)) if pair[0] != pair[1]),
                len(earlier),
            )
            for earlier in seen
        )
        cached = max(matches, default=0)
        seen.append(prompt)
        return Script(runs=((0.1, 2),), usage={"prompt_tokens_details": {"cached_tokens": cached}})

    report = benchmark(ScriptedServer(script), workload).report
    assert report.prefix.source == "usage"
    assert report.prefix.hit_rate == pytest.approx(report.prefix.reusable_share, abs=0.005)
    assert report.prefix.reusable_share is not None
    assert report.prefix.reusable_share > 0.5


def test_a_conversation_goes_on_with_the_ids_of_the_reply() -> None:
    def script(body: Mapping[str, Any]) -> Script:
        return Script(runs=((0.1, body["max_tokens"]),))

    server = ScriptedServer(script)
    workload = read_sample("tracelab_sessions", scale=10).limited(max_requests=3)
    benchmark(server, workload)
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts[1][: len(prompts[0]) + 20] == prompts[0] + list(range(20))
    assert prompts[2][: len(prompts[1]) + 13] == prompts[1] + list(range(13))


def test_questions_continue_with_the_reply_and_are_reported_by_category() -> None:
    usage = {"completion_tokens_details": {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 3}}
    server = ScriptedServer(always(replace(RUNS, usage=usage)))
    report = benchmark(server, read_sample("mt_bench_questions")).report
    assert report.server.prompt_form == "chat"
    first, second = server.bodies[:2]
    assert second["messages"][:2] == [*first["messages"], {"role": "assistant", "content": " word" * 9}]
    assert len(report.categories) == 8
    assert {category.num_requests for category in report.categories.values()} == {4}
    assert {category.acceptance_rate for category in report.categories.values()} == {5 / 8}
    assert report.acceptance.tokens_per_pass == 9 / 4
    assert (report.workload.planned_prompt_tokens, report.prefix.reusable_share) == (None, None)


def test_counters_of_the_server_are_those_of_the_run() -> None:
    before = VLLM.replace("} 30.0", "} 20.0").replace("} 10.0", "} 5.0").replace("} 45.0", "} 15.0")
    report = benchmark(ScriptedServer(always(RUNS), metrics=[before, VLLM]), synthetic(2)).report
    assert report.acceptance.source == "metrics"
    assert (report.acceptance.num_accepted, report.acceptance.num_rejected) == (10, 20)
    assert report.acceptance.acceptance_length == 3.0


def test_goodput_is_within_the_objectives() -> None:
    slow = Script(runs=((2.0, 1), (0.1, 8)))
    objectives = Objectives(ttft_ms=1000, tpot_ms=50)
    report = benchmark(ScriptedServer(in_turn(RUNS, slow)), synthetic(2), objectives=objectives).report
    assert report.goodput is not None
    assert (report.goodput.num_good, report.goodput.share) == (1, 0.5)
    assert report.goodput.requests_per_s == pytest.approx(1 / (0.66 + 2.1), rel=EXACT)


def test_trace_arrivals_of_mooncake_are_kept() -> None:
    workload = read_sample("mooncake_conversation", scale=512)
    arrivals = Arrivals(kind=ArrivalKind.TRACE, speed=2.0)
    result = benchmark(ScriptedServer(always(RUNS)), workload, arrivals=arrivals)
    sent_s = {record.request_index: record.sent_s - result.begin_s for record in result.records}
    for session, request in zip(workload.sessions, workload.requests, strict=True):
        assert session.start_s is not None
        assert sent_s[request.index] == pytest.approx(session.start_s / 2, abs=1e-6)


def test_what_every_request_asks_for() -> None:
    server = ScriptedServer(always(RUNS))
    benchmark(server, synthetic(1), sampling={"temperature": 0.5, "ignore_eos": True, "priority": 3})
    (body,) = server.bodies
    assert {name: value for name, value in body.items() if name != "prompt"} == {
        "model": "scripted",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "max_tokens": 9,
        "temperature": 0.5,
        "ignore_eos": True,
        "priority": 3,
    }
    assert min(body["prompt"]) >= 100  # what /tokenize told


@pytest.mark.parametrize(
    ("server", "form"),
    [
        ({}, "ids"),
        ({"has_tokenize": False}, "text"),
        ({"takes": ("text", "chat")}, "text"),
        ({"takes": ("chat",)}, "chat"),
    ],
)
def test_the_best_form_that_the_server_takes_is_used(server: dict[str, Any], form: str) -> None:
    seen: list[ServerFacts] = []
    scripted = ScriptedServer(always(RUNS), max_model_len=2048, **server)
    report = benchmark(scripted, synthetic(1), on_facts=seen.append).report
    assert (report.server.prompt_form, report.requests.completed) == (form, 1)
    assert [(facts.form, facts.model, facts.max_model_len) for facts in seen] == [(form, "scripted", 2048)]


def test_given_token_ids_need_no_tokenizer() -> None:
    server = ScriptedServer(always(RUNS), has_tokenize=False)
    benchmark(server, synthetic(3, input_tokens=400), vocab_size=50)
    assert {token for body in server.bodies for token in body["prompt"]} == set(range(50))


@pytest.mark.parametrize(("refused", "left"), [("return_token_ids", {"include_usage": True}), ("stream_options", None)])
def test_a_server_that_refuses_extensions_is_asked_without(refused: str, left: dict[str, Any] | None) -> None:
    class Strict(ScriptedServer):
        pass

    server = Strict(always(RUNS), refuses=(refused,))
    report = benchmark(server, synthetic(1)).report
    assert report.requests.completed == 1
    assert server.bodies[0].get("stream_options") == left
    assert "return_token_ids" not in server.bodies[0]


def test_what_the_server_refuses_is_said() -> None:
    with pytest.raises(
        ConfigError, match=r"takes no prompt for the model 'scripted' \(ids: HTTP 400, cannot take ids\)"
    ):
        benchmark(ScriptedServer(always(RUNS), takes=("text",)), synthetic(1), prompt_form=PromptForm.IDS)
    with pytest.raises(ConfigError, match=r"the server has no /tokenize to tell token ids \(give --vocab-size\)"):
        benchmark(ScriptedServer(always(RUNS), has_tokenize=False), synthetic(1), prompt_form=PromptForm.IDS)
    with pytest.raises(ConfigError, match=r"ids: HTTP 400.*text: HTTP 400.*chat: HTTP 400"):
        benchmark(ScriptedServer(always(RUNS), takes=()), synthetic(1))
    with pytest.raises(ConfigError, match="--prompt-form ids is for traces"):
        benchmark(ScriptedServer(always(RUNS)), read_sample("mt_bench_questions"), prompt_form=PromptForm.IDS)
    with pytest.raises(ServerGoneError, match="http://scripted cannot be reached"):
        benchmark(ScriptedServer(always(RUNS), is_down=True), synthetic(1))
    with pytest.raises(ConfigError, match="no request is left to send"):
        benchmark(ScriptedServer(always(RUNS)), synthetic(1).limited(max_context=5))
    with pytest.raises(ConfigError, match="must begin with http:// or https://, got 'ftp://x'"):
        Server("ftp://x")


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (401, ConfigError, "refuses the API key .HTTP 401.*give --api-key"),
        (503, SpecdecError, "answers HTTP 503: sorry"),
    ],
)
def test_a_server_that_cannot_be_asked_is_said(status: int, error: type[Exception], message: str) -> None:
    class Refusing(ScriptedServer):
        async def answer(self, path: str, body: Mapping[str, Any]) -> Any:
            _, kind, content = await super().answer("/nowhere", body)
            del content

            async def say() -> Any:
                yield b'{"error": {"message": "sorry"}}'

            return status, kind, say()

    with pytest.raises(error, match=message):
        benchmark(Refusing(always(RUNS)), synthetic(1))


def test_records_are_a_line_each(tmp_path: Path, read: ReadLines) -> None:
    server = ScriptedServer(in_turn(RUNS, Script(status=500, message="oh")))
    result = benchmark(server, synthetic(2))
    path = tmp_path / "requests.jsonl"
    write_records(path, result.records, begin_s=result.begin_s)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "request_index": 0,
        "session": "0",
        "category": "",
        "outcome": "completed",
        "error_kind": "",
        "error_detail": "",
        "finish_reason": "length",
        "due_s": pytest.approx(0),
        "sent_s": pytest.approx(0),
        "ended_s": pytest.approx(0.66),
        "ttft_ms": 500.0,
        "tpot_ms": 20.0,
        "e2e_ms": 660.0,
        "planned_prompt_tokens": 20,
        "planned_output_tokens": 9,
        "prompt_tokens": 20,
        "output_tokens": 9,
        "cached_tokens": None,
        "accepted_tokens": None,
        "rejected_tokens": None,
        "chunk_ms": [500.0, 520.0, 560.0, 660.0],
        "tokens_per_chunk": [1, 3, 2, 3],
    }
    assert (second["outcome"], second["error_kind"], second["error_detail"]) == ("failed", "http_500", "oh")
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        write_records(tmp_path, result.records, begin_s=0.0)


def test_the_fields_of_the_report_stay_what_they_are() -> None:
    """A change of this file is a change for whoever reads reports: raise `SCHEMA_VERSION` where a meaning changes."""
    schema = msgspec.json.schema(Report)
    fields = {name: sorted(definition["properties"]) for name, definition in sorted(schema["$defs"].items())}
    assert fields == json.loads((Path(__file__).parent / "report_fields.json").read_text())
    assert all(set(definition["required"]) == set(definition["properties"]) for definition in schema["$defs"].values())


def test_the_report_is_read_back_from_its_json() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 4}}
    server = ScriptedServer(in_turn(replace(RUNS, usage=usage), Script(status=500)))
    report = benchmark(server, synthetic(2), objectives=Objectives(tpot_ms=30)).report
    assert msgspec.json.decode(as_json(report), type=Report) == report
