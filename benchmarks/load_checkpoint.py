"""Load a block-FP8 checkpoint whole and as the eight ranks of TP8: time, bytes, and whether the slices are the whole.

Run: python benchmarks/load_checkpoint.py [DIR [--write]] [--json FILE]. `--write` makes the checkpoint first: 24.9 GB
with the dimensions of real_checkpoint.py. Without DIR one of 37 MB is written to a temporary place. Weights stay in FP8
and go to the GPU where there is one. No byte of a slice, values or scales, differs from the cut of the whole, or the
exit code is 1.

S = matrices stacked in a parameter, one for each expert; R = rows, C = columns.

"used" are the bytes of the tensors or slices, "read" what the files gave (a slice of columns is cut out of whole rows),
"disk" what of it was not in the page cache. Files are put out of the cache before loads marked cold, so far as the
system does so; a dash means that it does not say. "plain" reads all files from front to back, with as many threads.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.fp8_parameters import SCALE
from specdec.models.glm.parameters import TensorParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.real_checkpoint import SMALL, write_checkpoint

TP_SIZE = 8
NUM_THREADS = min(8, os.cpu_count() or 1)
_PLAIN_BYTES = 16 << 20  # of a request of the plain reader
_IO_COUNTERS = Path("/proc/self/io")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """One reading of the files.

    Attributes:
        is_cold: The files were put out of the page cache before.
        used_bytes: Bytes of the tensors, or of the slices.
        read_bytes: Bytes that the files gave; None where the system does not count.
        disk_bytes: Bytes of them that came from the disk, read-ahead included; None likewise.
        held_bytes: Bytes of the parameters, where they were loaded to.
        num_different: Parameters and scales that are not the cut of the whole; None where nothing is compared.
    """

    name: str
    is_cold: bool
    seconds: float
    used_bytes: int
    read_bytes: int | None
    disk_bytes: int | None
    held_bytes: int | None = None
    num_different: int | None = None

    @property
    def rate(self) -> float:
        """Bytes a second that the files gave, or that were used where the system does not count."""
        return (self.used_bytes if self.read_bytes is None else self.read_bytes) / self.seconds


def evict(directory: Path) -> None:
    """Ask the system to forget the files' pages; written ones go to the disk first."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(directory: Path) -> int:
    """Read all files from front to back; returns their bytes."""
    pieces = [
        (path, first)
        for path in sorted(directory.glob("*.safetensors"))
        for first in range(0, path.stat().st_size, _PLAIN_BYTES)
    ]

    def read(number: int) -> int:
        memory, num_bytes = bytearray(_PLAIN_BYTES), 0
        for path, first in pieces[number::NUM_THREADS]:
            with path.open("rb", buffering=0) as file:
                num_bytes += os.preadv(file.fileno(), [memory], first)
        return num_bytes

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return sum(pool.map(read, range(NUM_THREADS)))


def timed(name: str, directory: Path, run: Callable[[], int], *, is_cold: bool) -> Loading:
    """Time a reading, which returns the bytes that it used."""
    if is_cold:
        evict(directory)
    before, start = _io_counters(), time.perf_counter()
    used_bytes = run()
    seconds, after = time.perf_counter() - start, _io_counters()
    counted = {key: after[key] - before[key] for key in after if key in before}
    return Loading(
        name=name,
        is_cold=is_cold,
        seconds=seconds,
        used_bytes=used_bytes,
        read_bytes=counted.get("rchar"),
        disk_bytes=counted.get("read_bytes"),
    )


def _io_counters() -> dict[str, int]:
    if not _IO_COUNTERS.exists():
        return {}
    return {key: int(value) for key, value in (line.split(": ") for line in _IO_COUNTERS.read_text().splitlines())}


