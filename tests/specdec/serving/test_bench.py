"""`specdec bench` against `specdec serve` with glm-tiny: both ends of the same figures."""

import json
from typing import Any

import pytest

from specdec.cli.main import main
from tests.support.metric_samples import samples
from tests.support.running_server import RunningServer

pytestmark = pytest.mark.xdist_group("glm_tiny_server")

NUM_REQUESTS, NUM_OUTPUT_TOKENS, PAGE_SIZE = 6, 12, 64
LENGTHS = {"input-tokens": 220, "output-tokens": NUM_OUTPUT_TOKENS, "shared-tokens": 3 * PAGE_SIZE}


def counters(server: RunningServer) -> dict[tuple[str, ...], float]:
    with server.client() as client:
        return samples(client.get("/metrics").text)


def test_report_of_a_run_is_what_the_server_counted(
    tiny_server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    before = counters(tiny_server)
    options = [word for name, value in LENGTHS.items() for word in (f"--{name}", str(value))]
    load = ["--num-requests", str(NUM_REQUESTS), "--concurrency", "2", "--seed", "11", "--temperature", "0"]
    exit_code = main(
        ["bench", "--url", tiny_server.url, *options, *load, "--ignore-eos", "--slo-ttft", "60000", "--json"]
    )
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert exit_code == 0
    after = counters(tiny_server)

    def counted(name: str) -> float:
        return after[f"specdec:{name}_total",] - before[f"specdec:{name}_total",]

    assert report["server"]["model"] == "glm-tiny"
    assert (report["requests"]["completed"], report["requests"]["failed"]) == (NUM_REQUESTS, 0)
    assert report["tokens"]["output"] == NUM_REQUESTS * NUM_OUTPUT_TOKENS
    assert report["tokens"]["prompt"] == NUM_REQUESTS * LENGTHS["input-tokens"]
    assert report["goodput"]["share"] == 1

    latency = report["latency"]
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "itl_chunk_ms", "itl_token_ms"):
        summary = latency[name]
        assert 0 <= summary["p50"] <= summary["p90"] <= summary["p99"] <= summary["max"] < 1000 * report["duration_s"]
        assert summary["max"] > 0
    assert all(latency[name]["num_samples"] == NUM_REQUESTS for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
    steps = latency["ttft_ms"]["mean"] + (NUM_OUTPUT_TOKENS - 1) * latency["tpot_ms"]["mean"]
    assert steps <= latency["e2e_ms"]["mean"] + 1e-6

    acceptance = report["acceptance"]
    assert 0 < acceptance["rate"] < 1
    assert 1 < acceptance["acceptance_length"] <= 4
    assert 1 < acceptance["tokens_per_pass"] <= 4
    assert len(acceptance["rate_per_position"]) == 3
    assert all(0 <= rate <= 1 for rate in acceptance["rate_per_position"])
    assert 0 < acceptance["num_accepted"] <= counted("spec_decode_num_accepted_tokens")

    # Two pages are shared with the token behind them; those that come beside the first request may come too early.
    hits = counted("prefix_cache_hits")
    assert (NUM_REQUESTS - 2) * 2 * PAGE_SIZE <= hits <= NUM_REQUESTS * 2 * PAGE_SIZE
    assert report["prefix"]["hit_rate"] == pytest.approx(hits / report["tokens"]["prompt"])
    assert 0.35 < report["prefix"]["hit_rate"] <= report["prefix"]["reusable_share"] < 1
