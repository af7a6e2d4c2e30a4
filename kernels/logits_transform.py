"""Turn a model's logits into the logits a token is drawn from.

In this order, each step on the result of the one before it:

    repetition   l > 0 ? l / r : l * r            ids of the history (prompt and output)
    frequency    l - f * count                    ids of the output
    presence     l - p * [count > 0]
    bias         l + b                            given ids
    bans         l = -inf                         banned ids, all that are not allowed, all that a grammar forbids
    temperature  l / t                            0 stands for greedy: nothing is divided
    min-p        drop  l < max(l) + log(min_p)    that is, prob < min_p * max(prob)
    top-k        keep the first k
    top-p        keep the shortest beginning whose probability is at least top_p

"First" is a total order: the higher logit, then the lower id. Excluded ids are -inf. The last three steps never drop
the best id, so a row is empty only when its bans leave nothing. A row of greedy decoding ends after its bans: its token
is the argmax.

T = rows, V = token ids, R = the rows that use one step, N = (row, id) pairs. Each step touches only its own rows, and
every operation works along a row, so a row's result has the same bits whatever stands beside it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPenalties:
    """What the penalties need to know: one entry per (row, id) that occurs in the row's history; no pair twice."""

    row_N: torch.Tensor  # i64 [N]
    token_id_N: torch.Tensor  # i64 [N]
    output_count_N: (
        torch.Tensor
    )  # f32 [N], how often the id was emitted before this row; 0 for an id of the prompt alone
    repetition_N: torch.Tensor  # f32 [N], the row's penalties, repeated for its entries; 1 and 0 change nothing
    frequency_N: torch.Tensor  # f32 [N]
    presence_N: torch.Tensor  # f32 [N]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBias:
    """Numbers to add to single logits; no (row, id) pair twice."""

    row_N: torch.Tensor  # i64 [N]
    token_id_N: torch.Tensor  # i64 [N]
    bias_N: torch.Tensor  # f32 [N]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBans:
    """Single ids that must not be drawn; a pair may occur twice."""

    row_N: torch.Tensor  # i64 [N]
    token_id_N: torch.Tensor  # i64 [N]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllowedTokens:
    """Rows of which only some ids may be drawn."""

    row_R: torch.Tensor  # i64 [R]
    allowed_RV: torch.Tensor  # bool [R, V]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllowedBits:
    """Rows of which a grammar allows some ids, a bit for each; no row twice."""

    row_R: torch.Tensor  # i64 [R]
    bits_RX: torch.Tensor  # u8 [R, X], X >= V / 8: bit i of byte x, counted from the lowest, is id 8 * x + i


@dataclass(frozen=True, kw_only=True, slots=True)
class MinP:
    """Rows that drop the improbable."""

    row_R: torch.Tensor | None  # i64 [R]; None: all rows
    min_p_R: torch.Tensor  # f64 [R], above 0, at most 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Nucleus:
    """Rows cut by rank (top-k), by mass (top-p) or both."""

    row_R: torch.Tensor | None  # i64 [R]; None: all rows
    top_k_R: torch.Tensor  # i64 [R], at least 1; V or more keeps all
    top_p_R: torch.Tensor  # f64 [R], 0..1; 1 keeps all


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsRules:
    """What happens to T rows of logits; None where no row uses a step, which then costs nothing."""

    history: HistoryPenalties | None = None
    bias: TokenBias | None = None
    bans: TokenBans | None = None
    allowed: AllowedTokens | None = None
    grammar: AllowedBits | None = None
    temperature_T: torch.Tensor | None = None  # f32 [T], above 0; 1 for greedy rows
    min_p: MinP | None = None
    nucleus: Nucleus | None = None

    @property
    def edits_logits(self) -> bool:
        """Whether a step before the temperature applies to any row."""
        edits = (self.history, self.bias, self.bans, self.allowed, self.grammar)
        return any(edit is not None for edit in edits)


def transform_logits(logits_TV: torch.Tensor, rules: LogitsRules) -> torch.Tensor:
    """Apply `rules` to rows of logits.

    Args:
        logits_TV: f32 [T, V], finite; never written.
        rules: Tensors on the same device.

    Returns:
        f32 [T, V], -inf where excluded. It is `logits_TV` itself when no row uses any step. A row whose ids are all
        banned is -inf throughout, which a draw reports by a value that is not finite.
    """
    if rules.edits_logits:
        logits_TV = logits_TV.clone()
        _edit_(logits_TV, rules)
    if rules.temperature_T is not None:
        logits_TV = logits_TV / rules.temperature_T[:, None]
    if rules.min_p is not None:
        logits_TV = _on_rows(rules.min_p.row_R, logits_TV, partial(_drop_below_min_p, min_p_R=rules.min_p.min_p_R))
    if rules.nucleus is not None:
        keep = partial(_keep_nucleus, top_k_R=rules.nucleus.top_k_R, top_p_R=rules.nucleus.top_p_R)
        logits_TV = _on_rows(rules.nucleus.row_R, logits_TV, keep)
    return logits_TV


