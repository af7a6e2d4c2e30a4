"""Runs checks of Triton kernels in processes of their own: whether kernels are interpreted is decided at import."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

_COMPILING = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec.kernels.{module} import {factory}

types, constants, aligned, options = {types!r}, {constants!r}, {aligned!r}, {options!r}
kernel = {factory}()
types = iter(types)
signature = {{name: "constexpr" if name in constants else next(types) for name in kernel.arg_names}}
place_of = kernel.arg_names.index
places = {{(place_of(each) if isinstance(each, str) else each,): [["tt.divisibility", 16]] for each in aligned}}
source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=places)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
assert compiled.asm["cubin"]
ptxas = triton.knobs.nvidia.ptxas.path
print(json.dumps({{"ptx": compiled.asm["ptx"], "shared_bytes": compiled.metadata.shared, "ptxas": ptxas}}))
"""


# The interpreter's `range` takes arrays of one element for numbers, which NumPy 2.5 no longer does.
_INTERPRETING = """
from triton.runtime import interpreter

def patched(tensor, scope, patch=interpreter._patch_lang_tensor):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

interpreter._patch_lang_tensor = patched
"""


def run_interpreted(code: str, directory: Path) -> None:
    """Run code whose kernels are interpreted, on a machine without a GPU."""
    _run(_INTERPRETING + code, directory, TRITON_INTERPRET="1")


class Compiled(NamedTuple):
    """A kernel for a Hopper GPU.

    Attributes:
        ptx: Its code before registers are dealt out.
        shared_bytes: Shared memory of a block.
        ptxas: Path of the assembler that Triton brings along.
    """

    ptx: str
    shared_bytes: int
    ptxas: str


def compiled_for_hopper(
    kernel: str,
    directory: Path,
    *,
    types: Sequence[str],
    constants: Mapping[str, int | float | bool | None],
    aligned: Sequence[int | str] = (),
    options: Mapping[str, int | bool] | None = None,
) -> Compiled:
    """Compile a kernel for a Hopper GPU, which need not be there.

    Args:
        kernel: Module of `specdec.kernels` and the function in it that makes the kernel: "kv_write.write_kv_kernel".
        directory: For the check and Triton's cache.
        types: Of the arguments that are no constants, in their order: "*bf16", "i32".
        constants: Values of the others, None for a pointer that is not given.
        aligned: Places, among all arguments, or names of those that are multiples of 16.
        options: Of the launch, such as num_warps.
    """
    module, factory = kernel.split(".")
    code = _COMPILING.format(
        module=module,
        factory=factory,
        types=tuple(types),
        constants=dict(constants),
        aligned=tuple(aligned),
        options=dict(options or {}),
    )
    return Compiled(**json.loads(_run(code, directory, TRITON_CACHE_DIR=str(directory))))


def ptx_for_hopper(
    kernel: str,
    directory: Path,
    *,
    types: Sequence[str],
    constants: Mapping[str, int | float | bool | None],
    aligned: Sequence[int] = (),
    options: Mapping[str, int | bool] | None = None,
) -> str:
    """Compile a kernel as `compiled_for_hopper` does; gives its PTX."""
    return compiled_for_hopper(
        kernel, directory, types=types, constants=constants, aligned=aligned, options=options
    ).ptx


def _run(code: str, directory: Path, **environment: str) -> str:
    """Give what the code prints."""
    pytest.importorskip("triton")
    check = directory / "check.py"
    check.write_text(code)
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outcome = subprocess.run(
        [sys.executable, str(check)], env=inherited | environment, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout
