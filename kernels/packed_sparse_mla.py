"""Sparse multi-head latent attention of decode, over cached rows that stay packed FP8.

    kv_KX     = decode_fp8_packed(row index_TK of the pool)      of the first count_T slots of a query row
    score_TAK = scale * query_TAX . kv_KX
    lse_TA    = logsumexp_K(score_TAK)
    out_TAL   = sum_K exp(score_TAK - lse_TA) * kv_KX[:L]

T = query rows, A = heads, K = slots of a row, X = L + R = 512 + 64 values of a cached row, L = latent values,
P = pages, B = bytes of a page. A row of the pool has 656 bytes (`latent_formats`): 512 e4m3, 4 float32 scales,
64 bfloat16; row i is row i % 64 of page i // 64. A slot whose index is negative holds no key, wherever it stands in the
list. A query row without a key gives out = 0 and lse = -inf; NaN in a row that is read gives NaN.

Products are exact (a query times a power of two and e4m3 both fit fp16), sums are float32. A softmax weight times the
scale of its row, divided by the largest such scale so far, is rounded to fp16: 2e-4 of float64, while a row whose scale
is below 2^-14 of the largest one loses digits. The slots of a row are split every 256 (512 from 16 heads on) and the
splits folded in order, so the bits of a row depend on its own slots, not on the batch nor on who computes what. Three
kernels give the same bits: one for up to 16 rows, which works on the tiles of a split at once; one for more; and one
for many rows of 32 and 64 heads, as a rank of a dcp group has them, which copies a cached row once for all its heads.
Source: DeepSeek-V2, section 2.1 (latent attention, absorbed); Flash-Decoding (splits).
"""

from enum import IntEnum
from typing import NamedTuple

import torch

from specdec.kernels.cuda_program import NUM_SMS, Macros, cuda_kernel
from specdec.kernels.latent_attention import HEAD_COUNTS, sparse_attention_ref
from specdec.kernels.latent_rows import LATENT_DIM, PAGE_ROWS, ROPE_DIM, LatentFormat, check_latent_pool
from specdec.kernels.lse_merge import AttentionState
from specdec.kernels.tensor_check import check_tensor

ROW_BYTES = LatentFormat.FP8_PACKED.row_bytes

_ALIGNMENT = 16  # bytes that the kernel moves at once
_TILE_SLOTS = 64
_STEPS = (LATENT_DIM + ROPE_DIM) // 16  # matrix steps of a score
_TEAM_THREADS = 128
_SPLIT_THREADS = 512  # that take a split at once, in rounds of 4 tiles
_ROUND_TILES = 4
_FEW_ROWS = 16
_MOST_ROWS = {32: 128, 64: 64}  # by heads: beyond, the kernel with 32 heads a team was faster on an H200
_TEAM_HEADS = 32  # that 4 warps multiply at once in the kernel for many heads
_PIECE_SLOTS = 16  # that it copies at once
_MAX_PARTS = 64  # of one row: the sums of its 8 heads meet where 4 KB of softmax weights were


class WrittenLast(IntEnum):
    """What the kernel directly in front on the stream may write of what a call reads.

    A call starts while that kernel runs, and reads what is older before it has ended. It is older only if that kernel
    itself waits for those in front of it before it lets this one start (`griddepcontrol.wait`, then
    `launch_dependents`), or is an ordinary launch; and if it writes none of it, nor any of the same memory. Kernels
    behind the call may write what they like: theirs wait for the call's end.
    """

    ANYTHING = 0
    """Nothing is read before that kernel has ended."""
    QUERIES = 1
    """Only queries: index lists, counts and cached rows were written by earlier kernels; copies of rows start early."""


class Blocks(NamedTuple):
    """How the kernel for more than a few rows is cut into blocks: its speed depends on it, its bits do not.

    Attributes:
        teams: Groups of 4 warps that share the rows of a block.
        tiles: Times 8 heads of a team.
        stages: Tiles of 64 rows in shared memory.
        per_sm: Blocks that an SM holds.
    """

    teams: int
    tiles: int
    stages: int
    per_sm: int

    @property
    def heads(self) -> int:
        """Heads of a block."""
        return 8 * self.teams * self.tiles


