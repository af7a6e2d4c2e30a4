"""Draw the target's own token of every row, keep the drafts that equal it, and give the token behind them: one launch.

    drawn_T = argmax(logits + gumbel_noise)       or argmax(logits) where a row is greedy; the lowest id on a tie
    num_accepted_B = leading drafts that equal the drawn token of their row, and whose next row has one to draw
    token_ids_BK1  = the drawn tokens of the rows 0..num_accepted, -1 behind them

B = requests, T = rows of logits, K = most drafts of a request, K1 = K + 1, V = token ids. It is `verify_sampled` of
`specdec.sampling.accept` without a word to the host, and exact: scores are float64 and the noise is that of
`gumbel_noise`, bit for bit where both run on a GPU.
"""

from typing import NamedTuple

import torch

from specdec.kernels.cuda_program import Macros, cuda_kernel
from specdec.kernels.gumbel_noise import gumbel_argmax
from specdec.kernels.tensor_check import check_tensor

# Of logit_scores.cuh:
THREADS = 128
CHUNK_IDS = 8 * THREADS
MAX_DRAFTS = 15  # a block has a thread for each id of a chunk of each row

# Chunks of a thread and blocks of a multiprocessor, by dtype and whether there is noise: reading wants much in flight,
# noise many warps.
_SIZES = {
    (torch.bfloat16, False): (2, 6),
    (torch.bfloat16, True): (1, 8),
    (torch.float32, False): (2, 4),
    (torch.float32, True): (1, 8),
}


class ChainResult(NamedTuple):
    """What each request gains.

    Attributes:
        token_ids_BK1: Emitted ids, i64 [B, K1]; -1 behind them.
        num_accepted_B: Drafts kept, i64 [B]; the token after them is not counted.
        drawable_B: bool [B]; False where the first row had nothing to draw: all banned, or logits that are not finite.
    """

    token_ids_BK1: torch.Tensor
    num_accepted_B: torch.Tensor
    drawable_B: torch.Tensor


def chain_accept_ref(
    logits_TV: torch.Tensor,
    row_BK1: torch.Tensor,
    draft_ids_BK: torch.Tensor,
    *,
    key_T: torch.Tensor | None = None,
    greedy_T: torch.Tensor | None = None,
) -> ChainResult:
    """Define `ChainAcceptor`; see there for the arguments."""
    value_T, drawn_T = (out.double() if out.is_floating_point() else out for out in logits_TV.float().max(dim=-1))
    if key_T is not None:
        noisy_id_T, noisy_value_T = gumbel_argmax(logits_TV.float(), key_T)
        is_greedy_T = torch.zeros_like(key_T, dtype=torch.bool) if greedy_T is None else greedy_T
        drawn_T = torch.where(is_greedy_T, drawn_T, noisy_id_T)
        value_T = torch.where(is_greedy_T, value_T, noisy_value_T)
    drawn_BK1 = drawn_T[row_BK1]
    drawable_BK1 = value_T.isfinite()[row_BK1]
    is_kept_BK = (drawn_BK1[:, :-1] == draft_ids_BK) & drawable_BK1[:, 1:]
    num_accepted_B = is_kept_BK.long().cumprod(dim=1).sum(dim=1)
    is_emitted_BK1 = torch.arange(row_BK1.shape[1], device=row_BK1.device) <= num_accepted_B[:, None]
    return ChainResult(
        token_ids_BK1=drawn_BK1.masked_fill(~is_emitted_BK1, -1),
        num_accepted_B=num_accepted_B,
        drawable_B=drawable_BK1[:, 0],
    )


