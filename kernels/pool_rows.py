"""Physical rows of chosen positions, on the device that chose them.

    row_TK = page_RP[r, position // S] * S + position % S        r = request of the query row; -1 stays -1

T = query rows, Q of each request, K = positions of a row, R = requests, P = pages of a request, S = tokens of a page.
"""

import functools
from typing import Any

import torch

from specdec.kernels.tensor_check import check_rows, check_tensor

_BLOCK = 1024
_INTEGERS = (torch.int32, torch.int64)


def pool_rows_ref(position_TK: torch.Tensor, page_RP: torch.Tensor, *, page_size: int) -> torch.Tensor:
    """Define `pool_rows`: i64 [T, K]."""
    request_T1 = torch.arange(len(position_TK), device=page_RP.device)[:, None] // (len(position_TK) // len(page_RP))
    row_TK = page_RP[request_T1, position_TK.clamp(min=0) // page_size] * page_size + position_TK % page_size
    return torch.where(position_TK < 0, -1, row_TK)


def pool_rows(position_TK: torch.Tensor, page_RP: torch.Tensor, *, page_size: int, out_TK: torch.Tensor) -> None:
    """Locate positions, on a GPU, on the current stream.

    Args:
        position_TK: Positions of each row's request, i32 or i64, contiguous; -1 where there is none.
        page_RP: Physical pages of each request, i32 or i64, adjacent in a request; T is a multiple of R.
        page_size: S, a power of two.
        out_TK: Written, i32 or i64 as a row needs it, contiguous.

    Raises:
        ValueError: Shapes do not go together, or a tensor has another dtype or layout.
    """
    num_rows, num_chosen = position_TK.shape
    num_requests = len(page_RP)
    if num_rows % num_requests if num_requests else num_rows:
        raise ValueError(f"rows must be a multiple of the requests, got {num_rows} and {num_requests}")
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, got {page_size}")
    for name, tensor in (("positions", position_TK), ("out", out_TK)):
        if tensor.dtype not in _INTEGERS:
            raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")
        check_tensor(name, tensor, tensor.dtype, (num_rows, num_chosen))
    check_rows("pages", page_RP, _INTEGERS, page_RP.shape)
    if position_TK.numel():
        pool_rows_kernel()[num_rows, -(-num_chosen // _BLOCK)](
            position_TK, page_RP, out_TK, num_chosen, page_RP.stride(0), num_rows // num_requests,
            PAGE_SIZE=page_size, BLOCK=_BLOCK, STARTS_EARLY=out_TK.is_cuda, launch_pdl=out_TK.is_cuda,
        )  # fmt: skip


@functools.cache
def pool_rows_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        position_ptr,  # [num_rows, num_chosen]
        page_ptr,  # [requests, pages], requests `page_stride` apart
        out_ptr,  # [num_rows, num_chosen]
        num_chosen,
        page_stride,
        rows_per_request,
        PAGE_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)  # 2^31 positions are 1M rows of 2048
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_column = column < num_chosen
        position = tl.load(position_ptr + row * num_chosen + column, mask=is_column, other=-1)
        page_at = page_ptr + row // rows_per_request * page_stride + position // PAGE_SIZE
        page = tl.load(page_at, mask=position >= 0, other=0).to(out_ptr.dtype.element_ty)
        chosen = tl.where(position < 0, -1, page * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(out_ptr + row * num_chosen + column, chosen, mask=is_column)

    return kernel
