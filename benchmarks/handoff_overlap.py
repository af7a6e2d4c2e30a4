"""A prompt's KV goes to another GPU while it is computed: when layers are stored, when writes begin and land.

    computed   | chunk | chunk | ... | chunk |           GPU 0, passes of at most 192 rows
    written          ||||    ||||          ||||          GPU 0 to GPU 1, a few layers of a chunk each
                                             |<->|       exposed: from the last pass's end to the last byte

All layers of a TP8 rank of GLM-5.2 with random weights, no communication between ranks and no MTP layer; packed FP8.
The other GPU belongs to another process, which compares what arrived. Beside it: the same passes when nothing is sent,
the same bytes when nothing is computed, and a copy of one block between the GPUs. With one GPU both processes share it.

    python benchmarks/handoff_overlap.py [--layers 78] [--tokens 32768] [--chunk 2048] [--json FILE]
    python benchmarks/handoff_overlap.py --plot FILE [--to docs/figures]      # of a kept run
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

_ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "docs")]
from dcp_figures import Figure  # noqa: E402

from benchmarks.bench_kernels import machine  # noqa: E402
from benchmarks.rank_weights import VOCABULARY, Depth, RankWeights  # noqa: E402
from benchmarks.real_checkpoint import checkpoint_config  # noqa: E402
from specdec.dcp.communicator import single_rank_groups  # noqa: E402
from specdec.dcp.geometry import Geometry, PoolRole  # noqa: E402
from specdec.dcp.layout import KvFormat, PoolLayout  # noqa: E402
from specdec.dcp.page_table import KeptPageTable  # noqa: E402
from specdec.dcp.pool import KvPool  # noqa: E402
from specdec.memory.pool_plan import plan_layouts  # noqa: E402
from specdec.models.glm.config import GlmConfig  # noqa: E402
from specdec.models.glm.kernel_target import MAX_ROWS, KernelTarget  # noqa: E402
from specdec.ranks.kv_sides import KvSide  # noqa: E402
from specdec.ranks.rank_transfer import Moves, Order, RankTransfer, plan_order  # noqa: E402
from specdec.slot_table import Int64Array  # noqa: E402
from specdec.transfer.placement import entry_name  # noqa: E402
from specdec.transfer.transport import Peer, RegionCopies, Transport, Write, WriteState, open_transport  # noqa: E402

_PAGE_SIZE = 64
_WAIT_S = 60.0
_BLOCK_BYTES, _REPEATS = 1 << 30, 5
_COLOURS = {"computed": "#ffd166", "written": "#219ebc", "stored": "#8ecae6"}

Result = Mapping[str, Any]


class Clock:
    """Tells when the device passed an event, on the clock of the host; waits for the device when it is made."""

    def __init__(self) -> None:
        self._zero = self.mark()
        torch.cuda.synchronize()
        self.zero_s = time.monotonic()

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, event: torch.cuda.Event) -> float:
        """Seconds from zero to an event that has passed."""
        return self._zero.elapsed_time(event) * 1e-3


class Sent(NamedTuple):
    """A write.

    Attributes:
        write: As the transport gave it.
        posted_s: When, by `time.monotonic`.
        num_bytes: Bytes.
        num_descriptors: Contiguous pieces.
    """

    write: Write
    posted_s: float
    num_bytes: int
    num_descriptors: int


class RecordingTransport:
    """A transport that keeps the writes of one run."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.sent: list[Sent] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, peer: Peer, copies: Sequence[RegionCopies]) -> Write:
        """As the transport does."""
        posted_s = time.monotonic()
        sizes = [(each.descriptors.num_bytes, len(each.descriptors)) for each in copies]
        write = self._transport.write(peer, copies)
        self.sent.append(Sent(write, posted_s, *(sum(column) for column in zip(*sizes, strict=True))))
        return write


def open_pool(transport: Transport, layout: PoolLayout, num_pages: int, device: torch.device) -> KvPool:
    """Make a pool in memory that peers may write to."""
    return KvPool(
        layout,
        num_pages=num_pages,
        geometry=Geometry(1, 0, PoolRole.TARGET),
        device=device,
        allocate=partial(transport.allocate, device=device),
    )


def memory_of(pool: KvPool) -> dict[str, torch.Tensor]:
    """Its memory by name of the kind of entry."""
    return {entry_name(PoolRole.TARGET, entry.kind): pool.memory(entry.kind) for entry in pool.layout.entries}


