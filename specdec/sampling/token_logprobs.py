"""Log-probabilities of tokens, beside those of the likeliest alternatives.

R = rows, V = token ids, N = alternatives.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# (id, natural log of its probability), the likeliest first and the lower id first among equals.
TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """One token under the distribution it was drawn from, and under the model's own.

    Attributes:
        token_id: The token.
        logprob: Its log-probability after penalties, bans, temperature and cuts. A greedy token, for which the
            temperature is not applied, is reported as at temperature 1. -inf for a token that was excluded.
        top: The likeliest tokens of the same distribution; fewer than asked for where fewer were possible.
        raw_logprob: Its log-probability under the model's logits as they are.
        raw_top: The likeliest tokens under those.
    """

    token_id: int
    logprob: float
    top: TopLogprobs
    raw_logprob: float
    raw_top: TopLogprobs


def token_logprobs(
    raw_RV: torch.Tensor, transformed_RV: torch.Tensor, token_ids: Sequence[int], *, num_top: int
) -> list[TokenLogprobs]:
    """Report one token for each row of logits. Waits for the device.

    Args:
        raw_RV: The model's logits, f32 [R, V].
        transformed_RV: The same after `transform_logits`; the same tensor where nothing was drawn, as for a prompt.
        token_ids: The token that stands after each row, R of them.
        num_top: Alternatives to report, 0..V.
    """
    raw_logprobs, raw_top = _logprobs(raw_RV, token_ids, num_top)
    if transformed_RV is raw_RV:
        logprobs, top = raw_logprobs, raw_top
    else:
        logprobs, top = _logprobs(transformed_RV, token_ids, num_top)
    return [
        TokenLogprobs(
            token_id=token_id, logprob=logprobs[i], top=top[i], raw_logprob=raw_logprobs[i], raw_top=raw_top[i]
        )
        for i, token_id in enumerate(token_ids)
    ]


def _logprobs(logits_RV: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[list[float], list[TopLogprobs]]:
    logprob_RV = logits_RV.log_softmax(dim=-1)
    token_id_R1 = torch.tensor(token_ids, dtype=torch.int64, device=logits_RV.device)[:, None]
    own: list[float] = logprob_RV.gather(-1, token_id_R1)[:, 0].tolist()
    if num_top == 0:
        return own, [()] * len(token_ids)
    logprob_RV = logprob_RV.masked_fill(logprob_RV.isnan(), -math.inf)  # a row of NaN names no alternative
    # topk says nothing about the order of equals: it only tells the last value, and ids decide among its equals.
    last_R1 = logprob_RV.topk(num_top, dim=-1).values[:, -1:]
    above_RV = logprob_RV > last_R1
    tied_RV = logprob_RV == last_R1
    num_tied_R1 = num_top - above_RV.sum(dim=-1, keepdim=True)
    chosen_RV = above_RV | (tied_RV & (tied_RV.cumsum(dim=-1) <= num_tied_R1))
    id_RN = chosen_RV.nonzero()[:, 1].view(-1, num_top)
    logprob_RN, order_RN = logprob_RV.gather(-1, id_RN).sort(dim=-1, descending=True, stable=True)
    pairs = zip(id_RN.gather(-1, order_RN).tolist(), logprob_RN.tolist(), strict=True)
    return own, [
        tuple((i, logprob) for i, logprob in zip(ids, logprobs, strict=True) if logprob > -math.inf)
        for ids, logprobs in pairs
    ]
