"""Safetensors files of a checkpoint, read at the bytes that are asked for, with every fault named by file and tensor.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte range) and the tensor bytes.
Source: the format description of https://github.com/huggingface/safetensors.
"""

import math
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from specdec.kernels.errors import CheckpointError
from specdec.models.glm.json_files import parse_json_object, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: its file, shape, dtype, and first byte counted from the start of the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class CheckpointFiles:
    """All tensors of a checkpoint directory, by name.

    Attributes:
        tensors: Every tensor that the files hold.
        ignored_files: Safetensors files beside the checkpoint that the index does not name.
    """

    directory: Path
    tensors: dict[str, StoredTensor]
    ignored_files: tuple[str, ...]


def open_checkpoint(directory: Path) -> CheckpointFiles:
    """Read the headers of all shards, and check index and files against each other both ways.

    Raises:
        CheckpointError: No weights, a shard that is missing, empty, truncated or not safetensors, a tensor that the
            index places in a shard which lacks it, that the index does not know, or that two shards hold.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; give the directory that holds config.json")
    on_disk = sorted(path.name for path in directory.glob("*.safetensors"))
    index_path = directory / INDEX_NAME
    if index_path.exists():
        weight_map = _read_weight_map(index_path)
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if not (directory / shard).is_file():
                example = next(name for name, file in weight_map.items() if file == shard)
                raise CheckpointError(
                    f"{directory / shard}: missing, but {INDEX_NAME} places {example} there; download it again"
                )
    elif SINGLE_NAME in on_disk:
        weight_map, shards = None, [SINGLE_NAME]
        if not (directory / SINGLE_NAME).is_file():
            raise CheckpointError(
                f"{directory / SINGLE_NAME}: is no file, but a directory or a link to a file that is gone; download it "
                "again"
            )
    elif on_disk:
        raise CheckpointError(
            f"{directory}: has {on_disk[0]} but neither {SINGLE_NAME} nor {INDEX_NAME}; download both"
        )
    else:
        raise CheckpointError(f"{directory}: no weights; expected {SINGLE_NAME}, or shards with {INDEX_NAME}")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for tensor in read_header(directory / shard):
            if tensor.name in tensors:
                other = tensors[tensor.name].file.name
                raise CheckpointError(f"{tensor.file}: holds {tensor.name}, and so does {other}; remove one of the two")
            tensors[tensor.name] = tensor
    if weight_map is not None:
        _check_index(directory, weight_map, tensors)
    return CheckpointFiles(directory, tensors, tuple(name for name in on_disk if name not in shards))


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors that a safetensors file says it holds, after checking that the file is whole.

    Raises:
        CheckpointError: The file is empty, truncated, has bytes too many, cannot be read, or is no safetensors file;
            or its tensors do not lie one behind the other, as the format demands.
    """
    try:
        return _read_header(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _read_header(path: Path) -> list[StoredTensor]:
    size = path.stat().st_size
    if size == 0:
        raise CheckpointError(f"{path}: the file is empty; download it again")
    with path.open("rb") as file:
        start = file.read(_HEADER_LENGTH_BYTES)
        if start == b"version ":
            raise CheckpointError(f"{path}: is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        header_bytes = int.from_bytes(start, "little")
        data_start = _HEADER_LENGTH_BYTES + header_bytes
        if size < _HEADER_LENGTH_BYTES or (header_bytes <= _MAX_HEADER_BYTES and size < data_start):
            raise CheckpointError(f"{path}: truncated within its header ({size} bytes); download it again")
        if header_bytes > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: not a safetensors file (a header of {header_bytes} bytes)")
        header = parse_json_object(file.read(header_bytes), source=f"{path}, in the header")
    tensors = [
        _stored_tensor(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"
    ]
    end, last = data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size_bytes)):
        if tensor.offset != end:
            fault = "overlaps" if tensor.offset < end else "leaves a gap behind"
            raise CheckpointError(
                f"{path}: {tensor.name} {fault} {last} (begins at byte {tensor.offset}, not {end}); download it again"
            )
        end, last = end + tensor.size_bytes, tensor.name
        if end > size:
            raise CheckpointError(
                f"{path}: truncated: {tensor.name} ends at byte {end}, the file at {size}; download it again"
            )
    if end < size:
        raise CheckpointError(f"{path}: {size - end} bytes more than its header describes; download it again")
    return tensors


class OpenFiles:
    """Reads bytes of tensors into memory that is given; threads may share it. A context, which closes the files.

    The system is told not to read ahead: beside a rank's slice lie those of others, and a map or plain reads fetch up
    to five times the bytes.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        with ExitStack() as opened:
            self._files = {path: opened.enter_context(FileIO(path)) for path in files}
            for file in self._files.values():
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()

    def read(self, tensor: StoredTensor, out_B: torch.Tensor, *, first_byte: int = 0) -> None:
        """Fill memory with bytes of a tensor, in few large requests.

        Args:
            tensor: One of a file that was given.
            out_B: Receives as many bytes as it has, u8, contiguous, on the CPU.
            first_byte: Counted from the start of the tensor.

        Raises:
            CheckpointError: The file cannot be read, or has become shorter than its header says.
        """
        file, memory = self._files[tensor.file], out_B.numpy().data
        num_read = 0
        while num_read < len(memory):
            offset = tensor.offset + first_byte + num_read
            try:
                step = os.preadv(file.fileno(), [memory[num_read:]], offset)
            except OSError as error:
                raise CheckpointError(f"{tensor.file}: cannot be read at {tensor.name} ({error.strerror})") from error
            if step == 0:
                raise CheckpointError(
                    f"{tensor.file}: ended at byte {offset}, inside of {tensor.name}, while it was read; nothing may "
                    "write to it meanwhile"
                )
            num_read += step


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must name a file for each tensor")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path}: weight_map[{name!r}] must be a file name in this directory, got {shard!r}")
    return weight_map


def _check_index(directory: Path, weight_map: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            where = f"; it is in {tensors[name].file.name}" if name in tensors else ""
            raise CheckpointError(
                f"{directory / shard}: lacks {name}, which {INDEX_NAME} places there{where}; index and shards are of "
                "different downloads"
            )
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise CheckpointError(
                f"{tensor.file}: holds {name}, which {INDEX_NAME} does not know; index and shards are of different "
                "downloads"
            )


def _stored_tensor(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype_name, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header entry of {name} is malformed ({error!r})") from error
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise CheckpointError(
            f"{path}: the header entry of {name} is malformed: shape and data_offsets must be integers of at least 0, "
            f"got {list(shape)} and {[start, end]}"
        )
    num_values = math.prod(shape)
    if not isinstance(dtype_name, str) or dtype_name not in _DTYPES:
        raise CheckpointError(f"{path}: {name} has the dtype {dtype_name!r}; known are {', '.join(_DTYPES)}")
    dtype = _DTYPES[dtype_name]
    if end - start != num_values * dtype.itemsize:
        raise CheckpointError(
            f"{path}: {name} of shape {list(shape)} and dtype {dtype_name} takes {num_values * dtype.itemsize} bytes, "
            f"its header entry gives bytes {start} to {end}; download the file again"
        )
    return StoredTensor(name=name, file=path, shape=shape, dtype=dtype, offset=data_start + start)
