"""NVIDIA's compute-sanitizer over small GPU tests of every kernel: a line for each, exit status 1 unless all are clean.

    memcheck     accesses outside of a tensor, misaligned ones; torch's cache of memory is off, so each is its own
    synccheck    barriers that threads of a block do not reach alike
    racecheck    accesses of shared memory that no barrier orders
    initcheck    reads of device memory that nobody wrote

Tests take 10 to 50 times as long as without it, so of each file only a few run. Run: make sanitize-gpu, or
python benchmarks/sanitize_kernels.py [KERNEL...]
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_TOOLS = ("memcheck", "synccheck", "racecheck", "initcheck")
_TIMEOUT_S = 300
_AT_ONCE = max(1, (os.cpu_count() or 1) * 3 // 4)
_FAILED = 86  # what the sanitizer exits with when it found something
_NOT_FOLLOWED = "Internal Sanitizer Error"  # it counts launches that it had no memory to follow

# What `pytest -k` selects of tests/kernels/test_<kernel>.py; else what is named a test of a GPU and does not fill it.
_EVERY = "a_gpu and not compiles and not 32_bits"
SELECTIONS = {
    "absorbed_query": "a_gpu and 17",
    "add_rms_norm": "a_gpu and 2176",
    "block_fp8_linear": "same_in_every_batch and out_dtype1 and 1536",
    "chain_accept": "a_gpu and 1037 and (plain or hostile)",
    "cuda_program": "threads_launch",
    "index_query": "a_gpu and [6]",
    "index_select": "many_ties and 3-100 or fewer_requests",
    "kv_write": "a_gpu and [True-True-6]",
    "lm_head_pick": "1000-1024-True or ties_go",
    "moe_experts": "graph_replays or [40] or [1]",
    "narrow_linear": "a_gpu and [6]",
    "owner_top_k": "a_gpu and 5-999-100-ties",
    "pack_rows": "a_gpu and (65-132 or 65-656)",
    "packed_sparse_mla": "nan_in_a_row and [530] or as_many_splits and ([8] or [64])",
    "paged_index_scores": "exact_scores and [6]",
    "peer_add_norm": "a_gpu and False-3-6-2048",
    "peer_exchange": "a_gpu and (4096 or 4100)",
    "peer_merge": "a_gpu and (5-6-256 or 40-64-256)",
    "rejection_accept": "a_gpu and 9-3-1037 and (plain or hostile)",
    "shard_merge": "a_gpu and (sizes1 or sizes2)",
}
_NO_KERNEL = {"gumbel_noise"}  # torch's own
# What the copy engine moves racecheck does not follow, and initcheck sees it bring rows that count for nothing.
_COPY_ENGINE = {"block_fp8_linear", "index_select", "moe_experts", "packed_sparse_mla", "paged_index_scores"}


def kernels() -> list[str]:
    """Give the kernels that have tests on a GPU."""
    tests = sorted((_ROOT / "tests" / "kernels").glob("test_*.py"))
    names = [test.stem.removeprefix("test_") for test in tests if "needs_gpu" in test.read_text()]
    return [name for name in names if name not in _NO_KERNEL]


def tools_for(kernel: str) -> tuple[str, ...]:
    """Give the tools that make sense for a kernel."""
    return _TOOLS[:2] if kernel in _COPY_ENGINE else _TOOLS


def find_sanitizer() -> str | None:
    """Give the path of compute-sanitizer, None where there is none."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def check(sanitizer: str, tool: str, kernel: str, log: Path) -> str:
    """Run a tool over a kernel's tests: gives "clean", or what went wrong; all that was said goes into the log."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(_FAILED), "--launch-timeout", "120"]
    if tool == "memcheck":  # torch and Triton ask the driver for what it may not have
        command += ["--report-api-errors", "no"]
    if tool == "synccheck":
        command += ["--num-cuda-barriers", "65536"]
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/kernels/test_{kernel}.py", "-k", SELECTIONS.get(kernel, _EVERY)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("w") as output:
        try:
            ran = subprocess.run(
                command, cwd=_ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False,
                timeout=_TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"took more than {_TIMEOUT_S} s"
    said = log.read_text()
    if ran.returncode:
        if ran.returncode == _FAILED:
            return "could not follow every launch" if _NOT_FOLLOWED in said else "found something"
        return f"exit status {ran.returncode}"
    return "clean" if re.search(r"\b\d+ passed\b", said) and "skipped" not in said else "ran nothing: is there a GPU?"


def main() -> int:
    """Check all kernels and tell; gives the exit status."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is missing: it comes with the CUDA toolkit (package cuda-sanitizer)", file=sys.stderr)
        return 1
    logs = Path(tempfile.mkdtemp(prefix="sanitize-"))

    def checked(kernel: str, tool: str) -> tuple[bool, str]:
        start, log = time.perf_counter(), logs / f"{kernel}-{tool}.txt"
        outcome = check(sanitizer, tool, kernel, log)
        seen = "" if outcome == "clean" else f", see {log}"
        return outcome == "clean", f"{tool} {outcome} ({time.perf_counter() - start:.0f} s{seen})"

    are_clean = True
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        checks = {
            kernel: [pool.submit(checked, kernel, tool) for tool in tools_for(kernel)]
            for kernel in sys.argv[1:] or kernels()
        }
        for kernel, of_kernel in checks.items():
            outcomes = [each.result() for each in of_kernel]
            are_clean &= all(is_clean for is_clean, _ in outcomes)
            print(f"{kernel}: {', '.join(words for _, words in outcomes)}", flush=True)
    return 0 if are_clean else 1


if __name__ == "__main__":
    sys.exit(main())
