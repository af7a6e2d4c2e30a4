"""How fast the transports move KV between two processes of this host, by memory layout, against one raw block.

A path carries pages of 64 tokens, 10 layers, 656 bytes a row (packed FP8 latents), and is written in four layouts:

    packed           one contiguous buffer to another: what a gather kernel has packed
    page-major       one descriptor a page, all layers of it side by side
    layer-major      one descriptor a page and layer
    token unpacked   one descriptor a row, as ownership of single tokens needs without packing

Raw is the library alone copying one block of the same size between the same two processes: for shared memory one copy
into the mapping, for Mooncake one call with one descriptor, for NIXL one prepared transfer. Raw and adapter take turns,
the best of each counts, and what arrived is compared by checksum with what was to arrive.

    python benchmarks/loopback_transfer.py [--mbytes 720] [--json FILE] [--only nixl-tcp]
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from specdec.transfer.descriptors import Descriptors
from specdec.transfer.transport import RegionCopies, Transport, WriteState, open_transport

_NUM_LAYERS, _PAGE_SIZE, _ROW_BYTES = 10, 64, 656
_LAYER_PAGE_BYTES = _PAGE_SIZE * _ROW_BYTES
_PAGE_BYTES = _NUM_LAYERS * _LAYER_PAGE_BYTES
_DESCRIPTOR_BYTES = {"page-major": _PAGE_BYTES, "layer-major": _LAYER_PAGE_BYTES, "token unpacked": _ROW_BYTES}
_TARGETS = {
    "shared memory": {"packed": 0.90, "page-major": 0.90},
    "mooncake-tcp": {"packed": 0.90, "page-major": 0.80},
    "nixl-tcp": {"packed": 0.90, "page-major": 0.90},
    "nixl-shm": {"packed": 0.90, "page-major": 0.90},
}
_TIMEOUT_S = 600.0
_LOOPBACK = {"UCX_NET_DEVICES": "lo", "OMP_NUM_THREADS": "1"}
# The C library writes past the cache, which saves reading what is overwritten, from this many bytes on; its own choice,
# a good part of the last cache, is more than a page has.
_PAST_THE_CACHE = "glibc.cpu.x86_non_temporal_threshold=262144"
# Transport and settings that libraries read. Without UCX_TLS, UCX takes shared memory between processes of one host.
_WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "shared memory": ("local", {"GLIBC_TUNABLES": _PAST_THE_CACHE}),
    "mooncake-tcp": ("mooncake", {"MC_FORCE_TCP": "1"}),
    "nixl-tcp": ("nixl", {"UCX_TLS": "tcp"}),
    "nixl-shm": ("nixl", {}),
}


def layouts(num_bytes: int) -> dict[str, Descriptors]:
    """Descriptors of every layout: pages, parts of pages or rows in order here, in a fixed random order there."""
    zero = np.zeros(1, np.int64)
    plans = {"packed": Descriptors(zero, zero, np.array([num_bytes]))}
    for layout, size in _DESCRIPTOR_BYTES.items():
        count = num_bytes // size
        order = np.random.default_rng(count).permutation(count)
        plans[layout] = Descriptors(np.arange(count) * size, order * size, np.full(count, size))
    return plans


def expected_digest(source: np.ndarray, plan: Descriptors) -> str:
    """Digest of the destination once a plan has been carried out."""
    size = int(plan.length_X[0])
    moved = np.empty_like(source).reshape(-1, size)
    moved[plan.destination_offset_X // size] = source.reshape(-1, size)
    return hashlib.sha256(moved).hexdigest()


def serve(pipe: Connection, name: str, num_bytes: int) -> None:
    """Be written to."""
    transport = open_transport(name)
    memory = transport.allocate(num_bytes)
    transport.register({"pool": memory})
    pipe.send((transport.address(), memory.data_ptr()))
    while pipe.recv() == "digest":
        pipe.send(hashlib.sha256(memory.numpy()).hexdigest())
        memory.zero_()
    transport.close()


def raw_copy(transport: Any, peer: Any, source: torch.Tensor, destination: int) -> Callable[[], None]:
    """Copy the whole source as one block with the adapter's own library object: another one would bring threads."""
    num_bytes = source.nbytes
    if transport.name == "local":
        target, block = peer.link._destinations["pool"], source.numpy()
        return lambda: target.__setitem__(slice(None), block)
    if transport.name == "mooncake":
        engine, session = transport._engine, peer.link._endpoint.session

        def write_block() -> None:
            if engine.batch_transfer_sync_write(session, [source.data_ptr()], [destination], [num_bytes]) != 0:
                raise RuntimeError("Mooncake could not copy a block")

        return write_block
    agent = transport._agent

    def block_at(address: int) -> np.ndarray:
        return np.array([[address, num_bytes, 0]], np.uint64)

    own = agent.prep_xfer_dlist("NIXL_INIT_AGENT", block_at(source.data_ptr()), "DRAM")
    far = agent.prep_xfer_dlist(peer.link._name, block_at(destination), "DRAM")
    index = np.zeros(1, np.int32)

    def transfer_block() -> None:
        handle = agent.make_prepped_xfer("WRITE", own, index, far, index, b"")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL could not copy a block: {state}")

    return transfer_block


