"""`specdec prefill` as a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def prefill_process(
    *flags: str, model: str = "glm-tiny", listen: str = "127.0.0.1:0"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a prefill; gives the process and its address."""
    command = [sys.executable, "-m", "specdec", "prefill", "--model", model, "--listen", listen, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address
            yield process, address
        finally:
            process.kill()
