"""Pick the best token of each row from the logits of a vocabulary slice, without writing the logits.

    logit_TV = sum_I x_TI * weight_VI           block-FP8 weights times their scale; sums are float32
    value_T, id_T = max_V(logit_TV), the lowest id that has it

T = rows, V = vocabulary ids of the slice, I = features, J = ceil(V / 64), B = blocks of 128 features.
The order is total: zeros of both signs are equal, NaN is above infinity and the first NaN wins (as in torch.argmax); so
slices merge by (value, lower id) into the choice of the whole vocabulary. Logits are compared in float32, unrounded. A
row's bits are the same alone and among 32.

Source: the fused output layer of greedy decoding; block-FP8 weights as in `block_fp8_linear`.
"""

from typing import NamedTuple

import torch

from specdec.kernels.block_fp8_linear import ALIGNMENT, block_fp8_linear_ref, check_block_fp8
from specdec.kernels.cuda_program import NUM_SMS, CudaKernel, Macros, cuda_kernel
from specdec.kernels.tensor_check import check_tensor

_MOST_ROWS = 160  # of the weight, of a block of threads: 10 tiles of 16
_PARTS = 2  # warps that share a tile
_TOKENS = (8, 16, 32)


class TopToken(NamedTuple):
    """The best token of each row.

    Attributes:
        value_T: Its logit, float32.
        id_T: Its id, int64.
        is_finite_T: Whether the logit is finite, bool.
    """

    value_T: torch.Tensor
    id_T: torch.Tensor
    is_finite_T: torch.Tensor


def lm_head_pick_ref(
    x_TI: torch.Tensor, weight_VI: torch.Tensor, scale_JB: torch.Tensor | None = None, *, first_id: int = 0
) -> TopToken:
    """Define `LmHeadPick` in float64."""
    logit_TV = x_TI.double() @ weight_VI.double().T
    if scale_JB is not None:
        logit_TV = block_fp8_linear_ref(x_TI, weight_VI, scale_JB)
    id_T = logit_TV.argmax(dim=-1)
    value_T = logit_TV.gather(1, id_T[:, None])[:, 0].float()
    return TopToken(value_T, id_T + first_id, value_T.isfinite())


class LmHeadPick:
    """The output layer of a vocabulary slice on a GPU.

    Weights are fetched while the kernel before still runs, so they must have been written before that kernel began.
    Calls of one object use one workspace and must follow each other on a stream.

    Args:
        weight_VI: bfloat16, or float8_e4m3fn with scales; [V, I], contiguous, at a multiple of 16 bytes; I a
            multiple of 512.
        scale_JB: Scales of block-FP8 weights as of `concatenated_scales`, float32 [ceil(V / 64), I / 128].
        first_id: Id of the first row of the weight.

    Raises:
        ValueError: A tensor has another shape, dtype or layout.
    """

    def __init__(self, weight_VI: torch.Tensor, scale_JB: torch.Tensor | None = None, *, first_id: int = 0) -> None:
        num_ids, num_in = weight_VI.shape
        if scale_JB is not None:
            check_block_fp8(weight_VI, scale_JB)
        elif not num_ids or num_in % 512:
            raise ValueError(f"weight must be [V >= 1, multiple of 512], got {tuple(weight_VI.shape)}")
        else:
            check_tensor("weight without scales", weight_VI, torch.bfloat16, (num_ids, num_in), alignment=ALIGNMENT)
        self.weight_VI, self.first_id = weight_VI, first_id
        self._is_fp8 = scale_JB is not None
        self._scale = weight_VI if scale_JB is None else scale_JB  # not read for bfloat16
        self._rows = block_rows(num_ids)
        self._num_blocks = -(-num_ids // self._rows)
        device = weight_VI.device
        self._best = torch.empty(self._num_blocks * _TOKENS[-1], dtype=torch.int64, device=device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, x_TI: torch.Tensor, *, logits_TV: torch.Tensor | None = None) -> TopToken:
        """Pick, on the current stream.

        Args:
            x_TI: bfloat16 [T, I], contiguous, at a multiple of 16 bytes, T of 0..32.
            logits_TV: Receives the logits, float32 [T, V], contiguous; None leaves them out.

        Raises:
            ValueError: A tensor has another shape, dtype, place or device, or there are too many rows.
        """
        num_rows, (num_ids, num_in), device = len(x_TI), self.weight_VI.shape, self.weight_VI.device
        check_tensor("x", x_TI, torch.bfloat16, (num_rows, num_in), device=device, alignment=ALIGNMENT)
        if num_rows > _TOKENS[-1]:
            raise ValueError(f"x must have at most {_TOKENS[-1]} rows, got {num_rows}")
        if logits_TV is not None:
            check_tensor("logits", logits_TV, torch.float32, (num_rows, num_ids), device=device)
        top = TopToken(
            *(torch.empty(num_rows, dtype=dtype, device=device) for dtype in (torch.float32, torch.int64, torch.bool))
        )
        if num_rows:
            self._kernel(num_rows, logits=logits_TV is not None)(
                (self._num_blocks, 1, 1),
                -(-self._rows // 16) * _PARTS * 32,
                self.weight_VI,
                self._scale,
                x_TI,
                self._best if logits_TV is None else logits_TV,  # not written without logits
                self._best,
                self._arrived,
                *top,
                num_ids,
                num_rows,
                self.first_id,
            )
        return top

    def _kernel(self, num_rows: int, *, logits: bool) -> CudaKernel:
        tokens = next(tokens for tokens in _TOKENS if num_rows <= tokens)
        num_ids, num_in = self.weight_VI.shape
        return cuda_kernel(
            "lm_head_pick.cu",
            "lm_head_pick",
            macros=pick_macros(num_ids, num_in, tokens, is_fp8=self._is_fp8, logits=logits),
            shared_bytes=pick_shared_bytes(self._rows, tokens, is_fp8=self._is_fp8),
            starts_early=True,
        )


def block_rows(num_ids: int) -> int:
    """Rows of the weight of a block of threads: equal shares of as few rounds over the multiprocessors as can be."""
    rounds = -(-num_ids // (NUM_SMS * _MOST_ROWS))
    return -(-num_ids // (NUM_SMS * rounds))


def chunk_columns(tokens: int, *, is_fp8: bool) -> int:
    """Columns of x between two barriers; as measured."""
    return 512 if tokens == 8 or (tokens == 16 and is_fp8) else 256


def ring_slots(tokens: int) -> int:
    """Slots of 2 KB in the ring of a warp; as measured: what is left of the memory caches x."""
    return 3 if tokens == 32 else 4


def pick_shared_bytes(rows: int, tokens: int, *, is_fp8: bool) -> int:
    """Dynamic shared memory of a block of threads: the rings of its warps, and two chunks of x."""
    rings = -(-rows // 16) * _PARTS * ring_slots(tokens) * 2048
    return rings + 2 * tokens * (2 * chunk_columns(tokens, is_fp8=is_fp8) + 64)


def pick_macros(num_ids: int, num_in: int, tokens: int, *, is_fp8: bool, logits: bool) -> Macros:
    """Give the constants that `lm_head_pick.cu` is compiled with."""
    return (
        ("K", num_in),
        ("ROWS", block_rows(num_ids)),
        ("TOKENS", tokens),
        ("FP8", int(is_fp8)),
        ("CHUNK", chunk_columns(tokens, is_fp8=is_fp8)),
        ("AHEAD", ring_slots(tokens)),
        ("LOGITS", int(logits)),
    )
