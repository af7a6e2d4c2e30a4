"""What a Triton kernel compiled for a Hopper GPU, which need not be there, takes of a multiprocessor."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_COMPILING = """
import json, re, subprocess, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec.kernels.{module} import {factory}

types, constants, aligned, options = {types!r}, {constants!r}, {aligned!r}, {options!r}
ptx, cubin = {ptx!r}, {cubin!r}
kernel = {factory}()
types = iter(types)
signature = {{name: "constexpr" if name in constants else next(types) for name in kernel.arg_names}}
places = {{(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}}
source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=places)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "-o", cubin, ptx]
with open(ptx, "w") as file:
    file.write(compiled.asm["ptx"])
said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
spilled = max(map(int, re.findall(r"(\\d+) bytes spill", said)))
print(json.dumps({{"ptx": compiled.asm["ptx"], "shared_bytes": compiled.metadata.shared, "spilled_bytes": spilled}}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Of a compiled kernel.

    Attributes:
        ptx: Its code before registers are dealt out.
        shared_bytes: Shared memory of a block.
        spilled_bytes: That a thread stores or loads because registers ran out, whichever is more.
    """

    ptx: str
    shared_bytes: int
    spilled_bytes: int


def hopper_resources(
    kernel: str,
    directory: Path,
    *,
    types: Sequence[str],
    constants: Mapping[str, int | float | bool | None],
    aligned: Sequence[str],
    options: Mapping[str, int | bool],
) -> Resources:
    """Compile a kernel in a process of its own: whether kernels are interpreted is decided at import.

    Args:
        kernel: Module of `specdec.kernels` and the function in it that makes the kernel.
        directory: For the check, its files and Triton's cache.
        types: Of the arguments that are no constants, in their order: "*bf16", "i32".
        constants: Values of the others, None for a pointer that is not given.
        aligned: Names of the arguments that are multiples of 16.
        options: Of the launch, such as num_warps.
    """
    pytest.importorskip("triton")
    module, factory = kernel.split(".")
    code = _COMPILING.format(
        module=module,
        factory=factory,
        types=tuple(types),
        constants=dict(constants),
        aligned=tuple(aligned),
        options=dict(options),
        ptx=str(directory / "kernel.ptx"),
        cubin=str(directory / "kernel.cubin"),
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"TRITON_CACHE_DIR": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    return Resources(**json.loads(outcome.stdout))
