"""Copy pieces of memory to other places in one launch, also into memory of another GPU that this one has mapped.

    destination[destination_offset_X[x] + l * layers.destination_step + r * destination_step_X[x] + b]
        = source[source_offset_X[x] + l * layers.source_step + r * source_step_X[x] + b]
                                    for l in 0..layers.num_layers - 1, r in 0..count_X[x] - 1, b in 0..length_X[x] - 1

The copy engines of a GPU take microseconds for each piece, however small; one kernel moves any number of them at the
speed of the link. It may be told of memory that is no tensor here, so it takes addresses, and whoever calls has checked
that all pieces lie inside of both memories.

X = pieces, S = bytes of a memory.
"""

import functools
import itertools

import numpy as np
import numpy.typing as npt
import torch

from specdec.kernels.cuda_program import CudaKernel, Macros, as_current
from specdec.kernels.piece_repeats import ONE_LAYER, Layers, Repeats

_I64 = npt.NDArray[np.int64]
_LINE_BYTES, _PART_BYTES = 128, 1024  # of copy_pieces.cu, as the next
_TILE = 32
_ONE_PART_BYTES = _PART_BYTES - _LINE_BYTES + 1  # up to so many are one part, wherever they begin within a line
_THREADS = 512
_NUM_BLOCKS = 64  # as many as keep the links of a GPU busy; the rest of it computes meanwhile
_BYTES_PER_PIECE = 8 + 8 + 4 + 4  # both addresses, the length and the end
_BYTES_PER_REPEATED_PIECE = _BYTES_PER_PIECE + 4 + 4 + 4  # the count and both steps

COPY_PIECES_MACROS: Macros = (("THREADS", _THREADS),)


def copy_pieces_ref(
    source_S: torch.Tensor,
    destination_S: torch.Tensor,
    source_offset_X: _I64,
    destination_offset_X: _I64,
    length_X: _I64,
    *,
    repeats: Repeats | None = None,
    layers: Layers = ONE_LAYER,
) -> None:
    """Define what `PieceCopies` does, byte by byte."""
    for layer, (x, length) in itertools.product(range(layers.num_layers), enumerate(length_X.tolist())):
        for row in range(repeats.count_X[x] if repeats else 1):
            source = int(source_offset_X[x]) + layer * layers.source_step
            destination = int(destination_offset_X[x]) + layer * layers.destination_step
            if repeats:
                source += row * int(repeats.source_step_X[x])
                destination += row * int(repeats.destination_step_X[x])
            for byte in range(length):
                destination_S[destination + byte] = source_S[source + byte]


class PieceCopies:
    """Room for what one launch is told, on the host and on a GPU; for one launch at a time.

    Args:
        device: The GPU that copies.
        max_pieces: Most pieces of a launch.
    """

    def __init__(self, device: torch.device, *, max_pieces: int) -> None:
        self._device = device
        self._max_pieces = max_pieces
        num_bytes = max_pieces * _BYTES_PER_REPEATED_PIECE
        self._on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._filled = self._on_host.numpy()
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def copy(
        self,
        source: int,
        destination: int,
        source_offset_X: _I64,
        destination_offset_X: _I64,
        length_X: _I64,
        *,
        repeats: Repeats | None = None,
        layers: Layers = ONE_LAYER,
    ) -> None:
        """Copy on the current stream; returns at once, and this room must stay as it is until the copy has ended.

        Once an event behind it is done, the bytes are seen by every GPU and host.

        Args:
            source: Address of the memory that is read, in the GPU's view, as `destination`.
            destination: Address of the memory that is written, apart from it.
            source_offset_X: First byte of each piece in the source.
            destination_offset_X: First byte of each piece in the destination; pieces do not overlap there.
            length_X: Bytes of each piece, or of each row of it.
            repeats: Rows of each piece; None where each is one. All rows of a piece have 1..2^32 - 1 bytes, and the
                parts of 1024 bytes of all pieces together are fewer than 2^31.
            layers: Layers that the pieces are copied in.

        Raises:
            ValueError: There are more pieces than there is room for.
        """
        count = len(length_X)
        if count > self._max_pieces:
            raise ValueError(f"at most {self._max_pieces} pieces are copied in one launch, got {count}")
        if not count:
            return
        told_bytes = count * (_BYTES_PER_PIECE if repeats is None else _BYTES_PER_REPEATED_PIECE)
        addresses = self._filled[: 16 * count].view(np.int64).reshape(2, count)
        sizes = self._filled[16 * count : told_bytes].view(np.uint32).reshape(-1, count)
        np.add(source_offset_X, source, out=addresses[0])
        np.add(destination_offset_X, destination, out=addresses[1])
        sizes[0] = length_X
        if repeats is not None:
            sizes[2], sizes[3], sizes[4] = repeats
        if repeats is None and length_X.max() <= _ONE_PART_BYTES:
            sizes[1] = np.arange(1, count + 1, dtype=np.uint32)
        else:
            # Where layers begin at different places of a line, each is cut as if it touched the most lines.
            begin_X = _LINE_BYTES - 1 if layers.destination_step % _LINE_BYTES else addresses[1]
            np.cumsum(num_parts(begin_X, length_X, repeats), dtype=np.uint32, out=sizes[1])
        total = int(sizes[1, -1])
        self._on_device[:told_bytes].copy_(self._on_host[:told_bytes], non_blocking=True)
        at = self._on_device.data_ptr()
        columns = [at, *(at + bytes_before * count for bytes_before in (8, 16, 20))]
        columns += [0, 0, 0] if repeats is None else [at + bytes_before * count for bytes_before in (24, 28, 32)]
        load_copy_pieces(self._device)(
            (min(-(-_NUM_BLOCKS // layers.num_layers), -(-total // _TILE)), layers.num_layers, 1), _THREADS,
            *columns, layers.source_step, layers.destination_step, count, total,
        )  # fmt: skip


def num_parts(destination_X: "_I64 | int", length_X: _I64, repeats: Repeats | None = None) -> _I64:
    """Parts that the kernel cuts each piece into: so many bytes, from the line of its first byte at the destination.

    Rows that are apart from each other there are cut one by one, as if each began with the last byte of a line.
    """
    if repeats is None:
        return _num_parts_of_runs(destination_X, length_X)
    count_X = repeats.count_X
    parts_X = _num_parts_of_runs(destination_X, length_X * count_X)
    apart_X = (repeats.destination_step_X != length_X) & (count_X > 1)
    if apart_X.any():
        np.copyto(parts_X, count_X * _num_parts_of_runs(_LINE_BYTES - 1, length_X), where=apart_X)
    return parts_X


def _num_parts_of_runs(destination_X: "_I64 | int", length_X: _I64) -> _I64:
    parts_X: _I64 = length_X + (destination_X & (_LINE_BYTES - 1))
    parts_X += _PART_BYTES - 1
    parts_X >>= _PART_BYTES.bit_length() - 1
    return parts_X


@functools.cache
def load_copy_pieces(device: torch.device) -> CudaKernel:
    """Compile and load the kernel: once for each GPU that a process copies with.

    Raises:
        ConfigError: It does not compile.
        RuntimeError: This GPU does not take it.
    """
    with as_current(device):
        return CudaKernel("copy_pieces.cu", "copy_pieces", macros=COPY_PIECES_MACROS)
