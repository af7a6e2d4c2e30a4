"""Both acceptance rules against exact distributions, against plain decoding, and at the edges of the coin.

The model of these tests is a table: the logits of the next token depend on the last one alone.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from specdec.kernels.gumbel_noise import NoiseStream, gumbel_noise, position_keys, stream_key
from specdec.kernels.logits_transform import transform_logits
from specdec.sampling.accept import AcceptanceRule, VerifyResult, draw_drafts, verify_by_rejection, verify_sampled
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.sampling_rows import RequestSampling, SamplingBatch, SamplingRows
from tests.support.splitmix import stream_key_of_first_hash

VOCAB_SIZE = 8
NUM_DRAWS = 20_000
NUM_TOKENS = 4
CPU = torch.device("cpu")
SAMPLED, REJECTION = AcceptanceRule.SAMPLED, AcceptanceRule.REJECTION

Drafts = list[list[int]]
Propose = Callable[[SamplingBatch, list[list[int]], int], tuple[Drafts, torch.Tensor | None]]


def table(seed: int, *, spread: float = 1.5) -> torch.Tensor:
    return spread * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def requests_of(seeds: Sequence[int], **asked: Any) -> list[RequestSampling]:
    return [
        RequestSampling(
            SamplingParams(seed=seed, **asked), choice=0, prompt_ids=[0], stop_ids=[], vocab_size=VOCAB_SIZE
        )
        for seed in seeds
    ]


def lengths(token_ids: list[list[int]]) -> npt.NDArray[np.int64]:
    return np.array([len(ids) for ids in token_ids])


def verify(
    rule: AcceptanceRule, logits_TV: torch.Tensor, rows: SamplingRows, draft_probs_BKV: torch.Tensor | None = None
) -> VerifyResult:
    transformed_TV = transform_logits(logits_TV, rows.rules)
    if rule is SAMPLED:
        return verify_sampled(transformed_TV, rows)
    return verify_by_rejection(transformed_TV, rows, draft_probs_BKV)


def generate(
    target: torch.Tensor, requests: list[RequestSampling], rule: AcceptanceRule, propose: Propose, *, num_drafts: int
) -> tuple[npt.NDArray[np.int64], float]:
    """Decode `NUM_TOKENS` tokens after the prompt [0] in rounds; also gives the mean acceptance length."""
    token_ids = [[0] for _ in requests]
    emitted, rounds = 0, 0
    while True:
        running = [b for b, ids in enumerate(token_ids) if len(ids) <= NUM_TOKENS]
        if not running:
            return np.array([ids[1 : NUM_TOKENS + 1] for ids in token_ids]), emitted / rounds
        known = [token_ids[b] for b in running]
        batch = SamplingBatch([requests[b] for b in running], device=CPU)
        drafts, draft_probs_BKV = propose(batch, known, num_drafts)
        rows = batch.verify_rows(lengths(known), drafts)
        last_ids = [[ids[-1], *draft] for ids, draft in zip(known, drafts, strict=True)]
        result = verify(rule, target[[i for ids in last_ids for i in ids]], rows, draft_probs_BKV)
        assert result.drawable_B.all()
        new_ids = zip(running, result.token_ids_BK1.tolist(), (result.num_accepted_B + 1).tolist(), strict=True)
        for b, ids, count in new_ids:
            token_ids[b] += ids[:count]
            requests[b].observe(ids[:count])
            emitted, rounds = emitted + count, rounds + 1


def no_drafts(_batch: SamplingBatch, known: list[list[int]], _num_drafts: int) -> tuple[Drafts, None]:
    return [[] for _ in known], None


def drawn_from(draft_table: torch.Tensor, rule: AcceptanceRule) -> Propose:
    """Draft as a model does: draw each token from the table, one after another."""

    def propose(batch: SamplingBatch, known: list[list[int]], num_drafts: int) -> tuple[Drafts, torch.Tensor | None]:
        drafts: Drafts = [[] for _ in known]
        probs = []
        for _ in range(num_drafts):
            last = [(ids + draft)[-1] for ids, draft in zip(known, drafts, strict=True)]
            rows = batch.draft_rows(lengths(known), drafts)
            drawn = draw_drafts(transform_logits(draft_table[last], rows.rules), rows, rule)
            for draft, token_id in zip(drafts, drawn.token_id_B.tolist(), strict=True):
                draft.append(token_id)
            if drawn.draft_probs_BV is not None:
                probs.append(drawn.draft_probs_BV)
        return drafts, torch.stack(probs, dim=1) if probs else None

    return propose


def scripted(tokens: Sequence[int]) -> Propose:
    """Propose given tokens, whatever came before: right by chance, with certainty as their probability."""

    def propose(_batch: SamplingBatch, known: list[list[int]], num_drafts: int) -> tuple[Drafts, None]:
        return [list(tokens[:num_drafts]) for _ in known], None

    return propose


def exact_table(target: torch.Tensor, params: SamplingParams) -> npt.NDArray[np.float64]:
    """The distribution after each token, by the definition of the cuts."""
    rows = []
    for logits in (target / params.temperature).double().tolist():
        probs = np.exp(logits) / np.exp(logits).sum()
        probs[probs < params.min_p * probs.max()] = 0
        order = np.argsort(-probs, kind="stable")
        if params.top_k > 0:
            probs[order[params.top_k :]] = 0
            probs /= probs.sum()
        if params.top_p < 1:
            mass_before = np.cumsum(probs[order]) / probs.sum() - probs[order] / probs.sum()
            probs[order[mass_before >= params.top_p]] = 0
        rows.append(probs / probs.sum())
    return np.array(rows)


def assert_drawn_from(token_ids: npt.NDArray[np.int64], exact: npt.NDArray[np.float64]) -> None:
    """Each position within 0.02 of its exact distribution, pairs of neighbours by chi-square, nothing impossible."""
    position_probs = np.eye(VOCAB_SIZE)[0]
    previous = np.zeros(len(token_ids), dtype=np.int64)
    for position in range(NUM_TOKENS):
        pair_probs = (position_probs[:, None] * exact).ravel()
        pair_counts = np.bincount(previous * VOCAB_SIZE + token_ids[:, position], minlength=VOCAB_SIZE**2)
        assert pair_counts[pair_probs == 0].sum() == 0
        position_probs = pair_probs.reshape(VOCAB_SIZE, VOCAB_SIZE).sum(axis=0)
        counts = np.bincount(token_ids[:, position], minlength=VOCAB_SIZE)
        assert np.abs(counts / len(token_ids) - position_probs).sum() / 2 < 0.02
        # Cells expected fewer than 5 times make one cell together, as the chi-square statistic asks.
        expected = pair_probs * len(token_ids)
        large = expected >= 5
        observed_cells = np.append(pair_counts[large], pair_counts[~large].sum())
        expected_cells = np.append(expected[large], max(expected[~large].sum(), 1e-9))
        statistic = ((observed_cells - expected_cells) ** 2 / expected_cells).sum()
        # By chance above this once in about 30,000: mean + 4 standard deviations.
        assert statistic < len(expected_cells) + 4 * math.sqrt(2 * len(expected_cells))
        previous = token_ids[:, position]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0},
        pytest.param({"temperature": 0.7}, marks=pytest.mark.full),
        pytest.param({"top_p": 0.8}, marks=pytest.mark.full),
        pytest.param({"top_k": 3}, marks=pytest.mark.full),
        pytest.param({"min_p": 0.1}, marks=pytest.mark.full),
        {"temperature": 0.7, "top_p": 0.8, "top_k": 3, "min_p": 0.1},
    ],
)
@pytest.mark.parametrize("rule", [SAMPLED, REJECTION])
def test_drafts_of_another_model_leave_the_distribution_exact(rule: AcceptanceRule, asked: dict[str, Any]) -> None:
    target = table(0)
    requests = requests_of(range(NUM_DRAWS), **asked)
    token_ids, _ = generate(target, requests, rule, drawn_from(table(1), rule), num_drafts=3)
    assert_drawn_from(token_ids, exact_table(target, requests[0].params))


@pytest.mark.parametrize("rule", [SAMPLED, REJECTION])
@pytest.mark.parametrize(
    "draft",
    [
        pytest.param("target", id="the target itself", marks=pytest.mark.full),
        pytest.param("sharp", id="nearly certain of one token", marks=pytest.mark.full),
        pytest.param("scripted", id="the same tokens always"),
        pytest.param("none", id="nothing", marks=pytest.mark.full),
    ],
)
def test_good_and_bad_drafts_leave_the_distribution_exact(rule: AcceptanceRule, draft: str) -> None:
    target = table(0)
    propose = {
        "target": drawn_from(target, rule),
        "sharp": drawn_from(table(2, spread=15.0), rule),
        "scripted": scripted([3, 5, 5]),
        "none": no_drafts,
    }[draft]
    requests = requests_of(range(NUM_DRAWS))
    token_ids, acceptance_length = generate(target, requests, rule, propose, num_drafts=3)
    assert_drawn_from(token_ids, exact_table(target, requests[0].params))
    if draft == "target":
        assert acceptance_length == pytest.approx(4.0, abs=1e-3)


@pytest.mark.parametrize("seed_of_draft", [0, 1])
def test_rejection_accepts_as_often_as_the_distributions_overlap(seed_of_draft: int) -> None:
    target, draft = table(0), table(seed_of_draft)
    requests = requests_of(range(NUM_DRAWS))
    batch = SamplingBatch(requests, device=CPU)
    known = [[0] for _ in requests]
    drafts, probs = drawn_from(draft, REJECTION)(batch, known, 1)
    rows = batch.verify_rows(lengths(known), drafts)
    result = verify(REJECTION, target[[i for d in drafts for i in (0, d[0])]], rows, probs)
    overlap = torch.minimum(target[0].softmax(-1), draft[0].softmax(-1)).sum().item()
    assert result.num_accepted_B.double().mean().item() == pytest.approx(overlap, abs=4 * 0.5 / math.sqrt(NUM_DRAWS))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.4, "top_p": 0.9, "min_p": 0.05},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.8, "presence_penalty": 0.3},
        {"temperature": 0, "repetition_penalty": 1.7, "frequency_penalty": 0.8},
        {"logit_bias": {3: 2.0}, "banned_token_ids": [1, 2]},
    ],
)
def test_the_sampled_rule_gives_the_tokens_of_plain_decoding_whatever_is_drafted(asked: dict[str, Any]) -> None:
    target, num_requests = table(3), 60
    plain, _ = generate(target, requests_of(range(num_requests), **asked), SAMPLED, no_drafts, num_drafts=0)

    def right_but_for(wrong: int | None) -> Propose:
        def propose(batch: SamplingBatch, known: list[list[int]], num_drafts: int) -> tuple[Drafts, None]:
            drafts = []
            for ids in known:
                match = next(row for row in plain.tolist() if row[: len(ids) - 1] == ids[1:])
                draft = (match[len(ids) - 1 :] + [0] * num_drafts)[:num_drafts]
                drafts.append([(i + 1) % VOCAB_SIZE if j == wrong else i for j, i in enumerate(draft)])
            return drafts, None

        return propose

    for num_drafts in (1, 2, 3, 5):
        sources = [drawn_from(table(4), SAMPLED), drawn_from(target, SAMPLED), scripted([1] * num_drafts)]
        sources += [right_but_for(wrong) for wrong in (None, *range(num_drafts))]
        for propose in sources:
            requests = requests_of(range(num_requests), **asked)
            token_ids, _ = generate(target, requests, SAMPLED, propose, num_drafts=num_drafts)
            assert (token_ids == plain).all()


def test_without_drafts_both_rules_draw_the_same_tokens() -> None:
    target = table(5)
    by_rule = [
        generate(target, requests_of(range(300), temperature=0.8), rule, no_drafts, num_drafts=0)[0]
        for rule in (SAMPLED, REJECTION)
    ]
    assert (by_rule[0] == by_rule[1]).all()


@pytest.mark.parametrize("rule", [SAMPLED, REJECTION])
def test_temperature_zero_takes_the_argmax_under_both_rules(rule: AcceptanceRule) -> None:
    target = table(6)
    expected = [0]
    for _ in range(NUM_TOKENS):
        expected.append(int(target[expected[-1]].argmax()))
    for propose in (drawn_from(table(7), rule), scripted(expected[1:]), scripted([1, 1, 1]), no_drafts):
        token_ids, _ = generate(target, requests_of(range(5), temperature=0), rule, propose, num_drafts=3)
        assert (token_ids == expected[1:]).all()


def test_sharing_the_noise_keeps_more_drafts_than_drafting_the_argmax() -> None:
    target = table(8)
    draft = target + 0.5 * table(9)
    requests = requests_of(range(2000))
    _, shared = generate(target, requests, SAMPLED, drawn_from(draft, SAMPLED), num_drafts=3)
    greedy = drawn_from(1000 * draft, SAMPLED)  # the noise vanishes beside such logits
    _, argmax = generate(target, requests, SAMPLED, greedy, num_drafts=3)
    assert shared > argmax + 0.2


@pytest.mark.parametrize("rule", [SAMPLED, REJECTION])
def test_equal_logits_give_the_lowest_id_at_temperature_zero(rule: AcceptanceRule) -> None:
    batch = SamplingBatch(requests_of([0, 1], temperature=0), device=CPU)
    rows = batch.verify_rows(np.array([1, 1]), [[2, 2, 4], [4]])
    logits_V = torch.tensor([0.0, -1.0, 3.0, 1.0, 3.0, 3.0, 0.0, 0.0])
    result = verify(rule, logits_V.expand(6, VOCAB_SIZE), rows)
    assert result.token_ids_BK1.tolist() == [[2, 2, 2, -1], [2, -1, -1, -1]]
    assert result.num_accepted_B.tolist() == [2, 0]


@pytest.mark.parametrize(("rule", "stream"), [(SAMPLED, NoiseStream.TARGET), (REJECTION, NoiseStream.DRAFT)])
def test_drafts_share_the_noise_of_the_target_under_the_sampled_rule_alone(
    rule: AcceptanceRule, stream: NoiseStream
) -> None:
    """Rejection needs a draft that is independent of every number that judges or replaces it."""
    known = [[0] * (1 + b % 5) for b in range(200)]
    batch = SamplingBatch(requests_of(range(200)), device=CPU)
    logits_BV = table(3)[torch.arange(200) % VOCAB_SIZE]
    for drafts in ([[] for _ in known], [[b % VOCAB_SIZE] for b in range(200)]):
        drawn = draw_drafts(logits_BV, batch.draft_rows(lengths(known), drafts), rule)
        position_B = lengths(known) + lengths(drafts)
        key_B = [
            position_keys(
                np.array([stream_key(seed=b, choice=0, stream=stream)], dtype=np.uint64), position_B[b : b + 1]
            )
            for b in range(200)
        ]
        noise_BV = gumbel_noise(torch.from_numpy(np.concatenate(key_B)), VOCAB_SIZE)
        assert drawn.token_id_B.tolist() == (logits_BV.double() + noise_BV).argmax(dim=-1).tolist()


def coin_rows(drafts: Drafts, hashed: int, **asked: Any) -> SamplingRows:
    """Rows whose every coin has the given hash."""
    rows = SamplingBatch(requests_of([0] * len(drafts), **asked), device=CPU).verify_rows(
        np.ones(len(drafts), dtype=np.int64), drafts
    )
    keys = rows.stream_key_TS.copy()
    keys[:, NoiseStream.COIN] = [stream_key_of_first_hash(hashed, position=p) for p in rows.position_T.tolist()]
    return dataclasses.replace(rows, stream_key_TS=keys)


@pytest.mark.parametrize("hashed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("draft_prob", [0.0, 1e-38, 1e-9, 0.5, 1.0])
def test_a_draft_of_target_probability_zero_is_refused_by_every_coin(hashed: int, draft_prob: float) -> None:
    rows = coin_rows([[5], [5]], hashed, banned_token_ids=[5])
    probs_BKV = torch.full((2, 1, VOCAB_SIZE), (1 - draft_prob) / (VOCAB_SIZE - 1))
    probs_BKV[..., 5] = draft_prob
    for given in (probs_BKV, None):
        result = verify(REJECTION, torch.zeros(4, VOCAB_SIZE), rows, given)
        assert result.num_accepted_B.tolist() == [0, 0]
        assert 5 not in result.token_ids_BK1[:, 0].tolist()


@pytest.mark.parametrize("hashed", [0, 2**64 - 1])
def test_a_draft_as_likely_for_both_is_kept_by_every_coin(hashed: int) -> None:
    rows = coin_rows([[5, 2]], hashed)
    logits_TV = torch.randn(3, VOCAB_SIZE)
    result = verify(REJECTION, logits_TV, rows, logits_TV[None, :2].softmax(dim=-1))
    assert result.num_accepted_B.tolist() == [2]


@pytest.mark.parametrize("rule", [SAMPLED, REJECTION])
def test_the_first_forbidden_draft_ends_the_run(rule: AcceptanceRule) -> None:
    requests = requests_of(range(500), banned_token_ids=[6, 7], top_k=4)
    batch = SamplingBatch(requests, device=CPU)
    rows = batch.verify_rows(np.ones(500, dtype=np.int64), [[1, 6, 1]] * 500)
    result = verify(rule, torch.zeros(2000, VOCAB_SIZE), rows)
    assert result.num_accepted_B.max() == 1
    assert set(result.token_ids_BK1.flatten().tolist()) <= {-1, 0, 1, 2, 3}


@pytest.mark.parametrize("rule", [SAMPLED, REJECTION])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_tokens_ends_the_run_in_front_of_it(rule: AcceptanceRule, temperature: float) -> None:
    batch = SamplingBatch(requests_of([0, 1, 2, 3], temperature=temperature), device=CPU)
    rows = batch.verify_rows(np.ones(4, dtype=np.int64), [[3, 3], [3, 3], [], [3]])
    certain_V = torch.full((VOCAB_SIZE,), -torch.inf)
    certain_V[3] = 0.0
    other_V = certain_V.roll(1)
    broken_V, empty_V = torch.full((VOCAB_SIZE,), torch.nan), torch.full((VOCAB_SIZE,), -torch.inf)
    logits_TV = torch.stack([other_V, broken_V, empty_V, certain_V, empty_V, certain_V, broken_V, certain_V, other_V])
    result = verify(rule, logits_TV, rows)
    # The first request refuses its first draft and never looks at the broken rows behind it. The second one's draft is
    # right, and the last token before a row that has none.
    assert result.drawable_B.tolist() == [True, True, False, True]
    assert result.token_ids_BK1[0].tolist() == [4, -1, -1]
    assert result.token_ids_BK1[1].tolist() == [3, -1, -1]
    assert result.token_ids_BK1[3].tolist() == [3, 4, -1]
    assert result.num_accepted_B.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("rule", [SAMPLED, REJECTION])
def test_a_draft_before_a_row_without_tokens_leaves_the_distribution(rule: AcceptanceRule) -> None:
    num_requests = 4000
    batch = SamplingBatch(requests_of(range(num_requests)), device=CPU)
    known = np.ones(num_requests, dtype=np.int64)
    drawn = draw_drafts(
        torch.randn(VOCAB_SIZE).repeat(num_requests, 1), batch.draft_rows(known, [[]] * num_requests), rule
    )
    rows = batch.verify_rows(known, [[token_id] for token_id in drawn.token_id_B.tolist()])
    logits_TV = torch.full((2 * num_requests, VOCAB_SIZE), torch.nan)
    target_V = torch.randn(VOCAB_SIZE)
    logits_TV[::2] = target_V
    draft_probs_BKV = None if drawn.draft_probs_BV is None else drawn.draft_probs_BV[:, None]
    result = verify(rule, logits_TV, rows, draft_probs_BKV)
    assert result.drawable_B.all()
    assert not result.num_accepted_B.any()
    counts_V = torch.bincount(result.token_ids_BK1[:, 0], minlength=VOCAB_SIZE)
    assert (result.token_ids_BK1[:, 0] == drawn.token_id_B).any()
    assert (counts_V / num_requests - target_V.softmax(dim=0)).abs().max() < 0.04


def test_draft_probs_beyond_the_drafts_of_a_request_are_not_read() -> None:
    requests = requests_of(range(200))
    drafts = [[1, 2, 3][: b % 4] for b in range(200)]
    batch = SamplingBatch(requests, device=CPU)
    rows = batch.verify_rows(np.ones(200, dtype=np.int64), drafts)
    logits_TV = torch.randn(len(rows.position_T), VOCAB_SIZE)
    probs_BKV = torch.randn(200, 3, VOCAB_SIZE).softmax(dim=-1)
    expected = verify(REJECTION, logits_TV, rows, probs_BKV)
    unused_BK = torch.arange(3) >= rows.num_drafts_B[:, None]
    result = verify(REJECTION, logits_TV, rows, probs_BKV.masked_fill(unused_BK[..., None], torch.nan))
    assert torch.equal(result.token_ids_BK1, expected.token_ids_BK1)
    assert torch.equal(result.num_accepted_B, expected.num_accepted_B)


def test_a_draft_drawn_where_every_token_was_banned_is_replaced_from_the_target() -> None:
    batch = SamplingBatch(requests_of(range(50)), device=CPU)
    known = np.ones(50, dtype=np.int64)
    rows = batch.draft_rows(known, [[] for _ in range(50)])
    drawn = draw_drafts(torch.full((50, VOCAB_SIZE), -torch.inf), rows, REJECTION)
    assert drawn.draft_probs_BV is not None
    verify_rows = batch.verify_rows(known, [[token_id] for token_id in drawn.token_id_B.tolist()])
    logits_TV = torch.zeros(100, VOCAB_SIZE)
    logits_TV[:, 4:] = -torch.inf
    result = verify(REJECTION, logits_TV, verify_rows, drawn.draft_probs_BV[:, None])
    assert result.num_accepted_B.tolist() == [0] * 50
    assert result.drawable_B.all()
    assert set(result.token_ids_BK1[:, 0].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", [SAMPLED, REJECTION])
def test_the_order_of_requests_in_the_batch_changes_nothing(rule: AcceptanceRule) -> None:
    asked: list[dict[str, Any]] = [{}, {"temperature": 0}, {"temperature": 0.3}, {"top_k": 2}, {"min_p": 0.3}]
    drafts = [[1, 2], [], [4], [0, 7, 7], [5]]
    logits = [torch.randn(len(draft) + 1, VOCAB_SIZE) for draft in drafts]
    probs_BKV = torch.randn(5, 3, VOCAB_SIZE).softmax(dim=-1)

    def run(order: list[int]) -> dict[int, list[int]]:
        requests = [requests_of([b], **asked[b])[0] for b in order]
        rows = SamplingBatch(requests, device=CPU).verify_rows(
            np.array([5 + b for b in order]), [drafts[b] for b in order]
        )
        num_drafts = rows.draft_ids_BK.shape[1]
        result = verify(rule, torch.cat([logits[b] for b in order]), rows, probs_BKV[order, :num_drafts])
        emitted = zip(result.token_ids_BK1.tolist(), (result.num_accepted_B + 1).tolist(), strict=True)
        return dict(zip(order, (ids[:count] for ids, count in emitted), strict=True))

    together = run([0, 1, 2, 3, 4])
    assert run([3, 1, 4, 0, 2]) == together
    for b in range(5):
        assert run([b]) == {b: together[b]}
