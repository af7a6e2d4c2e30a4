"""Attention over the latent cache: of listed rows (sparse), or of all positions up to a row's own (dense).

    score_TAK = scale * query_TAX . kv_KX         kv_KX = rows of the pool that the query row sees (`latent_rows`)
    lse_TA    = logsumexp_K(score_TAK)
    out_TAL   = sum_K exp(score_TAK - lse_TA) * kv_KX[:L]

T = query rows, A = heads, K = keys of a row, X = 512 + 64 values of a cached row, L = its 512 latent ones, R = requests
of T / R rows each, P = pages of a request or of the pool, B = bytes of a page; in the kernel M = query lines
(a line is a head of a row) and S = slots of a tile. A query row without a key gives out = 0 and lse = -inf; NaN in a
row that is read gives NaN, in any other row it does nothing.

Queries are bfloat16 and e4m3 is exact in it, so products are exact; sums are float32. A softmax weight, times the scale
of its row's group in the packed format, is rounded to bfloat16: 2e-3 of float64. The keys of a row are split every
`keys_per_split`, taken tile by tile within a split, and the splits folded in order (`split_fold`), so the bits of a row
depend on its own keys, not on the batch nor on who computes what.

The lines of a request that see the same keys share a block of 64, the rows of a matrix instruction: 8 heads of 6 rows
read their keys once. Where some of them see less than others, values that are not finite are taken out, as a weight of
0 would not be enough.
Source: DeepSeek-V2, section 2.1 (latent attention, absorbed); Flash-Decoding (splits).
"""

import functools
import math
from typing import Any

import torch

from specdec.kernels.cuda_program import NUM_SMS
from specdec.kernels.latent_rows import (
    LATENT_DIM,
    PAGE_ROWS,
    ROPE_DIM,
    LatentFormat,
    check_latent_pool,
    latent_rows_ref,
)
from specdec.kernels.lse_merge import AttentionState
from specdec.kernels.split_fold import fold_splits
from specdec.kernels.tensor_check import check_tensor

HEAD_COUNTS = (8, 16, 32, 64)
LINES, WARPS = 64, 8  # of a block

# Slots of a tile, and tiles in shared memory: of FP8 rows the stored and the widened ones.
_TILES = {LatentFormat.BFLOAT16: (32, 3), LatentFormat.FP8: (64, 3), LatentFormat.FP8_PACKED: (32, 4)}
_MAX_BLOCKS = 8 * NUM_SMS  # from there on, blocks take several splits each


def sparse_attention_ref(
    query_TAX: torch.Tensor,
    pool_PB: torch.Tensor,
    index_TK: torch.Tensor,
    count_T: torch.Tensor,
    *,
    row_format: LatentFormat,
    scale: float,
    row_scale: float = 1.0,
) -> AttentionState:
    """Define `SparseAttention`: softmax over the keys of each row, in float64."""
    outs, lses = [], []
    for query_AX, index_K, count in zip(query_TAX.double(), index_TK, count_T.tolist(), strict=True):
        index_N = index_K[:count]
        key_NX = latent_rows_ref(pool_PB, index_N[index_N >= 0], row_format, row_scale=row_scale).double()
        score_AN = query_AX @ key_NX.T * scale
        outs.append(torch.softmax(score_AN, dim=-1) @ key_NX[:, :LATENT_DIM])
        lses.append(torch.logsumexp(score_AN, dim=-1))
    return AttentionState(torch.stack(outs), torch.stack(lses))