def measure(way: str, *, num_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Measure one way in this process and one that it starts."""
    name, _ = _WAYS[way]
    torch.set_num_threads(1)
    transport: Transport = open_transport(name, timeout_s=_TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=serve, args=(child, name, num_bytes), daemon=True)
    process.start()
    values = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    source = torch.from_numpy(values)
    transport.register({"pool": source})
    address, destination = pipe.recv()
    peer = transport.connect(address)
    plans = layouts(num_bytes)

    def send(plan: Descriptors) -> None:
        write = transport.write(peer, [RegionCopies("pool", "pool", plan)])
        if write.wait(_TIMEOUT_S) is not WriteState.DONE:
            raise RuntimeError(f"{way}: {write.error}")

    def has_arrived(plan: Descriptors) -> bool:
        pipe.send("digest")
        return bool(pipe.recv() == expected_digest(values, plan))

    send(plans["packed"])
    raw = raw_copy(transport, peer, source, destination)
    results = []
    for layout, plan in plans.items():
        times: dict[str, list[float]] = {"raw": [], layout: []}
        for _ in range(max(1, min(repeats, 150_000 // len(plan)))):
            for what, run in (("raw", raw), (layout, lambda plan=plan: send(plan))):
                started = time.perf_counter()
                run()
                times[what].append(time.perf_counter() - started)
        best, best_raw = min(times[layout]), min(times["raw"])
        results.append(
            {
                "way": way,
                "layout": layout,
                "descriptors": len(plan),
                "seconds": best,
                "gbytes_per_s": num_bytes / best / 1e9,
                "raw_gbytes_per_s": num_bytes / best_raw / 1e9,
                "of_raw": best_raw / best,
                "target": _TARGETS[way].get(layout),
                "bytes_right": has_arrived(plan),
            }
        )
    pipe.send("end")
    process.join(30)
    transport.close()
    return results


def main() -> None:
    """Measure every way in processes of its own, since a library reads its environment once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbytes", type=int, default=47, help="size of the path in MB (47, 720, ...)")
    parser.add_argument("--repeats", type=int, default=12, help="pairs of raw and adapter")
    parser.add_argument("--only", action="append", choices=list(_WAYS), help="measure this way; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    num_bytes = arguments.mbytes * 1_000_000 // _PAGE_BYTES * _PAGE_BYTES
    if arguments.here:
        print(json.dumps(measure(arguments.only[0], num_bytes=num_bytes, repeats=arguments.repeats)))
        return
    results: list[dict[str, Any]] = []
    for way in arguments.only or _WAYS:
        options = ["--mbytes", str(arguments.mbytes), "--repeats", str(arguments.repeats), "--only", way, "--here"]
        ran = subprocess.run(
            [sys.executable, __file__, *options],
            env=os.environ | _LOOPBACK | _WAYS[way][1],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        results += json.loads(ran.stdout.splitlines()[-1])
    table = Table(title=f"{num_bytes / 1e6:.0f} MB between two processes, load {os.getloadavg()[0]:.1f}")
    for column in ("way", "layout", "descriptors", "ms", "GB/s", "raw GB/s", "of raw", "target", "bytes"):
        table.add_column(column, justify="left" if column in ("way", "layout") else "right")
    for result in results:
        table.add_row(
            result["way"],
            result["layout"],
            f"{result['descriptors']:,}",
            f"{result['seconds'] * 1e3:.1f}",
            f"{result['gbytes_per_s']:.2f}",
            f"{result['raw_gbytes_per_s']:.2f}",
            f"{result['of_raw']:.2f}",
            f"{result['target']:.2f}" if result["target"] else "",
            "right" if result["bytes_right"] else "WRONG",
        )
    Console(width=120).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"mbytes": num_bytes / 1e6, "results": results}, indent=1) + "\n")
    if not all(result["bytes_right"] for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
