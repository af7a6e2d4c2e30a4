"""`specdec bench` against a server behind a socket."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import httpx2
import pytest

from tests.specdec.bench.conftest import SAMPLES
from tests.specdec.cli.conftest import Run
from tests.support.scripted_server import Script, ScriptedServer, serve_scripted

RUNS = Script(runs=((0.0, 1), (0.0, 3), (0.0, 2)))
LENGTHS = ("--num-requests", 3, "--input-tokens", 20, "--output-tokens", 6)


def always(script: Script) -> Callable[[Mapping[str, Any]], Script]:
    return lambda body: script


def test_a_trace_is_replayed_and_reported_in_every_way(run: Run, tmp_path: Path) -> None:
    trace = SAMPLES / "mooncake_conversation.jsonl"
    figure, requests = tmp_path / "run.svg", tmp_path / "requests.jsonl"
    server = ScriptedServer(always(RUNS), max_model_len=1000)
    options = ("--scale-length", 20, "--max-requests", 20, "--speed", 1000, "--warmup", 1, "--slo-ttft", 60_000)
    with serve_scripted(server) as url:
        outcome = run("bench", trace, "--url", url, *options, "--json", "--figure", figure, "--save-requests", requests)
    assert outcome.exit_code == 0, outcome.err
    report = json.loads(outcome.out)
    assert (report["requests"]["completed"], report["tokens"]["output"]) == (20, 120)
    assert (report["workload"]["kind"], report["workload"]["source"]) == ("mooncake", str(trace))
    assert (report["workload"]["scale_length"], report["load"]["speed"]) == (20, 1000)
    assert report["goodput"]["num_good"] == 20
    assert "20 requests in 20 sessions (mooncake) to scripted, prompts as ids, trace arrivals" in outcome.err
    assert "need more than the 1,000 tokens of scripted" in outcome.err
    assert len(server.bodies) == 21
    assert ET.parse(figure).getroot().tag.endswith("svg")
    assert [json.loads(line)["outcome"] for line in requests.read_text().splitlines()] == ["completed"] * 20


def test_tables_say_what_there_is(run: Run) -> None:
    usage = {
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1},
    }
    answers = iter([Script(status=429, message="[full]")])
    server = ScriptedServer(lambda body: next(answers, Script(runs=RUNS.runs, usage=usage)))
    with serve_scripted(server) as url:
        outcome = run("bench", "--url", f"{url}/v1", *LENGTHS, "--slo-tpot", 60_000, "--concurrency", 2)
    assert outcome.exit_code == 0, outcome.err
    for text in ("TTFT", "TPOT", "ITL by chunk", "ITL by token", "p99", "2 completed requests, milliseconds"):
        assert text in outcome.out
    for text in ("2 completed, 1 failed", "25.0% of the prompt tokens", "75.0% of the drafts", "2.00 tokens a pass"):
        assert text in outcome.out
    assert "TPOT <= 60000 ms" in outcome.out
    assert "http_429" in outcome.out
    assert "[full]" in outcome.out


def test_categories_of_questions(run: Run) -> None:
    with serve_scripted(ScriptedServer(always(RUNS))) as url:
        options = ("--url", url, "--max-requests", 3, "--output-tokens", 6)
        outcome = run("bench", SAMPLES / "mt_bench_questions.jsonl", *options)
    assert outcome.exit_code == 0, outcome.err
    assert "by category" in outcome.out
    assert "writing" in outcome.out
    assert "prompts as chat, closed arrivals" in outcome.err


def test_a_stream_that_breaks_off_is_a_failed_request(run: Run) -> None:
    answers = iter([Script(runs=RUNS.runs, cut_after=1), Script(is_refused=True)])
    with serve_scripted(ScriptedServer(lambda body: next(answers, RUNS))) as url:
        outcome = run("bench", "--url", url, *LENGTHS, "--json")
    assert outcome.exit_code == 0, outcome.err
    assert {kind: error["count"] for kind, error in json.loads(outcome.out)["requests"]["errors"].items()} == {
        "cut_stream": 1,
        "connection": 1,
    }


def test_a_server_that_vanishes_is_an_error_after_the_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.bench.load_run._LOOK_AGAIN_S", 0.0)

    def script(body: Mapping[str, Any]) -> Script:
        server.is_down = len(server.bodies) == 2
        return Script(runs=RUNS.runs, cut_after=1) if server.is_down else RUNS

    server = ScriptedServer(script)
    with serve_scripted(server) as url:
        outcome = run("bench", "--url", url, *LENGTHS, "--json")
    assert outcome.exit_code == 1
    assert json.loads(outcome.out)["requests"]["completed"] == 1
    assert f"specdec: the run ended early: {url} cannot be reached" in outcome.err


def test_a_run_in_which_nothing_completes_is_an_error(run: Run) -> None:
    with serve_scripted(ScriptedServer(always(Script(status=400, message="no")))) as url:
        outcome = run("bench", "--url", url, *LENGTHS)
    assert outcome.exit_code == 1
    assert "3 failed" in outcome.out
    assert outcome.err.splitlines()[-1] == "specdec: no request completed: what is above says why"


def test_ctrl_c_reports_what_there_is() -> None:
    def script(body: Mapping[str, Any]) -> Script:
        if len(server.bodies) == 3:
            os.kill(process.pid, signal.SIGINT)
            return Script(runs=((0.0, 1), (60.0, 1)))
        return RUNS

    server = ScriptedServer(script)
    with serve_scripted(server) as url:
        command = [sys.executable, "-m", "specdec", "bench", "--url", url, *map(str, LENGTHS), "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    report = json.loads(out)
    assert report["end"] == "interrupted"
    assert (report["requests"]["completed"], report["requests"]["unfinished"]) == (2, 1)


def test_an_api_key_is_sent_and_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str | None] = []
    real = httpx2.AsyncClient

    def spy(**fields: Any) -> Any:
        keys.append(fields["headers"].get("Authorization"))
        return real(**fields)

    monkeypatch.setattr(httpx2, "AsyncClient", spy)
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    with serve_scripted(ScriptedServer(always(RUNS))) as url:
        shown = [run("bench", "--url", url, *LENGTHS), run("bench", "--url", url, *LENGTHS, "--api-key", "given")]
    assert keys == ["Bearer from-the-environment", "Bearer given"]
    assert not any(key in outcome.out + outcome.err for key in ("from-the-environment", "given") for outcome in shown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give a workload file, or --num-requests, --input-tokens, --output-tokens for synthetic prompts"),
        ((*LENGTHS, "--max-requests", 2), "--max-requests: for a workload file"),
        (("TRACE", "--input-tokens", 5), "--input-tokens: for synthetic prompts"),
        (("TRACE", "--max-context", 0), "--max-context must be at least 1, got 0"),
        (("TRACE", "--scale-length", 0.1), "--scale-length must be at least 1"),
        (("TRACE", "--rate", 1.0), "--arrivals trace takes no --rate"),
        (("TRACE", "--arrivals", "poisson"), "--arrivals poisson needs --rate"),
        (("TRACE", "--figure", "run.gif"), "--figure must end in .png or .svg, got run.gif"),
        (("TRACE", "--figure", "nowhere/run.svg"), "nowhere/run.svg: cannot be written: there is no directory nowhere"),
        (("TRACE", "--save-requests", "nowhere/r.jsonl"), "nowhere/r.jsonl: cannot be written: there is no directory"),
        (("TRACE", "--extra-body", "[1]"), "--extra-body must be a JSON object, got [1]"),
        (("TRACE", "--extra-body", "{"), "--extra-body is not valid JSON"),
        (("TRACE", "--timeout", 0), "--timeout must be above 0 seconds, got 0"),
        (("TRACE", "--warmup", -1), "--warmup must be at least 0, got -1"),
        (("TRACE", "--vocab-size", 1), "--vocab-size must be at least 2, got 1"),
        (("TRACE", "--seed", -1), "--seed must be at least 0"),
        (("TRACE", "--slo-ttft", 0), "--slo-ttft must be above 0 milliseconds, got 0"),
        (("nowhere.jsonl",), "nowhere.jsonl: cannot be read"),
        (("TRACE", "--url", "nowhere"), "--url must begin with http:// or https://, got 'nowhere'"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_sent(run: Run, options: tuple[Any, ...], message: str) -> None:
    trace = str(SAMPLES / "mooncake_conversation.jsonl")
    outcome = run("bench", *(trace if option == "TRACE" else option for option in options))
    assert outcome.exit_code == 2
    assert message in outcome.err
    assert outcome.out == ""


def test_a_server_that_is_not_there_is_named(run: Run) -> None:
    outcome = run("bench", "--url", "http://127.0.0.1:1", *LENGTHS)
    assert outcome.exit_code == 1
    assert "http://127.0.0.1:1 cannot be reached" in outcome.err
    assert "start it, or correct --url" in outcome.err


def test_a_missing_library_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = run("bench", *LENGTHS, "--figure", "run.svg")
    assert outcome.exit_code == 2
    assert "specdec bench needs matplotlib: install specdec with the extra `bench`" in outcome.err
