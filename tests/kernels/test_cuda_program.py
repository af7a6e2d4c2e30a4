"""Files of CUDA C++ are compiled with their constants, or refused with the compiler's words."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.kernels import cuda_program
from specdec.kernels.cuda_program import CudaKernel, as_current, compile_cuda
from specdec.kernels.errors import ConfigError
from tests.support.gpu import needs_gpu

SCALE = """
extern "C" __global__ void scale(float *values, long long count, float by) {
  extern __shared__ float shared[];
#ifdef WAITS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  shared[threadIdx.x] = i < count ? values[i] : 0.0f;
  if (i < count) values[i] = shared[threadIdx.x] * by * FACTOR;
}
"""

# Lets the next kernel start before it waits itself: the most that a chain may overlap.
CHAIN = """
extern "C" __global__ void add(const int *from, int *to, long long clocks) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const long long start = clock64();
  while (clock64() - start < (blockIdx.x == 5 ? clocks : 0)) {}
  const int i = blockIdx.x * blockDim.x + threadIdx.x, other = (i + 999) % (gridDim.x * blockDim.x);
  to[i] = from[other] + 1;
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cuda_program, "_FOLDER", tmp_path)
    compile_cuda.cache_clear()
    (tmp_path / "scale.cu").write_text(SCALE)
    return tmp_path


def test_a_file_becomes_machine_code_and_the_log_tells_its_registers() -> None:
    compiled = compile_cuda("scale.cu", (("FACTOR", 3),), anew=True)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert "'scale' for 'sm_90a'" in compiled.log
    assert "0 bytes spill stores" in compiled.log


def test_constants_are_part_of_the_program() -> None:
    assert compile_cuda("scale.cu", (("FACTOR", 3),)).cubin != compile_cuda("scale.cu", (("FACTOR", 5),)).cubin


def test_a_header_of_the_folder_is_found(folder: Path) -> None:
    (folder / "factor.cuh").write_text("#define FACTOR 2\n")
    (folder / "scale.cu").write_text('#include "factor.cuh"\n' + SCALE)
    assert compile_cuda("scale.cu").cubin


def test_what_does_not_compile_is_named_with_its_constants_and_line() -> None:
    with pytest.raises(ConfigError, match=r"(?s)scale.cu does not compile with \{'OTHER': 1\}.*error: .*FACTOR"):
        compile_cuda("scale.cu", (("OTHER", 1),))


def test_a_gpu_is_made_the_current_one_and_a_cpu_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or nullcontext())
    for name in ("cuda:1", "cpu"):
        with as_current(torch.device(name)):
            pass
    assert asked == [torch.device("cuda:1")]


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver's bindings, whose records are real; what would reach a device answers that all went well."""
    driver = pytest.importorskip("cuda.bindings.driver")
    for name in ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction"):
        monkeypatch.setattr(driver, name, lambda *_: (0, 1))
    for name in ("cuCtxSetCurrent", "cuFuncSetAttribute", "cuLaunchKernelEx"):
        monkeypatch.setattr(driver, name, lambda *_: (0,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=threading.get_ident()))
    return driver


@pytest.mark.parametrize("starts_early", [False, True])
def test_threads_that_launch_one_kernel_at_once_do_not_mix_up_their_launches(
    no_device: Any, monkeypatch: pytest.MonkeyPatch, starts_early: bool
) -> None:
    both_launch = threading.Barrier(2)
    contexts: list[int] = []
    launched: dict[int, tuple[object, ...]] = {}

    def launch(config: Any, function: int, arguments: tuple[tuple[int, ...], object], extra: int) -> tuple[int]:
        both_launch.wait(timeout=60)  # the driver reads only now
        grid, block = (config.gridDimX, config.gridDimY, config.gridDimZ), config.blockDimX
        launched[arguments[0][0]] = (grid, block, int(config.hStream), config.sharedMemBytes, config.numAttrs)
        return (0,)

    monkeypatch.setattr(no_device, "cuLaunchKernelEx", launch)
    monkeypatch.setattr(no_device, "cuCtxSetCurrent", lambda _: (contexts.append(threading.get_ident()), (0,))[1])
    kernel = CudaKernel("scale.cu", "scale", macros=(("FACTOR", 3),), shared_bytes=512, starts_early=starts_early)

    def launch_twice(number: int) -> tuple[object, ...]:
        for block in (64 * number, 32 * number):
            kernel((number, number + 1, number + 2), block, number)
        return (number, number + 1, number + 2), 32 * number, threading.get_ident(), 512, int(starts_early)

    with ThreadPoolExecutor(2) as pool:
        expected = dict(zip((1, 5), pool.map(launch_twice, (1, 5)), strict=True))
    assert launched == expected
    assert len(contexts) == len(set(contexts)) == 3  # each thread once: this one and the two


