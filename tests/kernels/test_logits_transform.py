"""The transform of rows of logits against the same steps on one Python list."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels.logits_transform import (
    AllowedBits,
    AllowedTokens,
    HistoryPenalties,
    LogitsRules,
    MinP,
    Nucleus,
    TokenBans,
    TokenBias,
    transform_logits,
)

INF = math.inf
NUM_IDS = 11


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one row asks."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = NUM_IDS
    top_p: float = 1.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    counts: dict[int, int] = field(default_factory=dict)
    bias: dict[int, float] = field(default_factory=dict)
    banned: frozenset[int] = frozenset()
    allowed: frozenset[int] | None = None
    grammar: frozenset[int] | None = None


def rules_of(rows: list[Row]) -> LogitsRules:
    def pairs(entries: list[tuple[int, int, float]]) -> dict[str, torch.Tensor]:
        row_ids = [torch.tensor([entry[part] for entry in entries], dtype=torch.int64) for part in (0, 1)]
        return {"row_N": row_ids[0], "token_id_N": row_ids[1]}

    history = [(r, i, float(c)) for r, row in enumerate(rows) for i, c in row.counts.items()]
    bias = [(r, i, b) for r, row in enumerate(rows) for i, b in row.bias.items()]
    banned = [(r, i, 0.0) for r, row in enumerate(rows) for i in row.banned]
    allowed = {r: row.allowed for r, row in enumerate(rows) if row.allowed is not None}
    grammar = {r: row.grammar for r, row in enumerate(rows) if row.grammar is not None}
    min_p = {r: row.min_p for r, row in enumerate(rows) if row.min_p}
    cut = [r for r, row in enumerate(rows) if row.top_k < NUM_IDS or row.top_p < 1]
    temperatures = [row.temperature for row in rows]
    return LogitsRules(
        history=HistoryPenalties(
            **pairs(history),
            output_count_N=torch.tensor([entry[2] for entry in history]),
            repetition_N=torch.tensor([rows[entry[0]].repetition for entry in history]),
            frequency_N=torch.tensor([rows[entry[0]].frequency for entry in history]),
            presence_N=torch.tensor([rows[entry[0]].presence for entry in history]),
        )
        if history
        else None,
        bias=TokenBias(**pairs(bias), bias_N=torch.tensor([entry[2] for entry in bias])) if bias else None,
        bans=TokenBans(**pairs(banned)) if banned else None,
        allowed=AllowedTokens(
            row_R=torch.tensor(list(allowed)),
            allowed_RV=torch.tensor([[i in ids for i in range(NUM_IDS)] for ids in allowed.values()]),
        )
        if allowed
        else None,
        grammar=AllowedBits(
            row_R=torch.tensor(list(grammar)), bits_RX=torch.stack([bits_of(ids) for ids in grammar.values()])
        )
        if grammar
        else None,
        temperature_T=torch.tensor(temperatures) if set(temperatures) != {1.0} else None,
        min_p=MinP(
            row_R=None if len(min_p) == len(rows) else torch.tensor(list(min_p)),
            min_p_R=torch.tensor(list(min_p.values()), dtype=torch.float64),
        )
        if min_p
        else None,
        nucleus=Nucleus(
            row_R=None if len(cut) == len(rows) else torch.tensor(cut),
            top_k_R=torch.tensor([rows[r].top_k for r in cut]),
            top_p_R=torch.tensor([rows[r].top_p for r in cut], dtype=torch.float64),
        )
        if cut
        else None,
    )


def bits_of(ids: frozenset[int]) -> torch.Tensor:
    """Bits of ids, with bits set behind the last id, which mean nothing: u8 [3]."""
    number = sum(1 << i for i in ids) | ((1 << 24) - 1) >> NUM_IDS << NUM_IDS
    return torch.tensor(list(number.to_bytes(3, "little")), dtype=torch.uint8)


def transformed_by_hand(logits: list[float], row: Row) -> list[float]:
    result = list(logits)
    for i, count in row.counts.items():
        value = result[i] / row.repetition if result[i] > 0 else result[i] * row.repetition
        result[i] = value - row.frequency * count - (row.presence if count else 0.0)
    for i, bias in row.bias.items():
        result[i] += bias
    for i in range(NUM_IDS):
        if i in row.banned or any(ids is not None and i not in ids for ids in (row.allowed, row.grammar)):
            result[i] = -INF
    result = [value / row.temperature for value in result]
    best = max(result)
    if best == -INF:
        return result
    if row.min_p:
        result = [value if value - best >= math.log(row.min_p) - 1e-9 else -INF for value in result]
    order = sorted(range(NUM_IDS), key=lambda i: (-result[i], i))[: row.top_k]
    total = sum(math.exp(result[i] - best) for i in order)
    kept: list[int] = []
    mass = 0.0
    for i in order:
        if kept and row.top_p < 1 and mass >= row.top_p:
            break
        kept.append(i)
        mass += math.exp(result[i] - best) / total
    return [result[i] if i in kept else -INF for i in range(NUM_IDS)]


# Shares that no sum of the masses below can meet by chance, and logits that no two ways lead to: rounding decides
# nothing.
ids = st.integers(0, NUM_IDS - 1)
rows_of_logits = st.lists(
    st.sampled_from([-3.01, -1.07, -0.53, 0.02, 0.59, 1.13, 2.57]), min_size=NUM_IDS, max_size=NUM_IDS
)
any_row = st.builds(
    Row,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    min_p=st.sampled_from([0.0, 0.0137, 0.3137, 1.0]),
    top_k=st.sampled_from([1, 2, 5, NUM_IDS, 10**9]),
    top_p=st.sampled_from([0.0, 0.3137, 0.5501, 0.9013, 1.0]),
    repetition=st.sampled_from([0.7, 1.0, 1.3]),
    frequency=st.sampled_from([-0.5, 0.0, 0.25]),
    presence=st.sampled_from([0.0, 0.7]),
    counts=st.dictionaries(ids, st.integers(0, 3), max_size=5),
    bias=st.dictionaries(ids, st.sampled_from([-100.0, 0.81, 100.0]), max_size=3),
    banned=st.frozensets(ids, max_size=4),
    allowed=st.none() | st.frozensets(ids, min_size=1, max_size=6),
    grammar=st.none() | st.frozensets(ids, max_size=9),
)


@settings(max_examples=150)
@given(cases=st.lists(st.tuples(rows_of_logits, any_row), min_size=1, max_size=5))
def test_every_row_is_what_its_steps_give_one_after_another(cases: list[tuple[list[float], Row]]) -> None:
    logits_TV = torch.tensor([logits for logits, _ in cases])
    result_TV = transform_logits(logits_TV, rules_of([row for _, row in cases]))
    for result, (logits, row) in zip(result_TV.tolist(), cases, strict=True):
        assert result == pytest.approx(transformed_by_hand(logits, row), rel=1e-5, abs=1e-5)


@settings(max_examples=100)
@given(rows=st.lists(any_row, min_size=2, max_size=6), seed=st.integers(0, 100))
def test_a_row_has_the_same_bits_whatever_stands_beside_it(rows: list[Row], seed: int) -> None:
    logits_TV = torch.randn(len(rows), NUM_IDS, generator=torch.Generator().manual_seed(seed))
    together_TV = transform_logits(logits_TV, rules_of(rows))
    for r, row in enumerate(rows):
        assert torch.equal(together_TV[r : r + 1], transform_logits(logits_TV[r : r + 1], rules_of([row])))


def test_a_row_of_a_large_vocabulary_has_the_same_bits_alone() -> None:
    logits_TV = torch.randn(8, 40_003, generator=torch.Generator().manual_seed(0))

    def nucleus(num_rows: int) -> LogitsRules:
        top_p_R = torch.full((num_rows,), 0.95, dtype=torch.float64)
        return LogitsRules(nucleus=Nucleus(row_R=None, top_k_R=torch.full((num_rows,), 10**6), top_p_R=top_p_R))

    together_TV = transform_logits(logits_TV, nucleus(8))
    for r in range(8):
        assert torch.equal(together_TV[r : r + 1], transform_logits(logits_TV[r : r + 1], nucleus(1)))


def test_rows_without_rules_are_returned_as_they_are() -> None:
    logits_TV = torch.randn(3, 5)
    assert transform_logits(logits_TV, LogitsRules()) is logits_TV


def test_the_given_logits_are_never_written() -> None:
    logits_TV = torch.randn(2, NUM_IDS)
    before_TV = logits_TV.clone()
    everything = Row(temperature=0.5, min_p=0.1, top_k=3, top_p=0.9, repetition=1.2, counts={1: 2}, bias={2: 1.0})
    transform_logits(logits_TV, rules_of([everything, Row()]))
    assert torch.equal(logits_TV, before_TV)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_equal_logits_are_cut_in_the_order_of_their_ids(top_k: int) -> None:
    logits_TV = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0] + [-5.0] * 6])
    kept = transform_logits(logits_TV, rules_of([Row(top_k=top_k)]))[0] > -INF
    assert kept.nonzero().flatten().tolist() == sorted([1, 2, 4, 0][:top_k])


def test_top_p_zero_and_min_p_one_leave_only_the_most_likely() -> None:
    logits_TV = torch.randn(1, NUM_IDS)
    for row in (Row(top_p=0.0), Row(min_p=1.0), Row(top_k=1)):
        kept = transform_logits(logits_TV, rules_of([row]))[0] > -INF
        assert kept.nonzero().flatten().tolist() == [logits_TV[0].argmax().item()]


def test_top_p_one_keeps_tokens_of_no_measurable_mass() -> None:
    logits_TV = torch.tensor([[0.0] + [-200.0] * (NUM_IDS - 1)])
    row = Row(top_p=1.0, top_k=NUM_IDS - 1)
    assert (transform_logits(logits_TV, rules_of([row])) > -INF).sum() == NUM_IDS - 1


def test_a_row_whose_bans_leave_nothing_is_excluded_throughout() -> None:
    row = Row(allowed=frozenset({1, 2}), banned=frozenset({1, 2}), min_p=0.5, top_k=3, top_p=0.5, temperature=0.5)
    result_TV = transform_logits(torch.randn(2, NUM_IDS), rules_of([row, Row()]))
    assert (result_TV[0] == -INF).all()
    assert result_TV[1].isfinite().all()


def test_a_nan_is_not_cut_away() -> None:
    logits_TV = torch.zeros(1, NUM_IDS)
    logits_TV[0, 4] = math.nan
    for row in (Row(top_k=2), Row(top_p=0.5), Row(min_p=0.5), Row(temperature=0.5)):
        assert transform_logits(logits_TV, rules_of([row]))[0, 4].isnan()