def dense_attention_ref(
    query_TAX: torch.Tensor,
    pool_PB: torch.Tensor,
    page_RP: torch.Tensor,
    position_T: torch.Tensor,
    *,
    row_format: LatentFormat,
    scale: float,
    row_scale: float = 1.0,
) -> AttentionState:
    """Define `DenseAttention`: `sparse_attention_ref` of the positions from 0 to each row's own."""
    num_rows, (num_requests, num_pages) = len(position_T), page_RP.shape
    slot_K = torch.arange(num_pages * PAGE_ROWS, device=page_RP.device)
    row_RK = page_RP.long()[:, slot_K // PAGE_ROWS] * PAGE_ROWS + slot_K % PAGE_ROWS
    index_TK = row_RK.repeat_interleave(num_rows // num_requests, dim=0)
    return sparse_attention_ref(
        query_TAX, pool_PB, index_TK, position_T + 1, row_format=row_format, scale=scale, row_scale=row_scale
    )


class _LatentAttention:
    """The kernel with its workspace: max rows * heads * splits * 2 KB, where there are several splits."""

    def __init__(
        self,
        *,
        row_format: LatentFormat,
        max_rows: int,
        num_heads: int,
        max_keys: int,
        split_keys: int,
        device: torch.device | str,
        out_dtype: torch.dtype,
    ) -> None:
        if num_heads not in HEAD_COUNTS or out_dtype not in {torch.float32, torch.bfloat16}:
            raise ValueError(
                f"num_heads must be one of {HEAD_COUNTS}, out float32 or bfloat16, got {num_heads} and {out_dtype}"
            )
        if not 1 <= max_rows < 1 << 16 or max_keys < 1:  # the largest grid
            raise ValueError(f"there are 1 to 65535 rows and at least one key, got {max_rows} and {max_keys}")
        self.row_format, self.max_rows, self.num_heads, self.out_dtype = row_format, max_rows, num_heads, out_dtype
        self._num_splits, self._split_keys = -(-max_keys // split_keys), split_keys
        lines = max_rows * num_heads if self._num_splits > 1 else 0
        self._part = torch.empty(self._num_splits * lines * LATENT_DIM, device=device)
        self._top_sum = torch.empty(self._num_splits * lines * 2, device=device)

    def _state(
        self, query_TAX: torch.Tensor, out_TAL: torch.Tensor | None, lse_TA: torch.Tensor | None
    ) -> AttentionState:
        """Give the tensors that a call writes: nothing is allocated where both are given."""
        rows = (len(query_TAX), self.num_heads)
        return AttentionState(
            query_TAX.new_empty(*rows, LATENT_DIM, dtype=self.out_dtype) if out_TAL is None else out_TAL,
            query_TAX.new_empty(rows, dtype=torch.float32) if lse_TA is None else lse_TA,
        )

    def _run(
        self,
        query_TAX: torch.Tensor,
        pool_PB: torch.Tensor,
        list_GK: torch.Tensor,
        length_T: torch.Tensor,
        state: AttentionState,
        *,
        is_paged: bool,
        scale: float,
        row_scale: float,
    ) -> None:
        """Check what both kinds have, and launch; G = rows with a list, or requests with pages."""
        num_rows, num_groups = len(query_TAX), len(list_GK)
        rows, device = (num_rows, self.num_heads), self._part.device
        if num_rows > self.max_rows:
            raise ValueError(f"the workspace is for {self.max_rows} query rows, got {num_rows}")
        check_latent_pool(pool_PB, self.row_format, device)
        for name, tensor, shape, dtype in (
            ("query", query_TAX, (*rows, LATENT_DIM + ROPE_DIM), torch.bfloat16),
            ("position" if is_paged else "count", length_T, (num_rows,), torch.int32),
            ("out", state.out_TAL, (*rows, LATENT_DIM), self.out_dtype),
            ("lse", state.lse_TA, rows, torch.float32),
        ):
            check_tensor(name, tensor, dtype, shape, device=device)
        if not num_rows:
            return
        num_lines = num_rows // num_groups * self.num_heads
        line_blocks = -(-num_lines // LINES)
        split_blocks = min(self._num_splits, max(1, _MAX_BLOCKS // (line_blocks * num_groups)))
        is_split = self._num_splits > 1
        latent_attention_kernel()[line_blocks, split_blocks, num_groups](
            query_TAX, pool_PB, list_GK, length_T,
            *((None, None, self._part, self._top_sum) if is_split else (*state, None, None)),
            num_lines, list_GK.stride(0), pool_PB.stride(0), scale * row_scale * math.log2(math.e), row_scale,
            **kernel_constants(self.row_format, self.num_heads, self._split_keys, is_paged=is_paged),
            ON_GPU=query_TAX.is_cuda, launch_pdl=query_TAX.is_cuda, num_warps=WARPS,
        )  # fmt: skip
        if is_split:
            shape = (self._num_splits, *rows)
            fold_splits(
                self._part[: math.prod(shape) * LATENT_DIM].view(*shape, LATENT_DIM),
                self._top_sum[: math.prod(shape) * 2].view(*shape, 2),
                length_T,
                state,
                split_keys=self._split_keys,
                length_offset=int(is_paged),
                factor=row_scale,
            )


class SparseAttention(_LatentAttention):
    """Attends to listed rows of bfloat16 or plain FP8, for one device; calls must follow each other on one stream.

    `PackedSparseMla` is the same for packed rows.

    Args:
        row_format: Of the pool.
        max_rows: Most query rows of a call.
        num_heads: A: 8, 16, 32 or 64.
        num_slots: K, the capacity of a row's list.
        device: A Hopper GPU.
        out_dtype: float32 or bfloat16.
        index_dtype: int64 or int32.

    Raises:
        ValueError: A size, dtype or format that the kernel does not have.
    """

    def __init__(
        self,
        *,
        row_format: LatentFormat,
        max_rows: int,
        num_heads: int,
        num_slots: int,
        device: torch.device | str,
        out_dtype: torch.dtype = torch.float32,
        index_dtype: torch.dtype = torch.int64,
    ) -> None:
        if row_format is LatentFormat.FP8_PACKED:
            raise ValueError("listed rows of the packed format are attended to by PackedSparseMla")
        if index_dtype not in {torch.int64, torch.int32}:
            raise ValueError(f"an index is int64 or int32, got {index_dtype}")
        super().__init__(
            row_format=row_format,
            max_rows=max_rows,
            num_heads=num_heads,
            max_keys=num_slots,
            split_keys=keys_per_split(num_heads, is_paged=False),
            device=device,
            out_dtype=out_dtype,
        )
        self.num_slots, self.index_dtype = num_slots, index_dtype

    def __call__(
        self,
        query_TAX: torch.Tensor,
        pool_PB: torch.Tensor,
        index_TK: torch.Tensor,
        count_T: torch.Tensor,
        *,
        scale: float,
        row_scale: float = 1.0,
        out_TAL: torch.Tensor | None = None,
        lse_TA: torch.Tensor | None = None,
    ) -> AttentionState:
        """Attend with every head of a row to the row's slots, asynchronously on the current stream.

        Args:
            query_TAX: Absorbed queries (latent part, then rope part), bfloat16 [T, A, 576].
            pool_PB: Pages of one layer, u8 [P, 64 * row bytes]; the pages themselves may lie apart by a multiple of 16
                bytes.
            index_TK: Row of the pool of each slot, [T, K]; negative: no key. Below 2^31, and inside of the pool.
            count_T: Slots of the list that are read, i32 [T], 0..K.
            scale: Factor on the scores.
            row_scale: Factor on the cached values: of a layer's FP8 rows.
            out_TAL: Where the output goes, else a new tensor.
            lse_TA: Where the LSE goes, float32 [T, A], else a new tensor.

        Raises:
            ValueError: A tensor has another shape, dtype or layout.
        """
        check_tensor("index", index_TK, self.index_dtype, (len(query_TAX), self.num_slots), device=self._part.device)
        state = self._state(query_TAX, out_TAL, lse_TA)
        self._run(query_TAX, pool_PB, index_TK, count_T, state, is_paged=False, scale=scale, row_scale=row_scale)
        return state


class DenseAttention(_LatentAttention):
    """Attends to all positions up to a row's own, for one device; calls must follow each other on one stream.

    Args:
        row_format: Of the pool.
        max_rows: Most query rows of a call.
        max_positions: Most positions of a request.
        num_heads: A: 8, 16, 32 or 64.
        device: A Hopper GPU.
        out_dtype: float32 or bfloat16.

    Raises:
        ValueError: A size or dtype that the kernel does not have.
    """

    def __init__(
        self,
        *,
        row_format: LatentFormat,
        max_rows: int,
        max_positions: int,
        num_heads: int,
        device: torch.device | str,
        out_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            row_format=row_format,
            max_rows=max_rows,
            num_heads=num_heads,
            max_keys=max_positions,
            split_keys=keys_per_split(num_heads, is_paged=True),
            device=device,
            out_dtype=out_dtype,
        )
        self.max_positions = max_positions

    def __call__(
        self,
        query_TAX: torch.Tensor,
        pool_PB: torch.Tensor,
        page_RP: torch.Tensor,
        position_T: torch.Tensor,
        *,
        scale: float,
        row_scale: float = 1.0,
        out_TAL: torch.Tensor | None = None,
        lse_TA: torch.Tensor | None = None,
    ) -> AttentionState:
        """Attend with every head of a row to its request's positions, asynchronously on the current stream.

        Args:
            query_TAX: Absorbed queries (latent part, then rope part), bfloat16 [T, A, 576]; each request has the same
                number of rows, which stand together.
            pool_PB: Pages of one layer, u8 [P, 64 * row bytes]; the pages themselves may lie apart by a multiple of 16
                bytes.
            page_RP: Pages of each request, i32 [R, P], valid up to the page of its rows' last position; requests may
                lie apart.
            position_T: The last position that a row sees, i32 [T], below `max_positions`; -1 for none.
            scale: Factor on the scores.
            row_scale: Factor on the cached values: of a layer's FP8 rows.
            out_TAL: Where the output goes, else a new tensor.
            lse_TA: Where the LSE goes, float32 [T, A], else a new tensor.

        Raises:
            ValueError: A tensor has another shape, dtype or layout.
        """
        if page_RP.dtype != torch.int32 or page_RP.dim() != 2 or page_RP.stride(1) != 1:
            raise ValueError(f"pages must be int32 [R, P], got {page_RP.dtype} {tuple(page_RP.shape)}")
        if page_RP.device != self._part.device:
            raise ValueError(f"pages must be on {self._part.device}, got {page_RP.device}")
        if len(query_TAX) % max(len(page_RP), 1):
            raise ValueError(
                f"each request has the same number of rows, got {len(query_TAX)} rows of {len(page_RP)} requests"
            )
        state = self._state(query_TAX, out_TAL, lse_TA)
        self._run(query_TAX, pool_PB, page_RP, position_T, state, is_paged=True, scale=scale, row_scale=row_scale)
        return state


def keys_per_split(num_heads: int, *, is_paged: bool) -> int:
    """Keys after which the softmax of a row begins anew; part of what the bits of a result are.

    Short splits spread few rows over the GPU; what they leave to be folded is 2 KB a head, beside 0.6 to 1.2 KB a key.
    """
    if num_heads == 64:
        return 1024
    return 256 if num_heads == 8 and not is_paged else 512


def kernel_constants(row_format: LatentFormat, num_heads: int, split_keys: int, *, is_paged: bool) -> dict[str, Any]:
    """Give what the kernel is compiled with."""
    slots, stages = _TILES[row_format]
    return {
        "ROW_BYTES": row_format.row_bytes,
        "IS_BF16": row_format is LatentFormat.BFLOAT16,
        "IS_PACKED": row_format is LatentFormat.FP8_PACKED,
        "GROUPS": 4 if row_format is LatentFormat.FP8_PACKED else 2,
        "IS_PAGED": is_paged,
        "HEADS": num_heads,
        "SPLIT": split_keys,
        "LINES": LINES,
        "SLOTS": slots,
        "STAGES": stages,
    }


@functools.cache
def latent_attention_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    from specdec.kernels.latent_attention_tiles import latent_attention_tiles  # noqa: PLC0415

    return latent_attention_tiles