def page_sums(pool: KvPool, page_ids: Int64Array) -> dict[str, list[int]]:
    """A sum of each page's words, weighted by their places, by kind of entry: equal for equal pages."""
    index_P = torch.from_numpy(page_ids).to(pool.device)
    sums = {}
    for entry in pool.layout.entries:
        word_PW = pool.buffer(entry.kind).index_select(0, index_P).flatten(1).view(torch.int64)
        weight_W = torch.arange(1, 2 * word_PW.shape[1], 2, device=pool.device)
        sums[entry.kind.value] = (word_PW * weight_W).sum(dim=1).tolist()
    return sums


def receive(pipe: Connection, layout: PoolLayout, num_pages: int, transport_name: str, device: torch.device) -> None:
    """Be the other process: tell the address, then whatever is asked of pages, until None is asked."""
    torch.cuda.set_device(device)
    transport = open_transport(transport_name)
    pool = open_pool(transport, layout, num_pages, device)
    for entry in layout.entries:
        pool.buffer(entry.kind).fill_(0xFF)
    torch.cuda.synchronize()
    transport.register({name: memory.reshape(-1) for name, memory in memory_of(pool).items()})
    pipe.send(transport.address())
    while (page_ids := pipe.recv()) is not None:
        pipe.send(page_sums(pool, page_ids))
        for entry in layout.entries:
            pool.buffer(entry.kind).fill_(0xFF)
        torch.cuda.synchronize()
    transport.close()


