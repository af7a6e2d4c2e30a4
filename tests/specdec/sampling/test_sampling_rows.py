"""The rules of a batch's rows against what each request asks, row by row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels.gumbel_noise import NoiseStream, position_keys, stream_key
from specdec.kernels.logits_transform import transform_logits
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.sampling_rows import RequestSampling, SamplingBatch, SamplingRows

VOCAB_SIZE = 9
CPU = torch.device("cpu")


def sampling(
    prompt: Sequence[int] = (1, 2), *, choice: int = 0, stop_ids: Sequence[int] = (), **asked: Any
) -> RequestSampling:
    asked.setdefault("seed", 0)
    return RequestSampling(
        SamplingParams(**asked), choice=choice, prompt_ids=prompt, stop_ids=stop_ids, vocab_size=VOCAB_SIZE
    )


def verify_rows(
    requests: Sequence[RequestSampling], drafts: Sequence[Sequence[int]], *, num_known: Sequence[int] | None = None
) -> SamplingRows:
    known = [2] * len(requests) if num_known is None else num_known
    return SamplingBatch(requests, device=CPU).verify_rows(np.array(known), drafts)


def transformed(rows: SamplingRows, seed: int = 0) -> torch.Tensor:
    logits_TV = torch.randn(len(rows.position_T), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    return transform_logits(logits_TV, rows.rules)


def banned_ids(logits_V: torch.Tensor) -> set[int]:
    return set((logits_V == -torch.inf).nonzero().flatten().tolist())


def test_each_request_has_one_row_per_draft_and_one_more() -> None:
    rows = verify_rows([sampling()] * 4, [[5, 6], [], [7], [1, 2, 3]], num_known=[10, 20, 30, 40])
    assert rows.draft_ids_BK.tolist() == [[5, 6, -1], [-1, -1, -1], [7, -1, -1], [1, 2, 3]]
    assert rows.num_drafts_B.tolist() == [2, 0, 1, 3]
    assert rows.row_BK1.tolist() == [[0, 1, 2, 2], [3, 3, 3, 3], [4, 5, 5, 5], [6, 7, 8, 9]]
    assert rows.position_T.tolist() == [10, 11, 12, 20, 30, 31, 40, 41, 42, 43]


def test_a_batch_without_drafts_has_one_row_per_request() -> None:
    rows = verify_rows([sampling()] * 3, [[], [], []], num_known=[4, 5, 6])
    assert rows.draft_ids_BK.shape == (3, 0)
    assert rows.row_BK1.tolist() == [[0], [1], [2]]


def test_the_keys_of_a_row_are_those_of_its_seed_choice_and_position() -> None:
    rows = verify_rows([sampling(seed=-5, choice=2), sampling(seed=7)], [[3], []], num_known=[100, 8])
    for stream in NoiseStream:
        expected = [
            position_keys(
                np.array([stream_key(seed=seed, choice=choice, stream=stream)], dtype=np.uint64), np.array([position])
            ).item()
            for seed, choice, position in ((-5, 2, 100), (-5, 2, 101), (7, 0, 8))
        ]
        assert rows.keys(stream).tolist() == expected


def test_a_sampling_request_needs_a_seed_and_a_greedy_one_does_not() -> None:
    with pytest.raises(ValueError, match="with_fresh_seed"):
        sampling(seed=None)
    sampling(seed=None, temperature=0)


def test_requests_without_rules_leave_the_logits_as_they_are() -> None:
    rows = verify_rows([sampling(), sampling(temperature=0, top_k=3, top_p=0.5, min_p=0.5)], [[1], [2]])
    logits_TV = torch.randn(4, VOCAB_SIZE)
    assert transform_logits(logits_TV, rows.rules) is logits_TV


def test_greedy_rows_are_marked_only_beside_others() -> None:
    greedy, drawn = sampling(temperature=0), sampling()
    assert verify_rows([greedy, greedy], [[1], []]).all_greedy
    mixed = verify_rows([drawn, greedy], [[1], [2, 3]])
    assert not mixed.all_greedy
    assert mixed.greedy_T is not None
    assert mixed.greedy_T.tolist() == [False, False, True, True, True]
    assert verify_rows([drawn], [[1]]).greedy_T is None


def test_penalties_of_a_row_count_the_drafts_before_it() -> None:
    request = sampling(prompt=[1, 2], repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    request.observe([2, 3])
    rows = verify_rows([sampling(), request], [[4], [5, 2]], num_known=[2, 4])
    logits_TV = torch.ones(5, VOCAB_SIZE)
    halved = 0.5  # the logit 1 of a seen token, divided by the repetition penalty

    def after(counts: dict[int, int]) -> list[float]:
        row = [1.0] * VOCAB_SIZE
        for token_id, count in counts.items():
            row[token_id] = halved - 0.5 * count - 0.25 * (count > 0)
        return row

    plain = [1.0] * VOCAB_SIZE
    expected = [
        plain,
        plain,
        after({1: 0, 2: 1, 3: 1}),
        after({1: 0, 2: 1, 3: 1, 5: 1}),
        after({1: 0, 2: 2, 3: 1, 5: 1}),
    ]
    assert transform_logits(logits_TV, rows.rules).tolist() == expected


def test_presence_and_frequency_do_not_look_at_the_prompt() -> None:
    request = sampling(prompt=[1, 2, 2], presence_penalty=1.0, frequency_penalty=1.0)
    rows = verify_rows([request], [[2]])
    result_TV = transform_logits(torch.zeros(2, VOCAB_SIZE), rows.rules)
    assert result_TV.tolist() == [[0.0] * VOCAB_SIZE, [0.0, 0.0, -2.0] + [0.0] * 6]


def test_stop_ids_are_banned_exactly_in_the_rows_of_the_first_tokens() -> None:
    early = sampling(prompt=[1, 2, 3], stop_ids=[4, 0], min_tokens=3, banned_token_ids=[7])
    rows = verify_rows([early, sampling(stop_ids=[5])], [[6, 6, 6], []], num_known=[4, 9])
    result_TV = transformed(rows)
    # One token is there: rows 0 and 1 draw the second and the third, row 2 the fourth, which may stop.
    assert [banned_ids(row) for row in result_TV] == [{0, 4, 7}, {0, 4, 7}, {7}, {7}, set()]


def test_allowed_ids_and_bias_reach_all_rows_of_their_request_alone() -> None:
    requests = [sampling(logit_bias={3: 50.0, 4: -50.0}), sampling(allowed_token_ids=[2, 5]), sampling()]
    rows = verify_rows(requests, [[1], [1], []])
    logits_TV = torch.zeros(5, VOCAB_SIZE)
    result_TV = transform_logits(logits_TV, rows.rules)
    assert [row.argmax().item() for row in result_TV[:2]] == [3, 3]
    assert [row.argmin().item() for row in result_TV[:2]] == [4, 4]
    assert [banned_ids(row) for row in result_TV[2:4]] == [set(range(VOCAB_SIZE)) - {2, 5}] * 2
    assert result_TV[4].tolist() == [0.0] * VOCAB_SIZE


any_request = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 1, 3, 100]),
        "top_p": st.sampled_from([0.0, 0.6, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "logit_bias": st.just({3: 2.0, 8: -100.0}),
        "banned_token_ids": st.just([6]),
        "allowed_token_ids": st.just([0, 1, 2, 3, 4, 6]),
        "min_tokens": st.sampled_from([0, 1, 3]),
    },
)
draft_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4)


@settings(max_examples=150)
@given(cases=st.lists(st.tuples(any_request, draft_lists, draft_lists), min_size=1, max_size=5))
def test_rows_have_the_same_bits_beside_any_other_requests(
    cases: list[tuple[dict[str, Any], list[int], list[int]]],
) -> None:
    requests, num_known = [], []
    for asked, output, _ in cases:
        request = sampling(stop_ids=[0, 1], **asked)
        request.observe(output)
        requests.append(request)
        num_known.append(2 + len(output))
    drafts = [case[2] for case in cases]
    together = verify_rows(requests, drafts, num_known=num_known)
    together_TV = transformed(together)
    logits_TV = torch.randn(len(together_TV), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    for b, request in enumerate(requests):
        alone = verify_rows([request], [drafts[b]], num_known=[num_known[b]])
        row_R = together.row_BK1[b, : len(drafts[b]) + 1]
        assert torch.equal(transform_logits(logits_TV[row_R], alone.rules), together_TV[row_R])


@settings(max_examples=50)
@given(cases=st.lists(st.tuples(any_request, draft_lists), min_size=1, max_size=4))
def test_the_row_of_the_next_draft_is_the_last_row_of_verifying_the_drafts_so_far(
    cases: list[tuple[dict[str, Any], list[int]]],
) -> None:
    requests = [sampling(stop_ids=[0, 1], **asked) for asked, _ in cases]
    drafts = [case[1] for case in cases]
    num_known = np.full(len(cases), 2)
    batch = SamplingBatch(requests, device=CPU)
    verify, draft = batch.verify_rows(num_known, drafts), batch.draft_rows(num_known, drafts)
    last_B = verify.row_BK1[torch.arange(len(cases)), verify.num_drafts_B]
    logits_TV = torch.randn(len(verify.position_T), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    expected_BV = transform_logits(logits_TV, verify.rules)[last_B]
    assert torch.equal(transform_logits(logits_TV[last_B], draft.rules), expected_BV)
    assert torch.equal(draft.keys(NoiseStream.TARGET), verify.keys(NoiseStream.TARGET)[last_B])
    assert draft.row_BK1.tolist() == [[b] for b in range(len(cases))]
