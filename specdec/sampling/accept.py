"""Which drafts stay, and the token that follows them.

Two rules, both exact. Row i of a request judges draft i and has the target's logits after i drafts.

`sampled`    The target draws its own token of every row, by Gumbel-max with noise that depends on the seed and the
             position alone. A draft stays while it equals that token; the first that differs is replaced by it. The
             output is the one that plain decoding draws from the same seed, whatever was drafted. A draft that adds the
             same noise to its own logits agrees more often, and cannot change the output.
`rejection`  A draft stays while coin * draft_prob < target_prob. The first that fails is replaced by a draw from
             max(target_probs - draft_probs, 0), normalised; if none fails, a draw from the last row follows. Only the
             distribution of the output is that of plain decoding. (Leviathan, Kalman, Matias: Fast inference from
             transformers via speculative decoding, ICML 2023, algorithm 1.)

At temperature 0 both keep a draft while it is the argmax. A token of probability 0 is never emitted, so the first draft
that a ban excludes ends the run.

A draft after which no token can be drawn is emitted as the last of its run, not kept: the next step fails on its row,
as plain decoding does, and no token before it is lost.

B = requests, T = rows, K = most drafts of a request, K1 = K + 1, V = token ids. Logits are those of `transform_logits`.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch

from specdec.kernels.gumbel_noise import NoiseStream, coins, gumbel_argmax
from specdec.sampling.sampling_rows import SamplingRows


class AcceptanceRule(StrEnum):
    """How drafts are judged."""

    SAMPLED = "sampled"
    REJECTION = "rejection"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResult:
    """What one verify step decided for B requests with up to K drafts each.

    Attributes:
        token_ids_BK1: Emitted ids, i64 [B, K1]: the kept drafts and the token after them; -1 beyond them.
        num_accepted_B: Drafts kept, i64 [B], 0..K; the token after them is not counted.
        drawable_B: bool [B]; False where the first row had no token to draw: all banned, or logits that are not finite.
            The tokens of that request mean nothing, and it must fail.
    """

    token_ids_BK1: torch.Tensor
    num_accepted_B: torch.Tensor
    drawable_B: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftResult:
    """The next draft of B requests.

    Attributes:
        token_id_B: i64 [B].
        value_B: What each scored to be drawn, its logit or logit + noise, [B]: what ranks compare.
        draft_probs_BV: What each draft was drawn from, f32 [B, V], under the rejection rule; None under the sampled
            rule, which does not ask.
    """

    token_id_B: torch.Tensor
    value_B: torch.Tensor
    draft_probs_BV: torch.Tensor | None


def draw_drafts(logits_BV: torch.Tensor, rows: SamplingRows, rule: AcceptanceRule) -> DraftResult:
    """Draw the next draft of every request from the draft's transformed logits.

    Args:
        logits_BV: f32 [B, V].
        rows: `SamplingBatch.draft_rows` of the same requests.
        rule: `sampled` shares the target's noise, `rejection` uses a stream of its own.
    """
    if rule is AcceptanceRule.SAMPLED:
        token_id_B, value_B = _draw_target(logits_BV, rows)
        return DraftResult(token_id_B=token_id_B, value_B=value_B, draft_probs_BV=None)
    sharp_BV = _sharpen(logits_BV, rows)
    token_id_B, value_B = gumbel_argmax(sharp_BV, rows.keys(NoiseStream.DRAFT))
    return DraftResult(token_id_B=token_id_B, value_B=value_B, draft_probs_BV=sharp_BV.softmax(dim=-1))


def verify_sampled(logits_TV: torch.Tensor, rows: SamplingRows) -> VerifyResult:
    """Keep each draft while it equals the target's own draw.

    Args:
        logits_TV: The target's transformed logits, f32 [T, V].
        rows: `SamplingBatch.verify_rows`.
    """
    token_id_T, value_T = _draw_target(logits_TV, rows)
    target_ids_BK1 = token_id_T[rows.row_BK1]
    drawable_BK1 = value_T.isfinite()[rows.row_BK1]
    # Padding drafts are -1 and equal no token, so they end the run by themselves.
    num_accepted_B = _length_of_true((target_ids_BK1[:, :-1] == rows.draft_ids_BK) & drawable_BK1[:, 1:])
    is_emitted_BK1 = _index(target_ids_BK1) <= num_accepted_B[:, None]
    return VerifyResult(
        token_ids_BK1=target_ids_BK1.masked_fill(~is_emitted_BK1, -1),
        num_accepted_B=num_accepted_B,
        drawable_B=drawable_BK1[:, 0],
    )


def verify_by_rejection(
    logits_TV: torch.Tensor, rows: SamplingRows, draft_probs_BKV: torch.Tensor | None
) -> VerifyResult:
    """Keep each draft by a coin weighted with target_prob / draft_prob, and replace the first that fails.

    Args:
        logits_TV: The target's transformed logits, f32 [T, V].
        rows: `SamplingBatch.verify_rows`.
        draft_probs_BKV: What each draft was drawn from, f32 [B, K, V]; not read beyond a request's drafts. None: every
            draft was certain (its draft_prob is 1), as of a source that draws nothing.
    """
    row_BK1, is_draft_BK = rows.row_BK1, rows.draft_ids_BK >= 0
    draft_ids_BK = rows.draft_ids_BK.clamp(min=0)
    sharp_TV = _sharpen(logits_TV, rows)
    target_probs_TV = sharp_TV.softmax(dim=-1)

    target_prob_BK = target_probs_TV[row_BK1[:, :-1], draft_ids_BK].double()
    coin_BK = coins(rows.keys(NoiseStream.COIN))[row_BK1[:, :-1]]
    if draft_probs_BKV is not None:
        coin_BK = coin_BK * draft_probs_BKV.gather(-1, draft_ids_BK[..., None])[..., 0].double()
    is_kept_BK = is_draft_BK & (coin_BK < target_prob_BK)
    drawable_BK1 = logits_TV.amax(dim=-1).isfinite()[row_BK1]
    num_accepted_B = _length_of_true(is_kept_BK & drawable_BK1[:, 1:])
    ends_with_draft_B = _length_of_true(is_kept_BK) > num_accepted_B

    last_row_B = row_BK1.gather(1, num_accepted_B[:, None])[:, 0]
    all_kept_B = num_accepted_B == rows.num_drafts_B
    residual_BV = _residual(target_probs_TV[last_row_B], draft_ids_BK, draft_probs_BKV, num_accepted_B)
    # Equal distributions leave nothing, up to rounding, and a draft whose every token was banned leaves NaN. Such a
    # draft says nothing about the target, whose own distribution is then the one to draw from.
    from_target_B = all_kept_B | ~(residual_BV.amax(dim=-1) > 0)
    scores_BV = torch.where(from_target_B[:, None], sharp_TV[last_row_B], residual_BV.log())
    target_key_T, residual_key_T = rows.keys(NoiseStream.TARGET), rows.keys(NoiseStream.RESIDUAL)
    key_B = torch.where(all_kept_B, target_key_T[last_row_B], residual_key_T[last_row_B])
    last_id_B, _ = gumbel_argmax(scores_BV, key_B)

    is_last_BK1 = _index(row_BK1) == num_accepted_B[:, None]
    is_emitted_BK1 = _index(row_BK1) <= num_accepted_B[:, None]
    padded_ids_BK1 = torch.cat([draft_ids_BK, last_id_B[:, None]], dim=1)
    token_ids_BK1 = torch.where(is_last_BK1 & ~ends_with_draft_B[:, None], last_id_B[:, None], padded_ids_BK1)
    return VerifyResult(
        token_ids_BK1=token_ids_BK1.masked_fill(~is_emitted_BK1, -1),
        num_accepted_B=num_accepted_B,
        drawable_B=drawable_BK1[:, 0],
    )


def _residual(
    target_probs_BV: torch.Tensor,
    draft_ids_BK: torch.Tensor,
    draft_probs_BKV: torch.Tensor | None,
    num_accepted_B: torch.Tensor,
) -> torch.Tensor:
    """Give what the target's row holds beyond the draft it rejected, f32 [B, V], not normalised.

    A request whose drafts were all kept rejected none; the last one stands in, and its row is not used.
    """
    num_drafts = draft_ids_BK.shape[1]
    if num_drafts == 0:
        return target_probs_BV
    rejected_B1 = num_accepted_B.clamp(max=num_drafts - 1)[:, None]
    if draft_probs_BKV is None:
        return target_probs_BV.scatter(1, draft_ids_BK.gather(1, rejected_B1), 0.0)
    request_B = torch.arange(len(rejected_B1), device=rejected_B1.device)
    return (target_probs_BV - draft_probs_BKV[request_B, rejected_B1[:, 0]]).clamp_(min=0.0)


def _draw_target(logits_TV: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw every row with the target's noise, greedy ones by argmax; a value is not finite where there is no token."""
    if rows.all_greedy:
        value_T, token_id_T = logits_TV.max(dim=-1)
        return token_id_T, value_T
    token_id_T, value_T = gumbel_argmax(logits_TV, rows.keys(NoiseStream.TARGET))
    if rows.greedy_T is not None:
        greedy_value_T, greedy_id_T = logits_TV.max(dim=-1)
        token_id_T = torch.where(rows.greedy_T, greedy_id_T, token_id_T)
        value_T = torch.where(rows.greedy_T, greedy_value_T, value_T)
    return token_id_T, value_T


def _sharpen(logits_TV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Give logits whose softmax is what each row draws from: a greedy row is certain of its argmax."""
    if rows.greedy_T is None and not rows.all_greedy:
        return logits_TV
    certain_TV = torch.full_like(logits_TV, -math.inf).scatter_(1, logits_TV.argmax(dim=-1, keepdim=True), 0.0)
    return certain_TV if rows.greedy_T is None else torch.where(rows.greedy_T[:, None], certain_TV, logits_TV)


def _length_of_true(kept_BK: torch.Tensor) -> torch.Tensor:
    return kept_BK.long().cumprod(dim=1).sum(dim=1)


def _index(values_BK1: torch.Tensor) -> torch.Tensor:
    return torch.arange(values_BK1.shape[1], device=values_BK1.device)
