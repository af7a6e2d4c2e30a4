"""Queries of latent attention in absorbed form, and their way back from latents to values.

    query_TAX = [ x_TAN . key_up_ANL ,  rotate(x_TAR) ]          x = nope part, then rope part of each head
    value_TAV = latent_TAL . value_up_ALV

T = rows, A = heads, N / R / V = nope, rope and value dims of a head, L = latent values, X = L + R.
One program takes 16 rows of one head and a piece of the output, and reads its weights once, while the kernel in front
still runs: into registers or, where rows are few, only into the cache, for the wait lasts until what was loaded has
arrived, and a kernel in front may be short. A row's sums do not depend on the rows beside it.
Source: DeepSeek-V2, section 2.1 (absorption).
"""

import functools
from typing import Any

import torch

from specdec.kernels.linear import head_linear
from specdec.kernels.rotary import Rotation, check_rotation, rotate
from specdec.kernels.tensor_check import check_rows, check_tensor

_ROWS = 16  # of a matrix instruction
_COLUMNS = 32  # of the output; 8 heads of 512 make 128 programs
_LEAST_DEPTH = 16  # terms of a matrix instruction
_LINE_BYTES = 128


def absorbed_query_ref(x_TAY: torch.Tensor, key_up_ANL: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Define `absorbed_query`: [T, A, X] of the dtype of `x_TAY`; T is a multiple of the row block."""
    nope_dim = key_up_ANL.shape[1]
    absorbed_TAL = head_linear(x_TAY[..., :nope_dim], key_up_ANL)
    return torch.cat((absorbed_TAL, rotate(x_TAY[..., nope_dim:], rotation)), dim=-1)


def absorbed_query(
    x_TAY: torch.Tensor, key_up_ANL: torch.Tensor, rotation: Rotation, *, out_TAX: torch.Tensor
) -> torch.Tensor:
    """Absorb the key projection into the queries of any number of rows, on a GPU.

    Args:
        x_TAY: Queries of each head, bf16 or float32 [T, A, N + R]; rows may lie apart, what is in them not.
        key_up_ANL: Key part of `kv_b_proj`, the dtype of `x_TAY`; each head's [N, L] may lie anywhere. N is a multiple
            of 16.
        rotation: Of the rows; R / 2 pairs.
        out_TAX: Written, the dtype of `x_TAY`, contiguous.

    Raises:
        ValueError: Shapes do not go together, or a tensor has another dtype or layout.
    """
    num_rows, num_heads, width = x_TAY.shape
    nope_dim, latent_dim = key_up_ANL.shape[1:]
    rope_dim = 2 * rotation.cos_TP.shape[1]
    if width != nope_dim + rope_dim or out_TAX.shape != (num_rows, num_heads, latent_dim + rope_dim):
        raise ValueError(
            f"queries [T, A, N + R] and out [T, A, L + R] must go with key_up [A, N, L] and R = {rope_dim}, got "
            f"{tuple(x_TAY.shape)}, {tuple(out_TAX.shape)} and {tuple(key_up_ANL.shape)}"
        )
    _check_weight("key_up", key_up_ANL, num_heads)
    check_rotation(rotation, num_rows)
    check_rows("queries", x_TAY, (key_up_ANL.dtype,), x_TAY.shape)
    check_tensor("out", out_TAX, key_up_ANL.dtype, out_TAX.shape)
    grid = (-(-num_rows // _ROWS), num_heads, -(-latent_dim // _COLUMNS) + 1)
    absorbed_query_kernel()[grid](
        x_TAY, key_up_ANL, rotation.cos_TP, rotation.sin_TP, out_TAX, None, 0, num_rows, num_heads, x_TAY.stride(0),
        *key_up_ANL.stride(),
        INNER=nope_dim, OUTER=latent_dim, ROPE=rope_dim, **_tiles(key_up_ANL, num_rows),
        STARTS_EARLY=x_TAY.is_cuda, launch_pdl=x_TAY.is_cuda,
    )  # fmt: skip
    return out_TAX


def value_up(
    latent_TAL: torch.Tensor, value_up_ALV: torch.Tensor, *, out_TAV: torch.Tensor, ahead: torch.Tensor | None = None
) -> torch.Tensor:
    """Turn attended latents of any number of rows into values, on a GPU; defined by `head_linear`.

    Args:
        latent_TAL: Attention output, any float dtype, contiguous; rounded to the dtype of the weights first.
        value_up_ALV: Value part of `kv_b_proj`, bf16 or float32; each head's [L, V] may lie anywhere. L is a multiple
            of 16.
        out_TAV: Written, the dtype of the weights, contiguous.
        ahead: What the kernel behind reads, contiguous: it is brought into the cache while the attention in front runs,
            which leaves the memory idle where rows are few. A last part of a line of 128 bytes is left out.

    Raises:
        ValueError: Shapes do not go together, or a tensor has another dtype or layout.
    """
    num_rows, num_heads, latent_dim = latent_TAL.shape
    value_dim = value_up_ALV.shape[2]
    if value_up_ALV.shape[:2] != (num_heads, latent_dim) or out_TAV.shape != (num_rows, num_heads, value_dim):
        raise ValueError(
            f"latents [T, A, L] and out [T, A, V] must go with value_up [A, L, V], got {tuple(latent_TAL.shape)}, "
            f"{tuple(out_TAV.shape)} and {tuple(value_up_ALV.shape)}"
        )
    _check_weight("value_up", value_up_ALV, num_heads)
    check_tensor("latents", latent_TAL, latent_TAL.dtype, latent_TAL.shape)
    check_tensor("out", out_TAV, value_up_ALV.dtype, out_TAV.shape)
    if ahead is not None:
        check_tensor("ahead", ahead, ahead.dtype, ahead.shape)
    absorbed_query_kernel()[-(-num_rows // _ROWS), num_heads, -(-value_dim // _COLUMNS)](
        latent_TAL, value_up_ALV, None, None, out_TAV, None if ahead is None else ahead.view(torch.uint8),
        0 if ahead is None else ahead.nbytes // _LINE_BYTES, num_rows, num_heads, latent_TAL.stride(0),
        *value_up_ALV.stride(),
        INNER=latent_dim, OUTER=value_dim, ROPE=0, **_tiles(value_up_ALV, num_rows),
        STARTS_EARLY=latent_TAL.is_cuda, launch_pdl=latent_TAL.is_cuda,
    )  # fmt: skip
    return out_TAV


def _check_weight(name: str, weight_AIO: torch.Tensor, num_heads: int) -> None:
    if weight_AIO.dtype not in {torch.bfloat16, torch.float32} or len(weight_AIO) != num_heads:
        raise ValueError(
            f"{name} must be bfloat16 or float32 of {num_heads} heads, got {weight_AIO.dtype} {tuple(weight_AIO.shape)}"
        )
    if weight_AIO.shape[1] % _LEAST_DEPTH:
        raise ValueError(f"{name} must sum over a multiple of {_LEAST_DEPTH} values, got {weight_AIO.shape[1]}")


def _tiles(weight_AIO: torch.Tensor, num_rows: int) -> dict[str, int]:
    """Give the sizes of a program's products, and how many weights of each dim a line of the cache holds."""
    inner, line = weight_AIO.shape[1], _LINE_BYTES // weight_AIO.element_size()
    depth = min(128, inner & -inner)  # terms that one matrix product takes, of as many as there are
    is_along_inner = weight_AIO.stride(1) == 1
    return {
        "ROWS": _ROWS,
        "COLUMNS": _COLUMNS,
        "DEPTH": depth,
        "LINE_INNER": min(line, depth) if is_along_inner else 1,
        "LINE_OUTER": 1 if is_along_inner else min(line, _COLUMNS),
        "ARE_FEW": num_rows <= _ROWS,
    }


@functools.cache
def absorbed_query_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit
    def prefetch(at):  # type: ignore[no-untyped-def]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def arrived(value):  # type: ignore[no-untyped-def]
        """Give the value; opaque, so that what is done with it does not move up between loads."""
        PACK: tl.constexpr = 32 // value.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], value.dtype, is_pure=False, pack=PACK)

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        x_ptr,  # [num_rows, num_heads, INNER + ROPE], rows `row_stride` apart
        weight_ptr,  # [num_heads, INNER, OUTER] with strides
        cos_ptr,  # f32 [num_rows, ROPE / 2]
        sin_ptr,  # f32 [num_rows, ROPE / 2]
        out_ptr,  # [num_rows, num_heads, OUTER + ROPE]
        ahead_ptr,  # u8 [num_ahead, 128], or None
        num_ahead,
        num_rows,
        num_heads,
        row_stride,
        stride_head,
        stride_inner,
        stride_outer,
        INNER: tl.constexpr,
        OUTER: tl.constexpr,
        ROPE: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
        LINE_INNER: tl.constexpr,  # weights of a line of the cache
        LINE_OUTER: tl.constexpr,
        ARE_FEW: tl.constexpr,  # rows
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # i64: 2^31 values are 1M rows of 2048
        head = tl.program_id(1).to(tl.int64)
        is_row = row < num_rows
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        is_column = column < OUTER
        weight, column_at = weight_ptr + head * stride_head, column * stride_outer
        weights = tl.tuple(())
        if not ARE_FEW:
            for first in tl.static_range(0, INNER, DEPTH):
                inner_at = (first + tl.arange(0, DEPTH))[:, None] * stride_inner
                weights += (tl.load(weight + inner_at + column_at, mask=is_column, other=0.0),)
        if STARTS_EARLY:
            if ARE_FEW:
                for first in tl.static_range(0, INNER, DEPTH):
                    line_inner = first + LINE_INNER * tl.arange(0, DEPTH // LINE_INNER)[:, None]
                    line_column = tl.program_id(2) * COLUMNS + LINE_OUTER * tl.arange(0, COLUMNS // LINE_OUTER)[None, :]
                    line = weight + line_inner * stride_inner + tl.minimum(line_column, OUTER - 1) * stride_outer
                    prefetch(line)
            if ahead_ptr is not None:
                program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0)
                program += tl.program_id(0)
                for begin in range(
                    128 * program, num_ahead, 128 * tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
                ):
                    prefetch(ahead_ptr + 128 * tl.minimum(begin + tl.arange(0, 128), num_ahead - 1).to(tl.int64))
            gdc_wait()
            gdc_launch_dependents()
        x = x_ptr + row * row_stride + head * (INNER + ROPE)
        out = out_ptr + (row * num_heads + head) * (OUTER + ROPE)
        if tl.program_id(2) * COLUMNS < OUTER:
            terms, late_weights = tl.tuple(()), tl.tuple(())  # all at once: a load behind a product would wait for it
            for first in tl.static_range(0, INNER, DEPTH):
                inner = first + tl.arange(0, DEPTH)
                part = tl.load(x + inner[None, :], mask=is_row, other=0.0)
                terms += (part.to(weight_ptr.dtype.element_ty),)
                if ARE_FEW:
                    weight_at = weight + inner[:, None] * stride_inner + column_at
                    late_weights += (tl.load(weight_at, mask=is_column, other=0.0),)
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for part in tl.static_range(len(terms)):
                x_part, weight_part = terms[part], (late_weights if ARE_FEW else weights)[part]
                if STARTS_EARLY:
                    x_part, weight_part = arrived(x_part), arrived(weight_part)
                total = tl.dot(x_part, weight_part, acc=total, input_precision="ieee")
            tl.store(out + column, total, mask=is_row & is_column)
        elif ROPE > 0:  # the program behind the last piece rotates
            pair = tl.arange(0, ROPE // 2)[None, :]
            cos = tl.load(cos_ptr + row * (ROPE // 2) + pair, mask=is_row, other=0.0)
            sin = tl.load(sin_ptr + row * (ROPE // 2) + pair, mask=is_row, other=0.0)
            value = tl.arange(0, ROPE)[None, :]
            pairs = tl.load(x + INNER + value, mask=is_row, other=0.0).to(tl.float32).reshape(ROWS, ROPE // 2, 2)
            even, odd = tl.split(pairs)
            rotated = tl.interleave(even * cos - odd * sin, odd * cos + even * sin)
            tl.store(out + OUTER + value, rotated, mask=is_row)

    return kernel
