"""Load a checkpoint, or one tensor-parallel rank's share of it, straight into the model's parameters.

Parameters are allocated in their final dtype and device, and each piece goes into its rows through a few megabytes of
staging memory: no copy of a shard is ever made. Threads work on different parameters. A piece of some columns is cut
out of whole rows: storage gives pages of 4 KB, and a rank's columns of a row are 256 bytes to 2 KB.

R = rows, C = columns of a piece; J, B and I, K as in `fp8_parameters`.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch

from specdec.kernels.block_fp8 import BLOCK_SIZE, dequantise_block_fp8
from specdec.kernels.block_fp8_linear import SCALE_ROWS
from specdec.kernels.errors import ConfigError
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.fp8_parameters import SCALE, copy_scales, scale_shape, stays_fp8
from specdec.models.glm.ledger import Ledger
from specdec.models.glm.matching import MatchedTensors, match_tensors
from specdec.models.glm.parameters import ParameterPlan, Piece, TensorParallel, plan_parameters
from specdec.models.glm.safetensors_files import OpenFiles, StoredTensor, open_checkpoint
from specdec.models.glm.vocabulary import check_end_ids, vocabulary_faults

CONFIG_NAME = "config.json"

_COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_THREADS = 8
_STAGING_BYTES = 4 << 20  # of a thread: large requests, and what is cut or dequantised is still in its cache

_WHOLE = TensorParallel()
OnProgress = Callable[[int, int], None]  # (bytes of the parameters filled so far, bytes of all of them)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What was read, and what was not.

    Attributes:
        num_tensors: Tensors that the files hold.
        num_loaded: Tensors that were read, scales among them.
        num_scales: FP8 scales that were applied.
        num_mapped: Parameters of the model that the loaded tensors were mapped to.
        ignored: Tensors that were left out, with the reason; `num_loaded` and these make `num_tensors`.
        ignored_files: Safetensors files in the directory that do not belong to the checkpoint.
        bytes_read: Bytes of the tensors, or of this rank's slices of them. Files give more where a slice is of
            columns: whole rows.
        seconds: Wall time of the loading.
        has_mtp: The MTP layer was loaded, so the checkpoint can draft for itself.
        warnings: What a user should know though the loading succeeded.
    """

    num_tensors: int
    num_loaded: int
    num_scales: int
    num_mapped: int
    ignored: dict[str, str]
    ignored_files: tuple[str, ...]
    bytes_read: int
    seconds: float
    has_mtp: bool
    warnings: tuple[str, ...]

    def summary(self) -> str:
        """One line for a log."""
        return (
            f"loaded {self.num_loaded:,} tensors ({self.num_scales:,} scales), mapped to {self.num_mapped:,} "
            f"parameters, ignored {len(self.ignored):,}; {self.bytes_read / 1e9:.2f} GB in {self.seconds:.1f} s"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """The config, parameters by name (see `plan_parameters` and `fp8_parameters`), and the report of the loading."""

    config: GlmConfig
    parameters: dict[str, torch.Tensor]
    report: LoadReport


def load_checkpoint(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tensor_parallel: TensorParallel = _WHOLE,
    keep_fp8: bool = False,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint directory as Hugging Face writes it: config.json and safetensors, single or sharded.

    Args:
        path: The directory.
        dtype: Of the parameters; FP8 weights are dequantised to it, the router and the index key norm stay float32.
        device: Where the parameters live.
        tensor_parallel: Whose share of heads, MLPs, experts and vocabulary rows is loaded; only its rows are read.
        keep_fp8: Quantised matrices stay as they are stored where they are multiplied whole; see `fp8_parameters`.
        num_threads: Threads that read; None takes one per CPU core, eight at most.
        on_progress: Called on this thread after each parameter, with the bytes filled so far and the bytes of all.

    Raises:
        ConfigError: The config asks for something that is not implemented, or an argument does not fit it.
        CheckpointError: The files are damaged or do not hold what the config calls for.
    """
    start = time.perf_counter()
    if dtype not in _COMPUTE_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(map(str, _COMPUTE_DTYPES))}, got {dtype}")
    directory = Path(path)
    files = open_checkpoint(directory)
    config = GlmConfig.from_file(directory / CONFIG_NAME)
    matched = match_tensors(config, files)
    check_end_ids(config, directory)
    warnings = matched.warnings + vocabulary_faults(config, directory)
    plans = plan_parameters(config, dtype=dtype, with_mtp=matched.has_mtp, tensor_parallel=tensor_parallel)
    ignored = matched.ignored | _experts_of_other_ranks(matched, plans)
    if keep_fp8:
        plans = [
            replace(plan, dtype=torch.float8_e4m3fn) if stays_fp8(plan, matched.scales) else plan for plan in plans
        ]
    scale_shapes = {plan.name + SCALE: scale_shape(plan) for plan in plans if plan.dtype is torch.float8_e4m3fn}
    rows = {plan.name: plan.num_rows for plan in plans} | {name: shape[0] for name, shape in scale_shapes.items()}
    ledger = Ledger(parameter_rows=rows, tensors=files.tensors)
    for name, reason in ignored.items():
        ledger.ignore(name, reason)
    parameters = {plan.name: torch.empty(plan.shape, dtype=plan.dtype, device=device) for plan in plans}
    scales = {name: torch.empty(shape, dtype=torch.float32, device=device) for name, shape in scale_shapes.items()}
    num_threads = num_threads or min(_MAX_THREADS, os.cpu_count() or 1)
    with OpenFiles({tensor.file for tensor in (*matched.weights.values(), *matched.scales.values())}) as open_files:
        reader = _PieceReader(matched, ledger, open_files, num_threads=num_threads, device=torch.device(device))
        bytes_read = _read_all(reader, plans, parameters | scales, num_threads=num_threads, on_progress=on_progress)
    ledger.settle()
    report = LoadReport(
        num_tensors=len(files.tensors),
        num_loaded=ledger.num_used,
        num_scales=len(matched.scales),
        num_mapped=len(parameters),
        ignored=ignored,
        ignored_files=files.ignored_files,
        bytes_read=bytes_read,
        seconds=time.perf_counter() - start,
        has_mtp=matched.has_mtp,
        warnings=warnings,
    )
    return LoadedCheckpoint(config=config, parameters=parameters | scales, report=report)


def _experts_of_other_ranks(matched: MatchedTensors, plans: list[ParameterPlan]) -> dict[str, str]:
    """Give the expert tensors that this rank holds no part of, with the reason for leaving them out."""
    held = {piece.tensor for plan in plans for piece in plan.pieces}
    names = [name for name in matched.weights if name not in held and ".mlp.experts." in name]
    names += [matched.scales[name].name for name in names if name in matched.scales]
    return dict.fromkeys(names, "an expert of another rank")


def _read_all(
    reader: "_PieceReader",
    plans: list[ParameterPlan],
    parameters: dict[str, torch.Tensor],
    *,
    num_threads: int,
    on_progress: OnProgress | None,
) -> int:
    """Fill every parameter, each by one thread; returns the bytes read. The first error ends the others."""
    total = sum(parameters[plan.name].nbytes for plan in plans)
    num_done = bytes_read = 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="load-checkpoint") as pool:
        futures = {
            pool.submit(reader.fill, plan, parameters[plan.name], parameters.get(plan.name + SCALE)): plan.name
            for plan in plans
        }
        try:
            for future in as_completed(futures):
                bytes_read += future.result()
                num_done += parameters[futures[future]].nbytes
                if on_progress is not None:
                    on_progress(num_done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return bytes_read


class _PieceReader:
    """Copies pieces of stored tensors into parameters; as many threads as it was made for may share it."""

    def __init__(
        self, matched: MatchedTensors, ledger: Ledger, files: OpenFiles, *, num_threads: int, device: torch.device
    ) -> None:
        self._matched = matched
        self._ledger = ledger
        self._files = files
        size = max(_STAGING_BYTES, *map(_row_bytes, matched.weights.values()))
        self._staging: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(num_threads):
            self._staging.put(torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda"))

    def fill(self, plan: ParameterPlan, parameter: torch.Tensor, scale_JB: torch.Tensor | None) -> int:
        """Write all rows of a parameter, and its scales where it stays in FP8; returns the bytes read."""
        rows_RC = parameter.view(plan.num_rows, -1)
        staging = self._staging.get()
        try:
            for piece in plan.pieces:
                target_RC = rows_RC[piece.target_row : piece.target_row + piece.num_rows]
                if scale_JB is None and piece.tensor in self._matched.scales:
                    self._dequantise(piece, target_RC, staging)
                else:
                    self._copy(piece, target_RC, staging)
                self._ledger.write(plan.name, first_row=piece.target_row, num_rows=piece.num_rows)
        finally:
            self._staging.put(staging)
        if scale_JB is not None:
            self._keep_scales(plan, scale_JB)
        return sum(map(self._num_bytes, plan.pieces))

    def _copy(self, piece: Piece, target_RC: torch.Tensor, staging: torch.Tensor) -> None:
        for first, source_RC in self._parts(piece, staging):
            target_RC[first : first + len(source_RC)].copy_(source_RC)

    def _dequantise(self, piece: Piece, target_RC: torch.Tensor, staging: torch.Tensor) -> None:
        scale_IK = self._scale(piece).to(target_RC.device)
        for first, source_RC in self._parts(piece, staging):
            dequantise_block_fp8(
                source_RC.to(target_RC.device),
                scale_IK,
                first_row=piece.first_row + first,
                first_col=piece.first_col,
                out_RC=target_RC[first : first + len(source_RC)],
            )

    def _keep_scales(self, plan: ParameterPlan, scale_JB: torch.Tensor) -> None:
        collected_JB = torch.empty(scale_JB.shape)  # on the CPU: one copy to a GPU instead of one for each piece
        for piece in plan.pieces:
            copy_scales(piece, self._scale(piece), collected_JB)
            first, num_rows = piece.target_row // SCALE_ROWS, -(-piece.num_rows // SCALE_ROWS)
            self._ledger.write(plan.name + SCALE, first_row=first, num_rows=num_rows)
        scale_JB.copy_(collected_JB)

    def _parts(self, piece: Piece, staging: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Rows of a piece as they are stored, with the first one's number; valid until the next are asked for."""
        stored = self._matched.weights[piece.tensor]
        row_bytes = _row_bytes(stored)
        columns = slice(piece.first_col, piece.first_col + piece.num_cols)
        num_rows = len(staging) // row_bytes
        for first in range(0, piece.num_rows, num_rows):
            part = staging[: min(num_rows, piece.num_rows - first) * row_bytes]
            self._files.read(stored, part, first_byte=(piece.first_row + first) * row_bytes)
            yield first, part.view(stored.dtype).view(-1, row_bytes // stored.dtype.itemsize)[:, columns]
        self._ledger.use(piece.tensor)

    def _scale(self, piece: Piece) -> torch.Tensor:
        """All scales of the tensor of a piece, on the CPU."""
        stored = self._matched.scales[piece.tensor]
        scale_IK = torch.empty(stored.shape, dtype=stored.dtype)
        self._files.read(stored, scale_IK.view(-1).view(torch.uint8))
        self._ledger.use(stored.name)
        return scale_IK

    def _num_bytes(self, piece: Piece) -> int:
        """Bytes of a piece, and of the scales of the blocks that it touches."""
        num_bytes = piece.num_rows * piece.num_cols * self._matched.weights[piece.tensor].dtype.itemsize
        scale = self._matched.scales.get(piece.tensor)
        if scale is None:
            return num_bytes
        block_rows, block_cols = (
            (first + number - 1) // BLOCK_SIZE - first // BLOCK_SIZE + 1
            for first, number in ((piece.first_row, piece.num_rows), (piece.first_col, piece.num_cols))
        )
        return num_bytes + block_rows * block_cols * scale.dtype.itemsize


def _row_bytes(tensor: StoredTensor) -> int:
    """Bytes of a row, which of a vector is one value."""
    return tensor.size_bytes // tensor.shape[0]
