"""How fast the transports move KV from one GPU to another, for every layout, against one raw copy of as many bytes.

A prefill rank holds 10 layers of all tokens, 656 bytes a row (packed FP8 latents), pages of 64 tokens, and sends what
one of two decode ranks (DCP2) owns into that rank's pool on another GPU, in another process:

    owners   page   every other page is another rank's, as engines of this kind have it
             token  every other token is, as some other engines do
    pools    page   all layers of a page side by side
             layer  all pages of a layer side by side

Pages are scattered over both pools. `local` and its peers are timed from the call of `write` to DONE, packed ways with
the gather; `kernel` is the time of `local`'s kernels alone, with the upload of what they are told. Raw is torch's copy
between the two GPUs, of as many bytes in one block, in turns with the others. All numbers are medians, and what arrived
is compared with what a definition on the receiving GPU makes of the same source.

    python benchmarks/p2p_reshard.py [--tokens 32768] [--only local] [--json FILE]
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from specdec.dcp.layout import FieldLayout
from specdec.errors import ConfigError
from specdec.transfer.descriptors import Descriptors, RegionMemory, expand_path, repeat_path
from specdec.transfer.gpu_copies import Launch
from specdec.transfer.packed_sending import PackedSending, PackedSource
from specdec.transfer.packing import PackBuffer
from specdec.transfer.placement import layer_split, sharded
from specdec.transfer.reshard_plan import Path as ReshardPath
from specdec.transfer.reshard_plan import Span, plan_reshard
from specdec.transfer.sending_thread import _batches
from specdec.transfer.transport import RegionCopies, Transport, WriteState, open_transport

_NUM_LAYERS, _PAGE_SIZE, _ROW_BYTES, _DCP_SIZE = 10, 64, 656, 2
_LAYER_PAGE_BYTES = _PAGE_SIZE * _ROW_BYTES
_KIND = "latent"
_FIELDS = (FieldLayout("row", 0, _ROW_BYTES, _ROW_BYTES),)
_BUFFER_REGIONS, _BUFFER_REGION_BYTES = 3, 64 << 20
_TIMEOUT_S = 60.0
_TARGET = 0.90  # of raw
_LINK_BYTES_PER_S = 450e9  # NVLink of an H200, one way
# Most ranges that a way is timed with, and rows that are packed for the slower ones: beyond, it takes seconds.
_MOST_RANGES = {"local": 1 << 30, "nixl": 1 << 18, "mooncake": 1 << 12}
_MOST_PACKED = 1 << 18
_REPEATS = {"local": 15, "nixl": 5, "mooncake": 3}
_REPEATED_RANGES = 1_000_000  # in all, but twice at least
_SLEEP_CYCLES = 400_000_000  # a fifth of a second: all launches are there before the first begins


@dataclass(frozen=True, slots=True)
class Case:
    """What is moved.

    Attributes:
        num_tokens: Tokens of the prompt.
        owners: "page" or "token".
        pools: "page" or "layer".
        path: From the prefill rank to the decode rank.
        source: How the prefill rank's pool is laid out.
        destination: How the decode rank's pool is.
        source_bytes: Of the prefill rank's pool.
        destination_bytes: Of the decode rank's.
        descriptors: Unpacked, rows of a page told as one where they are interleaved.
        ranges: The same bytes, each range by itself.
    """

    num_tokens: int
    owners: str
    pools: str
    path: ReshardPath
    source: RegionMemory
    destination: RegionMemory
    source_bytes: int
    destination_bytes: int
    descriptors: Descriptors
    ranges: Descriptors


def make_case(num_tokens: int, owners: str, pools: str) -> Case:
    """Plan the path of one decode rank."""
    layers = range(_NUM_LAYERS)
    num_pages = -(-num_tokens // _PAGE_SIZE)
    own_pages = -(-num_pages // _DCP_SIZE)
    sizes = {"page_size": _PAGE_SIZE}
    source = layer_split(layers, num_ranks=1, model_layers=_NUM_LAYERS, num_pages=num_pages, **sizes)
    block_width = 1 if owners == "token" else None
    destination = sharded([layers], dcp_size=_DCP_SIZE, block_width=block_width, num_pages=own_pages, **sizes)
    generator = np.random.default_rng(num_tokens)
    if owners == "token":
        destination_pages = np.stack([generator.permutation(own_pages) for _ in range(_DCP_SIZE)])
    else:  # ids take turns between the ranks, as an allocator gives them out
        shards = [generator.permutation(own_pages) * _DCP_SIZE + shard for shard in range(_DCP_SIZE)]
        destination_pages = np.stack(shards, axis=1).reshape(-1)[:num_pages]
    span = Span(
        source=source, source_pages=generator.permutation(num_pages), destination=destination,
        destination_pages=destination_pages, begin=0, end=num_tokens,
    )  # fmt: skip
    (path,) = (path for path in plan_reshard({_KIND: span}).paths if path.destination_rank == 0)
    memories = [_memory(pools, count) for count in (num_pages, own_pages)]
    page_bytes = _NUM_LAYERS * _LAYER_PAGE_BYTES
    return Case(
        num_tokens=num_tokens,
        owners=owners,
        pools=pools,
        path=path,
        source=memories[0],
        destination=memories[1],
        source_bytes=num_pages * page_bytes,
        destination_bytes=own_pages * page_bytes,
        descriptors=repeat_path(path, *memories),
        ranges=expand_path(path, *memories),
    )


def _memory(pools: str, num_pages: int) -> RegionMemory:
    strides = (_LAYER_PAGE_BYTES, num_pages * _LAYER_PAGE_BYTES)
    if pools == "page":
        strides = (_NUM_LAYERS * _LAYER_PAGE_BYTES, _LAYER_PAGE_BYTES)
    return RegionMemory(page_size=_PAGE_SIZE, page_stride=strides[0], layer_stride=strides[1], fields=_FIELDS)


def fill_source(memory: torch.Tensor) -> None:
    """Fill the prefill rank's pool, u8 [S]; the same bytes on every GPU of a kind."""
    generator = torch.Generator(memory.device).manual_seed(0)
    memory.view(torch.int64).random_(generator=generator)


