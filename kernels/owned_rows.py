"""Which of a row's chosen positions this rank holds, and where: a list for each row, and its length, in one launch.

    row_TK   = page_RP[r, position // S] * S + position % S      of the positions whose page is here, in their order;
               -1 behind the last of them                        r = request of the query row
    count_T  = how many there are

T = query rows, Q of each request, K = positions of a row, R = requests, P = pages of a request, S = tokens of a page.
"""

import functools
from typing import Any

import torch

from specdec.kernels.pool_rows import pool_rows_ref
from specdec.kernels.tensor_check import check_tensor

_MOST_POSITIONS = 4096  # of a row, all of which a program holds


def owned_rows_ref(
    position_TK: torch.Tensor, page_RP: torch.Tensor, *, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Define `owned_rows`: i64 [T, K] and [T]."""
    num_rows, num_chosen = position_TK.shape
    request_T1 = torch.arange(num_rows, device=page_RP.device)[:, None] // (num_rows // len(page_RP))
    page_TK = page_RP[request_T1, position_TK.long().clamp(min=0) // page_size]
    is_here_TK = (position_TK >= 0) & (page_TK >= 0)
    row_TK = pool_rows_ref(position_TK.long(), page_RP.long(), page_size=page_size)
    place_TK = torch.where(is_here_TK, is_here_TK.cumsum(dim=1) - 1, num_chosen)  # the last column collects the others
    out_TK = row_TK.new_full((num_rows, num_chosen + 1), -1).scatter_(1, place_TK, row_TK)[:, :num_chosen]
    count_T = is_here_TK.sum(dim=1)
    return out_TK.masked_fill(torch.arange(num_chosen, device=count_T.device) >= count_T[:, None], -1), count_T


def owned_rows(
    position_TK: torch.Tensor,
    page_RP: torch.Tensor,
    *,
    page_size: int,
    out_TK: torch.Tensor,
    out_count_T: torch.Tensor,
) -> None:
    """Locate what is here, on a GPU, on the current stream.

    Args:
        position_TK: Positions of each row's request, i32; -1 where there is none; K at most 4096.
        page_RP: This rank's physical pages of each request, i32, -1 where another rank holds the page; T is a multiple
            of R.
        page_size: S, a power of two.
        out_TK: Written, i32.
        out_count_T: Written, i32. All are contiguous.

    Raises:
        ValueError: Shapes do not go together, or a tensor has another dtype or layout.
    """
    (num_rows, num_chosen), (num_requests, num_pages) = position_TK.shape, page_RP.shape
    if num_rows % max(num_requests, 1) or page_size & (page_size - 1) or not 1 <= num_chosen <= _MOST_POSITIONS:
        raise ValueError(
            f"rows must be a multiple of the requests, pages of 2^n tokens, positions 1..{_MOST_POSITIONS}, got "
            f"{num_rows} and {num_requests}, {page_size}, {num_chosen}"
        )
    for name, tensor, shape in (
        ("position_TK", position_TK, (num_rows, num_chosen)),
        ("page_RP", page_RP, (num_requests, num_pages)),
        ("out_TK", out_TK, (num_rows, num_chosen)),
        ("out_count_T", out_count_T, (num_rows,)),
    ):
        check_tensor(name, tensor, torch.int32, shape)
    if num_rows:
        owned_rows_kernel()[(num_rows,)](
            position_TK, page_RP, out_TK, out_count_T, num_chosen, num_pages, num_rows // num_requests,
            PAGE_SIZE=page_size, BLOCK=1 << (num_chosen - 1).bit_length(),
            STARTS_EARLY=out_TK.is_cuda, launch_pdl=out_TK.is_cuda, num_warps=8,
        )  # fmt: skip


@functools.cache
def owned_rows_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        position_ptr,  # [T, num_chosen] i32
        page_ptr,  # [R, num_pages] i32
        out_ptr,  # [T, num_chosen] i32
        count_ptr,  # [T] i32
        num_chosen,
        num_pages,
        rows_per_request,
        PAGE_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        is_column = column < num_chosen
        position = tl.load(position_ptr + row * num_chosen + column, mask=is_column, other=-1)
        page_at = page_ptr + row // rows_per_request * num_pages + position // PAGE_SIZE
        page = tl.load(page_at, mask=position >= 0, other=-1)
        is_here = page >= 0
        place = tl.cumsum(is_here.to(tl.int32), axis=0)
        count = tl.sum(is_here.to(tl.int32), axis=0)
        out = out_ptr + row * num_chosen
        tl.store(out + place - 1, page * PAGE_SIZE + position % PAGE_SIZE, mask=is_here)
        tl.store(out + column, -1, mask=is_column & (column >= count))
        tl.store(count_ptr + row, count)

    return kernel
