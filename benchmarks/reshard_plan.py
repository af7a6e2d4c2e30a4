"""Time to plan a transfer, to check the plan, to identify it, and to expand it to byte descriptors.

Run: python benchmarks/reshard_plan.py [--json]. 8 layer-split prefill ranks to 8 decode ranks, 78 layers of 576 bytes a
token, page-major pools, pages of 64 tokens; one core. Targets: all 64 paths at 500K tokens planned, checked and
identified within 2 ms; 256 pages over 4 ranks planned within 20 us; interleaved tokens planned, checked and identified
50 times faster than 168 ms of planning and 3.3 s of grouping, what sglang 0.5.23 takes for them on a two-core machine.

Expansion is timed for what the first source rank sends; interleaved tokens are packed, in regions of 64 MiB.

A fresh pool hands out pages in turn; in a fragmented one they come in any order. `prefix` tokens are at decode already.
Interleaved tokens go round the ranks one by one, the layout of other engines.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from specdec.dcp.layout import FieldLayout
from specdec.transfer.descriptors import RegionMemory, expand_path
from specdec.transfer.packing import pack_path, paths_by_pack
from specdec.transfer.placement import dcp, layer_split, token_interleaved
from specdec.transfer.plan_check import check_plan
from specdec.transfer.reshard_plan import ReshardPlan, Span, plan_reshard

PAGE_SIZE = 64
NUM_LAYERS = 78
TOKEN_BYTES = 576
PACK_REGION_BYTES = 64 << 20
REPETITIONS_S = 0.3  # of each timing; the best counts, since other work on the machine only ever adds


@dataclass(frozen=True, kw_only=True)
class Case:
    """One transfer that is planned."""

    name: str
    tokens: int
    prefix: int = 0
    num_sources: int = 8
    num_destinations: int = 8
    dcp_size: int = 8
    is_fragmented: bool = False
    is_interleaved: bool = False

    def span(self) -> Span:
        """Both sides, in pools of twice the pages that are needed."""
        num_pages = -(-self.tokens // PAGE_SIZE)
        sizes = {"page_size": PAGE_SIZE, "num_pages": 2 * num_pages}
        rng = np.random.default_rng(0)

        def pages(count: int) -> np.ndarray:
            return rng.permutation(count)[:num_pages] if self.is_fragmented else np.arange(num_pages)

        layers = range(NUM_LAYERS)
        sides = {"dcp_size": self.dcp_size, "tp_size": self.num_destinations, **sizes}
        if self.is_interleaved:
            sides["num_shards"] = sides.pop("dcp_size")
            destination = token_interleaved(layers, width=1, **sides)
            local_pages = -(-num_pages // self.dcp_size)
            destination_pages = np.stack([pages(2 * num_pages)[:local_pages] for _ in range(self.dcp_size)])
        else:
            destination = dcp(layers, **sides)
            destination_pages = pages(2 * num_pages * self.dcp_size)
        return Span(
            source=layer_split(layers, num_ranks=self.num_sources, model_layers=NUM_LAYERS, **sizes),
            destination=destination,
            source_pages=pages(2 * num_pages),
            destination_pages=destination_pages,
            begin=self.prefix,
            end=self.tokens,
        )


CASES = (
    Case(name="256 pages, 4 x 4", tokens=16_384, num_sources=4, num_destinations=4, dcp_size=4),
    *(Case(name=f"32K, dcp {size}", tokens=32_768, dcp_size=size) for size in (2, 4, 8)),
    Case(name="32K, dcp 8, prefix 30K", tokens=32_768, prefix=30_720),
    Case(name="32K, dcp 8, fragmented", tokens=32_768, is_fragmented=True),
    *(Case(name=f"500K, dcp {size}", tokens=500_000, dcp_size=size) for size in (2, 4, 8)),
    Case(name="500K, dcp 8, prefix 400K", tokens=500_000, prefix=400_000),
    Case(name="500K, dcp 8, fragmented", tokens=500_000, is_fragmented=True),
    Case(name="32K, 8 interleaved", tokens=32_768, is_interleaved=True),
    Case(name="500K, 8 interleaved", tokens=500_000, is_interleaved=True),
    Case(name="500K, 8 interleaved, fragmented", tokens=500_000, is_interleaved=True, is_fragmented=True),
)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of each step, and what came out."""

    plan_us: float
    check_us: float
    digest_us: float
    expand_us: float
    num_paths: int
    num_pieces: int
    num_descriptors: int  # of the first source rank

    @property
    def total_us(self) -> float:
        """Everything before the expansion."""
        return self.plan_us + self.check_us + self.digest_us


def measure(case: Case) -> Timing:
    """Time the steps of one case."""
    span = case.span()
    plan = plan_reshard({"target.latent": span})
    field = (FieldLayout("latent", 0, TOKEN_BYTES, TOKEN_BYTES),)
    layer_bytes = PAGE_SIZE * TOKEN_BYTES

    def memory(num_layers: int) -> RegionMemory:
        return RegionMemory(
            page_size=PAGE_SIZE, page_stride=layer_bytes * num_layers, layer_stride=layer_bytes, fields=field
        )

    paths = plan.paths_from(0)

    def expand() -> int:
        if case.is_interleaved:
            return sum(
                len(part.descriptors) * len(peers)
                for peers in paths_by_pack(paths)
                for part in pack_path(
                    peers[0],
                    memory(len(peers[0].route.layers)),
                    memory(NUM_LAYERS),
                    capacity_bytes=PACK_REGION_BYTES,
                )
            )
        return sum(len(expand_path(path, memory(len(path.route.layers)), memory(NUM_LAYERS))) for path in paths)

    plan_us = best_us(lambda: plan_reshard({"target.latent": span}))
    digest_us = best_us(lambda: ReshardPlan(plan.entries).digest)
    return Timing(
        plan_us=plan_us,
        check_us=best_us(lambda: check_plan(plan)),
        digest_us=digest_us,
        expand_us=best_us(expand),
        num_paths=len(plan.paths),
        num_pieces=len(plan.entries["target.latent"].pieces),
        num_descriptors=expand(),
    )


def best_us(run: Callable[[], object]) -> float:
    """Microseconds of the fastest of many runs."""
    best, end = float("inf"), time.perf_counter() + REPETITIONS_S
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    timings = {case: measure(case) for case in CASES}
    if arguments.json:
        print(json.dumps([{**asdict(case), **asdict(timing)} for case, timing in timings.items()]))
        return
    table = Table(title="us of one core", title_justify="left", collapse_padding=True)
    table.add_column("case", no_wrap=True)
    for name in ("plan", "check", "digest", "all", "expand", "paths", "pieces", "descriptors"):
        table.add_column(name, justify="right", no_wrap=True)
    for case, timing in timings.items():
        times = (timing.plan_us, timing.check_us, timing.digest_us, timing.total_us, timing.expand_us)
        counts = (timing.num_paths, timing.num_pieces, timing.num_descriptors)
        table.add_row(case.name, *(f"{each:,.0f}" for each in times), *(f"{each:,}" for each in counts))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
