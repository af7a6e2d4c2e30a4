"""On a GPU: how fast rows are gathered, and whether the order of a pool's layers matters to who reads it.

Rows of packed FP8 latents (656 bytes), pages of 64 tokens, 78 layers, 64K tokens. "select" reads 6 x 2,048 scattered
tokens of every layer, as sparse attention does; "scan" reads every page of a layer, as prefill does. Medians of CUDA
graph replays; the copy is torch's, of one block of 1 GiB. Bytes count once read and once written.

    python benchmarks/pool_layout.py [--json FILE]
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec.kernels.pack_rows import launch_pack_rows

_GIB = 1 << 30
_WORD = 4
_NUM_LAYERS, _NUM_PAGES, _PAGE_SIZE, _ROW_BYTES = 78, 1024, 64, 656
_NUM_QUERIES, _NUM_SELECTED = 6, 2048
_REPEATS = 20


def milliseconds(run: Callable[[], None]) -> float:
    """Median time of one replay of a graph of `run`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


class Memory:
    """Two buffers, and gathers from one into the other."""

    def __init__(self) -> None:
        self.source = torch.randint(0, 256, (6 * _GIB,), dtype=torch.uint8, device="cuda")
        self.out = torch.empty(2 * _GIB, dtype=torch.uint8, device="cuda")

    def gather(self, word_R: torch.Tensor, out_word_R: torch.Tensor, row_bytes: int) -> None:
        """Gather rows; offsets in words, i64 on the device."""
        source, out = self.source.view(torch.int32), self.out.view(torch.int32)
        vector = 4 if row_bytes % 16 == 0 else 1  # all places are multiples of whole rows
        launch_pack_rows(source, word_R, out, out_word_R, num_words=row_bytes // _WORD, vector=vector)


def consecutive(num_rows: int, row_bytes: int) -> torch.Tensor:
    """Offsets in words of rows behind each other."""
    return torch.arange(num_rows, device="cuda") * (row_bytes // _WORD)


def measure_gathers(memory: Memory) -> list[dict[str, Any]]:
    """Gather 1 GiB of scattered rows of several sizes."""
    copied = 2 * _GIB / milliseconds(lambda: memory.out[:_GIB].copy_(memory.source[:_GIB]))
    results = []
    for row_bytes in (132, 576, 656, _PAGE_SIZE * 576, _PAGE_SIZE * _ROW_BYTES, 10 * _PAGE_SIZE * _ROW_BYTES):
        num_rows = min(_GIB // row_bytes, 1 << 21)
        places = torch.randperm(6 * _GIB // row_bytes, device="cuda")[:num_rows] * (row_bytes // _WORD)
        run = partial(memory.gather, places, consecutive(num_rows, row_bytes), row_bytes)
        rate = 2 * num_rows * row_bytes / milliseconds(run)
        results.append({"row_bytes": row_bytes, "gbytes_per_s": rate / 1e6, "of_copy": rate / copied})
    return results


def measure_layouts(memory: Memory) -> list[dict[str, Any]]:
    """Read selected tokens and whole layers from pools of both orders."""
    layer_page = _PAGE_SIZE * _ROW_BYTES
    token_R = torch.cat([torch.randperm(_NUM_PAGES * _PAGE_SIZE)[:_NUM_SELECTED] for _ in range(_NUM_QUERIES)]).cuda()
    pages = torch.arange(_NUM_PAGES, device="cuda")
    results = []
    for layout, page_stride, layer_stride in (
        ("page-major", layer_page * _NUM_LAYERS, layer_page),
        ("layer-major", layer_page, layer_page * _NUM_PAGES),
    ):
        token_byte_R = token_R // _PAGE_SIZE * page_stride + token_R % _PAGE_SIZE * _ROW_BYTES
        for what, byte_R, row_bytes in (
            ("select", token_byte_R, _ROW_BYTES),
            ("scan", pages * page_stride, layer_page),
        ):
            words_of_layers = [(byte_R + layer * layer_stride) // _WORD for layer in range(_NUM_LAYERS)]
            out_word_R = consecutive(len(byte_R), row_bytes)

            def read(words: list[torch.Tensor] = words_of_layers, out: torch.Tensor = out_word_R) -> None:
                for word_R in words:
                    memory.gather(word_R, out, row_bytes)  # noqa: B023

            results.append({"layout": layout, "reads": what, "us_per_layer": milliseconds(read) / _NUM_LAYERS * 1e3})
    return results


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("pool_layout needs a GPU: skipped")
        sys.exit(0)
    memory = Memory()
    gathers, layouts = measure_gathers(memory), measure_layouts(memory)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for result in gathers:
        rate = f"{result['gbytes_per_s']:7.0f} GB/s, {result['of_copy']:.2f} of copy"
        print(f"rows of {result['row_bytes']:7,} bytes {rate}")
    for result in layouts:
        print(f"{result['layout']:12} {result['reads']:7} {result['us_per_layer']:7.2f} us a layer")
    if arguments.json:
        device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**device, "gathers": gathers, "layouts": layouts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
