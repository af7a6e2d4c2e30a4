"""Noise keys of the tokens that the rows of a decoding round draw, from lengths that only the device knows.

    key_T = mix( ((start_B + first + q + 1) * G) ^ stream_key_B )        row t = b * Q + q

`position_keys` of `gumbel_noise` on a GPU: row j of a request that starts at position s draws the token in front of
which s + j + 1 tokens stand. B = requests, Q = rows of each, T = B * Q.
"""

import functools
from typing import Any

import torch

from specdec.kernels.gumbel_noise import GOLDEN, MIX_1, MIX_2, position_keys
from specdec.kernels.tensor_check import check_tensor

_SIGNED = {  # the same bits
    name: factor - (1 << 64) for name, factor in (("GOLDEN", GOLDEN), ("MIX_1", MIX_1), ("MIX_2", MIX_2))
}
_BLOCK = 128


def noise_keys_ref(
    stream_key_B: torch.Tensor, start_B: torch.Tensor, *, rows_per_request: int, first: int
) -> torch.Tensor:
    """Define `noise_keys`: i64 [T]."""
    position_BQ = start_B[:, None].cpu() + first + 1 + torch.arange(rows_per_request)
    stream_key_T = stream_key_B.cpu().repeat_interleave(rows_per_request).numpy().view("uint64")
    return torch.from_numpy(position_keys(stream_key_T, position_BQ.flatten().numpy())).to(start_B.device)


def noise_keys(stream_key_B: torch.Tensor, start_B: torch.Tensor, *, first: int = 0, out_T: torch.Tensor) -> None:
    """Compute keys, on a GPU, on the current stream.

    Args:
        stream_key_B: `stream_key` of each request, the bits of an unsigned number, i64.
        start_B: Position of a request's row j = 0, i64.
        first: j of the first of the Q rows that `out_T` has of each request.
        out_T: Written, i64.

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    num_requests, num_rows = len(start_B), len(out_T)
    if not num_requests or num_rows % num_requests:
        raise ValueError(f"rows must be a multiple of the requests, got {num_rows} and {num_requests}")
    for name, tensor, size in (
        ("stream_key_B", stream_key_B, num_requests),
        ("start_B", start_B, num_requests),
        ("out_T", out_T, num_rows),
    ):
        check_tensor(name, tensor, torch.int64, (size,))
    noise_keys_kernel()[(-(-num_rows // _BLOCK),)](
        stream_key_B, start_B, out_T, num_rows, num_rows // num_requests, first,
        **_SIGNED, BLOCK=_BLOCK, STARTS_EARLY=out_T.is_cuda, launch_pdl=out_T.is_cuda,
    )  # fmt: skip


@functools.cache
def noise_keys_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        stream_key_ptr,  # [B] i64
        start_ptr,  # [B] i64
        out_ptr,  # [T] i64
        num_rows,
        rows_per_request,
        first,
        GOLDEN: tl.constexpr,
        MIX_1: tl.constexpr,
        MIX_2: tl.constexpr,
        BLOCK: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = row < num_rows
        request = row // rows_per_request
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        stream_key = tl.load(stream_key_ptr + request, mask=inside, other=0)
        position = tl.load(start_ptr + request, mask=inside, other=0) + first + row % rows_per_request + 1
        # Products have the same bits whatever the sign means; shifts must bring zeros.
        key = (position * GOLDEN ^ stream_key).to(tl.uint64, bitcast=True)
        key = ((key ^ (key >> 30)).to(tl.int64, bitcast=True) * MIX_1).to(tl.uint64, bitcast=True)
        key = ((key ^ (key >> 27)).to(tl.int64, bitcast=True) * MIX_2).to(tl.uint64, bitcast=True)
        tl.store(out_ptr + row, (key ^ (key >> 31)).to(tl.int64, bitcast=True), mask=inside)

    return kernel
