"""Keep drafts by weighted coins and draw the token behind them: rejection sampling in one launch.

    kept     while coin * draft_prob < target_prob                       target_prob = softmax(logits)[draft]
    token    a draw from max(target_probs - draft_probs, 0), where a draft was rejected; from the target's row where all
             were kept, or where nothing is left of the difference; a draft whose next row has nothing to draw, itself

B = requests, T = rows of logits, K = most drafts of a request, K1 = K + 1, V = token ids. A greedy row is certain of
its argmax. It is `verify_by_rejection` of `specdec.sampling.accept` without a word to the host. Coins and noise are
those of `gumbel_noise`; probabilities are float32 sums in another order than torch's, so their last digits differ.
Source: Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding, ICML 2023, algorithm 1.
"""

import math
from typing import NamedTuple

import torch

from specdec.kernels.chain_accept import CHUNK_IDS, MAX_DRAFTS, THREADS, ChainResult, check_chains, check_logits
from specdec.kernels.cuda_program import Macros, cuda_kernel
from specdec.kernels.gumbel_noise import coins, gumbel_argmax
from specdec.kernels.tensor_check import check_tensor

_PLACE_WORDS = 4  # of 8 bytes


class RejectionKeys(NamedTuple):
    """Noise keys of the rows by what they are for, i64 [T] each."""

    coin_T: torch.Tensor
    residual_T: torch.Tensor
    target_T: torch.Tensor


def rejection_accept_ref(
    logits_TV: torch.Tensor,
    row_BK1: torch.Tensor,
    draft_ids_BK: torch.Tensor,
    draft_probs_BKV: torch.Tensor | None,
    keys: RejectionKeys,
    *,
    greedy_T: torch.Tensor | None = None,
) -> ChainResult:
    """Define `RejectionAcceptor`; see there for the arguments."""
    sharp_TV = logits_TV
    if greedy_T is not None:
        certain_TV = torch.full_like(logits_TV, -math.inf).scatter_(1, logits_TV.argmax(dim=-1, keepdim=True), 0.0)
        sharp_TV = torch.where(greedy_T[:, None], certain_TV, logits_TV)
    probs_TV = sharp_TV.softmax(dim=-1)
    coin_T = coins(keys.coin_T)
    drawable_T = logits_TV.amax(dim=-1).isfinite()
    result = ChainResult(
        torch.full_like(row_BK1, -1), torch.zeros_like(row_BK1[:, 0]), torch.zeros_like(row_BK1[:, 0]).bool()
    )
    for b, (rows, drafts) in enumerate(zip(row_BK1.tolist(), draft_ids_BK.tolist(), strict=True)):
        kept = 0
        ends_with_draft = False
        drafts.append(-1)
        while drafts[kept] >= 0:
            certainty = 1.0 if draft_probs_BKV is None else float(draft_probs_BKV[b, kept, drafts[kept]])
            if not float(coin_T[rows[kept]]) * certainty < float(probs_TV[rows[kept], drafts[kept]]):
                break
            ends_with_draft = not bool(drawable_T[rows[kept + 1]])
            if ends_with_draft:
                break
            kept += 1
        row = rows[kept]
        scores_V, key = sharp_TV[row], keys.target_T[row]
        if drafts[kept] >= 0:
            key = keys.residual_T[row]
            if draft_probs_BKV is None:
                residual_V = probs_TV[row].index_fill(0, torch.tensor(drafts[kept], device=row_BK1.device), 0.0)
            else:
                residual_V = (probs_TV[row] - draft_probs_BKV[b, kept]).clamp_(min=0.0)
            # Equal distributions leave nothing, up to rounding, and a draft whose every token was banned leaves NaN.
            if bool(residual_V.amax() > 0):
                scores_V = residual_V.log()
        token_id, _ = gumbel_argmax(scores_V[None], key[None])
        result.token_ids_BK1[b, :kept] = draft_ids_BK[b, :kept]
        result.token_ids_BK1[b, kept] = draft_ids_BK[b, kept] if ends_with_draft else token_id[0]
        result.num_accepted_B[b] = kept
        result.drawable_B[b] = drawable_T[rows[0]]
    return result


