"""Multiply few rows by a block-FP8 weight, which is read once; activations stay bfloat16.

    sum_TOB = sum over the columns i of block B of  x_TI * q_OI          e4m3 is exact in bfloat16, sums are float32
    y_TO    = sum_G ( sum over the blocks B of group G of  scale_OB * sum_TOB )

T = rows, O = features out, I = features in, B = blocks of 128 columns, G = groups of 4 or 8 of them, J = ceil(O / 64).
The sums have one order: products in steps of 16 columns inside a block (the tensor core's), blocks inside a group,
groups. It depends on the shape of the weight alone, and all kernels keep it: a row's bits are the same alone and among
192. NaN and infinities in a row of x stay in that row.

Source: block-FP8 weights of DeepSeek-V3 (arXiv:2412.19437, section 3.3); unlike there, activations are not quantised.
"""

import functools
from collections.abc import Collection, Sequence

import torch

from specdec.kernels.block_fp8 import BLOCK_SIZE
from specdec.kernels.cuda_program import NUM_SMS, CudaKernel, Macros, cuda_kernel
from specdec.kernels.tensor_check import check_tensor

SCALE_ROWS = 64  # rows of the weight that share a row of scales here
ALIGNMENT = 16  # bytes that kernels move at once, of weights and of x

_SHARED_BYTES = 227 << 10  # of a block
_GEMV_WARPS = 16
_GEMV_TOKENS = (8, 16)
_GEMM_STAGES = {32: 4, 96: 4, 192: 2}  # of x in shared memory, by rows of x a block of threads
_GEMM_ROWS = 128


def concatenated_weights(weight_OI: Sequence[torch.Tensor]) -> torch.Tensor:
    """Give several float8_e4m3fn matrices or stacks of them, one below the other; torch itself joins no FP8 tensors."""
    return torch.cat([weight.view(torch.uint8) for weight in weight_OI]).view(torch.float8_e4m3fn)


def concatenated_scales(scale_inv_IJ: Sequence[torch.Tensor], num_rows: Sequence[int]) -> torch.Tensor:
    """Give one row of scales for each 64 rows of several block-FP8 matrices, one below the other: f32 [J, B].

    So matrices whose last block is short, such as the 576 rows of kv_a, may be followed by others.

    Args:
        scale_inv_IJ: Scales of each matrix, float32 [ceil(rows / 128), B].
        num_rows: Rows of each; of all but the last a multiple of 64.

    Raises:
        ValueError: A matrix has another number of rows of scales, or ends inside of 64 rows.
    """
    parts = []
    for number, (scale_IJ, rows) in enumerate(zip(scale_inv_IJ, num_rows, strict=True)):
        if len(scale_IJ) != -(-rows // BLOCK_SIZE) or scale_IJ.dtype != torch.float32:
            raise ValueError(f"{rows} rows need {-(-rows // BLOCK_SIZE)} rows of float32 scales, got {scale_IJ.shape}")
        if rows % SCALE_ROWS and number + 1 < len(num_rows):
            raise ValueError(f"a matrix above another must have a multiple of {SCALE_ROWS} rows, got {rows}")
        parts.append(scale_IJ.repeat_interleave(BLOCK_SIZE // SCALE_ROWS, dim=0)[: -(-rows // SCALE_ROWS)])
    return torch.cat(parts).contiguous()


def block_fp8_linear_ref(x_TI: torch.Tensor, weight_OI: torch.Tensor, scale_JB: torch.Tensor) -> torch.Tensor:
    """Define `BlockFp8Linear` in float64: f64 [T, O]."""
    scale_OI = scale_JB.double().repeat_interleave(SCALE_ROWS, 0).repeat_interleave(BLOCK_SIZE, 1)
    return x_TI.double() @ (weight_OI.double() * scale_OI[: len(weight_OI)]).T


class Workspace:
    """Memory that products of one stream use in turn; it grows while weights are made ready, never in a call.

    Attributes:
        memory: u8 [bytes].
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> None:
        """See that there are so many bytes; what was captured into a graph before still means the old ones."""
        if self.memory.numel() < num_bytes:
            self.memory = self.memory.new_empty(num_bytes)


class BlockFp8Linear:
    """A block-FP8 weight on a GPU, ready to be multiplied.

    Weights are fetched while the kernel before still runs, so they must have been written before that kernel began.
    Calls that use one workspace must follow each other on a stream.

    Args:
        weight_OI: float8_e4m3fn [O, I], contiguous, at a multiple of 16 bytes; I a multiple of 512.
        scale_JB: Its scales, as of `concatenated_scales`, float32 [ceil(O / 64), I / 128], contiguous.
        out_dtype: bfloat16 or float32.
        max_rows: Most rows of a call.
        workspace: Shared with other weights; None makes one.

    Raises:
        ValueError: A tensor has another shape, dtype or layout.
    """

    def __init__(
        self,
        weight_OI: torch.Tensor,
        scale_JB: torch.Tensor,
        *,
        out_dtype: torch.dtype = torch.bfloat16,
        max_rows: int = 192,
        workspace: Workspace | None = None,
    ) -> None:
        check_block_fp8(weight_OI, scale_JB)
        if out_dtype not in {torch.bfloat16, torch.float32}:
            raise ValueError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")
        self.weight_OI, self.scale_JB, self.out_dtype, self.max_rows = weight_OI, scale_JB, out_dtype, max_rows
        num_out, num_in = weight_OI.shape
        out_f32 = out_dtype is torch.float32
        self._gemv = {tokens: _Gemv(num_out, num_in, tokens, out_f32=out_f32) for tokens in _GEMV_TOKENS}
        self._gemm = {tokens: _Gemm(num_out, num_in, tokens, out_f32=out_f32) for tokens in _GEMM_STAGES}
        self._workspace = workspace or Workspace(weight_OI.device)
        if max_rows > _GEMV_TOKENS[-1]:
            self._workspace.reserve(max(gemm.workspace_bytes(max_rows) for gemm in self._gemm.values()))

    def __call__(self, x_TI: torch.Tensor, *, out_TO: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply, on the current stream: [T, O].

        Args:
            x_TI: bfloat16 [T, I], contiguous, at a multiple of 16 bytes, T of 0..max_rows.
            out_TO: Receives the result, contiguous; a new tensor where None.

        Raises:
            ValueError: A tensor has another shape, dtype, place or device, or there are too many rows.
        """
        num_rows, (num_out, num_in), device = len(x_TI), self.weight_OI.shape, self.weight_OI.device
        check_tensor("x", x_TI, torch.bfloat16, (num_rows, num_in), device=device, alignment=ALIGNMENT)
        if num_rows > self.max_rows:
            raise ValueError(f"x has {num_rows} rows, max_rows is {self.max_rows}")
        if out_TO is None:
            out_TO = torch.empty(num_rows, num_out, dtype=self.out_dtype, device=x_TI.device)
        check_tensor("out", out_TO, self.out_dtype, (num_rows, num_out), device=device)
        if not num_rows:
            return out_TO
        operands = self.weight_OI, self.scale_JB, x_TI
        if num_rows <= _GEMV_TOKENS[-1]:
            self._gemv[_least(_GEMV_TOKENS, num_rows)](*operands, out_TO)
        else:
            self._gemm[_least(_GEMM_STAGES, num_rows)](*operands, self._workspace.memory, out_TO)
        return out_TO


def group_blocks(num_out: int, num_in: int) -> int:
    """Blocks of columns of a group: 8 where these give work to most of the multiprocessors, else 4."""
    tiles = -(-num_out // _GEMM_ROWS)
    return 8 if num_in % 1024 == 0 and tiles * (num_in // 1024) >= 96 else 4


def gemv_rows(num_out: int, num_in: int, tokens: int) -> int:
    """Rows of the weight of a block of threads: a share for each multiprocessor, as far as its shared memory holds."""
    passes = 1
    while gemv_shared_bytes(rows := -(-num_out // (NUM_SMS * passes)), num_in, tokens) > _SHARED_BYTES or rows > 64:
        passes += 1
    return rows


def gemv_shared_bytes(rows: int, num_in: int, tokens: int) -> int:
    """Dynamic shared memory of a block of threads: its weights, and its sums for each block of columns."""
    blocks = num_in // BLOCK_SIZE
    own_blocks = -(-blocks // _GEMV_WARPS)
    sums = blocks * -(-rows // 16) * 16 * tokens * 4
    return _GEMV_WARPS * own_blocks * -(-rows // 4) * 4 * BLOCK_SIZE + sums + 8 * blocks


def gemm_shared_bytes(group: int, tokens: int) -> int:
    """Dynamic shared memory of a block of threads: all its weights, and stages of x."""
    return group * _GEMM_ROWS * BLOCK_SIZE + _GEMM_STAGES[tokens] * tokens * 2 * BLOCK_SIZE


def gemv_macros(num_out: int, num_in: int, tokens: int, *, out_f32: bool) -> Macros:
    """Give the constants that `block_fp8_gemv.cu` is compiled with."""
    rows, group = gemv_rows(num_out, num_in, tokens), group_blocks(num_out, num_in)
    return (
        ("K", num_in),
        ("ROWS", rows),
        ("WARPS", _GEMV_WARPS),
        ("TOKENS", tokens),
        ("GROUP", group),
        ("OUT_F32", int(out_f32)),
    )


def gemm_macros(num_out: int, num_in: int, tokens: int, *, out_f32: bool) -> Macros:
    """Give the constants that `block_fp8_gemm.cu` is compiled with."""
    group = group_blocks(num_out, num_in)
    return (
        ("K", num_in),
        ("TOKENS", tokens),
        ("GROUP", group),
        ("STAGES", _GEMM_STAGES[tokens]),
        ("OUT_F32", int(out_f32)),
    )


def check_block_fp8(weight_OI: torch.Tensor, scale_JB: torch.Tensor) -> None:
    """Raise a ValueError unless the tensors are a weight and its scales."""
    num_out, num_in = weight_OI.shape
    if not num_out or num_in % (4 * BLOCK_SIZE):
        raise ValueError(
            f"weight must be float8_e4m3fn [O >= 1, multiple of {4 * BLOCK_SIZE}], "
            f"got {weight_OI.dtype} {tuple(weight_OI.shape)}"
        )
    check_tensor("weight", weight_OI, torch.float8_e4m3fn, (num_out, num_in), alignment=ALIGNMENT)
    scale_shape = -(-num_out // SCALE_ROWS), num_in // BLOCK_SIZE
    check_tensor("scale", scale_JB, torch.float32, scale_shape, device=weight_OI.device)


def _least(tokens: Collection[int], num_rows: int) -> int:
    """Give the least of some numbers, in rising order, that holds so many rows, or the last."""
    return next((number for number in tokens if num_rows <= number), max(tokens))


class _Gemv:
    """Launches `block_fp8_gemv.cu` for up to `tokens` rows; compiled when first called."""

    def __init__(self, num_out: int, num_in: int, tokens: int, *, out_f32: bool) -> None:
        rows = gemv_rows(num_out, num_in, tokens)
        self._grid = -(-num_out // rows), 1, 1
        self._macros = gemv_macros(num_out, num_in, tokens, out_f32=out_f32)
        self._shared_bytes = gemv_shared_bytes(rows, num_in, tokens)

    @functools.cached_property
    def _kernel(self) -> CudaKernel:
        return cuda_kernel(
            "block_fp8_gemv.cu",
            "block_fp8_gemv",
            macros=self._macros,
            shared_bytes=self._shared_bytes,
            starts_early=True,
        )

    def __call__(
        self, weight_OI: torch.Tensor, scale_JB: torch.Tensor, x_TI: torch.Tensor, out_TO: torch.Tensor
    ) -> None:
        self._kernel(self._grid, _GEMV_WARPS * 32, weight_OI, scale_JB, x_TI, out_TO, len(weight_OI), len(x_TI))


class _Gemm:
    """Launches `block_fp8_gemm.cu` with `tokens` rows of x a block of threads; compiled when first called."""

    def __init__(self, num_out: int, num_in: int, tokens: int, *, out_f32: bool) -> None:
        self._tokens, self._blocks = tokens, num_in // BLOCK_SIZE
        self._tiles, self._group = -(-num_out // _GEMM_ROWS), group_blocks(num_out, num_in)
        self._macros = gemm_macros(num_out, num_in, tokens, out_f32=out_f32)

    def workspace_bytes(self, num_rows: int) -> int:
        """Bytes for x as the kernel wants it, and behind it for the sums of each group."""
        return self._arranged_bytes(num_rows) + 4 * self._blocks // self._group * self._tiles * _GEMM_ROWS * (
            self._padded(num_rows)
        )

    def __call__(
        self,
        weight_OI: torch.Tensor,
        scale_JB: torch.Tensor,
        x_TI: torch.Tensor,
        workspace: torch.Tensor,
        out_TO: torch.Tensor,
    ) -> None:
        arrange, multiply, add = self._kernels
        (num_out, num_rows), token_tiles = (len(weight_OI), len(x_TI)), self._padded(len(x_TI)) // self._tokens
        sums = workspace[self._arranged_bytes(num_rows) :]
        arrange((self._blocks, -(-num_rows // 8), 1), 64, x_TI, workspace, num_rows)
        groups = self._blocks // self._group
        multiply((self._tiles, groups, token_tiles), 256, weight_OI, scale_JB, workspace, sums, num_out)
        add((self._tiles, self._tokens // 8, token_tiles), 256, sums, out_TO, num_out, num_rows)

    @functools.cached_property
    def _kernels(self) -> list[CudaKernel]:
        shared = {"arrange_x": 0, "block_fp8_gemm": gemm_shared_bytes(self._group, self._tokens), "sum_groups": 0}
        return [
            cuda_kernel("block_fp8_gemm.cu", name, macros=self._macros, shared_bytes=size, starts_early=True)
            for name, size in shared.items()
        ]

    def _padded(self, num_rows: int) -> int:
        return -(-num_rows // self._tokens) * self._tokens

    def _arranged_bytes(self, num_rows: int) -> int:
        return self._padded(num_rows) * self._blocks * BLOCK_SIZE * 2