class Prefill:
    """A rank with all layers, its pool, and its transfer to one rank of a decode group.

    Args:
        arguments: Of the command line.
        config: Of the model.
        layout: Of both pools.
        address: Of the other process.
    """

    def __init__(
        self, arguments: argparse.Namespace, config: GlmConfig, layout: PoolLayout, address: bytes, device: torch.device
    ) -> None:
        self._num_tokens, self._chunk = arguments.tokens, arguments.chunk
        num_pages = -(-self._num_tokens // _PAGE_SIZE)
        rng = np.random.default_rng(0)
        self.page_ids, self.their_page_ids = (rng.permutation(num_pages).astype(np.int64) for _ in range(2))
        self.transport = RecordingTransport(open_transport(arguments.transport))
        transport: Any = self.transport  # stands in for one
        self.pool = open_pool(transport, layout, num_pages, device)
        self._side = KvSide(target=layout, draft=None, num_pages=num_pages, tp_size=1, dcp_size=1)
        self.transfer = RankTransfer(transport, side=self._side, rank=0, memory=memory_of(self.pool))
        self._address = address
        depth = Depth(
            num_layers=config.num_layers,
            num_dense=sum(kind != "sparse" for kind in config.mlp_layer_types),
            full=frozenset(layer for layer, kind in enumerate(config.indexer_types) if kind == "full"),
        )
        model = RankWeights(max_rows=MAX_ROWS).model(depth, with_mtp=False)
        self.target = KernelTarget(config, model, parallel=single_rank_groups(), max_positions=self._num_tokens)
        self._token_id_T = torch.randint(0, VOCABULARY, (self._num_tokens,), device=device)
        self._page_table = KeptPageTable(
            geometry=self.pool.geometry, page_size=_PAGE_SIZE, num_pages=num_pages, device=device
        )
        self._num_orders = 0

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First token of each, and the one behind its last."""
        firsts = range(0, self._num_tokens, self._chunk)
        return [(first, min(first + self._chunk, self._num_tokens)) for first in firsts]

    def compute(self, begin: int, end: int, *, when_stored: Any = None) -> None:
        """Launch the passes of a chunk."""
        position = np.arange(begin, end)
        pages = self._page_table.of(self.page_ids[None, : -(-end // _PAGE_SIZE)])
        placed = self.pool.place(pages, request_index=np.zeros_like(position), position=position)
        self.target.forward(
            self._token_id_T[begin:end], metadata=placed.metadata, pool=placed.store, when_stored=when_stored
        )

    def prepare(self, begin: int, end: int) -> None:
        """Prepare to send tokens."""
        order = Order(
            order_id=self._num_orders,
            destination=self._side,
            addresses=(self._address,),
            source_page_ids=self.page_ids,
            destination_page_ids=self.their_page_ids,
            target=(begin, end),
            draft=None,
            digest="",
        )
        self._num_orders += 1
        self.transfer.prepare([order._replace(digest=plan_order(order, self._side).digest)])

    def await_writes(self) -> list[Sent]:
        """Wait until all has landed; gives the writes since the last call.

        Raises:
            RuntimeError: An order failed.
        """
        sent, self.transport.sent = self.transport.sent, []
        for each in sent:
            if each.write.wait(_WAIT_S) is not WriteState.DONE:
                raise RuntimeError(f"a write has not landed: {each.write.error}")
        for report in self.transfer.move(Moves()):
            if report.error is not None:
                raise RuntimeError(f"order {report.order_id} failed: {report.error}")
        return sent

    def compute_alone(self) -> tuple[float, float]:
        """Seconds of all chunks when nothing is sent, and until the host had launched them."""
        clock = Clock()
        for begin, end in self.chunks:
            self.compute(begin, end)
        host_s = time.monotonic() - clock.zero_s
        last = clock.mark()
        torch.cuda.synchronize()
        return clock.seconds(last), host_s

    def send_alone(self) -> float:
        """Seconds from the call to the last byte when nothing is computed."""
        torch.cuda.synchronize()
        self.prepare(0, self._num_tokens)
        begun_s = time.monotonic()
        self.transfer.post_prepared()
        return max(landed_s(each) for each in self.await_writes()) - begun_s

    def compute_and_send(self) -> dict[str, Any]:
        """Send every chunk as its layers are stored; gives what happened when, in seconds from the beginning."""
        clock = Clock()
        chunks, stored = [], []
        for number, (begin, end) in enumerate(self.chunks):
            self.prepare(begin, end)

            def when_stored(layer: int, number: int = number) -> None:
                event, num_before = clock.mark(), len(self.transport.sent)
                self.transfer.post_stored(layer)
                stored.extend((number, layer, event) for _ in self.transport.sent[num_before:])

            started = clock.mark()
            self.compute(begin, end, when_stored=when_stored)
            chunks.append((begin, end, started, clock.mark()))
        sent = self.await_writes()
        torch.cuda.synchronize()
        return {
            "chunks": [
                {"begin": begin, "end": end, "started_s": clock.seconds(started), "computed_s": clock.seconds(computed)}
                for begin, end, started, computed in chunks
            ],
            "writes": [
                {
                    "chunk": number,
                    "layer": layer,
                    "num_bytes": each.num_bytes,
                    "num_descriptors": each.num_descriptors,
                    "posted_s": each.posted_s - clock.zero_s,
                    "stored_s": clock.seconds(event),
                    # Its turn may come before what it sends is stored: then it waits for that.
                    "begun_s": max(each.posted_s + each.write.queued_s - clock.zero_s, clock.seconds(event)),
                    "landed_s": landed_s(each) - clock.zero_s,
                }
                for (number, layer, event), each in zip(stored, sent, strict=True)
            ],
        }


def landed_s(sent: Sent) -> float:
    """When a write that has ended did, by `time.monotonic`."""
    return sent.posted_s + sent.write.queued_s + sent.write.sending_s


def block_rate(source: torch.device, destination: torch.device) -> float:
    """Bytes per second of the best of some copies of one block."""
    here = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device=source)
    there = torch.empty_like(here, device=destination)
    seconds = []
    for _ in range(_REPEATS):
        for device in (source, destination):
            torch.cuda.synchronize(device)
        begun_s = time.monotonic()
        there.copy_(here)
        for device in (source, destination):
            torch.cuda.synchronize(device)
        seconds.append(time.monotonic() - begun_s)
    return _BLOCK_BYTES / min(seconds)


def summarise(result: Result) -> dict[str, float]:
    """Numbers of a run, in seconds and bytes.

    Args:
        result: With `chunks`, `writes` and what was measured alone.

    Returns:
        computed_s: All passes while KV is sent; alone_s when none is.
        exposed_s: From the end of the last pass to the last byte.
        hidden: Share of the bytes that had landed when the last pass ended.
        hidden_time: Share of the seconds that sending takes alone that are not exposed.
        late_s: From a write's last layer being stored to its beginning: the median.
        sending_bytes_per_s: Of all bytes when nothing is computed.
    """
    chunks, writes = result["chunks"], result["writes"]
    computed_s = chunks[-1]["computed_s"]
    exposed_s = max(0.0, max(write["landed_s"] for write in writes) - computed_s)
    num_bytes = sum(write["num_bytes"] for write in writes)
    hidden_bytes = sum(write["num_bytes"] for write in writes if write["landed_s"] <= computed_s)
    return {
        "computed_s": computed_s - chunks[0]["started_s"],
        "alone_s": result["compute_alone_s"],
        "num_bytes": num_bytes,
        "num_writes": len(writes),
        "num_descriptors": sum(write["num_descriptors"] for write in writes),
        "exposed_s": exposed_s,
        "hidden": hidden_bytes / num_bytes,
        "hidden_time": 1 - exposed_s / result["send_alone_s"],
        "late_s": float(np.median([write["begun_s"] - write["stored_s"] for write in writes])),
        "sending_bytes_per_s": num_bytes / result["send_alone_s"],
    }


def draw_timeline(result: Result) -> Figure:
    """Draw all chunks with their writes, and below, in milliseconds, what happens around the end of the last pass."""
    chunks, writes, summary = result["chunks"], result["writes"], summarise(result)
    figure = Figure(860, 330)
    settings = result["settings"]
    figure.label(
        20, 24, f"Hand-off of {settings['tokens']:,} tokens, {settings['layers']} layers, {settings['transport']}",
        anchor="start", size=14,
    )  # fmt: skip
    for place, (name, colour) in enumerate(_COLOURS.items()):
        figure.box(20 + 120 * place, 36, 14, 12, "", colour)
        figure.label(40 + 120 * place, 46, name, anchor="start")
    end_s = max(chunks[-1]["computed_s"], *(write["landed_s"] for write in writes))
    _draw_lanes(figure, 64, result, 0.0, end_s, unit_s=1.0, unit="s")
    last = [write for write in writes if write["chunk"] == len(chunks) - 1]
    first_s = min(write["stored_s"] for write in last)
    _draw_lanes(figure, 184, result, first_s - 0.05 * (end_s - first_s), end_s, unit_s=1e-3, unit="ms")
    line = (
        f"{summary['hidden']:.1%} of {summary['num_bytes'] / 1e9:.2f} GB had landed when the last pass ended, the last "
        f"byte {summary['exposed_s'] * 1e3:.2f} ms later; alone they take {result['send_alone_s'] * 1e3:.1f} ms."
    )
    figure.label(20, 314, line, anchor="start")
    return figure


def _draw_lanes(
    figure: Figure, y: int, result: Result, begin_s: float, end_s: float, *, unit_s: float, unit: str
) -> None:
    """Draw what lies between two times: a lane of passes and one of writes, over an axis."""
    left, width, height = 90, 740, 26

    def x(at_s: float) -> float:
        return round(left + width * (min(max(at_s, begin_s), end_s) - begin_s) / (end_s - begin_s), 2)

    figure.label(20, y + 17, "computed", anchor="start")
    figure.label(20, y + 17 + height + 6, "written", anchor="start")
    for chunk in result["chunks"]:
        if chunk["computed_s"] > begin_s:
            from_x = x(chunk["started_s"])
            figure.box(from_x, y, x(chunk["computed_s"]) - from_x, height, "", _COLOURS["computed"])
    for write in result["writes"]:
        if write["landed_s"] > begin_s:
            figure.box(x(write["stored_s"]), y + height - 8, 1, 8, "", _COLOURS["stored"])
            from_x = x(write["begun_s"])
            figure.box(from_x, y + height + 6, max(1.0, x(write["landed_s"]) - from_x), height, "", _COLOURS["written"])
    for part in range(5):
        at_s = begin_s + part * (end_s - begin_s) / 4
        figure.label(x(at_s), y + 2 * height + 24, f"{(at_s - (begin_s if unit == 'ms' else 0)) / unit_s:.3g} {unit}")


def show(result: Result) -> None:
    """Print the numbers, and how the chunks went."""
    console, summary = Console(width=140), summarise(result)
    table = Table(title="chunks: milliseconds")
    for column in ("tokens", "computed in", "bytes", "writes", "first begun", "last landed", "behind the chunk's end"):
        table.add_column(column, justify="right")
    for number, chunk in enumerate(result["chunks"]):
        writes = [write for write in result["writes"] if write["chunk"] == number]
        landed = max(write["landed_s"] for write in writes)
        times = (
            min(write["begun_s"] for write in writes) - chunk["started_s"],
            landed - chunk["started_s"],
            landed - chunk["computed_s"],
        )
        table.add_row(
            f"{chunk['begin']}-{chunk['end']}",
            f"{(chunk['computed_s'] - chunk['started_s']) * 1e3:.1f}",
            f"{sum(write['num_bytes'] for write in writes) / 1e6:.0f} MB",
            str(len(writes)),
            *(f"{seconds * 1e3:.2f}" for seconds in times),
        )
    console.print(table)
    console.print(
        f"passes {summary['computed_s']:.3f} s while sending, {summary['alone_s']:.3f} s alone (launched in "
        f"{result['host_s']:.3f} s); {result['settings']['tokens'] / summary['computed_s']:,.0f} tokens/s"
    )
    console.print(
        f"{summary['num_bytes'] / 1e9:.3f} GB in {summary['num_writes']} writes, {summary['num_descriptors']} pieces: "
        f"alone {result['send_alone_s'] * 1e3:.2f} ms, {summary['sending_bytes_per_s'] / 1e9:.0f} GB/s; one block "
        f"{result['block_bytes_per_s'] / 1e9:.0f} GB/s"
    )
    console.print(
        f"hidden: {summary['hidden']:.2%} of the bytes, {summary['hidden_time']:.2%} of the time that they take alone; "
        f"exposed {summary['exposed_s'] * 1e3:.3f} ms; a write begins {summary['late_s'] * 1e6:.0f} us after its last "
        "layer is stored (median)"
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everything.

    Raises:
        RuntimeError: Something else arrived than was stored, or a write failed.
    """
    here, there = torch.device("cuda:0"), torch.device("cuda", min(1, torch.cuda.device_count() - 1))
    config = GlmConfig.from_dict(checkpoint_config(arguments.layers))
    layout = plan_layouts(
        config, page_size=_PAGE_SIZE, kv_format=KvFormat.FP8_PACKED, kv_scale=None, with_draft=False, dcp_size=1
    ).target
    num_pages = -(-arguments.tokens // _PAGE_SIZE)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, layout, num_pages, arguments.transport, there), daemon=True)
    process.start()
    theirs.close()
    with torch.inference_mode():
        prefill = Prefill(arguments, config, layout, pipe.recv(), here)
        prefill.compute(*prefill.chunks[0])  # compiles
        prefill.compute(*prefill.chunks[-1])
        compute_alone_s, host_s = prefill.compute_alone()
        timeline = prefill.compute_and_send()
        check(prefill, pipe)
        send_alone_s = min(prefill.send_alone() for _ in range(_REPEATS))
        check(prefill, pipe)
        prefill.transfer.close()
    pipe.send(None)
    process.join(_WAIT_S)
    return {
        "machine": machine(),
        "settings": {
            "layers": arguments.layers,
            "tokens": arguments.tokens,
            "chunk": arguments.chunk,
            "transport": arguments.transport,
            "gpus": len({here, there}),
        },
        "compute_alone_s": compute_alone_s,
        "host_s": host_s,
        "send_alone_s": send_alone_s,
        "block_bytes_per_s": block_rate(here, there),
        **timeline,
    }


def check(prefill: Prefill, pipe: Connection) -> None:
    """Compare all pages of both sides; the other side forgets what it has.

    Raises:
        RuntimeError: They differ.
    """
    pipe.send(prefill.their_page_ids)
    if pipe.recv() != page_sums(prefill.pool, prefill.page_ids):
        raise RuntimeError("what arrived is not what was stored")


def main() -> None:
    """Measure, print, keep; or draw what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=78)
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt, a multiple of 64")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a round, a multiple of 64")
    parser.add_argument("--transport", default="local")
    parser.add_argument("--json", type=Path, help="keep the run there")
    parser.add_argument("--plot", type=Path, help="draw this kept run, and measure nothing")
    parser.add_argument("--to", type=Path, default=_ROOT / "docs" / "figures", help="folder of the figure")
    arguments = parser.parse_args()
    if arguments.plot:
        result = json.loads(arguments.plot.read_text())
        draw_timeline(result).write(str(arguments.to.resolve() / "handoff_overlap.svg"))
        show(result)
        return
    if arguments.tokens % _PAGE_SIZE or arguments.chunk % _PAGE_SIZE:
        parser.error(f"--tokens and --chunk must be multiples of {_PAGE_SIZE}")
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure")
        return
    result = measure(arguments)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
