"""Runs checks of Triton kernels in processes of their own: whether kernels are interpreted is decided at import."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_COMPILING = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec.kernels.{module} import {factory}

types, constants, aligned, options = {types!r}, {constants!r}, {aligned!r}, {options!r}
kernel = {factory}()
types = iter(types)
signature = {{name: "constexpr" if name in constants else next(types) for name in kernel.arg_names}}
places = {{(place,): [["tt.divisibility", 16]] for place in aligned}}
source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=places)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
assert compiled.asm["cubin"]
print(compiled.asm["ptx"])
"""


def run_interpreted(code: str, directory: Path) -> None:
    """Run code whose kernels are interpreted, on a machine without a GPU."""
    _run(code, directory, TRITON_INTERPRET="1")


def ptx_for_hopper(
    kernel: str,
    directory: Path,
    *,
    types: Sequence[str],
    constants: Mapping[str, int | float | bool | None],
    aligned: Sequence[int] = (),
    options: Mapping[str, int | bool] | None = None,
) -> str:
    """Compile a kernel for a Hopper GPU, which need not be there.

    Args:
        kernel: Module of `specdec.kernels` and the function in it that makes the kernel: "row_norm.row_norm_kernel".
        directory: For the check and Triton's cache.
        types: Of the arguments that are no constants, in their order: "*bf16", "i32".
        constants: Values of the others, None for a pointer that is not given.
        aligned: Places, among all arguments, of those that are multiples of 16.
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
    return _run(code, directory, TRITON_CACHE_DIR=str(directory))


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
