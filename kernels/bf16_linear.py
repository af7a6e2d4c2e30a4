"""Multiply few rows by a bfloat16 weight, which is read once: what checkpoints keep in bfloat16 and is no head.

    y_TO = x_TI . w_OI         products exact, sums float32 in steps along I, rounded to bfloat16 at the end

T = rows, O = outputs, I = inputs. A program holds the sums of all rows for a few outputs, in tiles of 16 rows; a row's
sums have the same order in every tiling, so its bits do not depend on the rows beside it. Columns of a wider weight may
be taken: a tensor-parallel rank's share of a sum.
"""

import functools
from typing import Any

import torch

from specdec.kernels.tensor_check import check_tensor

_TILE_ROWS, _OUTPUTS, _STEP = 16, 32, 128
_TILES = (1, 2, 4, 8, 12)  # of rows a program may hold
MAX_ROWS = _TILE_ROWS * _TILES[-1]


def bf16_linear_ref(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Define `bf16_linear` in float64: f64 [T, O]."""
    return x_TI.double() @ weight_OI.double().T


def bf16_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, *, out_TO: torch.Tensor) -> None:
    """Multiply on a GPU, on the current stream.

    Args:
        x_TI: bfloat16, T of 0..192, adjacent values; rows may lie apart.
        weight_OI: bfloat16, O a multiple of 32, I of 128, adjacent values; rows may lie apart. Both kinds of rows begin
            at multiples of 16 bytes.
        out_TO: Written, bfloat16, contiguous.

    Raises:
        ValueError: A tensor has another shape, dtype or layout.
    """
    (num_rows, num_in), num_out = x_TI.shape, len(weight_OI)
    check_tensor("out_TO", out_TO, torch.bfloat16, (num_rows, num_out))
    for name, tensor in (("x_TI", x_TI), ("weight_OI", weight_OI)):
        if tensor.dtype != torch.bfloat16 or tensor.shape[1] != num_in or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} must be bfloat16 with {num_in} adjacent values in a row, got {tensor.dtype} "
                f"{tuple(tensor.shape)} of strides {tensor.stride()}"
            )
        if tensor.data_ptr() % 16 or tensor.stride(0) % 8:
            raise ValueError(f"rows of {name} must begin at multiples of 16 bytes, got strides {tensor.stride()}")
    if num_rows > MAX_ROWS or num_out % _OUTPUTS or num_in % _STEP:
        raise ValueError(
            f"x must have at most {MAX_ROWS} rows, outputs be a multiple of {_OUTPUTS} and inputs of {_STEP}, got "
            f"{num_rows}, {num_out} and {num_in}"
        )
    if num_rows:
        tiles = next(tiles for tiles in _TILES if num_rows <= _TILE_ROWS * tiles)
        bf16_linear_kernel()[(num_out // _OUTPUTS,)](
            x_TI, weight_OI, out_TO, num_rows, num_out, num_in, x_TI.stride(0), weight_OI.stride(0),
            TILES=tiles, ROWS=_TILE_ROWS, OUTPUTS=_OUTPUTS, STEP=_STEP,
            STARTS_EARLY=out_TO.is_cuda, launch_pdl=out_TO.is_cuda, num_warps=4, num_stages=4,
        )  # fmt: skip


@functools.cache
def bf16_linear_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        x_ptr,  # [num_rows, num_in] bf16
        weight_ptr,  # [num_out, num_in] bf16
        out_ptr,  # [num_rows, num_out] bf16
        num_rows,
        num_out,
        num_in,
        x_stride,
        weight_stride,
        TILES: tl.constexpr,
        ROWS: tl.constexpr,
        OUTPUTS: tl.constexpr,
        STEP: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        row = tl.arange(0, ROWS)
        term = tl.arange(0, STEP)
        weight_at = weight_ptr + output[None, :].to(tl.int64) * weight_stride + term[:, None]
        x_at = x_ptr + row[:, None].to(tl.int64) * x_stride + term[None, :]
        sums = tl.tuple(())
        for _ in tl.static_range(TILES):
            sums += (tl.zeros((ROWS, OUTPUTS), dtype=tl.float32),)
        for first in range(0, num_in, STEP):
            weight = tl.load(weight_at + first)
            added = tl.tuple(())
            for tile in tl.static_range(TILES):
                is_row = row[:, None] + tile * ROWS < num_rows
                x = tl.load(x_at + tile * ROWS * x_stride + first, mask=is_row, other=0.0)
                added += (tl.dot(x, weight, acc=sums[tile]),)
            sums = added
        for tile in tl.static_range(TILES):
            out_row = tile * ROWS + row[:, None]
            out_at = out_ptr + out_row.to(tl.int64) * num_out + output[None, :]
            tl.store(out_at, sums[tile].to(tl.bfloat16), mask=out_row < num_rows)

    return kernel
