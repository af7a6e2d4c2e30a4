"""Index queries as the FP8 scan takes them.

    rotated   = [ rotate(x_TJR),  the other D - R values of each head ]
    query_TJD, scale_TJ = e4m3 with a power-of-two scale, as index keys are stored
    weight_TJ = projected_TJ * scale_TJ * J^-0.5 * D^-0.5

so that the scan's score, sum_J weight_TJ * relu(query_TJD . key_SD) * key_scale_S, is `index_scores` of the dequantised
queries and keys: a positive scale passes the relu.

T = rows, J = index heads, D = index head dim, R = rotated values, first in a head.
Source: DeepSeek-V3.2, "DeepSeek Sparse Attention", whose indexer runs in FP8.
"""

import functools
import math
from typing import Any

import torch

from specdec.kernels.index_key_format import LARGEST_KEY, SMALLEST_KEY, encode_index_keys
from specdec.kernels.rotary import Rotation, check_rotation, rotate
from specdec.kernels.tensor_check import check_rows, check_tensor

_HEADS = 4  # of a program
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def index_query_ref(
    x_TJD: torch.Tensor, projected_TJ: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Define `index_query`: u8 [T, J, D] and float32 [T, J]."""
    num_heads, head_dim = x_TJD.shape[1:]
    rope_dim = 2 * rotation.cos_TP.shape[1]
    x_TJD = x_TJD.float()
    rotated_TJD = torch.cat((rotate(x_TJD[..., :rope_dim], rotation), x_TJD[..., rope_dim:]), dim=-1)
    query_XD, scale_X = encode_index_keys(rotated_TJD.flatten(0, 1))
    weight_TJ = projected_TJ.float() * scale_X.view(projected_TJ.shape) * (1 / math.sqrt(num_heads * head_dim))
    return query_XD.view(x_TJD.shape), weight_TJ


def index_query(
    x_TJD: torch.Tensor,
    projected_TJ: torch.Tensor,
    rotation: Rotation,
    *,
    query_TJD: torch.Tensor,
    weight_TJ: torch.Tensor,
) -> None:
    """Rotate and quantise the queries of any number of rows, and scale their heads' weights, on a GPU.

    Args:
        x_TJD: `wq_b` of the query latent, any float dtype; rows may lie apart, what is in them not. J and D are powers
            of two.
        projected_TJ: `weights_proj` of the layer's input, any float dtype; its rows may lie apart.
        rotation: Of the rows; R is at most D.
        query_TJD: Written, u8, contiguous.
        weight_TJ: Written, float32, contiguous.

    Raises:
        ValueError: Shapes do not go together, or a tensor has another dtype or layout.
    """
    num_rows, num_heads, head_dim = x_TJD.shape
    shape_TJ = (num_rows, num_heads)
    if query_TJD.shape != x_TJD.shape or weight_TJ.shape != shape_TJ or projected_TJ.shape != shape_TJ:
        raise ValueError(
            f"x and query are [T, J, D], projected and weight [T, J], got {tuple(x_TJD.shape)}, "
            f"{tuple(query_TJD.shape)}, {tuple(projected_TJ.shape)} and {tuple(weight_TJ.shape)}"
        )
    rope_dim = 2 * rotation.cos_TP.shape[1]
    if num_heads & (num_heads - 1) or head_dim & (head_dim - 1) or rope_dim > head_dim:
        raise ValueError(f"J and D must be powers of two, R at most D, got {num_heads}, {head_dim} and {rope_dim}")
    check_rows("x", x_TJD, _FLOATS, x_TJD.shape)
    check_rows("projected", projected_TJ, _FLOATS, shape_TJ)
    check_rotation(rotation, num_rows)
    check_tensor("query", query_TJD, torch.uint8, x_TJD.shape)
    check_tensor("weight", weight_TJ, torch.float32, shape_TJ)
    heads = min(num_heads, _HEADS)
    index_query_kernel()[num_rows, num_heads // heads](
        x_TJD, projected_TJ, rotation.cos_TP, rotation.sin_TP, query_TJD, weight_TJ,
        x_TJD.stride(0), projected_TJ.stride(0),
        num_heads, HEADS=heads, DIM=head_dim, ROPE=rope_dim, FACTOR=1 / math.sqrt(num_heads * head_dim),
        LARGEST=LARGEST_KEY, SMALLEST=SMALLEST_KEY, STARTS_EARLY=x_TJD.is_cuda, launch_pdl=x_TJD.is_cuda,
    )  # fmt: skip


@functools.cache
def index_query_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        x_ptr,  # [num_rows, num_heads, DIM], rows `x_stride` apart
        projected_ptr,  # [num_rows, num_heads], rows `projected_stride` apart
        cos_ptr,  # f32 [num_rows, ROPE / 2]
        sin_ptr,  # f32 [num_rows, ROPE / 2]
        query_ptr,  # u8 [num_rows, num_heads, DIM]
        weight_ptr,  # f32 [num_rows, num_heads]
        x_stride,
        projected_stride,
        num_heads,
        HEADS: tl.constexpr,
        DIM: tl.constexpr,
        ROPE: tl.constexpr,
        FACTOR: tl.constexpr,
        LARGEST: tl.constexpr,
        SMALLEST: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)  # 2^31 values are 512K rows of 32 heads of 128
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        dim = tl.arange(0, DIM)
        pair = tl.arange(0, DIM // 2)
        x = tl.load(x_ptr + row * x_stride + head[:, None] * DIM + dim[None, :]).to(tl.float32)
        first, second = tl.split(x.reshape(HEADS, DIM // 2, 2))
        is_rotated = pair < ROPE // 2
        cos = tl.load(cos_ptr + row * (ROPE // 2) + pair, mask=is_rotated, other=1.0)[None, :]
        sin = tl.load(sin_ptr + row * (ROPE // 2) + pair, mask=is_rotated, other=0.0)[None, :]
        first, second = first * cos - second * sin, second * cos + first * sin

        # The scale of `encode_index_keys`: NaN does not enter it, and its bits are rounded up to a whole exponent.
        size = tl.maximum(tl.abs(first), tl.abs(second))
        number = tl.where(size != size, 0.0, size)  # noqa: PLR0124
        amax = tl.minimum(tl.max(number, axis=1), LARGEST)
        bits = (amax / 448.0).to(tl.int32, bitcast=True)
        power = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(amax < SMALLEST, 1.0, power)
        query = (tl.interleave(first, second) / scale[:, None]).to(tl.float8e4nv)
        query_at = query_ptr + (row * num_heads + head[:, None]) * DIM + dim[None, :]
        tl.store(query_at, query.to(tl.uint8, bitcast=True))
        projected = tl.load(projected_ptr + row * projected_stride + head).to(tl.float32)
        tl.store(weight_ptr + row * num_heads + head, projected * scale * FACTOR)

    return kernel