class _Launch(NamedTuple):
    """One of the kernels: its name and its file's, what it is compiled with, its shared bytes, blocks and threads."""

    name: str
    macros: Macros
    shared_bytes: int
    num_blocks: int
    num_threads: int


def packed_sparse_mla_ref(
    query_TAX: torch.Tensor, pool_PB: torch.Tensor, index_TK: torch.Tensor, count_T: torch.Tensor, *, scale: float
) -> AttentionState:
    """Define `PackedSparseMla`: `sparse_attention_ref` of packed rows."""
    return sparse_attention_ref(query_TAX, pool_PB, index_TK, count_T, row_format=LatentFormat.FP8_PACKED, scale=scale)


class PackedSparseMla:
    """The kernel with its workspace, for one device; calls must follow each other on one stream.

    Args:
        max_rows: Most query rows of a call.
        num_heads: A: 8, 16, 32 or 64.
        num_slots: K, the capacity of a row's list.
        device: A Hopper GPU.
        out_dtype: float32 or bfloat16.
        index_dtype: int64 or int32.
        blocks: Only to compare: else chosen by the number of heads.
        few_rows: Only to compare: up to so many rows a block takes a whole split at once. Bits do not depend on it.
        most_rows: Only to compare, with 32 or 64 heads: beyond so many rows a team takes 32 heads.

    Raises:
        ValueError: A size or dtype that the kernel does not have.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        num_heads: int,
        num_slots: int,
        device: torch.device | str,
        out_dtype: torch.dtype = torch.float32,
        index_dtype: torch.dtype = torch.int64,
        blocks: Blocks | None = None,
        few_rows: int = _FEW_ROWS,
        most_rows: int | None = None,
    ) -> None:
        if num_heads not in HEAD_COUNTS or (blocks is not None and num_heads % blocks.heads):
            raise ValueError(f"num_heads must be one of {HEAD_COUNTS} and whole blocks, got {num_heads} and {blocks}")
        if out_dtype not in {torch.float32, torch.bfloat16} or index_dtype not in {torch.int64, torch.int32}:
            raise ValueError(f"out is float32 or bfloat16, an index int64 or int32, got {out_dtype} and {index_dtype}")
        num_splits = -(-num_slots // slots_per_split(num_heads))
        if max_rows < 1 or not 1 <= num_splits <= _MAX_PARTS:
            raise ValueError(f"there are rows and 1 to {_MAX_PARTS} splits, got {max_rows} and {num_slots} slots")
        self.num_heads, self.num_slots, self.out_dtype, self.index_dtype = num_heads, num_slots, out_dtype, index_dtype
        self.max_rows = max_rows
        self._blocks, self._few_rows = blocks or blocks_for(num_heads), few_rows
        self._most_rows = _MOST_ROWS.get(num_heads, max_rows) if most_rows is None else most_rows
        self._num_splits = num_splits
        parts = num_splits * max_rows * num_heads if num_splits > 1 else 0
        self._part = torch.empty(parts, LATENT_DIM, device=device)
        self._part_sum = torch.empty(parts, 2, device=device)
        self._ended = torch.zeros(max_rows * num_heads // 8, dtype=torch.int32, device=device)

    def __call__(
        self,
        query_TAX: torch.Tensor,
        pool_PB: torch.Tensor,
        index_TK: torch.Tensor,
        count_T: torch.Tensor,
        *,
        scale: float,
        written_last: WrittenLast = WrittenLast.ANYTHING,
        out_TAL: torch.Tensor | None = None,
        lse_TA: torch.Tensor | None = None,
    ) -> AttentionState:
        """Attend with every head of a row to the row's slots, asynchronously on the current stream.

        Args:
            query_TAX: Absorbed queries (latent part, then rope part), bfloat16 [T, A, 576], at a multiple of 16 bytes.
            pool_PB: Pages of one layer, u8 [P, 64 * 656]; the pages themselves may lie apart by a multiple of 16 bytes.
            index_TK: Row of the pool of each slot, [T, K]; negative: no key. Below 2^31, and inside of the pool.
            count_T: Slots of the list that are read, i32 [T], 0..K.
            scale: Factor on the scores.
            written_last: What the kernel in front may write; the result is the same where this is true.
            out_TAL: Where the output goes, at a multiple of 16 bytes, else a new tensor.
            lse_TA: Where the LSE goes, float32 [T, A], else a new tensor.

        Raises:
            ValueError: A tensor has another shape, dtype or layout.
        """
        num_rows = len(query_TAX)
        if out_TAL is None:
            out_TAL = query_TAX.new_empty(num_rows, self.num_heads, LATENT_DIM, dtype=self.out_dtype)
        if lse_TA is None:
            lse_TA = query_TAX.new_empty(num_rows, self.num_heads, dtype=torch.float32)
        check_latent_pool(pool_PB, LatentFormat.FP8_PACKED, self._ended.device)
        self._check_rows(query_TAX, index_TK, count_T, AttentionState(out_TAL, lse_TA))
        if num_rows:
            launch = self._launch(num_rows, written_last)
            kernel = cuda_kernel(
                f"{launch.name}.cu",
                launch.name,
                macros=launch.macros,
                shared_bytes=launch.shared_bytes,
                starts_early=True,
            )
            tensors = (query_TAX, pool_PB, index_TK, count_T, out_TAL, lse_TA, self._part, self._part_sum, self._ended)
            numbers = (num_rows, self.num_slots, pool_PB.stride(0), float(scale))
            kernel((launch.num_blocks, 1, 1), launch.num_threads, *tensors, *numbers)
        return AttentionState(out_TAL, lse_TA)

    def _launch(self, num_rows: int, written_last: WrittenLast) -> _Launch:
        sizes = (self.num_heads, self.index_dtype.itemsize, self.out_dtype.itemsize, written_last)
        num_items = num_rows * self._num_splits
        if num_rows <= self._few_rows:
            num_blocks = min(NUM_SMS, num_items * (self.num_heads // 8))
            return _Launch("packed_sparse_mla_split", *split_kernel_macros(*sizes), num_blocks, _SPLIT_THREADS)
        if num_rows > self._most_rows:
            num_teams = self.num_heads // _TEAM_HEADS
            num_blocks = min(NUM_SMS * _blocks_of_teams(num_teams), num_items)
            num_threads = _TEAM_THREADS * (num_teams + 1)  # one group copies rows
            return _Launch("packed_sparse_mla_teams", *teams_kernel_macros(*sizes), num_blocks, num_threads)
        num_blocks, num_threads = NUM_SMS * self._blocks.per_sm, _TEAM_THREADS * self._blocks.teams
        return _Launch("packed_sparse_mla", *kernel_macros(*sizes, self._blocks), num_blocks, num_threads)

    def _check_rows(
        self, query_TAX: torch.Tensor, index_TK: torch.Tensor, count_T: torch.Tensor, state: AttentionState
    ) -> None:
        num_rows, heads = len(query_TAX), self.num_heads
        if num_rows > self.max_rows:
            raise ValueError(f"the workspace is for {self.max_rows} query rows, got {num_rows}")
        for name, tensor, shape, dtype, alignment in (
            ("query", query_TAX, (num_rows, heads, LATENT_DIM + ROPE_DIM), torch.bfloat16, _ALIGNMENT),
            ("index", index_TK, (num_rows, self.num_slots), self.index_dtype, 1),
            ("count", count_T, (num_rows,), torch.int32, 1),
            ("out", state.out_TAL, (num_rows, heads, LATENT_DIM), self.out_dtype, _ALIGNMENT),
            ("lse", state.lse_TA, (num_rows, heads), torch.float32, 1),
        ):
            check_tensor(name, tensor, dtype, shape, device=self._ended.device, alignment=alignment)


def slots_per_split(num_heads: int) -> int:
    """Slots after which the softmax of a row begins anew; part of what the bits of a result are."""
    return 256 if num_heads == 8 else 512


def blocks_for(num_heads: int) -> Blocks:
    """Choose the blocks that were the fastest on an H200 at 96 and 192 query rows."""
    return Blocks(teams=1, tiles=1 if num_heads == 8 else 2, stages=2, per_sm=2)


def kernel_macros(
    num_heads: int, index_bytes: int, out_bytes: int, written_last: WrittenLast, blocks: Blocks
) -> tuple[Macros, int]:
    """Give what the kernel is compiled with, and the bytes of shared memory of a block (`Shared` in the .cu file)."""
    teams, tiles, stages, per_sm = blocks
    fragments = (4 * 4 * tiles + (1 if tiles == 1 else _STEPS * tiles)) * 32 * 8  # softmax weights, query
    numbers = 4 * (8 * tiles * 9 + 16)
    shared_bytes = stages * (_TILE_SLOTS * ROW_BYTES + 8) + teams * (fragments + numbers) + 8
    own = (("TEAMS", teams), ("TILES", tiles), ("STAGES", stages), ("PER_SM", per_sm))
    return (*own, *_common_macros(num_heads, index_bytes, out_bytes, written_last, shared_bytes)), shared_bytes


def split_kernel_macros(
    num_heads: int, index_bytes: int, out_bytes: int, written_last: WrittenLast
) -> tuple[Macros, int]:
    """Give the same of the kernel for few rows."""
    tiles = _ROUND_TILES
    fragments = (tiles * 4 * 4 + _STEPS + 4 * tiles) * 32 * 8  # softmax weights, query, what is added to their sums
    numbers = 4 * ((8 + 8 + 4) * 20 + 4 * 8)
    shared_bytes = tiles * (_TILE_SLOTS * ROW_BYTES + 8) + fragments + numbers + 8
    return _common_macros(num_heads, index_bytes, out_bytes, written_last, shared_bytes), shared_bytes


def teams_kernel_macros(
    num_heads: int, index_bytes: int, out_bytes: int, written_last: WrittenLast
) -> tuple[Macros, int]:
    """Give the same of the kernel for many rows of 32 or 64 heads."""
    num_teams = num_heads // _TEAM_HEADS
    pieces, per_sm = 11 if num_teams == 2 else 5, _blocks_of_teams(num_teams)  # as much as shared memory holds
    fragments = (4 * _TILE_SLOTS + LATENT_DIM + ROPE_DIM) * _TEAM_HEADS * 2  # softmax weights, query
    numbers = 4 * (_TEAM_HEADS * 11 + 16)
    shared_bytes = pieces * (_PIECE_SLOTS * ROW_BYTES + 2 * 8 + 4) + num_teams * (fragments + numbers + 4)
    shared_bytes += -shared_bytes % _ALIGNMENT
    macros = _common_macros(num_heads, index_bytes, out_bytes, written_last, shared_bytes)
    return (("PIECES", pieces), ("PER_SM", per_sm), *macros), shared_bytes


def _blocks_of_teams(num_teams: int) -> int:
    """Blocks of the kernel for many heads that an SM holds: two teams in any case."""
    return 2 // num_teams


def _common_macros(
    num_heads: int, index_bytes: int, out_bytes: int, written_last: WrittenLast, shared_bytes: int
) -> Macros:
    return (
        ("HEADS", num_heads),
        ("SPLIT", slots_per_split(num_heads)),
        ("PAGE_ROWS", PAGE_ROWS),
        ("INDEX_BYTES", index_bytes),
        ("OUT_BYTES", out_bytes),
        ("WRITTEN_LAST", int(written_last)),
        ("SHARED_BYTES", shared_bytes),
    )
