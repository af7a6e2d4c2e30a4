"""What two GPUs of one host do together, beside NCCL: one table, checked before it is timed.

    exchanges          single exchanges, and a sum over the ranks with its norm
    dcp2_attention     attention over shared pages, and orders of its exchange
    dcp2_indexer       the choice of positions over shared index keys
    tp2_round          whole rounds over eight layers of real widths

A process a GPU; times are medians of CUDA graph replays of the first rank. NVLink multicast stays off.

    python benchmarks/two_gpus.py [--only exchanges] [--json FILE]
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.bench_kernels import machine, show
from benchmarks.two_gpu_cases.ranks import run_on_ranks

CASES = ("exchanges", "dcp2_attention", "dcp2_indexer", "tp2_round")
_NUM_RANKS = 2


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CASES, help="run this case; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < _NUM_RANKS:
        print(f"{torch.cuda.device_count()} GPUs for {_NUM_RANKS} ranks: nothing to measure")
        return
    results: list[dict[str, Any]] = []
    kept = {"machine": machine(), "results": results}
    for name in arguments.only or CASES:
        began = time.perf_counter()
        try:
            results += run_on_ranks(importlib.import_module(f"benchmarks.two_gpu_cases.{name}").run, _NUM_RANKS)
        except Exception as error:  # the other cases are still worth their time
            print(f"{name} failed: {error}", file=sys.stderr)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        if arguments.json:  # at once: a later case may run out of time
            arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    main()
