"""Log-probabilities of tokens against a sort of the log-softmax."""

import math

import pytest
import torch

from specdec.sampling.token_logprobs import token_logprobs


def top_by_sorting(logits: list[float], num_top: int) -> list[tuple[int, float]]:
    total = math.log(sum(math.exp(value) for value in logits))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:num_top]
    return [(i, logits[i] - total) for i in order if logits[i] > -math.inf]


@pytest.mark.parametrize("num_top", [0, 1, 3, 7])
def test_every_token_has_its_own_logprob_and_the_likeliest_in_order(num_top: int) -> None:
    raw_RV = torch.tensor([[1.0, 2.0, 2.0, 0.5, 2.0, -1.0, 0.0], [0.0] * 7, [5.0, -3.0, 1.0, 1.0, 0.0, 1.0, 1.0]])
    transformed_RV = (raw_RV / 0.7).index_fill(1, torch.tensor([1]), -math.inf)
    token_ids = [4, 6, 0]
    reports = token_logprobs(raw_RV, transformed_RV, token_ids, num_top=num_top)
    for r, report in enumerate(reports):
        raw, transformed = raw_RV[r].tolist(), transformed_RV[r].tolist()
        assert report.token_id == token_ids[r]
        assert report.raw_logprob == pytest.approx(dict(top_by_sorting(raw, 7))[token_ids[r]], abs=1e-6)
        assert report.logprob == pytest.approx(dict(top_by_sorting(transformed, 7))[token_ids[r]], abs=1e-6)
        for top, logits in ((report.raw_top, raw), (report.top, transformed)):
            expected = top_by_sorting(logits, num_top)
            assert [i for i, _ in top] == [i for i, _ in expected]
            assert [value for _, value in top] == pytest.approx([value for _, value in expected], abs=1e-6)


def test_excluded_tokens_are_no_alternatives() -> None:
    raw_RV = torch.zeros(1, 5)
    transformed_RV = torch.tensor([[0.0, -math.inf, 0.0, -math.inf, -math.inf]])
    (report,) = token_logprobs(raw_RV, transformed_RV, [1], num_top=4)
    assert [i for i, _ in report.top] == [0, 2]
    assert report.logprob == -math.inf
    assert [i for i, _ in report.raw_top] == [0, 1, 2, 3]


def test_a_prompt_is_reported_from_one_distribution() -> None:
    logits_RV = torch.randn(4, 9)
    for report in token_logprobs(logits_RV, logits_RV, [0, 3, 8, 3], num_top=2):
        assert (report.logprob, report.top) == (report.raw_logprob, report.raw_top)


def test_no_rows_give_no_reports() -> None:
    assert token_logprobs(torch.empty(0, 9), torch.empty(0, 9), [], num_top=2) == []
