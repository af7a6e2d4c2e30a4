"""CUDA C++ kernels: a `.cu` file of this folder, compiled by NVRTC when it is first wanted.

Sizes that are constants of a model become macros, so that loops unroll and a wrong size cannot be launched. A kernel's
scalar parameters are `long long` or `float`; its pointers come from tensors. Compiling needs no GPU, which is how the
tests see every kernel compile.

Kernels are loaded when they are first launched, these like those of Triton. So what a CUDA graph is to hold is run once
before it is captured, with the shapes and the optional tensors that it will have: that loads whatever it launches. A
kernel of this kind that is first wanted inside of a capture is refused, by name. Any thread may launch.
"""

import ctypes
import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.kernels.errors import ConfigError

ARCHITECTURE = "sm_90a"  # Hopper, with its matrix instructions for whole warp groups
NUM_SMS = 132  # multiprocessors of an H200, over which launchers deal out blocks; results do not depend on it
_FOLDER = Path(__file__).parent

Macros = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled file.

    Attributes:
        cubin: Machine code.
        log: What the compiler said, with the registers, shared memory and spills of each kernel.
    """

    cubin: bytes
    log: str


@functools.cache
def compile_cuda(file: str, macros: Macros = (), *, anew: bool = False) -> Compiled:
    """Compile a file of this folder.

    Args:
        file: Its name.
        macros: Constants it is compiled with.
        anew: Also where NVRTC keeps the machine code of an earlier process, which comes without a log.

    Raises:
        ConfigError: NVRTC is not installed, or does not take the file.
    """
    nvrtc = _nvrtc()
    source = (_FOLDER / file).read_bytes()
    options = [
        f"--gpu-architecture={ARCHITECTURE}",
        "--std=c++17",
        "--ptxas-options=-v",
        f"--include-path={_FOLDER}",
        *(f"-D{name}={value}" for name, value in macros),
        *(["--no-cache"] if anew else []),
    ]
    program = _checked(nvrtc.nvrtcCreateProgram(source, file.encode(), 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        words = log.rstrip(b"\0 ").decode(errors="replace")
        if status:
            raise ConfigError(f"{file} does not compile with {dict(macros)}:\n{words}")
        cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, words)


class CudaKernel:
    """One kernel of a file, on the current device.

    Args:
        file: Name of the file in this folder.
        name: Of an `extern "C"` kernel in it.
        macros: Constants it is compiled with.
        shared_bytes: Dynamic shared memory of a block.
        starts_early: Blocks start while the kernel before still ends, to fetch what is older than that one, such as
            weights. Before it reads or writes anything else, every thread of the kernel must pass
            `griddepcontrol.wait`, which returns once all kernels before have ended and their writes are seen.

    Raises:
        RuntimeError: The current stream is capturing a graph, or the driver refuses.
    """

    def __init__(
        self, file: str, name: str, *, macros: Macros = (), shared_bytes: int = 0, starts_early: bool = False
    ) -> None:
        from cuda.bindings import driver  # noqa: PLC0415

        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name} of {file} cannot be loaded while a graph is captured: run once before what it will hold"
            )
        self._launch = driver.cuLaunchKernelEx
        device = _checked(driver.cuDeviceGet(torch.cuda.current_device()))
        context = _checked(driver.cuDevicePrimaryCtxRetain(device))  # torch's
        self._of_thread = _LaunchConfig(driver, context, shared_bytes, starts_early=starts_early)
        self._library = _checked(driver.cuModuleLoadData(compile_cuda(file, macros).cubin))
        self._function = _checked(driver.cuModuleGetFunction(self._library, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))

    def __call__(self, grid: tuple[int, int, int], block: int, *arguments: torch.Tensor | int | float) -> None:
        """Launch on the current stream.

        Args:
            grid: Blocks in x, y and z.
            block: Threads of a block.
            arguments: What the kernel takes: tensors by their address, an int as `long long`, a float as `float`.
        """
        values: list[int | float] = []
        types: list[type[ctypes._SimpleCData[Any]]] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                values.append(argument.data_ptr())
                types.append(ctypes.c_void_p)
            else:
                values.append(argument)
                types.append(ctypes.c_longlong if isinstance(argument, int) else ctypes.c_float)
        config = self._of_thread.config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX = block
        config.hStream = torch.cuda.current_stream().cuda_stream
        _checked(self._launch(config, self._function, (tuple(values), tuple(types)), 0))


class _LaunchConfig(threading.local):
    """How a kernel is launched. Each thread makes one of its own when it first launches: a launch writes into it.

    To make one for every launch would more than double the time that filling it in takes.

    Attributes:
        config: The driver's record.
    """

    def __init__(self, driver: Any, context: Any, shared_bytes: int, *, starts_early: bool) -> None:
        _checked(driver.cuCtxSetCurrent(context))  # a new thread has none, and torch gives it one when it likes
        self.config = driver.CUlaunchConfig()
        self.config.sharedMemBytes = shared_bytes
        self.config.blockDimY = self.config.blockDimZ = 1
        if starts_early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self.config.attrs = [attribute]
            self.config.numAttrs = 1


@functools.cache
def cuda_kernel(
    file: str, name: str, *, macros: Macros = (), shared_bytes: int = 0, starts_early: bool = False
) -> CudaKernel:
    """Give the kernel, made when it is first wanted; for one device a process."""
    return CudaKernel(file, name, macros=macros, shared_bytes=shared_bytes, starts_early=starts_early)


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread: kernels are loaded and launched there. On a CPU there is none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415

        _checked(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"the CUDA compiler library cannot be loaded ({error}): pip install cuda-bindings nvidia-cuda-nvrtc"
        ) from error
    return nvrtc


def _checked(result: tuple[Any, ...]) -> Any:
    """Give what a call of the bindings returned behind its status.

    Raises:
        RuntimeError: The status is an error.
    """
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None
