"""Gather strided rows of bytes into a buffer, so that they can be sent as few long pieces.

    out[out_offset[r] + b] = source[offset[r] + b]        for b in 0..row_bytes - 1

R = rows, S = bytes of a memory range. Rows move as whole words: what the bytes mean, NaN included, does not matter. A
word is 4 bytes where rows and offsets allow it, else 1.
"""

import functools
from typing import Any

import torch

_TILE = 1024  # words of a tile of the kernel


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
    num_words = row_bytes
    aligned = (row_bytes, source_S.data_ptr(), out_S.data_ptr(), source_S.numel(), out_S.numel())
    if all(number % 4 == 0 for number in aligned) and not bool(((offset_R | out_offset_R) & 3).any()):
        source_S, out_S, num_words = source_S.view(torch.int32), out_S.view(torch.int32), row_bytes // 4
        offset_R, out_offset_R = offset_R >> 2, out_offset_R >> 2
    if source_S.device.type == "cuda":
        offset_R, out_offset_R = (each.to(source_S.device, non_blocking=True) for each in (offset_R, out_offset_R))
        launch_pack_rows(source_S, offset_R, out_S, out_offset_R, num_words=num_words)
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
    source_S: torch.Tensor, offset_R: torch.Tensor, out_S: torch.Tensor, out_offset_R: torch.Tensor, *, num_words: int
) -> None:
    """Run the Triton kernel: words of one integer dtype, offsets and lengths in words, everything on one device."""
    words = min(_TILE, 1 << (num_words - 1).bit_length())
    rows = _TILE // words
    grid = (-(-len(offset_R) // rows), -(-num_words // words))
    pack_rows_kernel()[grid](source_S, offset_R, out_S, out_offset_R, len(offset_R), num_words, ROWS=rows, WORDS=words)


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
        num_words,
        ROWS: tl.constexpr,
        WORDS: tl.constexpr,
    ) -> None:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[None, :]
        offset = tl.load(offset_ptr + row, mask=row < num_rows, other=0)
        out_offset = tl.load(out_offset_ptr + row, mask=row < num_rows, other=0)
        inside = (row < num_rows) & (word < num_words)
        words = tl.load(source_ptr + offset + word, mask=inside)
        tl.store(out_ptr + out_offset + word, words, mask=inside)

    return kernel


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
