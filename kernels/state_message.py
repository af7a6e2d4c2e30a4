"""Partial attention as it travels: each head's output with its LSE behind it, the heads by the rank that keeps them.

    message_NTAY[n, t, a] = out_TGL[t, n * A + a], lse_TG[t, n * A + a], and bytes that mean nothing

N = ranks, T = query rows, A = heads that a rank keeps, G = N * A, L = values of a head's output, Y = 2 L + 16 bytes.
Source: "Helix Parallelism" (arXiv:2507.07120), whose exchange is one all-to-all over heads.
"""

import functools
from typing import Any

import torch

from specdec.kernels.lse_merge import AttentionState
from specdec.kernels.tensor_check import check_tensor

_LSE_BYTES = 16  # of which an LSE takes 4, so that outputs begin where whole words are read
_WARPS = 2  # of a program, which packs one head of one row: 16 bytes a thread


def pack_states_ref(out_TGL: torch.Tensor, lse_TG: torch.Tensor, *, num_ranks: int) -> torch.Tensor:
    """Define `pack_states`; what means nothing is zero."""
    num_rows, num_heads, num_values = out_TGL.shape
    by_rank = (num_rows, num_ranks, num_heads // num_ranks)
    message_NTAY = _empty_message(out_TGL, num_ranks).zero_()
    message_NTAY.view(torch.bfloat16)[..., :num_values] = out_TGL.view(*by_rank, num_values).transpose(0, 1)
    message_NTAY.view(torch.float32)[..., num_values // 2] = lse_TG.view(by_rank).transpose(0, 1)
    return message_NTAY


def unpacked_states(message_NTAY: torch.Tensor) -> AttentionState:
    """Give the outputs, bfloat16 [N, T, A, L], and LSEs, float32 [N, T, A], in the memory of a message."""
    num_values = (message_NTAY.shape[-1] - _LSE_BYTES) // 2
    return AttentionState(
        message_NTAY.view(torch.bfloat16)[..., :num_values], message_NTAY.view(torch.float32)[..., num_values // 2]
    )


def pack_states(out_TGL: torch.Tensor, lse_TG: torch.Tensor, *, num_ranks: int) -> torch.Tensor:
    """Pack on a GPU, on the current stream.

    Args:
        out_TGL: bfloat16, contiguous; L is a multiple of 8.
        lse_TG: Natural LSEs, float32, contiguous; -inf for a row without keys, whose output may be anything.
        num_ranks: N, divides G.

    Returns:
        The message, u8 [N, T, A, Y].

    Raises:
        ValueError: A tensor has another shape or dtype.
    """
    num_rows, num_heads, num_values = out_TGL.shape
    if num_heads % num_ranks or num_values % 8:
        raise ValueError(f"{num_heads} heads of {num_values} values cannot be packed for {num_ranks} ranks")
    check_tensor("out_TGL", out_TGL, torch.bfloat16, out_TGL.shape)
    check_tensor("lse_TG", lse_TG, torch.float32, (num_rows, num_heads))
    message_NTAY = _empty_message(out_TGL, num_ranks)
    if num_rows:
        pack_states_kernel()[(num_rows, num_heads)](
            out_TGL, lse_TG, message_NTAY.view(torch.bfloat16), message_NTAY.view(torch.float32),
            HEADS=num_heads // num_ranks, VALUES=num_values, BLOCK=1 << (num_values - 1).bit_length(),
            PAD=_LSE_BYTES, STARTS_EARLY=out_TGL.is_cuda, num_warps=_WARPS, launch_pdl=out_TGL.is_cuda,
        )  # fmt: skip
    return message_NTAY


def _empty_message(out_TGL: torch.Tensor, num_ranks: int) -> torch.Tensor:
    num_rows, num_heads, num_values = out_TGL.shape
    shape = (num_ranks, num_rows, num_heads // num_ranks, 2 * num_values + _LSE_BYTES)
    return torch.empty(shape, dtype=torch.uint8, device=out_TGL.device)


@functools.cache
def pack_states_kernel() -> Any:
    """Make the kernel when it is first wanted: Triton takes a quarter of a second to import and needs a GPU."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        out_ptr,  # [T, G, L] bf16
        lse_ptr,  # [T, G] f32
        values_ptr,  # the message as bf16
        words_ptr,  # the same memory as f32
        HEADS: tl.constexpr,
        VALUES: tl.constexpr,
        BLOCK: tl.constexpr,
        PAD: tl.constexpr,
        STARTS_EARLY: tl.constexpr,  # before the kernel in front has ended
    ) -> None:
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        num_rows, num_heads = tl.num_programs(0), tl.num_programs(1)
        place = ((head // HEADS) * num_rows + row) * HEADS + head % HEADS
        value = tl.arange(0, BLOCK)
        if STARTS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        out = tl.load(out_ptr + (row * num_heads + head) * VALUES + value, value < VALUES)
        tl.store(values_ptr + place * (VALUES + PAD // 2) + value, out, value < VALUES)
        tl.store(words_ptr + place * (VALUES // 2 + PAD // 4) + VALUES // 2, tl.load(lse_ptr + row * num_heads + head))

    return kernel
