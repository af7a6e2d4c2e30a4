"""What follows a layer's first projection, in one launch: its cache entries are written, its query latents normed.

    latent = e4m3 of rms_norm(kv[:L]), rope = rotate(kv[L:])           into records of `latent_formats`, packed
    key    = e4m3 of rotate(layer_norm(key)), its first R values       into pages of `index_key_format`, where the layer
                                                                       has an indexer
    query  = rms_norm(query)

T = rows, L = latent values (512), R = rotated values (64), D = index head dim (128), P = R / 2 pairs, M = pages,
B = bytes of a page, Q = values of a query latent. A page of S tokens holds S records of L + 4 L / 128 + 2R bytes, or S
keys of D bytes and behind them S float32 scales. Row `page * S + slot` says where an entry goes; -1 writes nothing:
another rank owns it. Everything rounds where `rms_norm`, `rotate` and the two formats round.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from specdec.kernels.index_key_format import encode_index_keys
from specdec.kernels.latent_formats import PACKED_GROUP_SIZE, encode_fp8_packed, packed_row_bytes
from specdec.kernels.rms_norm import layer_norm, rms_norm
from specdec.kernels.rotary import Rotation, check_rotation, rotate
from specdec.kernels.tensor_check import check_rows, check_tensor

_SCALE_BYTES = 4
_WARPS = 4  # of a program: 4 values of a latent a thread


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentEntries:
    """Latents on their way into the cache.

    Attributes:
        kv_TX: Latent, then rope part, before norm and rotation, bfloat16 [T, L + R], adjacent values.
        weight_L: Scale of the norm, bfloat16.
        eps: Of the norm.
        pages_MB: Pages of one layer, u8 [M, S * record], adjacent bytes; pages may lie apart.
    """

    kv_TX: torch.Tensor
    weight_L: torch.Tensor
    eps: float
    pages_MB: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryLatents:
    """Query latents on their way to the second projection.

    Attributes:
        x_TQ: Before the norm, bfloat16, adjacent values.
        weight_Q: Scale of the norm, bfloat16.
        eps: Of the norm.
        out_TQ: After it, bfloat16, contiguous.
    """

    x_TQ: torch.Tensor
    weight_Q: torch.Tensor
    eps: float
    out_TQ: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexKeyEntries:
    """Index keys on their way into the cache.

    Attributes:
        key_TD: Keys before norm and rotation, bfloat16 or float32 [T, D], adjacent values.
        weight_D: Scale of the norm, float32 or bfloat16.
        bias_D: What the norm adds, like `weight_D`.
        eps: Of the norm.
        pages_MB: Pages of one layer, u8 [M, S * (D + 4)], adjacent bytes; pages may lie apart.
    """

    key_TD: torch.Tensor
    weight_D: torch.Tensor
    bias_D: torch.Tensor
    eps: float
    pages_MB: torch.Tensor


def write_kv_ref(
    latents: LatentEntries,
    queries: QueryLatents,
    keys: IndexKeyEntries | None,
    rotation: Rotation,
    row_T: torch.Tensor,
    *,
    page_size: int,
) -> None:
    """Define `write_kv`: normalise, rotate, encode, then put each row that is not -1 into its page."""
    queries.out_TQ.copy_(rms_norm(queries.x_TQ, queries.weight_Q, eps=queries.eps))
    num_latent, rope_dim = len(latents.weight_L), 2 * rotation.cos_TP.shape[1]
    owned_T = row_T >= 0
    page_T, slot_T = row_T[owned_T] // page_size, row_T[owned_T] % page_size
    latent_TL = rms_norm(latents.kv_TX[:, :num_latent], latents.weight_L, eps=latents.eps)
    record_TB = encode_fp8_packed(latent_TL, rotate(latents.kv_TX[:, num_latent:], rotation))
    latents.pages_MB.unflatten(1, (page_size, -1))[page_T, slot_T] = record_TB[owned_T]
    if keys is None:
        return
    key_TD = layer_norm(keys.key_TD, keys.weight_D.float(), keys.bias_D.float(), eps=keys.eps)
    key_TD = torch.cat((rotate(key_TD[:, :rope_dim], rotation), key_TD[:, rope_dim:]), dim=1)
    stored_TD, scale_T = encode_index_keys(key_TD)
    scales_offset = page_size * stored_TD.shape[1]
    keys.pages_MB[:, :scales_offset].unflatten(1, (page_size, -1))[page_T, slot_T] = stored_TD[owned_T]
    scale_TB = scale_T[:, None].view(torch.uint8)
    keys.pages_MB[:, scales_offset:].unflatten(1, (page_size, -1))[page_T, slot_T] = scale_TB[owned_T]


def write_kv(
    latents: LatentEntries,
    queries: QueryLatents,
    keys: IndexKeyEntries | None,
    rotation: Rotation,
    row_T: torch.Tensor,
    *,
    page_size: int,
) -> None:
    """Write the entries of T rows and norm their query latents, on a GPU, on the current stream.

    The kernel in front may write what is projected, and nothing else of this: `rotation` and `row_T` are read before it
    has ended, like the norms' weights.

    Args:
        latents: Of every layer; L is a power of two and a multiple of 128.
        queries: Of every layer.
        keys: Of a layer with an indexer, None elsewhere; D is a power of two and at least R.
        rotation: Of the rows; R is a power of two.
        row_T: Physical rows, i64 [T], each at most once among those that are read back; -1 where nothing is written.
        page_size: S.

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    (num_rows, num_pairs), num_features = rotation.cos_TP.shape, len(queries.weight_Q)
    _check(latents, keys, rotation, row_T, page_size)
    check_rows("x_TQ", queries.x_TQ, (torch.bfloat16,), (num_rows, num_features))
    check_tensor("weight_Q", queries.weight_Q, torch.bfloat16, (num_features,))
    check_tensor("out_TQ", queries.out_TQ, torch.bfloat16, (num_rows, num_features))
    if not num_rows:
        return
    index: tuple[Any, ...] = (None,) * 4
    if keys is not None:
        index = (keys.key_TD, keys.weight_D, keys.bias_D, keys.pages_MB)
    write_kv_kernel()[(num_rows, 2 if keys is None else 3)](
        latents.kv_TX,
        latents.weight_L,
        latents.pages_MB,
        queries.x_TQ,
        queries.weight_Q,
        queries.out_TQ,
        *index,
        rotation.cos_TP,
        rotation.sin_TP,
        row_T,
        latents.eps,
        queries.eps,
        0.0 if keys is None else keys.eps,
        latents.kv_TX.stride(0),
        latents.pages_MB.stride(0),
        queries.x_TQ.stride(0),
        0 if keys is None else keys.key_TD.stride(0),
        0 if keys is None else keys.pages_MB.stride(0),
        PAGE_SIZE=page_size,
        LATENT=len(latents.weight_L),
        QUERY=num_features,
        QUERY_BLOCK=1 << (num_features - 1).bit_length(),
        PAIRS=num_pairs,
        INDEX_DIM=2 * num_pairs if keys is None else len(keys.weight_D),
        GROUP=PACKED_GROUP_SIZE,
        STARTS_EARLY=row_T.is_cuda,
        num_warps=_WARPS,
        launch_pdl=row_T.is_cuda,
        enable_fp_fusion=False,  # a rotation rounds as in the definition
    )