def timed_load(
    directory: Path, device: torch.device, name: str, share: TensorParallel, *, is_cold: bool
) -> tuple[Loading, dict[str, torch.Tensor]]:
    """Load a share of the checkpoint, weights in FP8, and time it; waits for the device."""
    parameters: dict[str, torch.Tensor] = {}

    def run() -> int:
        loaded = load_checkpoint(
            directory,
            dtype=torch.bfloat16,
            device=device,
            tensor_parallel=share,
            keep_fp8=True,
            num_threads=NUM_THREADS,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        parameters.update(loaded.parameters)
        return loaded.report.bytes_read

    loading = timed(name, directory, run, is_cold=is_cold)
    return replace(loading, held_bytes=sum(each.nbytes for each in parameters.values())), parameters


def different(whole: Mapping[str, torch.Tensor], part: Mapping[str, torch.Tensor], rank: int) -> list[str]:
    """Name parameters and scales of a rank that are not the cut of the whole, bit for bit, or that one side lacks."""
    names = sorted(whole.keys() ^ part.keys())
    for name in sorted(whole.keys() & part.keys()):
        num_stacked = len(whole[name.removesuffix(SCALE)]) if ".expert_" in name else 1
        expected_SRC = _cut(name, _stacked_bytes(whole[name], num_stacked), rank)
        if not torch.equal(expected_SRC, _stacked_bytes(part[name], num_stacked)):
            names.append(name)
    return names


def _stacked_bytes(parameter: torch.Tensor, num_stacked: int) -> torch.Tensor:
    """Matrices [S, R, bytes of C]; those of all experts are one parameter, their scales one below the other."""
    return parameter.view(num_stacked, -1, parameter.shape[-1]).view(torch.uint8)


def _cut(name: str, whole_SRC: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's share of a whole parameter or of its scales, by the model's rules for the axis that is cut."""
    kind = name.removesuffix(SCALE).rsplit(".", 1)[-1]
    if kind in ("embed_tokens", "lm_head", "q_b_proj", "kv_b_proj"):
        return whole_SRC.chunk(TP_SIZE, dim=1)[rank]
    if kind.endswith("gate_up_proj"):  # gate rows, then up rows
        halves_SHNRC = whole_SRC.view(len(whole_SRC), 2, TP_SIZE, -1, whole_SRC.shape[-1])
        return halves_SHNRC[:, :, rank].flatten(1, 2)
    if kind == "o_proj" or kind.endswith("down_proj"):
        return whole_SRC.chunk(TP_SIZE, dim=2)[rank]
    return whole_SRC


def measured(directory: Path, device: torch.device) -> list[Loading]:
    """Load everything, compare the slices with the whole, and name on stderr what differs."""
    results = [timed("plain", directory, lambda: read_plainly(directory), is_cold=is_cold) for is_cold in (True, False)]
    results.append(timed_load(directory, device, "whole", TensorParallel(), is_cold=True)[0])
    loading, whole = timed_load(directory, device, "whole", TensorParallel(), is_cold=False)
    results.append(loading)
    for rank in range(TP_SIZE):
        results.append(_compared(directory, device, whole, rank, is_cold=False))
    results.append(_compared(directory, device, whole, 0, is_cold=True))
    return results


def _compared(
    directory: Path, device: torch.device, whole: Mapping[str, torch.Tensor], rank: int, *, is_cold: bool
) -> Loading:
    share = TensorParallel(rank=rank, size=TP_SIZE)
    loading, part = timed_load(directory, device, f"rank {rank}", share, is_cold=is_cold)
    names = different(whole, part, rank)
    for name in names:
        print(f"{loading.name}: {name} is not the cut of the whole", file=sys.stderr)
    return replace(loading, num_different=len(names))


def print_table(results: list[Loading]) -> None:
    """Print one row for each reading; "of plain" compares rates of the bytes that the files gave."""
    table = Table("reading", "cache", "s", "used", "read", "disk", "GB/s", "of plain", "held", "same", title="GB")
    for column in table.columns[2:]:
        column.justify = "right"
    plain_rate = {result.is_cold: result.rate for result in results if result.name == "plain"}
    for result in results:
        table.add_row(
            result.name,
            "cold" if result.is_cold else "warm",
            f"{result.seconds:.2f}",
            *(_gigabytes(value) for value in (result.used_bytes, result.read_bytes, result.disk_bytes)),
            f"{result.rate / 1e9:.2f}",
            f"{result.rate / plain_rate[result.is_cold]:.2f}",
            _gigabytes(result.held_bytes),
            "-" if result.num_different is None else "no" if result.num_different else "yes",
        )
    Console().print(table)


def _gigabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.2f}"


def main() -> None:
    """Write where asked, load, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", help="of the checkpoint")
    parser.add_argument("--write", action="store_true", help="write the checkpoint first")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": NUM_THREADS,
    }
    with ExitStack() as stack:
        directory = arguments.directory or Path(stack.enter_context(TemporaryDirectory()))
        if arguments.write or arguments.directory is None:
            start = time.perf_counter()
            size = write_checkpoint(directory, device=device, changes=None if arguments.directory else SMALL)
            report["written"] = {"bytes": size, "seconds": time.perf_counter() - start}
            print(f"wrote {size / 1e9:.2f} GB in {report['written']['seconds']:.1f} s")
        results = measured(directory, device)
    print(f"{report['device']}, torch {report['torch']}, {NUM_THREADS} threads")
    print_table(results)
    if arguments.json:
        report["loads"] = [asdict(result) for result in results]
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(any(result.num_different for result in results))


if __name__ == "__main__":
    main()
