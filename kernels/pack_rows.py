"""Gather strided rows of bytes into a buffer, so that they can be sent as few long pieces.

    out[out_offset[r] + b] = source[offset[r] + b]        for b in 0..row_bytes - 1

R = rows, S = bytes of a memory range. Rows move as whole words: what the bytes mean, NaN included, does not matter. A
word is 4 bytes where rows and offsets allow it, else 1.
"""

import functools
from typing import Any

import torch

_BLOCK = {4: 256, 1: 512}  # vectors of a program by words of a vector: more at once wait for each other's offsets
_WARPS = 4


def pack_rows_ref(
    source_S: torch.Tensor, offset_R: torch.Tensor, out_S: torch.Tensor, out_offset_R: torch.Tensor, *, row_bytes: int
) -> None:
    """Define `pack_rows`: byte by byte."""
    for offset, out_offset in zip(offset_R.tolist(), out_offset_R.tolist(), strict=True):
        for byte in range(row_bytes):
            out_S[out_offset + byte] = source_S[offset + byte]


def pack_rows(
    source_S: torch.Tensor, offset_R: torch.Tensor, out_S: torch.Tensor, out_offset_R: torch.Tensor, *, row_bytes: int
) -> None:
    """Gather rows of `source_S` into `out_S`; on a GPU asynchronously, on the current stream.

    Args:
        source_S: Memory that is read, u8, contiguous.
        offset_R: First byte of each row in it, i64, in host memory: so it is checked without waiting for the device.
        out_S: Memory that is written, u8, contiguous, on the device of `source_S`, apart from it.
        out_offset_R: First byte of each row in it, i64, in host memory; rows do not overlap there.
        row_bytes: Bytes of a row, >= 1.

    Raises:
        ValueError: A row leaves its memory, or a tensor has another shape, dtype or device.
    """
    _check(source_S, out_S, (offset_R, out_offset_R), row_bytes)
    if not len(offset_R):
        return
    num_words, vector = row_bytes, 1
    numbers = (row_bytes, source_S.data_ptr(), out_S.data_ptr())
    if _aligned(4, (*numbers, source_S.numel(), out_S.numel()), (offset_R, out_offset_R)):
        vector = 4 if _aligned(16, numbers, (offset_R, out_offset_R)) else 1
        source_S, out_S, num_words = source_S.view(torch.int32), out_S.view(torch.int32), row_bytes // 4
        offset_R, out_offset_R = offset_R >> 2, out_offset_R >> 2
    if source_S.device.type == "cuda":
        offset_R, out_offset_R = (each.to(source_S.device, non_blocking=True) for each in (offset_R, out_offset_R))
        launch_pack_rows(source_S, offset_R, out_S, out_offset_R, num_words=num_words, vector=vector)
        return
    # Every place of the source at which a row can begin, as a view.
    rows = source_S.as_strided((source_S.numel() - num_words + 1, num_words), (1, 1))
    gaps_R = out_offset_R[1:] - out_offset_R[:-1]
    gap = int(gaps_R[0]) if len(gaps_R) else num_words
    if gap >= num_words and bool((gaps_R == gap).all()):
        out = out_S.as_strided((len(offset_R), num_words), (gap, 1), out_S.storage_offset() + int(out_offset_R[0]))
        if gap == num_words:
            torch.index_select(rows, 0, offset_R, out=out)
        else:
            out.copy_(rows.index_select(0, offset_R))
    else:
        out_S[out_offset_R[:, None] + torch.arange(num_words)] = rows.index_select(0, offset_R)