def _edit_(logits_TV: torch.Tensor, rules: LogitsRules) -> None:
    history, bias, bans, allowed = rules.history, rules.bias, rules.bans, rules.allowed
    if history is not None:
        index = (history.row_N, history.token_id_N)
        logits_N = logits_TV[index]
        logits_N = torch.where(logits_N > 0, logits_N / history.repetition_N, logits_N * history.repetition_N)
        logits_N = logits_N - history.frequency_N * history.output_count_N
        logits_TV[index] = logits_N - history.presence_N * (history.output_count_N > 0)
    if bias is not None:
        index = (bias.row_N, bias.token_id_N)
        logits_TV[index] = logits_TV[index] + bias.bias_N
    if bans is not None:
        logits_TV[bans.row_N, bans.token_id_N] = -math.inf
    if allowed is not None:
        logits_TV[allowed.row_R] = logits_TV[allowed.row_R].masked_fill_(~allowed.allowed_RV, -math.inf)
    if rules.grammar is not None:
        row_R, bits_RX = rules.grammar.row_R, rules.grammar.bits_RX
        is_allowed_RV = _unpack(bits_RX)[:, : logits_TV.shape[1]]
        logits_TV[row_R] = logits_TV[row_R].masked_fill_(~is_allowed_RV, -math.inf)


def _unpack(bits_RX: torch.Tensor) -> torch.Tensor:
    """Give a truth value for each bit, bool [R, 8 * X]."""
    bit_8 = torch.arange(8, dtype=torch.uint8, device=bits_RX.device)
    return ((bits_RX[:, :, None] >> bit_8) & 1).bool().flatten(1)


def _on_rows(
    row_R: torch.Tensor | None, logits_TV: torch.Tensor, step: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    if row_R is None:
        return step(logits_TV)
    return logits_TV.index_copy(0, row_R, step(logits_TV[row_R]))


def _drop_below_min_p(logits_RV: torch.Tensor, min_p_R: torch.Tensor) -> torch.Tensor:
    # Compared as logits: no exponential, and min_p = 1 keeps exactly the largest.
    floor_R1 = logits_RV.amax(dim=-1, keepdim=True) + min_p_R.log().float()[:, None]
    return logits_RV.masked_fill(logits_RV < floor_R1, -math.inf)


def _keep_nucleus(logits_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    num_ids = logits_RV.shape[-1]
    sorted_RV = _sort_descending(logits_RV)
    top_k_R1 = top_k_R.clamp(max=num_ids)[:, None]
    rank_V = torch.arange(num_ids, device=logits_RV.device)
    mass_RV = sorted_RV.masked_fill(rank_V >= top_k_R1, -math.inf).double().softmax(dim=-1).cumsum(dim=-1)
    # An id stays while the mass before it is below top_p. Rounding may put a tail's mass at 1: top_p = 1 stands apart.
    num_mass_R1 = 1 + (mass_RV[:, :-1] < top_p_R[:, None]).sum(dim=-1, keepdim=True)
    num_kept_R1 = torch.where(top_p_R[:, None] < 1, torch.minimum(num_mass_R1, top_k_R1), top_k_R1)
    last_R1 = sorted_RV.gather(-1, num_kept_R1 - 1)
    tied_RV = logits_RV == last_R1
    num_tied_R1 = num_kept_R1 - (logits_RV > last_R1).sum(dim=-1, keepdim=True)
    # Written as what to drop, so that a NaN stays and is reported by the draw.
    drop_RV = (logits_RV < last_R1) | (tied_RV & (tied_RV.cumsum(dim=-1) > num_tied_R1))
    return logits_RV.masked_fill(drop_RV, -math.inf)


def _sort_descending(logits_RV: torch.Tensor) -> torch.Tensor:
    if logits_RV.device.type != "cpu":
        return logits_RV.sort(dim=-1, descending=True).values
    # On a CPU torch sorts (value, index) pairs: 1.6 ms for [8, 3072]; numpy's sort of the values alone took 0.1 ms.
    return torch.from_numpy(np.sort(-logits_RV.numpy(), axis=-1)).neg_()
