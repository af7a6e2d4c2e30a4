"""Statistics against their definitions."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.bench import measure
from specdec.bench.measure import Objectives
from specdec.bench.report import Summary
from specdec.bench.request_record import Outcome, RequestRecord, TokenUsage
from specdec.bench.server_counters import ServerCounters, parse_counters
from specdec.errors import ConfigError

NOTHING = ServerCounters({})

VLLM = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 45.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 30.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 14.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 12.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total 400
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total 100
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total 77
"""


def record(
    *chunks_s: float, tokens: Sequence[int] | None = None, sent_s: float = 100.0, **fields: Any
) -> RequestRecord:
    values: dict[str, Any] = {
        "request_index": 0,
        "session": "",
        "category": "",
        "outcome": Outcome.COMPLETED,
        "num_planned_prompt": 50,
        "num_planned_output": 9,
        "due_s": sent_s,
        "sent_s": sent_s,
        "ended_s": chunks_s[-1] if chunks_s else sent_s,
        "chunks_s": chunks_s,
        "tokens_per_chunk": None if tokens is None else tuple(tokens),
    }
    return RequestRecord(**{**values, **fields})


def test_latencies_of_a_request_with_several_tokens_in_a_chunk() -> None:
    request = record(100.5, 100.75, 101.25, tokens=(2, 4, 1), ended_s=101.5, due_s=99.0)
    assert request.ttft_s == 0.5
    assert request.tpot_s == 0.75 / 6
    assert request.e2e_s == 1.5
    assert request.start_delay_s == 1.0
    assert request.chunk_gaps_s() == [0.25, 0.5]
    assert list(request.token_gaps_s()) == [0.0, *[0.0625] * 4, 0.5]


def test_tokens_are_counted_by_the_server_else_by_chunk() -> None:
    assert record(101, 102, usage=TokenUsage(num_prompt=7, num_output=5)).num_output_tokens == 5
    assert record(101, 102, usage=TokenUsage(num_prompt=7, num_output=5)).num_prompt_tokens == 7
    assert record(101, 102, tokens=(1, 3)).num_output_tokens == 4
    assert record(101, 102).num_output_tokens == 2
    assert record(101, 102).num_prompt_tokens == 50
    assert record(101, 102, num_planned_prompt=None).num_prompt_tokens == 0


def test_what_a_short_reply_does_not_have() -> None:
    empty, single = record(tokens=()), record(101.0, tokens=(1,))
    assert (empty.ttft_s, empty.tpot_s, empty.chunk_gaps_s(), list(empty.token_gaps_s())) == (None, None, [], [])
    assert (single.ttft_s, single.tpot_s, single.chunk_gaps_s(), list(single.token_gaps_s())) == (1.0, None, [], [])
    assert list(record(101.0, 102.0, 103.0).token_gaps_s()) == []  # the tokens of a chunk are not known


