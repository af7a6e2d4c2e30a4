"""Where the rows of a decoding round stand, from lengths that only the device knows: one launch.

    position_T  = start_B + j                                        j = first + q < num_rows_B, else -1: padding
    write_row_T = page_BP[b, position // S] * S + position % S       -1 where padding, or the page is elsewhere
    count_T     = min(position + 1, K)                               keys that a row attends to
    owned_T     = positions up to a row's own whose pages are here   all position + 1 of them on one rank
    rotation_T  = cos, sin of position * inverse_frequency_F

B = requests, Q = rows of each, T = B * Q, row t = b * Q + q, P = pages of a request, S = tokens of a page, K = keys
that an indexer chooses, F = rotated pairs. Padding rows are rotated by nothing: every replay gives them the same.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from specdec.kernels.rotary import Rotation, rotation_at
from specdec.kernels.tensor_check import check_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRows:
    """The rows of a round; the same memory in every round that a graph replays.

    Attributes:
        position_T: i32, -1 for padding.
        write_row_T: Physical row of the pool that takes a row's KV, i64; -1 for padding.
        count_T: Keys that a row attends to, i32; 0 for padding.
        owned_T: Positions up to its own that this rank holds, i32; 0 for padding.
        rotation: Of the positions.
    """

    position_T: torch.Tensor
    write_row_T: torch.Tensor
    count_T: torch.Tensor
    owned_T: torch.Tensor
    rotation: Rotation

    @classmethod
    def empty(cls, num_rows: int, *, num_pairs: int, device: torch.device) -> "DecodeRows":
        """Give memory for T rows."""

        def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            position_T=new(num_rows, dtype=torch.int32),
            write_row_T=new(num_rows, dtype=torch.int64),
            count_T=new(num_rows, dtype=torch.int32),
            owned_T=new(num_rows, dtype=torch.int32),
            rotation=Rotation(
                cos_TP=new(num_rows, num_pairs, dtype=torch.float32),
                sin_TP=new(num_rows, num_pairs, dtype=torch.float32),
            ),
        )


def decode_rows_ref(
    start_B: torch.Tensor,
    num_rows_B: torch.Tensor,
    page_BP: torch.Tensor,
    inverse_frequency_F: torch.Tensor,
    *,
    rows_per_request: int,
    first: int,
    page_size: int,
    most_keys: int,
    before_BP: torch.Tensor | None = None,
) -> DecodeRows:
    """Define `decode_rows`; see there for the arguments."""
    j_Q = first + torch.arange(rows_per_request, device=start_B.device)
    is_live_BQ = j_Q < num_rows_B[:, None]
    position_BQ = torch.where(is_live_BQ, start_B[:, None] + j_Q, -1)
    index_BQ = position_BQ.clamp(min=0) // page_size
    page_BQ = page_BP.long().gather(1, index_BQ)
    is_here_BQ = is_live_BQ & (page_BQ >= 0)
    write_row_BQ = torch.where(is_here_BQ, page_BQ * page_size + position_BQ % page_size, -1)
    position_T = position_BQ.flatten()
    owned_BQ = position_BQ + 1
    if before_BP is not None:
        own_BQ = torch.where(is_here_BQ, position_BQ % page_size + 1, 0)
        owned_BQ = torch.where(is_live_BQ, before_BP.long().gather(1, index_BQ) * page_size + own_BQ, 0)
    return DecodeRows(
        position_T=position_T.int(),
        write_row_T=write_row_BQ.flatten(),
        count_T=(position_T + 1).clamp(max=most_keys).int(),
        owned_T=owned_BQ.flatten().int(),
        rotation=rotation_at(position_T.clamp(min=0), inverse_frequency_F),
    )


def decode_rows(
    start_B: torch.Tensor,
    num_rows_B: torch.Tensor,
    page_BP: torch.Tensor,
    inverse_frequency_F: torch.Tensor,
    *,
    first: int = 0,
    page_size: int,
    most_keys: int,
    before_BP: torch.Tensor | None = None,
    out: DecodeRows,
) -> None:
    """Place the rows, on a GPU, on the current stream.

    Args:
        start_B: Position of a request's row j = 0, i64.
        num_rows_B: Its rows are those of j below this, i64; 0 or less has none.
        page_BP: Physical pages of each request, i32, contiguous; valid up to the page of its last row; -1 where another
            rank has the page.
        inverse_frequency_F: float32.
        first: j of the first of the Q rows that `out` takes of each request.
        page_size: S, a power of two.
        most_keys: K.
        before_BP: How many pages in front of each are here, i32; None where all are.
        out: Written.

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    num_requests, num_pages = page_BP.shape
    num_pairs, num_rows = len(inverse_frequency_F), len(out.position_T)
    if not num_requests or num_rows % num_requests or num_pairs & (num_pairs - 1) or page_size & (page_size - 1):
        raise ValueError(
            f"rows must be a multiple of the requests, pairs and page_size powers of two, got {num_rows}, "
            f"{num_requests}, {num_pairs} and {page_size}"
        )
    for name, tensor, dtype, shape in (
        ("start_B", start_B, torch.int64, (num_requests,)),
        ("num_rows_B", num_rows_B, torch.int64, (num_requests,)),
        ("page_BP", page_BP, torch.int32, (num_requests, num_pages)),
        ("inverse_frequency_F", inverse_frequency_F, torch.float32, (num_pairs,)),
        ("out.position_T", out.position_T, torch.int32, (num_rows,)),
        ("out.write_row_T", out.write_row_T, torch.int64, (num_rows,)),
        ("out.count_T", out.count_T, torch.int32, (num_rows,)),
        ("out.owned_T", out.owned_T, torch.int32, (num_rows,)),
        ("out.rotation.cos_TP", out.rotation.cos_TP, torch.float32, (num_rows, num_pairs)),
        ("out.rotation.sin_TP", out.rotation.sin_TP, torch.float32, (num_rows, num_pairs)),
    ):
        check_tensor(name, tensor, dtype, shape)
    if before_BP is not None:
        check_tensor("before_BP", before_BP, torch.int32, (num_requests, num_pages))
    decode_rows_kernel()[(num_rows,)](
        start_B, num_rows_B, page_BP, before_BP, inverse_frequency_F,
        out.position_T, out.write_row_T, out.count_T, out.owned_T, out.rotation.cos_TP, out.rotation.sin_TP,
        num_pages, num_rows // num_requests, first,
        PAGE_SIZE=page_size, MOST_KEYS=most_keys, PAIRS=num_pairs,
        STARTS_EARLY=start_B.is_cuda, launch_pdl=start_B.is_cuda, num_warps=1,
    )  # fmt: skip


