"""What a Triton kernel compiled for a Hopper GPU, which need not be there, takes of a multiprocessor."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.triton_process import compiled_for_hopper


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
    """Compile a kernel and assemble it; arguments as of `compiled_for_hopper`."""
    compiled = compiled_for_hopper(
        kernel, directory, types=types, constants=constants, aligned=aligned, options=options
    )
    ptx = directory / "kernel.ptx"
    ptx.write_text(compiled.ptx)
    command = [compiled.ptxas, "-v", "--gpu-name=sm_90a", "-o", str(directory / "kernel.cubin"), str(ptx)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return Resources(
        ptx=compiled.ptx,
        shared_bytes=compiled.shared_bytes,
        spilled_bytes=max(map(int, re.findall(r"(\d+) bytes spill", said))),
    )