@given(
    gaps=st.lists(st.floats(0, 10), max_size=20),
    tokens=st.lists(st.integers(1, 8), min_size=21, max_size=21),
)
def test_the_mean_of_token_latencies_is_tpot(gaps: list[float], tokens: list[int]) -> None:
    times = [101.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    request = record(*times, tokens=tokens[: len(times)])
    samples = list(request.token_gaps_s())
    assert len(samples) == max(0, request.num_output_tokens - 1)
    if samples:
        assert sum(samples) / len(samples) == pytest.approx(request.tpot_s)


def test_percentiles_are_over_all_samples_and_interpolated() -> None:
    summary = Summary.of([(101 - place) / 1000 for place in range(1, 101)])
    assert summary is not None
    assert (summary.num_samples, summary.max) == pytest.approx((100, 100))
    assert summary.mean == pytest.approx(50.5)
    assert (summary.p50, summary.p90) == pytest.approx((50.5, 90.1))
    assert (summary.p95, summary.p99) == pytest.approx((95.05, 99.01))
    assert Summary.of([]) is None
    one = Summary.of([0.25])
    assert one is not None
    assert {one.mean, one.p50, one.p90, one.p95, one.p99, one.max} == {250.0}


def test_latency_is_of_every_sample_of_every_request() -> None:
    done = [record(101, 102, 104, tokens=(1, 1, 2)), record(103, 104, tokens=(1, 1)), record(tokens=())]
    latency = measure.measure_latency(done)
    assert latency.ttft_ms is not None
    assert latency.tpot_ms is not None
    assert latency.itl_chunk_ms is not None
    assert latency.itl_token_ms is not None
    assert (latency.ttft_ms.num_samples, latency.ttft_ms.mean) == (2, 2000)
    assert (latency.tpot_ms.num_samples, latency.tpot_ms.mean) == (2, 1000)
    assert (latency.itl_chunk_ms.num_samples, latency.itl_chunk_ms.max) == (3, 2000)
    assert (latency.itl_token_ms.num_samples, latency.itl_token_ms.max) == (4, 1000)
    silent = measure.measure_latency([*done, record(101, 102, 103)])
    assert silent.itl_token_ms is None  # one does not tell, and the others may be of another kind
    assert silent.itl_chunk_ms is not None
    assert silent.itl_chunk_ms.num_samples == 5


def test_requests_are_counted_by_outcome_and_kind() -> None:
    def failed(kind: str, detail: str, **fields: Any) -> RequestRecord:
        return record(outcome=Outcome.FAILED, error_kind=kind, error_detail=detail, **fields)

    records = [
        record(103.0),
        failed("http_429", "first", ended_s=101.0),
        failed("http_429", "second", sent_s=103.0, ended_s=104.0),  # begins when another ends
        failed("timeout", "slow", ended_s=102.0),
        record(outcome=Outcome.UNFINISHED, sent_s=104.0, ended_s=105.0),
    ]
    counted = measure.count_requests(records, num_planned=10, num_skipped=2)
    assert (counted.completed, counted.failed, counted.unfinished) == (1, 3, 1)
    assert (counted.skipped, counted.not_sent, counted.most_at_once) == (2, 3, 3)
    assert {kind: (error.count, error.example) for kind, error in counted.errors.items()} == {
        "http_429": (2, "first"),
        "timeout": (1, "slow"),
    }


def test_throughput_divides_by_the_time_from_the_first_sent_to_the_last_end() -> None:
    records = [record(101, 102, tokens=(1, 5)), record(107, sent_s=105.0, tokens=(4,), ended_s=110.0)]
    assert measure.duration_s(records) == 10.0
    throughput = measure.measure_throughput(records, 10.0)
    assert throughput.requests_per_s == 0.2
    assert throughput.prompt_tokens_per_s == 10.0
    assert throughput.output_tokens_per_s == 1.0
    assert measure.duration_s([]) == 0.0
    assert measure.measure_throughput([], 0.0).requests_per_s == 0.0


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    records = [
        record(101.0, 101.25, tokens=(1, 1)),  # TTFT 1 s, TPOT 250 ms
        record(100.5, 101.5, tokens=(1, 1)),  # 500 ms, 1 s
        record(100.25, tokens=(1,)),  # 250 ms, and no TPOT
        record(tokens=()),  # completed without a token
        record(100.25, outcome=Outcome.FAILED),
        record(100.25, outcome=Outcome.UNFINISHED),
    ]

    def num_good(ttft_ms: float | None, tpot_ms: float | None) -> int:
        goodput = measure.measure_goodput(records, Objectives(ttft_ms=ttft_ms, tpot_ms=tpot_ms), 4.0)
        assert goodput is not None
        assert goodput.share == goodput.num_good / 5
        assert goodput.requests_per_s == goodput.num_good / 4
        return goodput.num_good

    assert num_good(1000, None) == 3
    assert num_good(999, None) == 2
    assert num_good(None, 250) == 2
    assert num_good(500, 1000) == 2
    assert num_good(500, 999) == 1
    assert measure.measure_goodput(records, Objectives(), 4.0) is None
    with pytest.raises(ConfigError, match="--slo-tpot must be above 0 milliseconds, got 0"):
        Objectives(tpot_ms=0)


def test_prefix_hits_by_usage_else_by_metrics() -> None:
    def cached(num_cached: int | None, num_prompt: int) -> RequestRecord:
        return record(101.0, usage=TokenUsage(num_prompt=num_prompt, num_output=1, num_cached=num_cached))

    by_usage = measure.measure_prefix([cached(30, 60), cached(None, 40)], parse_counters(VLLM), reusable_share=0.5)
    assert (by_usage.source, by_usage.hit_rate, by_usage.reusable_share) == ("usage", 0.3, 0.5)
    by_metrics = measure.measure_prefix([cached(None, 40)], parse_counters(VLLM), reusable_share=None)
    assert (by_metrics.source, by_metrics.hit_rate) == ("metrics", 0.25)
    unknown = measure.measure_prefix([cached(None, 40)], NOTHING, reusable_share=None)
    assert (unknown.source, unknown.hit_rate) == ("none", None)


def test_acceptance_by_usage_else_by_metrics() -> None:
    def drafted(
        num_output: int, num_accepted: int | None, num_rejected: int | None, category: str = ""
    ) -> RequestRecord:
        usage = TokenUsage(num_prompt=1, num_output=num_output, num_accepted=num_accepted, num_rejected=num_rejected)
        return record(101.0, 103.0, usage=usage, category=category)

    done = [drafted(20, 12, 4, "a"), drafted(10, 3, 5, "b"), drafted(5, None, None, "b")]
    by_usage = measure.measure_acceptance(done, NOTHING)
    assert (by_usage.source, by_usage.num_accepted, by_usage.num_rejected) == ("usage", 15, 9)
    assert (by_usage.rate, by_usage.tokens_per_pass) == (15 / 24, 30 / 15)
    assert (by_usage.acceptance_length, by_usage.rate_per_position) == (None, [])
    by_metrics = measure.measure_acceptance(done[2:], parse_counters(VLLM))
    assert (by_metrics.source, by_metrics.num_accepted, by_metrics.num_rejected) == ("metrics", 30, 15)
    assert (by_metrics.rate, by_metrics.acceptance_length) == (30 / 45, 1 + 30 / 15)
    assert by_metrics.rate_per_position == [14 / 15, 12 / 15, 4 / 15]
    unknown = measure.measure_acceptance(done[2:], NOTHING)
    assert (unknown.source, unknown.rate) == ("none", None)
    categories = measure.measure_categories([*done, record(101.0)])
    assert list(categories) == ["a", "b"]
    assert (categories["a"].acceptance_rate, categories["a"].tokens_per_pass) == (0.75, 2.5)
    assert (categories["b"].num_requests, categories["b"].output_tokens) == (2, 15)
    assert categories["b"].acceptance_rate == 3 / 8
    assert categories["b"].mean_tpot_ms == pytest.approx(2000 * (1 / 9 + 1 / 4) / 2)


def test_counters_of_a_run_are_differences() -> None:
    after = parse_counters(VLLM.replace(" 30.0", " 42.0"))
    difference = after.since(parse_counters(VLLM))
    assert (difference.num_drafts, difference.num_accepted_tokens) == (0, 12)
    assert after.since(NOTHING) == after
    own = parse_counters("specdec_spec_decode_num_drafts_total 3\n")
    assert own.num_drafts == 3


@pytest.mark.parametrize("text", ["", "<html>", "other_total 5\n", "spec_decode_num_drafts_total{ 5\n"])
def test_what_has_no_such_counters_tells_nothing(text: str) -> None:
    counters = parse_counters(text)
    assert (counters.num_drafts, counters.prefix_hit_rate, counters.accepted_per_position) == (None, None, ())