def test_a_kernel_is_not_loaded_while_a_graph_is_captured(no_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = CudaKernel("scale.cu", "scale", macros=(("FACTOR", 3),))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    loaded((1, 1, 1), 32, 7)
    with pytest.raises(RuntimeError, match=r"scale of scale\.cu cannot be loaded while a graph is captured: run once"):
        CudaKernel("scale.cu", "scale", macros=(("FACTOR", 5),))


@needs_gpu
def test_threads_launch_one_kernel_with_grids_of_their_own() -> None:
    kernel = CudaKernel("scale.cu", "scale", macros=(("FACTOR", 1),), shared_bytes=1024)
    values = [torch.ones(128 * num_blocks, device="cuda") for num_blocks in (1, 3, 8, 64)]
    torch.cuda.synchronize()

    def launch(number: int) -> None:  # in a thread that torch has not given a context
        for by in [2.0, 0.5] * 100 + [4.0]:
            kernel((len(values[number]) // 128, 1, 1), 128, values[number], len(values[number]), by)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(launch, range(4)))
    torch.cuda.synchronize()
    for each in values:
        assert bool((each == 4).all())


@needs_gpu
def test_a_graph_that_would_load_a_kernel_is_refused_and_the_next_capture_works() -> None:
    values = torch.ones(32, device="cuda")
    with pytest.raises(RuntimeError, match="cannot be loaded"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        CudaKernel("scale.cu", "scale", macros=(("FACTOR", 7),))
    kernel = CudaKernel("scale.cu", "scale", macros=(("FACTOR", 7),), shared_bytes=128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel((1, 1, 1), 32, values, 32, 1.0)
    graph.replay()
    assert values.tolist() == [7.0] * 32


@needs_gpu
@pytest.mark.parametrize("starts_early", [False, True])
def test_a_kernel_runs_also_in_a_graph_and_one_behind_the_other(starts_early: bool) -> None:
    macros = (("FACTOR", 2), *((("WAITS", 1),) if starts_early else ()))
    kernel = CudaKernel("scale.cu", "scale", macros=macros, shared_bytes=100_000, starts_early=starts_early)
    values = torch.ones(1000, device="cuda")
    kernel((8, 1, 1), 128, values, 999, 0.25)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(101):
            kernel((8, 1, 1), 128, values, 999, 0.5)
    graph.replay()
    assert values.tolist() == [0.5] * 999 + [1.0]


@needs_gpu
def test_a_kernel_that_starts_early_overtakes_none_of_the_kernels_before(folder: Path) -> None:
    (folder / "chain.cu").write_text(CHAIN)
    kernel = CudaKernel("chain.cu", "add", starts_early=True)
    buffers = [torch.zeros(32 * 128, dtype=torch.int32, device="cuda") for _ in range(3)]

    def chain() -> None:
        for turn in range(60):  # each reads what the one before wrote and overwrites what that one read
            kernel((32, 1, 1), 128, buffers[turn % 3], buffers[(turn + 1) % 3], 200_000 if turn % 4 == 0 else 0)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(3):
        graph.replay()
    assert buffers[0].tolist() == [240] * 4096
    assert buffers[2].tolist() == [239] * 4096