def has_arrived(memory: torch.Tensor, source_bytes: int, ranges: Descriptors) -> bool:
    """Compare the decode rank's pool with a definition, unit by unit of 16 bytes; the pool is zeros afterwards."""
    source = torch.empty(source_bytes, dtype=torch.uint8, device=memory.device)
    fill_source(source)
    source_X, destination_X, length_X = (
        torch.from_numpy(array).to(memory.device) // 16
        for array in (ranges.source_offset_X, ranges.destination_offset_X, ranges.length_X)
    )
    within = torch.arange(int(length_X.sum()), device=memory.device)
    within -= torch.repeat_interleave(length_X.cumsum(0) - length_X, length_X)
    expected = torch.zeros_like(memory)
    to = torch.repeat_interleave(destination_X, length_X) + within
    within += torch.repeat_interleave(source_X, length_X)
    expected.view(torch.int64).view(-1, 2)[to] = source.view(torch.int64).view(-1, 2)[within]
    is_right = torch.equal(expected, memory)
    memory.zero_()
    torch.cuda.synchronize(memory.device)
    return is_right


def serve(pipe: Connection, gpu: int) -> None:
    """Be the decode rank."""
    torch.cuda.set_device(gpu)
    transport, memory = None, None
    while True:
        match pipe.recv():
            case ["open", name, num_bytes]:
                transport = open_transport(name)
                memory = transport.allocate(num_bytes, f"cuda:{gpu}")
                transport.register({_KIND: memory})
                pipe.send(transport.address())
            case ["check", source_bytes, ranges]:
                assert memory is not None
                pipe.send(has_arrived(memory, source_bytes, ranges))
                torch.cuda.empty_cache()
            case ["close"]:
                assert transport is not None
                transport.close()
                transport, memory = None, None
                pipe.send(None)
            case ["end"]:
                return


