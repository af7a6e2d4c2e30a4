"""The rates that every floor is computed from, and what one node of a graph costs."""

import functools
from typing import Any

import torch

from benchmarks.gpu_timing import graph_us
from benchmarks.kernel_cases.rates import BF16_FLOPS_PER_US, FP8_FLOPS_PER_US, memory_us
from benchmarks.kernel_cases.result import CaseResult

_STREAM_BYTES = 2 << 30
_READ_BLOCK = 8192  # words of a program
_MATRIX = 8192
_NODES = 1000


def run() -> list[CaseResult]:
    """Measure this GPU; the floors are by the rates of `rates`, so "of floor" says how it compares with them."""
    return [
        _copy(),
        _read(),
        _matmul(torch.bfloat16, BF16_FLOPS_PER_US),
        _matmul(torch.float8_e4m3fn, FP8_FLOPS_PER_US),
        _empty_nodes(),
    ]


def _copy() -> CaseResult:
    source, target = (torch.randint(1 << 30, (_STREAM_BYTES // 4,), dtype=torch.int32, device="cuda") for _ in range(2))
    us = graph_us([lambda: torch.add(source, 1, out=target)])
    return _result("copy of 2 GiB", us, memory_us(2 * _STREAM_BYTES), _rate(2 * _STREAM_BYTES / us / 1e6, "TB/s"))


def _read() -> CaseResult:
    words = torch.randint(1 << 30, (_STREAM_BYTES // 4,), dtype=torch.int32, device="cuda")
    sums = torch.empty(len(words) // _READ_BLOCK, dtype=torch.int32, device="cuda")
    us = graph_us([lambda: _read_kernel()[(len(sums),)](words, sums, BLOCK=_READ_BLOCK, num_warps=8)])
    error = float((sums != words.view(len(sums), -1).sum(dim=1, dtype=torch.int32)).sum())
    return _result("read of 2 GiB", us, memory_us(_STREAM_BYTES), _rate(_STREAM_BYTES / us / 1e6, "TB/s"), error)


def _matmul(dtype: torch.dtype, flops_per_us: float) -> CaseResult:
    left, right = (torch.randn(_MATRIX, _MATRIX, device="cuda").to(dtype) for _ in range(2))
    if dtype is torch.bfloat16:
        us = graph_us([lambda: left @ right.T])
    else:
        one = torch.ones((), device="cuda")
        us = graph_us([lambda: torch._scaled_mm(left, right.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)])
    flops = 2.0 * _MATRIX**3
    return _result(
        f"{dtype} product, 8192 cubed".removeprefix("torch."),
        us,
        flops / flops_per_us,
        _rate(flops / us / 1e6, "TFLOP/s"),
    )


def _empty_nodes() -> CaseResult:
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel = _empty_kernel()
    us = graph_us([functools.partial(kernel[(1,)], word, num_warps=1)] * _NODES)
    return _result(f"empty node in a chain of {_NODES}", us, us)


def _result(shape: str, us: float, floor_us: float, note: str = "", error: float = 0.0) -> CaseResult:
    return CaseResult(case="calibrate", shape=shape, ours_us=us, floor_us=floor_us, error=error, note=note)


def _rate(rate: float, unit: str) -> str:
    return f"{rate:.3g} {unit}"


@functools.cache
def _read_kernel() -> Any:
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(words_ptr, sums_ptr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.load(words_ptr + place)))

    return kernel


@functools.cache
def _empty_kernel() -> Any:
    import triton  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(word_ptr) -> None:  # type: ignore[no-untyped-def]
        pass

    return kernel
