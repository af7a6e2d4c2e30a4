"""From requests and their drafts to the sampling rules of every row of logits.

A request with K drafts d1..dK has K + 1 rows. Row i draws the token after prompt + output + d1..di: its penalties count
those drafts, its noise belongs to that token's position, `min_tokens` is judged by the output up to there.

B = requests, T = rows (those of request 0 first, in order), K = most drafts of a request, K1 = K + 1,
S = noise streams.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.kernels.gumbel_noise import NoiseStream, position_keys, stream_key
from specdec.kernels.logits_transform import (
    AllowedTokens,
    HistoryPenalties,
    LogitsRules,
    MinP,
    Nucleus,
    TokenBans,
    TokenBias,
)
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.token_history import TokenHistory

Int64Array = npt.NDArray[np.int64]


class RequestSampling:
    """What sampling keeps for one choice of one request, from its first token to its last.

    Args:
        params: With a seed (`SamplingParams.with_fresh_seed`) unless greedy.
        choice: Index among the choices of the prompt.
        prompt_ids: The prompt.
        stop_ids: Ids that end this request, banned in its first `min_tokens` tokens.
        vocab_size: Ids are 0..vocab_size - 1.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        choice: int,
        prompt_ids: Sequence[int] | Int64Array,
        stop_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        if params.seed is None and not params.is_greedy:
            raise ValueError("sampling needs a seed: build the request from params.with_fresh_seed()")
        self.params = replace(params, grammar=None)  # what it allows travels as masks, where this travels
        self.num_prompt = len(prompt_ids)
        self.stream_keys = tuple(stream_key(seed=params.seed or 0, choice=choice, stream=s) for s in NoiseStream)
        self.early_bans = np.array(sorted(set(stop_ids)) if params.min_tokens else [], dtype=np.int64)
        self.bans = np.array(params.banned_token_ids, dtype=np.int64)
        self.bias_ids = np.array(list(params.logit_bias.keys()), dtype=np.int64)
        self.bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.allowed_V: npt.NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            self.allowed_V = np.zeros(vocab_size, dtype=np.bool_)
            self.allowed_V[list(params.allowed_token_ids)] = True
        self.history: TokenHistory | None = None
        if params.repetition_penalty != 1:
            self.history = TokenHistory(prompt_ids)
        elif params.frequency_penalty != 0 or params.presence_penalty != 0:
            self.history = TokenHistory()

    @property
    def needs_only_temperature(self) -> bool:
        """Whether the logits are drawn from as they are, but for the temperature."""
        params = self.params
        is_cut = not params.is_greedy and (params.min_p > 0 or params.top_k > 0 or params.top_p < 1)
        has_rules = len(self.early_bans) or len(self.bans) or len(self.bias_ids) or self.allowed_V is not None
        return not is_cut and not has_rules and self.history is None

    def observe(self, token_ids: Iterable[int]) -> None:
        """Add emitted tokens to the history of the penalties; every emitted token must pass here once."""
        if self.history is not None:
            self.history.observe(token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """The sampling rules of T rows of logits, and the drafts that those rows judge.

    Attributes:
        draft_ids_BK: i64 [B, K], -1 beyond a request's drafts.
        num_drafts_B: i64 [B]; request b has num_drafts_B[b] + 1 rows.
        row_BK1: Row of each request and draft count, i64 [B, K1]; beyond a request's drafts, its last row.
        rules: For `transform_logits`.
        greedy_T: Rows that take the argmax, bool [T]; None where all or none do.
        all_greedy: Whether all do.
        stream_key_TS: Stream keys of the rows, u64 [T, S], on the host.
        position_T: Number of tokens before the drawn one, i64 [T], on the host.
    """

    draft_ids_BK: torch.Tensor
    num_drafts_B: torch.Tensor
    row_BK1: torch.Tensor
    rules: LogitsRules
    greedy_T: torch.Tensor | None
    all_greedy: bool
    stream_key_TS: npt.NDArray[np.uint64]
    position_T: Int64Array

    def keys(self, stream: NoiseStream) -> torch.Tensor:
        """Give the noise keys of all rows for one stream: i64 [T]."""
        key_T = position_keys(self.stream_key_TS[:, stream], self.position_T)
        return torch.from_numpy(key_T).to(self.row_BK1.device)


class NoiseOfRequests(NamedTuple):
    """How requests draw that use nothing but a temperature.

    Attributes:
        stream_key_B: `stream_key` of the target's stream, u64.
        temperature_B: f32; of a greedy request, 1.
        greedy_B: bool.
    """

    stream_key_B: npt.NDArray[np.uint64]
    temperature_B: npt.NDArray[np.float32]
    greedy_B: npt.NDArray[np.bool_]


def noise_of(requests: Sequence[RequestSampling]) -> NoiseOfRequests:
    """Say how requests draw that use nothing but a temperature."""
    params = [request.params for request in requests]
    return NoiseOfRequests(
        stream_key_B=np.array([request.stream_keys[NoiseStream.TARGET] for request in requests], dtype=np.uint64),
        temperature_B=np.array([1.0 if each.is_greedy else each.temperature for each in params], dtype=np.float32),
        greedy_B=np.array([each.is_greedy for each in params], dtype=np.bool_),
    )


class SamplingBatch:
    """Requests that are sampled together, round after round, until one joins or leaves.

    Building it reads every request's parameters once; a round then costs a few operations on small arrays, and requests
    that use nothing but a temperature are never looked at again.
    """

    def __init__(self, requests: Sequence[RequestSampling], *, device: torch.device) -> None:
        self._requests = requests
        self.device = device
        params = [request.params for request in requests]
        greedy = [item.is_greedy for item in params]
        self._greedy_B = np.array(greedy, dtype=np.bool_)
        self._all_greedy = all(greedy)
        self._mixed = any(greedy) and not self._all_greedy
        self._stream_key_BS = np.array([request.stream_keys for request in requests], dtype=np.uint64)
        # Greedy requests are drawn by argmax, which no temperature and no cut can move.
        self._temperature_B = np.array([item.temperature or 1.0 for item in params], dtype=np.float32)
        self._divides = bool((self._temperature_B != 1).any())
        self._min_p_B = np.array([0.0 if item.is_greedy else item.min_p for item in params])
        self._top_k_B = np.array([item.top_k if item.top_k > 0 else np.iinfo(np.int64).max for item in params])
        self._top_p_B = np.array([item.top_p for item in params], dtype=np.float64)
        self._cuts_B = ~self._greedy_B & ((self._top_k_B < np.iinfo(np.int64).max) | (self._top_p_B < 1))
        pairs = list(enumerate(requests))
        self._with_history = [(b, request, request.history) for b, request in pairs if request.history is not None]
        self._with_bias = [(b, request) for b, request in pairs if len(request.bias_ids)]
        self._with_bans = [(b, request) for b, request in pairs if len(request.bans) or len(request.early_bans)]
        self._with_allowed = [(b, request.allowed_V) for b, request in pairs if request.allowed_V is not None]

    @property
    def has_history(self) -> bool:
        """Whether any request has penalties, whose history grows with every emitted token."""
        return bool(self._with_history)

    def verify_rows(self, num_known_B: Int64Array, drafts: Sequence[Sequence[int]]) -> SamplingRows:
        """Give the rows that verify `drafts`: for each request, one per draft and one for the token after them.

        Args:
            num_known_B: Tokens of prompt and output of each request, i64 [B].
            drafts: Draft ids of each request; none is an empty sequence.
        """
        num_drafts_B = np.fromiter(map(len, drafts), dtype=np.int64, count=len(drafts))
        num_rows_B = num_drafts_B + 1
        first_row_B = np.cumsum(num_rows_B) - num_rows_B
        request_T = np.repeat(np.arange(len(drafts)), num_rows_B)
        draft_index_K = np.arange(num_drafts_B.max(initial=0))
        draft_ids_BK = np.full((len(drafts), len(draft_index_K)), -1, dtype=np.int64)
        draft_ids_BK[draft_index_K < num_drafts_B[:, None]] = np.fromiter(chain.from_iterable(drafts), dtype=np.int64)
        row_BK1 = first_row_B[:, None] + np.minimum(np.arange(len(draft_index_K) + 1), num_drafts_B[:, None])
        return self._rows(
            request_T=request_T,
            draft_count_T=np.arange(len(request_T)) - first_row_B[request_T],
            num_known_B=num_known_B,
            drafts=drafts,
            draft_ids_BK=draft_ids_BK,
            num_drafts_B=num_drafts_B,
            row_BK1=row_BK1,
        )

    def draft_rows(self, num_known_B: Int64Array, drafts: Sequence[Sequence[int]]) -> SamplingRows:
        """Give one row per request, for drawing the draft that follows its `drafts` so far.

        Args:
            num_known_B: Tokens of prompt and output of each request, i64 [B].
            drafts: Draft ids so far of each request, not necessarily equally many.
        """
        num_requests = len(drafts)
        request_T = np.arange(num_requests)
        return self._rows(
            request_T=request_T,
            draft_count_T=np.fromiter(map(len, drafts), dtype=np.int64, count=num_requests),
            num_known_B=num_known_B,
            drafts=drafts,
            draft_ids_BK=np.empty((num_requests, 0), dtype=np.int64),
            num_drafts_B=np.zeros(num_requests, dtype=np.int64),
            row_BK1=request_T[:, None],
        )

    def _rows(
        self,
        *,
        request_T: Int64Array,
        draft_count_T: Int64Array,
        num_known_B: Int64Array,
        drafts: Sequence[Sequence[int]],
        draft_ids_BK: Int64Array,
        num_drafts_B: Int64Array,
        row_BK1: Int64Array,
    ) -> SamplingRows:
        position_T = num_known_B[request_T] + draft_count_T
        rules = LogitsRules(
            history=self._history(request_T, draft_count_T, drafts),
            bias=self._bias(request_T),
            bans=self._bans(request_T, position_T),
            allowed=self._allowed(request_T),
            temperature_T=self._tensor(self._temperature_B[request_T]) if self._divides else None,
            min_p=self._min_p(request_T),
            nucleus=self._nucleus(request_T),
        )
        return SamplingRows(
            draft_ids_BK=self._tensor(draft_ids_BK),
            num_drafts_B=self._tensor(num_drafts_B),
            row_BK1=self._tensor(row_BK1),
            rules=rules,
            greedy_T=self._tensor(self._greedy_B[request_T]) if self._mixed else None,
            all_greedy=self._all_greedy,
            stream_key_TS=self._stream_key_BS[request_T],
            position_T=position_T,
        )

    def _history(
        self, request_T: Int64Array, draft_count_T: Int64Array, drafts: Sequence[Sequence[int]]
    ) -> HistoryPenalties | None:
        if not self._with_history:
            return None
        rows, ids, counts, penalties = [], [], [], []
        for b, request, history in self._with_history:
            row_R = _rows_of(request_T, b)
            for row, seen in zip(row_R, history.after_drafts(drafts[b], draft_count_T[row_R]), strict=True):
                rows.append(np.full(len(seen.token_id_N), row))
                ids.append(seen.token_id_N)
                counts.append(seen.output_count_N)
            params = request.params
            penalties.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
        row_N = np.concatenate(rows)
        penalty_B3 = np.zeros((len(self._requests), 3), dtype=np.float32)
        penalty_B3[[b for b, _, _ in self._with_history]] = penalties
        penalty_N3 = penalty_B3[request_T[row_N]]
        return HistoryPenalties(
            row_N=self._tensor(row_N),
            token_id_N=self._tensor(np.concatenate(ids)),
            output_count_N=self._tensor(np.concatenate(counts)),
            repetition_N=self._tensor(penalty_N3[:, 0]),
            frequency_N=self._tensor(penalty_N3[:, 1]),
            presence_N=self._tensor(penalty_N3[:, 2]),
        )

    def _bias(self, request_T: Int64Array) -> TokenBias | None:
        if not self._with_bias:
            return None
        pairs = [(_rows_of(request_T, b), request) for b, request in self._with_bias]
        return TokenBias(
            row_N=self._tensor(np.concatenate([row_R.repeat(len(request.bias_ids)) for row_R, request in pairs])),
            token_id_N=self._tensor(
                np.concatenate([np.tile(request.bias_ids, len(row_R)) for row_R, request in pairs])
            ),
            bias_N=self._tensor(np.concatenate([np.tile(request.bias_values, len(row_R)) for row_R, request in pairs])),
        )

    def _bans(self, request_T: Int64Array, position_T: Int64Array) -> TokenBans | None:
        rows, ids = [], []
        for b, request in self._with_bans:
            row_R = _rows_of(request_T, b)
            early_R = row_R[position_T[row_R] < request.num_prompt + request.params.min_tokens]
            for banned_rows, banned in ((row_R, request.bans), (early_R, request.early_bans)):
                rows.append(banned_rows.repeat(len(banned)))
                ids.append(np.tile(banned, len(banned_rows)))
        if not any(map(len, rows)):
            return None
        return TokenBans(row_N=self._tensor(np.concatenate(rows)), token_id_N=self._tensor(np.concatenate(ids)))

    def _allowed(self, request_T: Int64Array) -> AllowedTokens | None:
        if not self._with_allowed:
            return None
        pairs = [(_rows_of(request_T, b), allowed_V) for b, allowed_V in self._with_allowed]
        return AllowedTokens(
            row_R=self._tensor(np.concatenate([row_R for row_R, _ in pairs])),
            allowed_RV=self._tensor(
                np.concatenate([np.tile(allowed_V, (len(row_R), 1)) for row_R, allowed_V in pairs])
            ),
        )

    def _min_p(self, request_T: Int64Array) -> MinP | None:
        if not self._min_p_B.any():
            return None
        min_p_T = self._min_p_B[request_T]
        row_R = np.flatnonzero(min_p_T)
        return MinP(row_R=self._row_index(row_R, len(request_T)), min_p_R=self._tensor(min_p_T[row_R]))

    def _nucleus(self, request_T: Int64Array) -> Nucleus | None:
        if not self._cuts_B.any():
            return None
        row_R = np.flatnonzero(self._cuts_B[request_T])
        request_R = request_T[row_R]
        return Nucleus(
            row_R=self._row_index(row_R, len(request_T)),
            top_k_R=self._tensor(self._top_k_B[request_R]),
            top_p_R=self._tensor(self._top_p_B[request_R]),
        )

    def _row_index(self, row_R: Int64Array, num_rows: int) -> torch.Tensor | None:
        return None if len(row_R) == num_rows else self._tensor(row_R)

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def _rows_of(request_T: Int64Array, b: int) -> Int64Array:
    start, end = np.searchsorted(request_T, [b, b + 1])
    return np.arange(start, end)
