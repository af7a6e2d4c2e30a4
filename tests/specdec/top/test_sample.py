"""From counts to the figures that are shown."""

import math

import pytest

from specdec.top.activity import Activity, Percentiles, Window
from specdec.top.history import History
from specdec.top.reading import parse_metrics
from specdec.top.sample import Pages, PrefillStatus
from tests.support.scripted_status import metrics_text

SECONDS = {0.1: 50.0, 0.2: 90.0, 0.4: 100.0, math.inf: 100.0}
COUNTERS = {
    'request_success_total{finished_reason="stop"}': 6.0,
    'request_success_total{finished_reason="abort"}': 2.0,
    "prompt_tokens_total": 1000.0,
    "generation_tokens_total": 400.0,
    "spec_decode_num_drafts_total": 80.0,
    "spec_decode_num_draft_tokens_total": 240.0,
    "spec_decode_num_accepted_tokens_total": 120.0,
    'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 70.0,
    'spec_decode_num_accepted_tokens_per_pos_total{position="2"}': 10.0,
    "prefix_cache_queries_total": 1000.0,
    "prefix_cache_hits_total": 640.0,
    "num_preemptions_total": 3.0,
    'prefill_prompts_total{outcome="received"}': 5.0,
    'transfers_total{outcome="done"}': 4.0,
    'transfer_bytes_total{source_rank="0",destination_rank="0",kind="target latents"}': 1000.0,
    'transfer_bytes_total{source_rank="0",destination_rank="1",kind="target latents"}': 3000.0,
}
HISTOGRAMS = {
    "time_to_first_token_seconds": SECONDS,
    "inter_token_latency_seconds": {0.1: 0.0, math.inf: 0.0},
    "request_queue_time_seconds": {1.0: 10.0, math.inf: 10.0},
}


def test_every_figure_by_hand() -> None:
    told = Activity.of(parse_metrics(metrics_text(COUNTERS, buckets=HISTOGRAMS), read_at_s=0.0).counts)
    assert told.ended == {"stop": 6, "abort": 2}
    assert (told.prompt_tokens, told.output_tokens, told.num_preemptions) == (1000, 400, 3)
    assert told.ttft_ms == Percentiles(p50=100.0, p90=200.0, p99=pytest.approx(380.0))
    assert told.itl_ms is None
    assert told.queue_ms == Percentiles(p50=500.0, p90=900.0, p99=990.0)
    assert told.acceptance_length == 1 + 120 / 80
    assert told.acceptance_by_position == [70 / 80, 0.0, 10 / 80]
    assert told.prefix_hit_rate == 0.64
    assert told.prefill_prompts == {"received": 5}
    assert (told.transfers, told.transfer_bytes) == ({"done": 4}, 4000)


def test_nothing_told_is_nothing_shown() -> None:
    told = Activity.of(parse_metrics("", read_at_s=0.0).counts)
    assert (told.prompt_tokens, told.output_tokens, told.num_preemptions) == (None, None, None)
    assert (told.ttft_ms, told.itl_ms, told.queue_ms) == (None, None, None)
    assert (told.acceptance_length, told.acceptance_by_position, told.prefix_hit_rate) == (None, [], None)
    assert (told.ended, told.prefill_prompts, told.transfers, told.transfer_bytes) == ({}, {}, {}, None)


def test_rounds_without_drafts_have_no_acceptance() -> None:
    idle = dict.fromkeys(COUNTERS, 0.0)
    told = Activity.of(parse_metrics(metrics_text(idle), read_at_s=0.0).counts)
    assert (told.acceptance_length, told.acceptance_by_position, told.prefix_hit_rate) == (None, [], None)
    assert told.output_tokens == 0


def test_rates_are_over_the_window() -> None:
    history = History(10.0)
    history.add(parse_metrics(metrics_text(dict.fromkeys(COUNTERS, 0.0)), read_at_s=100.0))
    assert Window.of(history) is None
    history.add(parse_metrics(metrics_text(COUNTERS), read_at_s=104.0))
    window = Window.of(history)
    assert window is not None
    assert window.duration_s == 4.0
    assert (window.ended_per_s, window.prompt_tokens_per_s, window.output_tokens_per_s) == (2.0, 250.0, 100.0)
    assert window.transfer_bytes_per_s == 1000.0
    assert window.activity.acceptance_length == 2.5


def test_rates_of_what_is_not_counted_are_unknown() -> None:
    history = History(10.0)
    for at_s in (0.0, 1.0):
        history.add(parse_metrics(metrics_text(gauges={"num_requests_running": 1}), read_at_s=at_s))
    window = Window.of(history)
    assert window is not None
    assert (window.ended_per_s, window.prompt_tokens_per_s, window.output_tokens_per_s) == (0.0, None, None)


def test_pages_by_state() -> None:
    gauges = {f'kv_pages{{state="{state}"}}': count for state, count in (("used", 3.0), ("cached", 4.0), ("free", 5.0))}
    told = parse_metrics(metrics_text(gauges={**gauges, "kv_pages_quarantined": 2.0}), read_at_s=0.0)
    pages = Pages.of(told)
    assert pages == Pages(used=3, cached=4, free=5, quarantined=2)
    assert pages.total == 12
    assert Pages.of(parse_metrics(metrics_text(gauges={"kv_cache_usage_perc": 0.5}), read_at_s=0.0)) is None


def test_prefills_are_in_the_state_whose_gauge_is_1() -> None:
    states = {"a:1": "ready", "b:2": "down"}
    gauges = {
        f'prefill_state{{prefill="{address}",state="{state}"}}': float(state == states[address])
        for address in ("b:2", "a:1")
        for state in ("connecting", "ready", "down")
    }
    told = parse_metrics(metrics_text(gauges={**gauges, 'prefill_queued_tokens{prefill="a:1"}': 70.0}), read_at_s=0.0)
    assert PrefillStatus.all_of(told) == [
        PrefillStatus(address="a:1", state="ready", queued_tokens=70),
        PrefillStatus(address="b:2", state="down", queued_tokens=None),
    ]
    assert PrefillStatus.all_of(parse_metrics("", read_at_s=0.0)) == []
