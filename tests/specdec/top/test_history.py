"""What is counted between readings, over restarts and gaps."""

import math
import random

import pytest

from specdec.top.history import History
from specdec.top.reading import Reading, parse_metrics
from tests.support.scripted_status import metrics_text

TOKENS = "generation_tokens_total"


def reading(at_s: float, tokens: float, *, started_at_s: float | None = None, **counters: float) -> Reading:
    return parse_metrics(metrics_text({TOKENS: tokens, **counters}, started_at_s=started_at_s), read_at_s=at_s)


def history(*readings: Reading, window_s: float = 100.0) -> History:
    history = History(window_s)
    for each in readings:
        history.add(each)
    return history


def test_one_reading_tells_nothing_about_a_window() -> None:
    alone = history(reading(1.0, 7))
    assert (alone.duration_s, alone.counts.total(TOKENS)) == (0.0, None)
    assert alone.newest is not None
    assert alone.newest.counts.total(TOKENS) == 7


def test_a_window_counts_what_grew() -> None:
    two = history(reading(1.0, 7), reading(3.5, 17))
    assert (two.duration_s, two.counts.total(TOKENS), two.num_restarts) == (2.5, 10, 0)


def test_a_window_moves_with_the_newest_reading() -> None:
    readings = [reading(float(second), second * second) for second in range(8)]
    moving = history(*readings, window_s=3.0)
    assert (moving.duration_s, moving.counts.total(TOKENS)) == (3.0, 49 - 16)


def test_a_window_keeps_a_step_that_reaches_into_it() -> None:
    moving = history(reading(0.0, 0), reading(50.0, 5), reading(52.0, 9), window_s=3.0)
    assert (moving.duration_s, moving.counts.total(TOKENS)) == (52.0, 9)
    moving.add(reading(53.5, 10))
    assert (moving.duration_s, moving.counts.total(TOKENS)) == (3.5, 5)


def test_counts_that_fall_are_those_of_a_new_process() -> None:
    restarted = history(reading(0.0, 10), reading(1.0, 15), reading(2.0, 3), reading(3.0, 8))
    assert (restarted.duration_s, restarted.counts.total(TOKENS), restarted.num_restarts) == (3.0, 5 + 3 + 5, 1)


def test_a_new_process_is_known_by_its_start_whatever_it_has_counted() -> None:
    restarted = history(reading(0.0, 10, started_at_s=100.0), reading(5.0, 25, started_at_s=200.0))
    assert (restarted.counts.total(TOKENS), restarted.num_restarts) == (25, 1)


def test_one_counter_that_falls_sets_back_all() -> None:
    first, second = reading(0.0, 10, prompt_tokens_total=50), reading(1.0, 12, prompt_tokens_total=4)
    restarted = history(first, second)
    assert (restarted.counts.total(TOKENS), restarted.counts.total("prompt_tokens_total")) == (12, 4)


def test_a_counter_that_is_gone_was_set_back() -> None:
    restarted = history(reading(0.0, 10, prompt_tokens_total=50), reading(1.0, 12))
    assert (restarted.counts.total(TOKENS), restarted.num_restarts) == (12, 1)


def test_a_counter_that_is_new_began_at_0() -> None:
    growing = history(reading(0.0, 10), reading(1.0, 12, prompt_tokens_total=4))
    assert (growing.counts.total("prompt_tokens_total"), growing.num_restarts) == (4, 0)


def test_buckets_are_counted_like_counters() -> None:
    texts = (
        metrics_text(buckets={"latency": {1.0: 5, 2.0: 6, math.inf: 6}}),
        metrics_text(buckets={"latency": {1.0: 5, 2.0: 9, math.inf: 10}}),
        metrics_text(buckets={"latency": {1.0: 1, 2.0: 1, math.inf: 1}}),
    )
    steps = [parse_metrics(text, read_at_s=float(second)) for second, text in enumerate(texts)]
    assert history(*steps[:2]).counts.count_by_bound("latency") == {1.0: 0, 2.0: 3, math.inf: 4}
    assert history(*steps).counts.count_by_bound("latency") == {1.0: 1, 2.0: 4, math.inf: 5}


@pytest.mark.parametrize("seed", range(10))
def test_any_run_of_growth_and_restarts_is_added_up(seed: int) -> None:
    """All that is lost is what a process counted behind the last reading of it."""
    draw = random.Random(seed)
    at_s, tokens, seen, started_at_s = 0.0, 5, 0, 1.0
    kept = History(1e9)
    kept.add(reading(at_s, tokens, started_at_s=started_at_s))
    num_restarts = 0
    for _ in range(30):
        at_s += draw.uniform(0.1, 5.0)
        if draw.random() < 0.2:
            num_restarts += 1
            started_at_s, tokens = started_at_s + 1, 0
        grown = draw.randrange(20)
        tokens += grown
        seen += grown
        kept.add(reading(at_s, tokens, started_at_s=started_at_s))
    assert (kept.counts.total(TOKENS), kept.num_restarts) == (seen, num_restarts)
    assert kept.duration_s == pytest.approx(at_s)


def test_engines_and_models_are_added() -> None:
    text = metrics_text({TOKENS: 3}, prefix="vllm:") + metrics_text({TOKENS: 4}, model_name="b", prefix="vllm:")
    both = parse_metrics(text.replace('"b"', '"b",engine="1"'), read_at_s=0.0)
    assert (both.counts.total(TOKENS), both.model_name) == (7, "tiny")


def test_labels_keep_series_apart() -> None:
    series = {'kept_total{position="0",kind="a"}': 1.0, 'kept_total{position="0",kind="b"}': 2.0}
    counts = parse_metrics(metrics_text({**series, 'kept_total{position="1",kind="a"}': 4.0}), read_at_s=0.0).counts
    assert counts.by_label("kept_total", "position") == {"0": 3.0, "1": 4.0}
    assert counts.by_label("kept_total", "kind") == {"a": 5.0, "b": 2.0}
    assert counts.by_label("kept_total", "rank") == {}
    assert counts.total("kept_total") == 7.0


def test_bounds_are_numbers_however_they_are_written() -> None:
    text = metrics_text(buckets={"h": {1.0: 2}}) + metrics_text(buckets={"h": {1.0: 3}}).replace('"1.0"', '"1"')
    assert parse_metrics(text, read_at_s=0.0).counts.count_by_bound("h") == {1.0: 5.0}


def test_a_value_that_is_no_number_is_left_out() -> None:
    told = parse_metrics(metrics_text(gauges={"a": math.nan, "b": 2.0}), read_at_s=0.0)
    assert (told.gauge("a"), told.gauge("b"), told.gauge("c")) == (None, 2.0, None)


@pytest.mark.parametrize(
    "text", ["<html>", "a{", "a b c d", "a 1e", "\x00", 'a{b="c} 1', "a 1 x", 'a{x="y",\t="z"} 1', 'a_bucket{le="b"} 1']
)
def test_what_is_in_no_such_format_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_metrics(text, read_at_s=0.0)