class Writer:
    """The prefill rank with one transport, connected to the decode rank."""

    def __init__(self, name: str, case: Case, pipe: Connection) -> None:
        self.name, self.case, self.pipe = name, case, pipe
        self.transport: Transport = open_transport(name, timeout_s=_TIMEOUT_S)
        self.source = self.transport.allocate(case.source_bytes, "cuda:0")
        fill_source(self.source)
        memory = self.transport.allocate(_BUFFER_REGIONS * _BUFFER_REGION_BYTES, "cuda:0")
        self.transport.register({_KIND: self.source, "buffer": memory})
        buffer = PackBuffer(memory, num_regions=_BUFFER_REGIONS)
        self._sending = PackedSending(self.transport, buffer, buffer_name="buffer")
        pipe.send(["open", name, case.destination_bytes])
        self.peer: Any = self.transport.connect(pipe.recv())
        torch.cuda.synchronize()

    def send(self) -> None:
        """Write every piece from where it lies."""
        write = self.transport.write(self.peer, [RegionCopies(_KIND, _KIND, self.case.descriptors)])
        if write.wait(_TIMEOUT_S) is not WriteState.DONE:
            raise RuntimeError(f"{self.name}: {write.error}")

    def send_packed(self) -> None:
        """Gather slices, and write these."""
        source = PackedSource(self.source, self.case.source)
        writes = self._sending.send(
            [self.case.path], {_KIND: source}, lambda _: self.case.destination, {0: self.peer}, timeout_s=_TIMEOUT_S
        )
        for write in writes:
            if write.wait(_TIMEOUT_S) is not WriteState.DONE:
                raise RuntimeError(f"{self.name}, packed: {write.error}")
        self._sending.reclaim()

    def kernel_s(self) -> float:
        """Seconds of `local`'s launches, as many side by side as it has in flight."""
        link = self.peer.link
        copies = (RegionCopies(_KIND, _KIND, self.case.descriptors),)
        destination = link._gpu._map(_KIND).address
        batches = list(_batches(copies, link))
        launches = [Launch(self.source.device) for _ in batches]
        streams = [launch.stream for launch in launches[: link.batches_in_flight]]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(_SLEEP_CYCLES)
        events[0].record()
        for stream in streams:
            stream.wait_event(events[0])
        for number, (launch, batch) in enumerate(zip(launches, batches, strict=True)):
            with torch.cuda.stream(streams[number % len(streams)]):
                launch.pieces.copy(
                    self.source.data_ptr(), destination,
                    batch.source_offset_X, batch.destination_offset_X, batch.length_X, repeats=batch.repeats,
                    layers=batch.layers,
                )  # fmt: skip
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        events[1].record()
        torch.cuda.synchronize()
        return float(events[0].elapsed_time(events[1])) / 1e3

    def is_right(self) -> bool:
        """Ask the decode rank what it has; it forgets it."""
        self.pipe.send(["check", self.case.source_bytes, self.case.ranges])
        return bool(self.pipe.recv())

    def close(self) -> None:
        """End both sides."""
        self.pipe.send(["close"])
        self.pipe.recv()
        self.transport.close()


