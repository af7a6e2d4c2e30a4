"""Look tokens up in the part of an embedding that a rank holds, on a GPU.

    out_TH = table_VH[token_T - first_id]       zeros where another rank holds the token, and in a row of padding

T = rows, V = rows of the table, H = hidden. Added over the ranks, this is the whole embedding's row, exactly.
"""

import functools
from typing import Any

import torch

from specdec.kernels.tensor_check import check_tensor

_BLOCK = 1024


def embed_rows_ref(
    token_T: torch.Tensor, position_T: torch.Tensor, table_VH: torch.Tensor, *, first_id: int
) -> torch.Tensor:
    """Define `embed_rows`: [T, H]."""
    local_T = token_T - first_id
    is_here_T = (local_T >= 0) & (local_T < len(table_VH)) & (position_T >= 0)
    return table_VH[local_T.where(is_here_T, 0)].masked_fill(~is_here_T[:, None], 0)


def embed_rows(
    token_T: torch.Tensor, position_T: torch.Tensor, table_VH: torch.Tensor, *, first_id: int, out_TH: torch.Tensor
) -> None:
    """Look up, on the current stream.

    Args:
        token_T: Token ids, i64; anything in a row of padding.
        position_T: Where the rows stand, i32; -1 for padding.
        table_VH: bfloat16, contiguous.
        first_id: Token of its first row.
        out_TH: Written, bfloat16, contiguous.

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    num_rows, (num_ids, num_features) = len(token_T), table_VH.shape
    check_tensor("token_T", token_T, torch.int64, (num_rows,))
    check_tensor("position_T", position_T, torch.int32, (num_rows,))
    check_tensor("table_VH", table_VH, torch.bfloat16, (num_ids, num_features))
    check_tensor("out_TH", out_TH, torch.bfloat16, (num_rows, num_features))
    if num_rows:
        embed_rows_kernel()[num_rows, -(-num_features // _BLOCK)](
            token_T, position_T, table_VH, out_TH, num_ids, num_features, first_id,
            BLOCK=_BLOCK, STARTS_EARLY=token_T.is_cuda, launch_pdl=token_T.is_cuda,
        )  # fmt: skip


@functools.cache
def embed_rows_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        token_ptr,  # [T] i64
        position_ptr,  # [T] i32
        table_ptr,  # [num_ids, num_features] bf16
        out_ptr,  # [T, num_features] bf16
        num_ids,
        num_features,
        first_id,
        BLOCK: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        local = tl.load(token_ptr + row) - first_id
        is_here = (tl.load(position_ptr + row) >= 0) & (local >= 0) & (local < num_ids)
        value = tl.load(table_ptr + local * num_features + feature, mask=is_here & (feature < num_features), other=0.0)
        tl.store(out_ptr + row * num_features + feature, value, mask=feature < num_features)

    return kernel
