"""What operators see of a server: metrics, logs, health, and how it ends."""

import gc
import io
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from specdec.dcp.merge_clock import MergeTime
from specdec.dcp.shard_balance import ShardBalance
from specdec.errors import RankLostError
from specdec.handoff.prefill_link import LinkCounts, LinkState
from specdec.prefill.outgoing import OutgoingCounts
from specdec.ranks.rank_transfer import PathCounts
from specdec.request import SpeculationStats
from specdec.serving.engine_gauges import EngineGauges
from specdec.serving.generation import Generation
from specdec.serving.handoff_gauges import DoorGauges, IntakeGauges, PrefillGauges
from specdec.serving.metric_names import METRICS, PREFIX
from specdec.serving.web.json_log import JsonFormatter
from tests.support.fake_engine import BROKEN_ROUND, END, FakeEngine
from tests.support.metric_samples import samples
from tests.support.running_server import RunningServer, running_server, wait_until

HELLO = [{"role": "user", "content": "Hello"}]
INTAKE = IntakeGauges(
    prefills=(
        PrefillGauges(
            address="host:1",
            state=LinkState.SILENT,
            num_queued_tokens=70,
            counts=LinkCounts(
                num_started=7,
                num_arrived=5,
                num_failed=1,
                num_stale=3,
                num_connections=2,
                num_prompt_tokens=900,
                num_cached_tokens=640,
            ),
        ),
    ),
    prompts_by_outcome={"received": 5, "lost": 1},
    wait_s=1.5,
)
DOOR = DoorGauges(
    num_groups=2,
    num_running=1,
    counts=OutgoingCounts(
        num_started=6,
        num_done=4,
        num_failed=1,
        num_stale=4,
        num_prompt_tokens=800,
        num_cached_tokens=320,
        paths={(0, 1, "draft.latent"): PathCounts(num_bytes=4096, num_descriptors=8, queued_s=0.25, sending_s=0.5)},
    ),
)
SECRET = "xyzzy-secret"
CHAT = "/v1/chat/completions"