class ChainAcceptor:
    """The launcher and its memory, for one stream at a time.

    Args:
        max_requests: Most requests of a call.
        max_drafts: K, at most 15.
        vocab_size: V.
        dtype: Of the logits, float32 or bfloat16.
        device: A GPU.
    """

    def __init__(
        self, *, max_requests: int, max_drafts: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if dtype not in {torch.float32, torch.bfloat16}:
            raise ValueError(f"logits must be float32 or bfloat16, got {dtype}")
        if not 0 <= max_drafts <= MAX_DRAFTS:
            raise ValueError(f"max_drafts must be 0 to {MAX_DRAFTS}, got {max_drafts}")
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._num_rows = max_drafts + 1
        num_tiles = -(-vocab_size // CHUNK_IDS)  # with the smallest
        shape = (max_requests, self._num_rows, num_tiles)
        self._best_order = torch.empty(shape, dtype=torch.int64, device=device)
        self._best_id = torch.empty(shape, dtype=torch.int32, device=device)
        self._finished = torch.zeros(max_requests, dtype=torch.int32, device=device)  # a launch leaves zeros, too

    def __call__(
        self,
        logits_TV: torch.Tensor,
        row_BK1: torch.Tensor,
        draft_ids_BK: torch.Tensor,
        *,
        key_T: torch.Tensor | None = None,
        greedy_T: torch.Tensor | None = None,
        out: ChainResult,
    ) -> ChainResult:
        """Draw and compare, on the current stream.

        Args:
            logits_TV: The target's transformed logits, adjacent ids, rows at a multiple of 16 bytes.
            row_BK1: Row of each request and draft count, i64; beyond a request's drafts, its last row.
            draft_ids_BK: i64, -1 beyond a request's drafts.
            key_T: Noise keys of the rows, i64; None where all rows are greedy.
            greedy_T: Rows that take the argmax, bool; None where, by `key_T`, all or none do.
            out: Receives the result, contiguous.

        Returns:
            `out`.

        Raises:
            ValueError: A tensor has another shape or dtype.
        """
        num_requests = len(row_BK1)
        if num_requests > len(self._finished):
            raise ValueError(f"at most {len(self._finished)} requests, got {num_requests}")
        device = self._finished.device
        check_logits(logits_TV, self._dtype, vocab_size=self._vocab_size, device=device)
        check_chains(row_BK1, draft_ids_BK, out, num_rows=self._num_rows, device=device)
        for name, tensor, dtype in (("key_T", key_T, torch.int64), ("greedy_T", greedy_T, torch.bool)):
            if tensor is not None:
                check_tensor(name, tensor, dtype, (len(logits_TV),), device=device)
        if num_requests:
            macros = chain_accept_macros(
                vocab_size=self._vocab_size, num_rows=self._num_rows, dtype=self._dtype, noise=key_T is not None
            )
            tile = CHUNK_IDS * _SIZES[self._dtype, key_T is not None][0]
            cuda_kernel("chain_accept.cu", "chain_accept", macros=macros, starts_early=True)(
                (-(-self._vocab_size // tile), num_requests, 1),
                THREADS,
                logits_TV,
                row_BK1,
                draft_ids_BK,
                0 if key_T is None else key_T,
                0 if greedy_T is None else greedy_T,
                self._best_order,
                self._best_id,
                self._finished,
                *out,
                logits_TV.stride(0),
            )
        return out


def check_logits(logits_TV: torch.Tensor, dtype: torch.dtype, *, vocab_size: int, device: torch.device) -> None:
    """Raise a ValueError unless these are logits as `logit_scores.cuh` reads them: rows may lie apart."""
    row_bytes = logits_TV.stride(0) * logits_TV.element_size()
    if logits_TV.stride(1) != 1 or (vocab_size % 8 == 0 and (row_bytes | logits_TV.data_ptr()) % 16):
        raise ValueError(f"rows of logits must lie at multiples of 16 bytes, got strides {logits_TV.stride()}")
    if logits_TV.dtype != dtype or logits_TV.shape[1:] != (vocab_size,):
        raise ValueError(f"logits_TV must be {dtype} [T, {vocab_size}], got {logits_TV.dtype} {tuple(logits_TV.shape)}")
    if logits_TV.device != device:
        raise ValueError(f"logits_TV must be on {device}, got {logits_TV.device}")


def check_chains(
    row_BK1: torch.Tensor, draft_ids_BK: torch.Tensor, out: ChainResult, *, num_rows: int, device: torch.device
) -> None:
    """Raise a ValueError unless these name the rows and drafts of requests, `num_rows` of each, and take a result."""
    num_requests = len(row_BK1)
    for name, tensor, dtype, shape in (
        ("row_BK1", row_BK1, torch.int64, (num_requests, num_rows)),
        ("draft_ids_BK", draft_ids_BK, torch.int64, (num_requests, num_rows - 1)),
        ("out.token_ids_BK1", out.token_ids_BK1, torch.int64, (num_requests, num_rows)),
        ("out.num_accepted_B", out.num_accepted_B, torch.int64, (num_requests,)),
        ("out.drawable_B", out.drawable_B, torch.bool, (num_requests,)),
    ):
        check_tensor(name, tensor, dtype, shape, device=device)


def chain_accept_macros(*, vocab_size: int, num_rows: int, dtype: torch.dtype, noise: bool) -> Macros:
    """Give the constants that the kernel is compiled with."""
    num_chunks, num_blocks = _SIZES[dtype, noise]
    return (
        ("VOCAB", vocab_size),
        ("ROWS", num_rows),
        ("LOGITS_BF16", int(dtype is torch.bfloat16)),
        ("NOISE", int(noise)),
        ("CHUNKS", num_chunks),
        ("BLOCKS", num_blocks),
    )
