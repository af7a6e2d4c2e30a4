"""Processes as the kernel sees them, for tests that none is left."""

import time
from pathlib import Path


def children_of(pid: int) -> set[int]:
    """The processes that `pid` has started and that have not been waited for."""
    children = set()
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit() and (status := _status(int(directory.name))) is not None and status[1] == pid:
            children.add(int(directory.name))
    return children


def torch_threads() -> list[str]:
    """Names of this process's threads that torch.distributed has started."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith(("gloo_", "pt_"))]


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    status = _status(pid)
    return status is not None and status[0] != "Z"


def await_end(pids: set[int], *, timeout_s: float) -> set[int]:
    """Wait until processes have ended; gives those that have not."""
    deadline = time.monotonic() + timeout_s
    while (left := {pid for pid in pids if is_running(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _status(pid: int) -> tuple[str, int] | None:
    """State and parent of a process; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return fields[0], int(fields[1])
