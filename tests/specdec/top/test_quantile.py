import math
import random
from bisect import bisect_left

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from specdec.top.quantile import bucket_quantile
from specdec.top.reading import parse_metrics


@pytest.mark.parametrize(
    ("count_by_bound", "share", "expected"),
    [
        ({1.0: 10, math.inf: 10}, 0.5, 0.5),  # the first bucket begins at 0
        ({1.0: 5, 2.0: 10, math.inf: 10}, 0.5, 1.0),  # exactly at a bound
        ({1.0: 5, 2.0: 10, math.inf: 10}, 0.9, 1.8),
        ({1.0: 5, 2.0: 5, 4.0: 15, math.inf: 15}, 0.5, 2.5),  # an empty bucket is passed over
        ({1.0: 0, 2.0: 0, 4.0: 1, math.inf: 1}, 0.01, 2.02),
        ({1.0: 1, math.inf: 10}, 0.5, 1.0),  # in the last bucket: the bound below it
        ({math.inf: 10}, 0.5, 0.0),
        ({4.0: 15, 1.0: 5, math.inf: 15, 2.0: 5}, 0.5, 2.5),  # in any order
        ({1.0: 0, math.inf: 0}, 0.5, None),
        ({}, 0.5, None),
        ({1.0: 3}, 0.5, None),  # without an infinite bound it is no histogram
        ({1.0: 9, math.inf: 10}, 1.0, 1.0),
    ],
)
def test_quantiles_by_hand(count_by_bound: dict[float, float], share: float, expected: float | None) -> None:
    assert bucket_quantile(count_by_bound, share) == (None if expected is None else pytest.approx(expected, rel=1e-12))


@pytest.mark.parametrize("seed", range(20))
def test_an_estimate_lies_in_the_bucket_of_the_observation_it_estimates(seed: int) -> None:
    draw = random.Random(seed)
    bounds = sorted(draw.sample(range(1, 1000), 12))
    registry = CollectorRegistry()
    histogram = Histogram("x:latency", "", registry=registry, buckets=[float(bound) for bound in bounds])
    observed = sorted(draw.uniform(0, bounds[-1]) for _ in range(draw.choice([1, 2, 99, 1000])))
    for value in observed:
        histogram.observe(value)
    counts = parse_metrics(generate_latest(registry).decode(), read_at_s=0.0).counts
    for share in (0.001, 0.5, 0.9, 0.99, 1.0):
        exact = observed[math.ceil(share * len(observed)) - 1]
        place = bisect_left(bounds, exact)
        lower, upper = ([0, *bounds][place], bounds[place])
        estimate = bucket_quantile(counts.count_by_bound("latency"), share)
        assert estimate is not None
        assert lower <= estimate <= upper