class RejectionAcceptor:
    """The launcher and its memory, for one stream at a time.

    Args:
        max_requests: Most requests of a call.
        max_drafts: K, at most 15.
        vocab_size: V.
        device: A GPU.
    """

    def __init__(self, *, max_requests: int, max_drafts: int, vocab_size: int, device: torch.device) -> None:
        if not 0 <= max_drafts <= MAX_DRAFTS:
            raise ValueError(f"max_drafts must be 0 to {MAX_DRAFTS}, got {max_drafts}")
        self._vocab_size = vocab_size
        self._num_rows = max_drafts + 1
        self._num_tiles = -(-vocab_size // CHUNK_IDS)
        tiles = (max_requests, self._num_rows, self._num_tiles)
        candidates = (max_requests, 2, self._num_tiles)  # the residual's and the target's
        self._tile_sums = torch.empty(*tiles, 2, dtype=torch.float32, device=device)
        self._tile_ids = torch.empty(tiles, dtype=torch.int32, device=device)
        self._best_order = torch.empty(candidates, dtype=torch.int64, device=device)
        self._best_id = torch.empty(candidates, dtype=torch.int32, device=device)
        self._places = torch.empty(max_requests, _PLACE_WORDS, dtype=torch.int64, device=device)
        self._progress = torch.zeros(max_requests, dtype=torch.int32, device=device)  # a launch leaves zeros, too

    def __call__(
        self,
        logits_TV: torch.Tensor,
        row_BK1: torch.Tensor,
        draft_ids_BK: torch.Tensor,
        draft_probs_BKV: torch.Tensor | None,
        keys: RejectionKeys,
        *,
        greedy_T: torch.Tensor | None = None,
        out: ChainResult,
    ) -> ChainResult:
        """Judge and draw, on the current stream.

        Args:
            logits_TV: The target's transformed logits, float32, adjacent ids, rows at a multiple of 16 bytes.
            row_BK1: Row of each request and draft count, i64; beyond a request's drafts, its last row.
            draft_ids_BK: i64, -1 beyond a request's drafts.
            draft_probs_BKV: What each draft was drawn from, float32, contiguous, at a multiple of 16 bytes; not read
                beyond a request's drafts. None: every draft was certain.
            keys: Of the rows.
            greedy_T: Rows that take the argmax, bool, alike for all rows of a request; None where none does.
            out: Receives the result, contiguous.

        Returns:
            `out`.

        Raises:
            ValueError: A tensor has another shape or dtype.
        """
        self._check(logits_TV, row_BK1, draft_probs_BKV, keys, greedy_T)
        check_chains(row_BK1, draft_ids_BK, out, num_rows=self._num_rows, device=self._places.device)
        num_requests = len(row_BK1)
        if not num_requests:
            return out
        kernel = cuda_kernel(
            "rejection_accept.cu",
            "rejection_accept",
            macros=rejection_accept_macros(vocab_size=self._vocab_size, num_rows=self._num_rows),
            shared_bytes=self._num_rows * CHUNK_IDS * logits_TV.element_size(),
            starts_early=True,
        )
        kernel(
            (2 * num_requests * self._num_tiles, 1, 1),  # one judges a tile, one draws from it
            THREADS,
            logits_TV,
            row_BK1,
            draft_ids_BK,
            0 if draft_probs_BKV is None else draft_probs_BKV,
            keys.coin_T,
            keys.residual_T,
            keys.target_T,
            0 if greedy_T is None else greedy_T,
            self._tile_sums,
            self._tile_ids,
            self._best_order,
            self._best_id,
            self._places,
            self._progress,
            *out,
            logits_TV.stride(0),
        )
        return out

    def _check(
        self,
        logits_TV: torch.Tensor,
        row_BK1: torch.Tensor,
        draft_probs_BKV: torch.Tensor | None,
        keys: RejectionKeys,
        greedy_T: torch.Tensor | None,
    ) -> None:
        if len(row_BK1) > len(self._places):
            raise ValueError(f"at most {len(self._places)} requests, got {len(row_BK1)}")
        device = self._places.device
        check_logits(logits_TV, torch.float32, vocab_size=self._vocab_size, device=device)
        if draft_probs_BKV is not None:
            shape = (len(row_BK1), self._num_rows - 1, self._vocab_size)
            check_tensor("draft_probs_BKV", draft_probs_BKV, torch.float32, shape, device=device, alignment=16)
        for name, key_T in keys._asdict().items():
            check_tensor(f"keys.{name}", key_T, torch.int64, (len(logits_TV),), device=device)
        if greedy_T is not None:
            check_tensor("greedy_T", greedy_T, torch.bool, (len(logits_TV),), device=device)


def rejection_accept_macros(*, vocab_size: int, num_rows: int) -> Macros:
    """Give the constants that the kernel is compiled with."""
    return (("VOCAB", vocab_size), ("ROWS", num_rows), ("LOGITS_BF16", 0), ("CHUNKS", 1))