def launch_pack_rows(
    source_S: torch.Tensor,
    offset_R: torch.Tensor,
    out_S: torch.Tensor,
    out_offset_R: torch.Tensor,
    *,
    num_words: int,
    vector: int,
) -> None:
    """Run the Triton kernel: words of one integer dtype, offsets and lengths in words, everything on one device.

    Args:
        source_S: As in `pack_rows`, like the arguments not named here, but unchecked.
        offset_R: First word of each row.
        out_S: Memory that is written.
        out_offset_R: First word of each row.
        num_words: Of a row.
        vector: Words that move at once, 1 or 4: it divides the row and every offset, and both memories begin at a
            multiple of it.
    """
    block = _BLOCK[vector]
    pack_rows_kernel()[(-(-len(offset_R) * (num_words // vector) // block),)](
        source_S,
        offset_R,
        out_S,
        out_offset_R,
        len(offset_R),
        WORDS=num_words,
        VECTOR=vector,
        BLOCK=block,
        num_warps=_WARPS,
    )


@functools.cache
def pack_rows_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        source_ptr,  # words
        offset_ptr,  # [num_rows] i64: offsets of a large pool pass 2^31
        out_ptr,  # words
        out_offset_ptr,  # [num_rows] i64
        num_rows,
        WORDS: tl.constexpr,  # of a row
        VECTOR: tl.constexpr,  # words that move at once
        BLOCK: tl.constexpr,
    ) -> None:
        # Rows are cut into vectors and these dealt out one by one, whatever row they are of: no thread is idle.
        VECTORS: tl.constexpr = WORDS // VECTOR
        first = tl.program_id(0).to(tl.int64) * BLOCK
        vector = (first % VECTORS).to(tl.int32) + tl.arange(0, BLOCK)
        row = first // VECTORS + vector // VECTORS
        inside = row < num_rows
        word = vector % VECTORS * VECTOR
        offset = tl.load(offset_ptr + row, mask=inside, other=0) + word
        out_offset = tl.load(out_offset_ptr + row, mask=inside, other=0) + word
        if VECTOR > 1:
            offset = tl.multiple_of(offset, VECTOR)
            out_offset = tl.multiple_of(out_offset, VECTOR)
        place = tl.arange(0, VECTOR)[None, :]
        words = tl.load(source_ptr + (offset[:, None] + place), mask=inside[:, None])
        tl.store(out_ptr + (out_offset[:, None] + place), words, mask=inside[:, None])

    return kernel


def _aligned(num_bytes: int, numbers: tuple[int, ...], offsets: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether all are multiples of a power of two."""
    bits_R = (offsets[0] | offsets[1]) & (num_bytes - 1)
    return all(number % num_bytes == 0 for number in numbers) and not bool(bits_R.any())


def _check(
    source_S: torch.Tensor, out_S: torch.Tensor, offsets: tuple[torch.Tensor, torch.Tensor], row_bytes: int
) -> None:
    if row_bytes < 1 or any(offset_R.shape != offsets[0].shape or offset_R.dim() != 1 for offset_R in offsets):
        shapes = [tuple(offset_R.shape) for offset_R in offsets]
        raise ValueError(f"rows have at least one byte and an offset on each side, got {row_bytes} and {shapes}")
    if source_S.device != out_S.device:
        raise ValueError(f"source and out must be on one device, got {source_S.device} and {out_S.device}")
    for name, memory_S, offset_R in (("source", source_S, offsets[0]), ("out", out_S, offsets[1])):
        if memory_S.dtype != torch.uint8 or memory_S.dim() != 1 or not memory_S.is_contiguous():
            raise ValueError(f"{name} must be uint8 [S] and contiguous, got {memory_S.dtype} {tuple(memory_S.shape)}")
        if offset_R.dtype != torch.int64 or offset_R.device.type != "cpu":
            raise ValueError(f"offsets must be int64 in host memory, got {offset_R.dtype} on {offset_R.device}")
        if len(offset_R) and not 0 <= int(offset_R.min()) <= int(offset_R.max()) <= memory_S.numel() - row_bytes:
            raise ValueError(
                f"rows of {row_bytes} bytes from {int(offset_R.min())} to {int(offset_R.max())} leave {name} of "
                f"{memory_S.numel()} bytes"
            )