def test_metrics_count_what_passes(engine: FakeEngine, server: RunningServer) -> None:
    engine.text = "</think>Hello, world!" + END
    with server.client() as client:
        answer = client.post(CHAT, json={"messages": HELLO, "n": 2}).json()
        client.post(CHAT, json={"messages": HELLO, "max_tokens": 1})
        client.post(CHAT, json={})
        found = samples(client.get("/metrics").text)
    num_prompt, num_output = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
    assert found["specdec:prompt_tokens_total",] == 2 * num_prompt
    assert found["specdec:prefix_cache_queries_total",] == 2 * num_prompt
    assert found["specdec:generation_tokens_total",] == num_output + 1
    assert found["specdec:request_success_total", "stop"] == 2
    assert found["specdec:request_success_total", "length"] == 1
    assert found["specdec:time_to_first_token_seconds_count",] == 3
    assert found["specdec:e2e_request_latency_seconds_count",] == 3
    assert found["specdec:request_generation_tokens_sum",] == num_output + 1
    assert found["specdec:inter_token_latency_seconds_count",] == 2 * (-(-num_output // 2 // 2) - 1)
    assert found["specdec:request_queue_time_seconds_count",] == 2
    assert found["specdec:http_responses_total", "200"] == 2
    assert found["specdec:http_responses_total", "400"] == 1


def test_metrics_of_the_engine_are_read_between_rounds(engine: FakeEngine) -> None:
    threads = []

    def read() -> EngineGauges:
        threads.append(threading.current_thread().name)
        return EngineGauges(
            num_running=3,
            num_waiting=2,
            num_pages=100,
            num_free_pages=50,
            num_cached_pages=30,
            num_quarantined_pages=4,
            num_preemptions=1,
            speculation=SpeculationStats(num_drafts=10, num_draft_tokens=30, accepted_per_position=(9, 5, 2)),
            num_audited_decisions=7,
            disagreements_by_rank=(0, 1),
            shards=ShardBalance(np.array([300, 100]), num_empty_shards=5),
            merges=MergeTime(num_merges=40, seconds=0.75),
            intake=INTAKE,
            door=DOOR,
        )

    with running_server(engine, read_gauges=read) as server, server.client() as client:
        text = client.get("/metrics").text
    assert threads == ["specdec-rounds"]
    found = samples(text)
    expected = {
        ("num_requests_running",): 3,
        ("num_requests_waiting",): 2,
        ("kv_cache_usage_perc",): 0.2,
        ("kv_pages", "used"): 20,
        ("kv_pages", "cached"): 30,
        ("kv_pages", "free"): 50,
        ("kv_pages_quarantined",): 4,
        ("num_preemptions_total",): 1,
        ("spec_decode_num_drafts_total",): 10,
        ("spec_decode_num_draft_tokens_total",): 30,
        ("spec_decode_num_accepted_tokens_total",): 16,
        ("spec_decode_num_accepted_tokens_per_pos_total", "0"): 9,
        ("spec_decode_num_accepted_tokens_per_pos_total", "2"): 2,
        ("audit_decisions_total",): 7,
        ("audit_disagreements_total", "1"): 1,
        ("kv_shard_tokens", "0"): 300,
        ("kv_shard_tokens", "1"): 100,
        ("kv_shard_balance",): 2 / 3,
        ("kv_empty_shards",): 5,
        ("dcp_merges_total",): 40,
        ("dcp_merge_seconds_total",): 0.75,
        ("prefill_prompts_total", "lost"): 1,
        ("prefill_wait_seconds_total",): 1.5,
        ("prefill_state", "host:1", "ready"): 0,
        ("prefill_state", "host:1", "silent"): 1,
        ("prefill_queued_tokens", "host:1"): 70,
        ("prefill_transfers_total", "arrived", "host:1"): 5,
        ("prefill_connections_total", "host:1"): 2,
        ("prefill_prompt_tokens_total", "host:1"): 900,
        ("prefill_cached_tokens_total", "host:1"): 640,
        ("prefill_stale_messages_total", "host:1"): 3,
        ("decode_groups",): 2,
        ("transfers_running",): 1,
        ("transfers_total", "failed"): 1,
        ("transfer_prompt_tokens_total",): 800,
        ("transfer_cached_tokens_total",): 320,
        ("transfer_stale_messages_total",): 4,
        ("transfer_bytes_total", "1", "draft.latent", "0"): 4096,
        ("transfer_descriptors_total", "1", "draft.latent", "0"): 8,
        ("transfer_seconds_total", "1", "draft.latent", "queued", "0"): 0.25,
        ("transfer_seconds_total", "1", "draft.latent", "sending", "0"): 0.5,
    }
    for (name, *labels), value in expected.items():
        assert found[(PREFIX + name, *labels)] == value, name
    exported = {re.sub("_total$", "", name) for name in re.findall(rf"# HELP {PREFIX}(\w+) ", text)}
    assert {name for name in exported if not name.endswith("_created")} == {metric.name for metric in METRICS}


def test_names_of_vllm_are_kept_behind_our_prefix() -> None:
    for metric in METRICS:
        assert not metric.vllm or metric.vllm == f"vllm:{metric.name}"
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the server logs, as JSON lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    loggers = [logging.getLogger(name) for name in ("specdec.serving", "uvicorn")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield stream
    for logger in loggers:
        logger.removeHandler(handler)


def test_log_has_a_line_a_request_and_nothing_that_users_wrote(
    engine: FakeEngine, server: RunningServer, log: io.StringIO
) -> None:
    engine.text = f"</think>{SECRET}" + END
    said = [{"role": "user", "content": SECRET}]
    with server.client() as client:
        client.post(CHAT, json={"messages": said}, headers={"x-request-id": "mine-1"})
        client.post(CHAT, json={"messages": said, "stream": True})
        client.post(CHAT, json={"messages": said, "model": SECRET})
        client.post(CHAT, json={"messages": said, "stop": [SECRET, ""]})
        client.post(CHAT, content=SECRET, headers={"content-type": "application/json"})
        engine.failure = BROKEN_ROUND
        client.post(CHAT, json={"messages": said})
        engine.failure = None
        client.get("/health")
        client.post("/v1/messages", json={"messages": said, "max_tokens": 4, "system": SECRET})
    wait_until(lambda: log.getvalue().count('"message": "request"') == 7, "a line each")  # written behind the answer
    text = log.getvalue()
    assert SECRET not in text
    lines = [json.loads(line) for line in text.splitlines()]
    requests = [line for line in lines if line["message"] == "request"]
    assert [line["status"] for line in requests] == [200, 200, 404, 400, 400, 500, 200]
    first = requests[0]
    assert (first["request_id"], first["method"], first["path"]) == ("mine-1", "POST", CHAT)
    assert first["prompt_tokens"] > 0
    assert first["completion_tokens"] > 0
    assert first["first_token_seconds"] >= 0
    assert first["seconds"] >= first["first_token_seconds"]
    (failure,) = (line for line in lines if line["level"] == "error" and "reason" in line)
    assert failure["request_id"] == requests[5]["request_id"]
    assert failure["exception"] == "RoundError"


def test_request_ids_come_back_and_are_plain(server: RunningServer) -> None:
    with server.client() as client:
        response = client.post(CHAT, json={"messages": HELLO}, headers={"x-request-id": "abc.DEF_1:2-3"})
        assert response.headers["x-request-id"] == "abc.DEF_1:2-3"
        assert response.json()["id"] == "chatcmpl-abc.DEF_1:2-3"
        seen = set()
        for odd in ("", "x y", "x" * 200, "ü", "{}"):
            response = client.get("/version", headers={"x-request-id": odd.encode()})
            assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
            seen.add(response.headers["x-request-id"])
        assert len(seen) == 5
        assert client.get("/nothing", headers={"x-request-id": "e1"}).headers["x-request-id"] == "e1"


def test_formatter_leaves_out_the_message_of_an_exception() -> None:
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        record = logging.makeLogRecord({"msg": "it failed", "exc_info": (KeyError, error, error.__traceback__)})
    line = JsonFormatter().format(record)
    assert SECRET not in line
    fields = json.loads(line)
    assert fields["exception"] == "KeyError"
    assert "test_operations.py" in fields["frames"][0]


def test_web_pages_may_call_only_where_they_are_allowed(engine: FakeEngine, server: RunningServer) -> None:
    page = {"origin": "https://page.example"}
    ask = {**page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with server.client() as client:
        assert "access-control-allow-origin" not in client.get("/version", headers=page).headers
        assert client.options(CHAT, headers=ask).status_code == 405
    with running_server(engine, allowed_origins=("https://page.example",)) as other_server:
        client = other_server.client()
        assert client.get("/version", headers=page).headers["access-control-allow-origin"] == page["origin"]
        assert client.options(CHAT, headers=ask).status_code == 200
        other = {"origin": "https://other.example"}
        assert "access-control-allow-origin" not in client.get("/version", headers=other).headers
        client.close()


def in_background(server: RunningServer, body: dict[str, Any]) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []

    def ask() -> None:
        with server.client() as client:
            answers.append(client.post(CHAT, json=body))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


def test_draining_server_finishes_what_runs_and_lets_nothing_in(engine: FakeEngine) -> None:
    engine.gate.clear()
    with running_server(engine) as server:
        thread, answers = in_background(server, {"messages": HELLO, "stream": True})
        wait_until(lambda: server.service.admission.num_open == 1, "it runs")
        server.drain()
        with server.client() as client:
            wait_until(lambda: client.get("/ready").status_code == 503, "it is not ready")
            assert client.get("/health").status_code == 200
            refused = client.post(CHAT, json={"messages": HELLO})
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            overloaded = client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 5})
            assert overloaded.json()["error"]["type"] == "overloaded_error"
        engine.gate.set()
        thread.join(timeout=60)
    assert answers[0].status_code == 200
    assert answers[0].text.endswith("data: [DONE]\n\n")
    assert server.failure is None


def test_draining_ends_after_its_time(engine: FakeEngine) -> None:
    engine.text = "x"
    engine.is_stepped = True
    with running_server(engine, drain_timeout_s=0.3) as server:
        thread, answers = in_background(server, {"messages": HELLO, "stream": True})
        wait_until(lambda: engine.num_steps > 1, "it has begun")
        server.drain()
        time.sleep(0.5)
        engine.gate.set()
        thread.join(timeout=60)
    assert "the server is shutting down" in answers[0].text
    assert engine.num_cancelled == 1


def test_lost_engine_is_noticed_while_nothing_runs(engine: FakeEngine) -> None:
    with running_server(engine) as server:
        engine.lost = RankLostError("rank 1 has died")
        wait_until(lambda: server.failure is not None, "it ends")
    assert isinstance(server.failure, RankLostError)


def test_nothing_is_left_of_many_requests(engine: FakeEngine, server: RunningServer) -> None:
    gc.collect()
    others = {id(each) for each in gc.get_objects() if isinstance(each, Generation)}  # of other tests

    def none_is_left() -> bool:
        return all(id(each) in others for each in gc.get_objects() if isinstance(each, Generation))

    with server.client() as client:
        client.post(CHAT, json={"messages": HELLO})
        num_threads, num_files = threading.active_count(), samples(client.get("/metrics").text)["process_open_fds",]
        for index in range(100):
            body = {"messages": HELLO, "stream": index % 2 == 0, "n": 1 + index % 3}
            assert client.post(CHAT, json=body).status_code == 200
        wait_until(lambda: server.service.admission.num_open == 0, "all have left")
        assert not engine.running
        wait_until(none_is_left, "the task of the last answer has ended")  # without a collection
        assert threading.active_count() <= num_threads + 7  # the workers, of which there are at most 8
        assert samples(client.get("/metrics").text)["process_open_fds",] <= num_files
