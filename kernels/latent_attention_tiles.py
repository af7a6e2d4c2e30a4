"""The Triton kernel of `latent_attention`, which has the formula and the legend.

A module of its own, which is imported with the first launch: Triton takes a quarter of a second to import, and its
interpreter finds what a kernel calls among the globals of a module only.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]
def read_fields(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    pool_ptr,
    begin_S,  # byte offsets of rows, multiples of 16
    is_read_S,
    OFFSET: tl.constexpr,  # bytes of a row before the fields, a multiple of 16
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,  # of a field
):
    """Read adjacent fields of a tile's rows, 16 bytes at once; slots that are not read give zeros."""
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    place_S = tl.multiple_of((begin_S + OFFSET) // SIZE, 16 // SIZE)
    field_ptr = pool_ptr.to(tl.pointer_type(DTYPE))
    return tl.load(field_ptr + (place_S[:, None] + tl.arange(0, FIELDS)[None, :]), is_read_S[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    query,  # a group each [M, WIDTH], and the rope part [M, 64]
    pool_ptr,
    begin_S,
    is_read_S,
    is_seen_MS,
    top_M,  # largest score in base 2
    sum_M,  # of 2^(score - top)
    outs,  # a group each [M, WIDTH]
    score_factor,
    IS_BF16: tl.constexpr,
    IS_PACKED: tl.constexpr,
    GROUPS: tl.constexpr,
    SEEN_BY_ALL: tl.constexpr,  # what is read
    OPERAND: tl.constexpr,  # dtype of the matrix operands
):
    """Add a tile of slots to the state of all lines."""
    LATENT: tl.constexpr = tl.bfloat16 if IS_BF16 else tl.float8e4nv
    VALUE_BYTES: tl.constexpr = 2 if IS_BF16 else 1
    ROPE: tl.constexpr = tl.bfloat16 if IS_BF16 or IS_PACKED else tl.float8e4nv
    WIDTH: tl.constexpr = 512 // GROUPS
    ROPE_AT: tl.constexpr = 1024 if IS_BF16 else 528 if IS_PACKED else 512
    keys = tl.tuple(())
    scales = tl.tuple(())
    score_MS = tl.zeros(is_seen_MS.shape, tl.float32)
    for g in tl.static_range(GROUPS):
        key_SV = read_fields(pool_ptr, begin_S, is_read_S, g * WIDTH * VALUE_BYTES, WIDTH, LATENT).to(OPERAND)
        keys += (key_SV,)
        if IS_PACKED:
            scale_at = pool_ptr.to(tl.pointer_type(tl.float32)) + ((begin_S + 512) // 4 + g)
            scales += (tl.load(scale_at, is_read_S, other=0.0),)
            score_MS += tl.dot(query[g], tl.trans(key_SV), input_precision="ieee") * scales[g][None, :]
        else:
            score_MS = tl.dot(query[g], tl.trans(key_SV), acc=score_MS, input_precision="ieee")
    rope_SR = read_fields(pool_ptr, begin_S, is_read_S, ROPE_AT, 64, ROPE).to(OPERAND)
    score_MS = tl.dot(query[GROUPS], tl.trans(rope_SR), acc=score_MS, input_precision="ieee")
    score_MS = tl.where(is_seen_MS, score_MS * score_factor, -float("inf"))
    new_top_M = tl.maximum(top_M, tl.max(score_MS, axis=1))
    base_M = tl.where(new_top_M == -float("inf"), 0.0, new_top_M)  # -inf - -inf would be NaN
    weight_MS = tl.exp2(score_MS - base_M[:, None])
    keep_M = tl.exp2(top_M - base_M)
    new_outs = tl.tuple(())
    for g in tl.static_range(GROUPS):
        share_MS = weight_MS * scales[g][None, :] if IS_PACKED else weight_MS
        value_SV = keys[g]
        if not SEEN_BY_ALL:  # a line that sees a NaN has it from its score
            share_MS = tl.where(is_seen_MS, share_MS, 0.0)
            value_SV = tl.where(tl.abs(value_SV) < float("inf"), value_SV, 0.0).to(OPERAND)
        kept_MV = outs[g] * keep_M[:, None]
        new_outs += (tl.dot(share_MS.to(OPERAND), value_SV, acc=kept_MV, input_precision="ieee"),)
    return new_top_M, sum_M * keep_M + tl.sum(weight_MS, axis=1), new_outs


# Compiled once whatever the number of rows and wherever lists begin: a pass must not wait for a compiler.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_lines", "list_stride"], do_not_specialize_on_alignment=["list_ptr", "length_ptr"]
)
def latent_attention_tiles(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    query_ptr,  # [groups, num_lines, 576] bf16
    pool_ptr,  # u8, pages `page_stride` bytes apart
    list_ptr,  # of each group, `list_stride` apart: rows [slots], negative for none, or pages
    length_ptr,  # [rows] i32: counts of slots, or positions
    out_ptr,  # [groups, num_lines, 512], or None: then there are several splits
    lse_ptr,  # [groups, num_lines] f32, or None
    part_ptr,  # [splits, groups, num_lines, 512] f32, or None
    top_sum_ptr,  # [splits, groups, num_lines, 2] f32, or None
    num_lines,  # of a group, heads of a row adjacent
    list_stride,
    page_stride,
    score_factor,  # from products of stored values to scores in base 2
    value_factor,  # from stored values to outputs
    ROW_BYTES: tl.constexpr,
    IS_BF16: tl.constexpr,
    IS_PACKED: tl.constexpr,
    GROUPS: tl.constexpr,  # of latent values; the packed format has a scale for each
    IS_PAGED: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    LINES: tl.constexpr,
    SLOTS: tl.constexpr,  # divides 64
    STAGES: tl.constexpr,
    ON_GPU: tl.constexpr,  # starts before the kernel in front has ended; the interpreter multiplies bf16 wrongly
) -> None:
    """Attend with a block of lines to splits of their keys; a group is what has one list, a row or a request."""
    OPERAND: tl.constexpr = tl.bfloat16 if ON_GPU else tl.float32
    if ON_GPU:
        gdc_wait()
        gdc_launch_dependents()
    WIDTH: tl.constexpr = 512 // GROUPS
    group = tl.program_id(2).to(tl.int64)
    line_M = tl.program_id(0) * LINES + tl.arange(0, LINES)
    is_line_M = line_M < num_lines
    place_M = group * num_lines + line_M
    query = tl.tuple(())
    for g in tl.static_range(GROUPS + 1):
        at_MV = place_M[:, None] * 576 + (g * WIDTH + tl.arange(0, WIDTH if g < GROUPS else 64))[None, :]
        query += (tl.load(query_ptr + at_MV, is_line_M[:, None], other=0.0).to(OPERAND),)
    length_M = tl.load(length_ptr + place_M // HEADS, is_line_M, other=-1 if IS_PAGED else 0)
    if IS_PAGED:
        length_M += 1
    last = tl.max(length_M)
    seen_by_all = tl.min(tl.where(length_M > 0, length_M, last))  # keys that every line with keys sees
    list_ptr += group * list_stride
    slot_S = tl.arange(0, SLOTS)
    num_splits = (last + SPLIT - 1) // SPLIT
    if part_ptr is None:
        num_splits = 1  # a row without keys is written, too

    for split in range(tl.program_id(1), num_splits, tl.num_programs(1)):
        begin = split * SPLIT
        end = tl.minimum(begin + SPLIT, last)
        top_M = tl.full((LINES,), -float("inf"), tl.float32)
        sum_M = tl.zeros((LINES,), tl.float32)
        outs = tl.tuple(())
        for _ in tl.static_range(GROUPS):
            outs += (tl.zeros((LINES, WIDTH), tl.float32),)
        # Where a tile lies is loaded a tile ahead, so that its rows can be asked for in time. What a loop would compute
        # but once (disable_licm) does not fit into the registers beside the outputs.
        if IS_PAGED:
            whole_end = tl.maximum(begin, tl.minimum(end, seen_by_all // SLOTS * SLOTS))
            page = tl.load(list_ptr + begin // 64, begin < end, other=0)
            for at in tl.range(begin, whole_end, SLOTS, num_stages=STAGES, disable_licm=True):
                begin_S = tl.multiple_of(page.to(tl.int64) * page_stride, 16) + (at % 64 + slot_S) * ROW_BYTES
                begin_S = tl.multiple_of(begin_S, 16)
                page = tl.load(list_ptr + (at + SLOTS) // 64, at + SLOTS < end, other=0)
                is_read_S = at + slot_S < end
                is_seen_MS = is_read_S[None, :].broadcast_to(LINES, SLOTS)
                top_M, sum_M, outs = attend(
                    query, pool_ptr, begin_S, is_read_S, is_seen_MS, top_M, sum_M, outs, score_factor,
                    IS_BF16, IS_PACKED, GROUPS, True, OPERAND,
                )  # fmt: skip
            for at in tl.range(whole_end, end, SLOTS, num_stages=1, disable_licm=True):
                begin_S = tl.multiple_of(page.to(tl.int64) * page_stride, 16) + (at % 64 + slot_S) * ROW_BYTES
                begin_S = tl.multiple_of(begin_S, 16)
                page = tl.load(list_ptr + (at + SLOTS) // 64, at + SLOTS < end, other=0)
                is_seen_MS = (at + slot_S)[None, :] < length_M[:, None]
                top_M, sum_M, outs = attend(
                    query, pool_ptr, begin_S, at + slot_S < end, is_seen_MS, top_M, sum_M, outs, score_factor,
                    IS_BF16, IS_PACKED, GROUPS, False, OPERAND,
                )  # fmt: skip
        else:
            index_S = tl.load(list_ptr + begin + slot_S, begin + slot_S < end, other=-1)
            for at in tl.range(begin, end, SLOTS, num_stages=STAGES, disable_licm=True):
                begin_S = tl.multiple_of(index_S.to(tl.int64) // 64 * page_stride + index_S % 64 * ROW_BYTES, 16)
                is_read_S = index_S >= 0
                next_S = at + SLOTS + slot_S
                index_S = tl.load(list_ptr + next_S, next_S < end, other=-1)
                is_seen_MS = is_read_S[None, :].broadcast_to(LINES, SLOTS)
                top_M, sum_M, outs = attend(
                    query, pool_ptr, begin_S, is_read_S, is_seen_MS, top_M, sum_M, outs, score_factor,
                    IS_BF16, IS_PACKED, GROUPS, True, OPERAND,
                )  # fmt: skip

        if part_ptr is None:
            is_empty_M = (sum_M == 0.0) | (length_M <= 0)  # what padding rows have of tiles that all others see is void
            total_M = tl.where(is_empty_M, 1.0, sum_M)
            for g in tl.static_range(GROUPS):
                out_MV = tl.where(is_empty_M[:, None], 0.0, outs[g] * value_factor / total_M[:, None])
                to_MV = place_M[:, None] * 512 + (g * WIDTH + tl.arange(0, WIDTH))[None, :]
                tl.store(out_ptr + to_MV, out_MV, is_line_M[:, None])
            top_M = tl.where(is_empty_M, -float("inf"), top_M)
            tl.store(lse_ptr + place_M, (top_M + tl.log2(total_M)) * 0.6931471805599453, is_line_M)
        else:
            part_M = split * (tl.num_programs(2) * num_lines) + place_M
            for g in tl.static_range(GROUPS):
                to_MV = part_M[:, None] * 512 + (g * WIDTH + tl.arange(0, WIDTH))[None, :]
                tl.store(part_ptr + to_MV, outs[g], is_line_M[:, None])
            tl.store(top_sum_ptr + part_M * 2, top_M, is_line_M)
            tl.store(top_sum_ptr + part_M * 2 + 1, sum_M, is_line_M)
