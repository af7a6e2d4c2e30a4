"""Every kernel on one GPU beside its peers and the floor: one table, checked before it is timed.

Each case runs in a process of its own, on fresh random inputs that are rotated past the cache; times are medians of
CUDA graph replays. "of floor" is floor / ours, "best peer" is its time / ours.

    python benchmarks/bench_kernels.py [--only sparse_mla] [--json FILE] [--peers FOLDER]

FOLDER holds what FlashMLA and DeepGEMM are taken from: the folder `vllm` of a vLLM wheel, with its `_flashmla_C` and
`third_party`. Without it only the peers in torch run.
"""

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

_ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT))
from benchmarks import kernel_cases  # noqa: E402

_NO_CASES = {"noise_pool", "peers", "rates", "result"}
CASES = sorted(module.name for module in pkgutil.iter_modules(kernel_cases.__path__) if module.name not in _NO_CASES)


def machine() -> dict[str, str]:
    """Say what ran the kernels."""
    import triton  # noqa: PLC0415
    from cuda.bindings import driver, nvrtc  # noqa: PLC0415

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": str(driver.cuDriverGetVersion()[1]),
        "nvrtc": ".".join(str(part) for part in nvrtc.nvrtcVersion()[1:]),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }


def measured(case: str) -> Iterator[dict[str, Any]]:
    """Run one case in a process of its own and give results as they come; what it cannot do is printed and left out."""
    with subprocess.Popen(
        [sys.executable, __file__, "--here", "--only", case], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
    if process.returncode:
        print(f"{case} failed with exit code {process.returncode}", file=sys.stderr)


def show(results: list[dict[str, Any]]) -> None:
    """Print one table."""
    table = Table(title="microseconds, medians of graph replays")
    for column in ("case", "shape", "ours", "floor", "of floor", "best peer", "us", "ratio", "error", "note"):
        table.add_column(column, justify="left" if column in ("case", "shape", "best peer", "note") else "right")
    for result in results:
        peer, peer_us = min(result["peers_us"].items(), key=lambda item: item[1], default=("", None))
        table.add_row(
            result["case"],
            result["shape"],
            f"{result['ours_us']:.1f}",
            f"{result['floor_us']:.1f}",
            f"{result['floor_us'] / result['ours_us']:.2f}",
            peer,
            f"{peer_us:.1f}" if peer_us else "",
            f"{peer_us / result['ours_us']:.2f}" if peer_us else "",
            f"{result['error']:.0e}",
            result["note"],
        )
    Console(width=200).print(table)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CASES, help="run this case; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--peers", type=Path, help="folder that holds vllm/third_party")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure")
        return
    if arguments.here:
        module = importlib.import_module(f"benchmarks.kernel_cases.{arguments.only[0]}")
        for result in module.run():
            print(json.dumps(asdict(result)), flush=True)
        return
    if arguments.peers:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(arguments.peers), os.getenv("PYTHONPATH"))))
    results: list[dict[str, Any]] = []
    kept = {"machine": machine(), "results": results}
    for case in arguments.only or CASES:
        for result in measured(case):
            results.append(result)
            if arguments.json:  # at once: a later case may run out of time
                arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    main()
