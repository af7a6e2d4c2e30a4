"""Gather strided rows of bytes into one dense block, so that they can be sent as few long pieces.

    out[r] = source[offset[r] : offset[r] + row_bytes]

R = rows, B = bytes of a row. Rows move as whole words: what the bytes mean, NaN included, does not matter. A word is 4
bytes where rows and offsets allow it, else 1.
"""

import functools
from typing import Any

import torch

_TILE = 1024  # words of a tile of the kernel


def pack_rows_ref(source_S: torch.Tensor, offset_R: torch.Tensor, out_RB: torch.Tensor) -> None:
    """Define `pack_rows`: byte by byte."""
    column_B = torch.arange(out_RB.shape[1], device=source_S.device)
    out_RB.copy_(source_S[offset_R.to(source_S.device)[:, None] + column_B])


def pack_rows(source_S: torch.Tensor, offset_R: torch.Tensor, out_RB: torch.Tensor) -> None:
    """Gather rows of `source_S` into `out_RB`; on a GPU asynchronously, on the current stream.

    Args:
        source_S: Memory of one region, u8, contiguous.
        offset_R: First byte of each row, i64, in host memory, so that it is checked without waiting for the device.
        out_RB: Where the rows go, u8 [R, B], contiguous, on the device of `source_S`, apart from it.

    Raises:
        ValueError: A row leaves `source_S`, or a tensor has another shape, dtype or device.
    """
    _check(source_S, offset_R, out_RB)
    num_rows, row_bytes = out_RB.shape
    if not num_rows or not row_bytes:
        return
    aligned = (row_bytes, source_S.data_ptr(), out_RB.data_ptr(), source_S.numel())
    if all(number % 4 == 0 for number in aligned) and not bool((offset_R & 3).any()):
        source_S, out_RB, offset_R = source_S.view(torch.int32), out_RB.view(torch.int32), offset_R >> 2
    if source_S.device.type == "cuda":
        launch_pack_rows(source_S, offset_R.to(source_S.device, non_blocking=True), out_RB)
        return
    num_words = out_RB.shape[1]
    # Every place of the source at which a row can begin, as a view.
    rows = source_S.as_strided((source_S.numel() - num_words + 1, num_words), (1, 1))
    torch.index_select(rows, 0, offset_R, out=out_RB)


def launch_pack_rows(source_S: torch.Tensor, offset_R: torch.Tensor, out_RW: torch.Tensor) -> None:
    """Run the Triton kernel: words of one integer dtype, offsets in words, everything on one device."""
    num_rows, num_words = out_RW.shape
    words = min(_TILE, 1 << (num_words - 1).bit_length())
    rows = _TILE // words
    grid = (-(-num_rows // rows), -(-num_words // words))
    _kernel()[grid](source_S, offset_R, out_RW, num_rows, num_words, ROWS=rows, WORDS=words)


@functools.cache
def _kernel() -> Any:
    """The kernel, made when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415

    @triton.jit
    def pack_rows_kernel(
        source_ptr,  # [S] words
        offset_ptr,  # [num_rows] i64, in words
        out_ptr,  # [num_rows, num_words]
        num_rows,
        num_words,
        ROWS: tl.constexpr,
        WORDS: tl.constexpr,
    ):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[None, :]
        offset = tl.load(offset_ptr + row, mask=row < num_rows, other=0)
        inside = (row < num_rows) & (word < num_words)
        words = tl.load(source_ptr + offset + word, mask=inside)
        # i64: rows x words of a large buffer pass 2^31.
        tl.store(out_ptr + row.to(tl.int64) * num_words + word, words, mask=inside)

    return pack_rows_kernel


def _check(source_S: torch.Tensor, offset_R: torch.Tensor, out_RB: torch.Tensor) -> None:
    if source_S.dtype != torch.uint8 or out_RB.dtype != torch.uint8 or offset_R.dtype != torch.int64:
        raise ValueError(
            f"source and out must be uint8 and offsets int64, got {source_S.dtype}, {out_RB.dtype}, {offset_R.dtype}"
        )
    if source_S.dim() != 1 or out_RB.dim() != 2 or offset_R.shape != out_RB.shape[:1]:
        raise ValueError(
            f"source must be [S], offsets [R] and out [R, B], got {tuple(source_S.shape)}, {tuple(offset_R.shape)} and "
            f"{tuple(out_RB.shape)}"
        )
    if not source_S.is_contiguous() or not out_RB.is_contiguous():
        raise ValueError("source and out must be contiguous: rows are written in place")
    if source_S.device != out_RB.device or offset_R.device.type != "cpu":
        raise ValueError(
            f"source and out must be on one device and offsets in host memory, got {source_S.device}, {out_RB.device} "
            f"and {offset_R.device}"
        )
    if len(offset_R) and not 0 <= int(offset_R.min()) <= int(offset_R.max()) <= source_S.numel() - out_RB.shape[1]:
        raise ValueError(
            f"rows of {out_RB.shape[1]} bytes from {int(offset_R.min())} to {int(offset_R.max())} leave a source of "
            f"{source_S.numel()} bytes"
        )