def measure(case: Case, name: str, pipe: Connection) -> list[dict[str, Any]]:
    """Time one transport, packed and not."""
    num_bytes, num_ranges = case.ranges.num_bytes, len(case.ranges)
    is_unpacked_timed = num_ranges <= _MOST_RANGES[name]
    is_packed_timed = case.owners == "token" and num_ranges <= max(_MOST_RANGES[name], _MOST_PACKED)
    if not (is_unpacked_timed or is_packed_timed):
        return []
    writer = Writer(name, case, pipe)
    blocks = [torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(2)]

    def copy_raw() -> None:
        blocks[1].copy_(blocks[0])
        torch.cuda.synchronize(0)

    runs: dict[str, Callable[[], None]] = {}
    if is_unpacked_timed:
        runs["unpacked"] = writer.send
    if is_packed_timed:
        runs["packed"] = writer.send_packed
    results = []
    for way, run in runs.items():
        run()
        bytes_right = writer.is_right()
        copy_raw()
        seconds: dict[str, list[float]] = {"raw": [], way: []}
        for _ in range(max(2, min(_REPEATS[name], _REPEATED_RANGES // num_ranges))):
            for what, timed in (("raw", copy_raw), (way, run)):
                started = time.perf_counter()
                timed()
                seconds[what].append(time.perf_counter() - started)
        bytes_right &= writer.is_right()
        kernel_s = None
        if (name, way) == ("local", "unpacked"):
            kernel_s = statistics.median(writer.kernel_s() for _ in range(3))
            bytes_right &= writer.is_right()
        median, raw = (statistics.median(seconds[what]) for what in (way, "raw"))
        results.append(
            {
                "tokens": case.num_tokens,
                "owners": case.owners,
                "pools": case.pools,
                "way": f"{name} {way}",
                "ranges": num_ranges,
                "descriptors": len(case.descriptors),
                "mbytes": num_bytes / 1e6,
                "seconds": median,
                "gbytes_per_s": num_bytes / median / 1e9,
                "raw_gbytes_per_s": num_bytes / raw / 1e9,
                "of_raw": raw / median,
                "kernel_seconds": kernel_s,
                "kernel_of_raw": raw / kernel_s if kernel_s else None,
                "floor_seconds": num_bytes / _LINK_BYTES_PER_S,
                "bytes_right": bytes_right,
            }
        )
    writer.close()
    return results


def show(results: list[dict[str, Any]], skipped: list[str]) -> None:
    """Print one table."""
    table = Table(title=f"one path between two GPUs, {torch.cuda.get_device_name(0)}; of raw: {_TARGET:.2f} is wanted")
    columns = ("tokens", "owners", "pools", "way", "ranges", "MB", "ms", "GB/s", "raw", "of raw", "kernel", "of raw")
    for column in (*columns, "bytes"):
        table.add_column(column, justify="left" if column in ("owners", "pools", "way") else "right")
    for result in results:
        kernel = result["kernel_seconds"]
        table.add_row(
            f"{result['tokens']:,}",
            result["owners"],
            result["pools"],
            result["way"],
            f"{result['ranges']:,}",
            f"{result['mbytes']:.0f}",
            f"{result['seconds'] * 1e3:.2f}",
            f"{result['gbytes_per_s']:.1f}",
            f"{result['raw_gbytes_per_s']:.0f}",
            f"{result['of_raw']:.3f}",
            f"{kernel * 1e3:.2f}" if kernel else "",
            f"{result['kernel_of_raw']:.2f}" if kernel else "",
            "right" if result["bytes_right"] else "WRONG",
        )
    console = Console(width=140)
    console.print(table)
    for words in skipped:
        console.print(words)


def main() -> None:
    """Measure all transports that can be loaded, in two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, action="append", help="of the prompt; may be repeated (32768, 500000)")
    parser.add_argument("--only", action="append", choices=list(_REPEATS), help="measure this; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < 2:
        parser.error("two GPUs are needed")
    os.environ.setdefault("MC_FORCE_TCP", "1")  # what Mooncake takes for memory of GPUs within a host without adapters
    torch.cuda.set_device(0)
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=serve, args=(child, 1), daemon=True)
    process.start()
    results: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for num_tokens in arguments.tokens or (32_768, 500_000):
        for owners in ("page", "token"):
            for pools in ("page", "layer"):
                case = make_case(num_tokens, owners, pools)
                for name in arguments.only or _REPEATS:
                    if name in skipped:
                        continue
                    try:
                        results += measure(case, name, pipe)
                    except ConfigError as error:
                        skipped[name] = f"{name}: not measured: {error}"
                    torch.cuda.empty_cache()
    pipe.send(["end"])
    process.join(30)
    show(results, list(skipped.values()))
    if arguments.json:
        record = {"machine": torch.cuda.get_device_name(0), "target_of_raw": _TARGET, "results": results}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    if not all(result["bytes_right"] for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
