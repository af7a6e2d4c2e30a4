"""Take the same rows of several tensors, in one launch on a GPU.

    out_BX = source_TX[row_B]        of each source

B = rows that are taken, T = rows of a source, X = values of a row: whole words of 4 bytes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from specdec.kernels.tensor_check import check_tensor

_MOST_SOURCES = 4
_BLOCK = 1024  # words


def take_rows_ref(row_B: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Define `take_rows`."""
    return [source[row_B] for source in sources]


def take_rows(row_B: torch.Tensor, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Copy rows, on the current stream.

    Args:
        row_B: Which rows, i64, each below T.
        sources: At most 4 tensors [T, ...], contiguous.
        outs: For each the tensor [B, ...] that takes its rows, like it but for the first axis; apart from the sources.

    Raises:
        ValueError: There are too many tensors, or one has another shape, dtype or layout.
    """
    check_tensor("row_B", row_B, torch.int64, (len(row_B),))
    if not 1 <= len(sources) <= _MOST_SOURCES or len(sources) != len(outs):
        raise ValueError(f"there are 1..{_MOST_SOURCES} sources and as many outs, got {len(sources)} and {len(outs)}")
    for place, (source, out) in enumerate(zip(sources, outs, strict=True)):
        check_tensor(f"source {place}", source, source.dtype, source.shape)
        check_tensor(f"out {place}", out, source.dtype, (len(row_B), *source.shape[1:]))
        if _row_bytes(source) % 4:
            raise ValueError(f"rows of source {place} must have whole words of 4 bytes, got {_row_bytes(source)} bytes")
    copies = [
        (source.view(torch.uint8).view(-1).view(torch.int32), out.view(torch.uint8).view(-1).view(torch.int32), words)
        for source, out in zip(sources, outs, strict=True)
        if (words := _row_bytes(source) // 4)
    ]
    if len(row_B) and copies:
        unused = copies[:1] * (_MOST_SOURCES - len(copies))
        take_rows_kernel()[len(row_B), len(copies)](
            row_B, *(value for copy in (*copies, *unused) for value in copy),
            BLOCK=_BLOCK, STARTS_EARLY=row_B.is_cuda, launch_pdl=row_B.is_cuda,
        )  # fmt: skip


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor[:1].nbytes


@functools.cache
def take_rows_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        row_ptr,  # [B] i64
        source_0,  # [T, words_0] i32
        out_0,  # [B, words_0] i32
        words_0,
        source_1,
        out_1,
        words_1,
        source_2,
        out_2,
        words_2,
        source_3,
        out_3,
        words_3,
        BLOCK: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        to = tl.program_id(0).to(tl.int64)
        which = tl.program_id(1)
        source_ptr, out_ptr, words = source_0, out_0, words_0
        if which == 1:
            source_ptr, out_ptr, words = source_1, out_1, words_1
        elif which == 2:
            source_ptr, out_ptr, words = source_2, out_2, words_2
        elif which == 3:
            source_ptr, out_ptr, words = source_3, out_3, words_3
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        row = tl.load(row_ptr + to)
        for first in range(0, words, BLOCK):
            word = first + tl.arange(0, BLOCK)
            value = tl.load(source_ptr + row * words + word, mask=word < words)
            tl.store(out_ptr + to * words + word, value, mask=word < words)

    return kernel
