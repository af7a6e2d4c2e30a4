"""Quantiles of observations of which only buckets are known."""

import math
from collections.abc import Mapping


def bucket_quantile(count_by_bound: Mapping[float, float], share: float) -> float | None:
    """Estimate a quantile as `histogram_quantile` of Prometheus does: observations lie evenly in their bucket.

    Args:
        count_by_bound: Observations up to each upper bound; the last bound is infinite.
        share: Above 0, at most 1.

    Returns:
        The estimate; of a quantile in the last bucket the bound below it, and None without observations.
    """
    rank = share * count_by_bound.get(math.inf, 0.0)
    if rank <= 0:
        return None
    lower, num_below = 0.0, 0.0
    for bound, count in sorted(count_by_bound.items()):
        if count >= rank:
            return lower if bound == math.inf else lower + (bound - lower) * (rank - num_below) / (count - num_below)
        lower, num_below = bound, count
    return None  # counts that do not grow with their bound are no histogram
