"""A small sample of a large matrix of settings in which every pair of values still meets."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def all_rows(axes: Mapping[str, Sequence[Any]]) -> Iterator[Row]:
    """Every combination of one value per axis."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def pairwise_rows(axes: Mapping[str, Sequence[Any]], *, seed: int, num_candidates: int = 40) -> list[Row]:
    """Rows in which every two values of two axes stand together at least once.

    Each row is the best of some random completions of a pair that is still missing, so the rows depend on the seed
    only.
    """
    generator = np.random.default_rng(seed)
    names = list(axes)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }
    rows = []
    while missing:
        a, i, b, j = min(missing)
        candidates = np.stack(
            [generator.integers(0, len(axes[name]), size=num_candidates) for name in names], axis=1
        ).tolist()
        for candidate in candidates:
            candidate[a], candidate[b] = i, j
        best = max(candidates, key=lambda candidate: len(_pairs(candidate) & missing))
        missing -= _pairs(best)
        rows.append({name: axes[name][index] for name, index in zip(names, best, strict=True)})
    return rows


def _pairs(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}
