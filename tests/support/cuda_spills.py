"""What compiled CUDA files tell of their registers."""

import re

from specdec.kernels.cuda_program import Macros, compile_cuda


def most_bytes_spilled(file: str, macros: Macros) -> int:
    """Most bytes that a kernel of the file stores or loads because registers ran out."""
    log = compile_cuda(file, macros, anew=True).log
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spills, log
    return max(int(size) for kernel in spills for size in kernel)