@functools.cache
def decode_rows_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        start_ptr,  # [B] i64
        num_rows_ptr,  # [B] i64
        page_ptr,  # [B, num_pages] i32
        before_ptr,  # [B, num_pages] i32, or None
        frequency_ptr,  # [PAIRS] f32
        position_ptr,  # [T] i32
        write_row_ptr,  # [T] i64
        count_ptr,  # [T] i32
        owned_ptr,  # [T] i32
        cos_ptr,  # [T, PAIRS] f32
        sin_ptr,  # [T, PAIRS] f32
        num_pages,
        rows_per_request,
        first,
        PAGE_SIZE: tl.constexpr,
        MOST_KEYS: tl.constexpr,
        PAIRS: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        row = tl.program_id(0)
        request = row // rows_per_request
        j = first + row % rows_per_request
        pair = tl.arange(0, PAIRS)
        frequency = tl.load(frequency_ptr + pair)
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        is_live = j < tl.load(num_rows_ptr + request)
        position = tl.where(is_live, tl.load(start_ptr + request) + j, -1)
        place = request.to(tl.int64) * num_pages + position // PAGE_SIZE
        page = tl.load(page_ptr + place, mask=is_live, other=-1).to(tl.int64)
        tl.store(position_ptr + row, position.to(tl.int32))
        tl.store(write_row_ptr + row, tl.where(page >= 0, page * PAGE_SIZE + position % PAGE_SIZE, -1))
        tl.store(count_ptr + row, tl.minimum(position + 1, MOST_KEYS).to(tl.int32))
        owned = position + 1
        if before_ptr is not None:
            before = tl.load(before_ptr + place, mask=is_live, other=0).to(tl.int64)
            owned = before * PAGE_SIZE + tl.where(page >= 0, position % PAGE_SIZE + 1, 0)
        tl.store(owned_ptr + row, owned.to(tl.int32))
        angle = tl.where(is_live, position, 0).to(tl.float32) * frequency
        tl.store(cos_ptr + row * PAIRS + pair, tl.cos(angle))
        tl.store(sin_ptr + row * PAIRS + pair, tl.sin(angle))

    return kernel