@functools.cache
def write_kv_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        kv_ptr,  # [T, L + R] bf16
        latent_weight_ptr,  # [L] bf16
        latent_pages_ptr,  # [M, S * record] u8
        query_ptr,  # [T, Q] bf16
        query_weight_ptr,  # [Q] bf16
        normed_ptr,  # [T, Q] bf16
        key_ptr,  # [T, D], or None like the next three
        key_weight_ptr,  # [D]
        key_bias_ptr,  # [D]
        key_pages_ptr,  # [M, S * (D + 4)] u8
        cos_ptr,  # [T, P] f32
        sin_ptr,  # [T, P] f32
        row_ptr,  # [T] i64
        latent_eps,
        query_eps,
        key_eps,
        kv_stride_t,
        latent_page_bytes,
        query_stride_t,
        key_stride_t,
        key_page_bytes,
        PAGE_SIZE: tl.constexpr,
        LATENT: tl.constexpr,
        QUERY: tl.constexpr,
        QUERY_BLOCK: tl.constexpr,
        PAIRS: tl.constexpr,
        INDEX_DIM: tl.constexpr,
        GROUP: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        LARGEST_FLOAT: tl.constexpr = 3.4028234663852886e38
        token = tl.program_id(0).to(tl.int64)
        row = tl.load(row_ptr + token)
        page = row // PAGE_SIZE  # i64: bytes of a pool pass 2^31
        slot = row % PAGE_SIZE
        cos_ptr += token * PAIRS
        sin_ptr += token * PAIRS
        # In both parts that quantise: NaN is left out of a maximum and an infinity enters it as the largest float.
        if tl.program_id(1) == 0:
            GROUPS: tl.constexpr = LATENT // GROUP
            RECORD: tl.constexpr = LATENT + 4 * GROUPS + 4 * PAIRS
            value = tl.arange(0, LATENT)
            pair = tl.arange(0, PAIRS)
            weight = tl.load(latent_weight_ptr + value).to(tl.float32)
            cos = tl.load(cos_ptr + pair)
            sin = tl.load(sin_ptr + pair)
            if STARTS_EARLY:
                gdc_wait()
                gdc_launch_dependents()
            kv_ptr += token * kv_stride_t
            latent = tl.load(kv_ptr + value).to(tl.float32)
            first = tl.load(kv_ptr + LATENT + 2 * pair).to(tl.float32)
            second = tl.load(kv_ptr + LATENT + 2 * pair + 1).to(tl.float32)

            factor = tl.rsqrt(tl.sum(latent * latent) / LATENT + latent_eps)
            rounded = (latent * factor).to(tl.bfloat16).to(tl.float32)
            grouped = (rounded * weight).to(tl.bfloat16).to(tl.float32).reshape(GROUPS, GROUP)
            amax = tl.max(tl.minimum(tl.maximum(tl.abs(grouped), 0.0), LARGEST_FLOAT), axis=1)
            scale = tl.where(amax < 448.0 * 2.0**-126, 1.0, tl.div_rn(amax, 448.0))
            scaled = tl.div_rn(grouped, tl.broadcast_to(scale[:, None], (GROUPS, GROUP)))
            scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            record_ptr = latent_pages_ptr + page * latent_page_bytes + slot * RECORD
            stored = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).reshape(LATENT)
            tl.store(record_ptr + value, stored, row >= 0)
            scale_ptr = (record_ptr + LATENT).to(tl.pointer_type(tl.float32))
            tl.store(scale_ptr + tl.arange(0, GROUPS), scale, row >= 0)
            rope_ptr = (record_ptr + LATENT + 4 * GROUPS).to(tl.pointer_type(tl.bfloat16))
            tl.store(rope_ptr + 2 * pair, (first * cos - second * sin).to(tl.bfloat16), row >= 0)
            tl.store(rope_ptr + 2 * pair + 1, (second * cos + first * sin).to(tl.bfloat16), row >= 0)
        elif tl.program_id(1) == 1:
            feature = tl.arange(0, QUERY_BLOCK)
            inside = feature < QUERY
            query_weight = tl.load(query_weight_ptr + feature, inside, other=0.0).to(tl.float32)
            if STARTS_EARLY:
                gdc_wait()
                gdc_launch_dependents()
            query = tl.load(query_ptr + token * query_stride_t + feature, inside, other=0.0).to(tl.float32)
            query_factor = tl.rsqrt(tl.sum(query * query) / QUERY + query_eps)
            normed = (query * query_factor).to(tl.bfloat16).to(tl.float32) * query_weight
            tl.store(normed_ptr + token * QUERY + feature, normed.to(tl.bfloat16), inside)
        elif key_ptr is not None:
            even = 2 * tl.arange(0, INDEX_DIM // 2)
            turns = even < 2 * PAIRS
            weight_x = tl.load(key_weight_ptr + even).to(tl.float32)
            weight_y = tl.load(key_weight_ptr + even + 1).to(tl.float32)
            bias_x = tl.load(key_bias_ptr + even).to(tl.float32)
            bias_y = tl.load(key_bias_ptr + even + 1).to(tl.float32)
            key_cos = tl.load(cos_ptr + even // 2, turns, other=1.0)
            key_sin = tl.load(sin_ptr + even // 2, turns, other=0.0)
            if STARTS_EARLY:
                gdc_wait()
                gdc_launch_dependents()
            key_ptr += token * key_stride_t
            x = tl.load(key_ptr + even).to(tl.float32)
            y = tl.load(key_ptr + even + 1).to(tl.float32)

            mean = tl.sum(x + y) / INDEX_DIM
            x -= mean
            y -= mean
            key_factor = tl.rsqrt(tl.sum(x * x + y * y) / INDEX_DIM + key_eps)
            x = x * key_factor * weight_x + bias_x
            y = y * key_factor * weight_y + bias_y
            turned_x = tl.where(turns, x * key_cos - y * key_sin, x)
            turned_y = tl.where(turns, y * key_cos + x * key_sin, y)
            larger = tl.maximum(tl.maximum(tl.abs(turned_x), tl.abs(turned_y)), 0.0)
            key_amax = tl.minimum(tl.max(larger), 448.0 * 2.0**119)
            key_bits = tl.div_rn(key_amax, 448.0).to(tl.int32, bitcast=True)
            power = ((key_bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)  # the next power of two
            key_scale = tl.where(key_amax < 448.0 * 2.0**-126, 1.0, power)
            inverse = tl.div_rn(1.0, key_scale)  # a power of two: products with it are exact
            scaled_x = tl.clamp(turned_x * inverse, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            scaled_y = tl.clamp(turned_y * inverse, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            stored_ptr = key_pages_ptr + page * key_page_bytes
            key_scale_ptr = (stored_ptr + PAGE_SIZE * INDEX_DIM + 4 * slot).to(tl.pointer_type(tl.float32))
            stored_ptr += slot * INDEX_DIM
            tl.store(stored_ptr + even, scaled_x.to(tl.float8e4nv).to(tl.uint8, bitcast=True), row >= 0)
            tl.store(stored_ptr + even + 1, scaled_y.to(tl.float8e4nv).to(tl.uint8, bitcast=True), row >= 0)
            tl.store(key_scale_ptr, key_scale, row >= 0)

    return kernel


def _check(
    latents: LatentEntries, keys: IndexKeyEntries | None, rotation: Rotation, row_T: torch.Tensor, page_size: int
) -> None:
    num_rows, num_pairs = rotation.cos_TP.shape
    num_latent = len(latents.weight_L)
    sizes = [num_latent, num_pairs, *([] if keys is None else [len(keys.weight_D)])]
    if any(size & (size - 1) for size in sizes) or num_latent % PACKED_GROUP_SIZE or min(sizes[2:], default=128) < 64:
        raise ValueError(f"L, R / 2 and D must be powers of two, L from 128, D from 64, got {sizes}")
    if keys is not None and len(keys.weight_D) < 2 * num_pairs:
        raise ValueError(f"D must be at least R, got {len(keys.weight_D)} and {2 * num_pairs}")
    check_rotation(rotation, num_rows)
    if page_size < 1 or page_size & 3:
        raise ValueError(f"page_size must be a positive multiple of 4, so that scales are aligned, got {page_size}")
    record = packed_row_bytes(num_latent, 2 * num_pairs)
    bf16, u8 = (torch.bfloat16,), (torch.uint8,)
    bf16_or_f32 = (torch.bfloat16, torch.float32)
    rules: list[tuple[str, torch.Tensor, tuple[int, ...], tuple[torch.dtype, ...]]] = [
        ("row_T", row_T, (num_rows,), (torch.int64,)),
        ("kv_TX", latents.kv_TX, (num_rows, num_latent + 2 * num_pairs), bf16),
        ("weight_L", latents.weight_L, (num_latent,), bf16),
        ("latent pages_MB", latents.pages_MB, (len(latents.pages_MB), page_size * record), u8),
    ]
    if keys is not None:
        dim = len(keys.weight_D)
        page_bytes = page_size * (dim + _SCALE_BYTES)
        rules += [
            ("key_TD", keys.key_TD, (num_rows, dim), bf16_or_f32),
            ("weight_D", keys.weight_D, (dim,), bf16_or_f32),
            ("bias_D", keys.bias_D, (dim,), bf16_or_f32),
            ("index key pages_MB", keys.pages_MB, (len(keys.pages_MB), page_bytes), u8),
        ]
    for name, entries in (("latent", latents), ("index key", keys)):
        if entries is not None and (entries.pages_MB.data_ptr() | entries.pages_MB.stride(0)) % _SCALE_BYTES:
            raise ValueError(
                f"{name} pages must lie at multiples of {_SCALE_BYTES} bytes, got {entries.pages_MB.data_ptr():#x} and "
                f"{entries.pages_MB.stride(0)} from page to page"
            )
    for name, tensor, shape, dtypes in rules:
        if tensor.shape != shape or tensor.dtype not in dtypes or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be {dtypes} {shape}, adjacent, got {tensor.dtype} {tuple(tensor.shape)}")
