"""Files of CUDA C++ are compiled with their constants, or refused with the compiler's words."""

from pathlib import Path

import pytest
import torch

from specdec.kernels import cuda_program
from specdec.kernels.cuda_program import CudaKernel, compile_cuda
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
    compiled = compile_cuda("scale.cu", (("FACTOR", 3),))
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
