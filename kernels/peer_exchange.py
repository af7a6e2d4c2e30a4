"""Exchange rows of bytes between the GPUs of one host, in one launch over memory that each lets the others write to.

    all_gather(x)     out[r] = x of rank r              or, along another axis, out[i, r] = x[i] of rank r
    all_to_all(x_N)   out[r] = row s of rank r's x_N, on rank s

A rank writes what a peer is to have into that peer's slab, and copies what has come into its own out of there. Large
rows are followed by a flag; in small ones, every word says itself that it has come, which saves the time of a fence and
of the flag. Nothing waits for the host, and a graph may hold any number of exchanges: epochs are counted on the device.

Bytes arrive as they are. All ranks of a group launch the same exchanges in the same order, each on one stream.
Source: the one-shot exchanges of NCCL's protocols "Simple" and "LL".
"""

import math

import torch

from specdec.kernels.cuda_program import CudaKernel, Macros, cuda_kernel
from specdec.kernels.peer_slab import NUM_BLOCKS, SMALL_UNIT_BYTES, THREADS, PeerSlabs, SlabLayout

_LEAST_BYTES = 16 * THREADS  # of a block's share of a row
UNITS = (16, 4, 1)  # bytes that a thread may move at once


def peer_exchange_macros(layout: SlabLayout, *, unit: int) -> Macros:
    """Constants of the kernel.

    Args:
        layout: Of the slabs.
        unit: Bytes that are moved at once, one of `UNITS`.
    """
    return (
        ("RANKS", layout.num_ranks), ("UNIT", unit), ("THREADS", THREADS), ("BLOCKS", NUM_BLOCKS),
        ("CHUNK", layout.chunk_bytes), ("CHUNKS_AT", layout.chunks_at),
    )  # fmt: skip


def peer_exchange_small_macros(layout: SlabLayout) -> Macros:
    """Constants of the kernel for small rows."""
    return (
        ("RANKS", layout.num_ranks), ("THREADS", THREADS), ("BLOCKS", layout.num_small_blocks),
        ("MOST_UNITS", layout.most_small_units), ("PAIRS_AT", layout.pairs_at),
    )  # fmt: skip


def load_peer_exchange(layout: SlabLayout) -> None:
    """Compile and load the kernels, which a graph that is captured must not; whatever is refused here is so for good.

    Raises:
        ConfigError: They do not compile.
        RuntimeError: This GPU does not take them.
    """
    _small_kernel(layout)
    for unit in UNITS:
        _chunk_kernel(layout, unit)


def peer_all_gather(tensor: torch.Tensor, slabs: PeerSlabs, *, axis: int = 0) -> torch.Tensor:
    """Stack every rank's tensor in rank order, on the current stream: [*shape[:axis], N, *shape[axis:]].

    Args:
        tensor: Contiguous, any dtype, at most `SlabLayout.most_row_bytes`.
        slabs: Of the group.
        axis: Of the ranks, at most that of the tensor's last one.

    Raises:
        ValueError: It is too large, or not contiguous.
    """
    before, behind = tensor.shape[:axis], tensor.shape[axis:]
    out = tensor.new_empty((*before, slabs.layout.num_ranks, *behind))
    run_bytes = tensor.itemsize * math.prod(behind)
    _exchange(tensor, out, slabs, row_bytes=tensor.nbytes, run_bytes=run_bytes, in_stride=0)
    return out


def peer_all_to_all(tensor_N: torch.Tensor, slabs: PeerSlabs) -> torch.Tensor:
    """Send row r to rank r, on the current stream; row r of the result, of the same shape, came from rank r.

    Args:
        tensor_N: Contiguous, any dtype, rows of at most `SlabLayout.most_row_bytes`.
        slabs: Of the group.

    Raises:
        ValueError: It has another number of rows, is too large or not contiguous.
    """
    if len(tensor_N) != slabs.layout.num_ranks:
        raise ValueError(f"an exchange over {slabs.layout.num_ranks} ranks was given {len(tensor_N)} rows")
    out_N = torch.empty_like(tensor_N)
    row_bytes = tensor_N.nbytes // len(tensor_N)
    _exchange(tensor_N, out_N, slabs, row_bytes=row_bytes, run_bytes=row_bytes, in_stride=row_bytes)
    return out_N


def unit_of(run_bytes: int) -> int:
    """Give the most bytes that can be moved at once in runs of this size, which lie side by side."""
    return next(unit for unit in UNITS if run_bytes % unit == 0)


def is_small(row_bytes: int, layout: SlabLayout, *, unit: int) -> bool:
    """Whether rows of so many bytes, moved so many at once, travel as words that say themselves that they have come."""
    return unit == SMALL_UNIT_BYTES and row_bytes <= layout.most_small_units * SMALL_UNIT_BYTES


def _exchange(
    tensor: torch.Tensor, out: torch.Tensor, slabs: PeerSlabs, *, row_bytes: int, run_bytes: int, in_stride: int
) -> None:
    """Launch the kernel; which one, and how rows are shared, is the same on all ranks: only their size decides.

    Args:
        tensor: What is sent.
        out: Takes in the rows, a run of each rank at a time.
        slabs: Of the group.
        row_bytes: What each rank has for another.
        run_bytes: Of a run, a part of the row.
        in_stride: Bytes from what goes to one rank to what goes to the next.
    """
    layout = slabs.layout
    if row_bytes > layout.most_row_bytes or not tensor.is_contiguous():
        raise ValueError(
            f"rows must be contiguous and have at most {layout.most_row_bytes} bytes, got {row_bytes} in a tensor of "
            f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        )
    if not row_bytes:
        return
    unit = unit_of(run_bytes)
    if tensor.data_ptr() % unit:
        tensor = tensor.clone()
    if is_small(row_bytes, layout, unit=unit):
        kernel, epochs = _small_kernel(layout), slabs.pair_epochs
        num_blocks = -(-layout.num_ranks * row_bytes // (unit * THREADS))
    else:
        kernel, epochs = _chunk_kernel(layout, unit), slabs.chunk_epochs
        num_blocks = min(NUM_BLOCKS, -(-row_bytes // _LEAST_BYTES))
    kernel(
        (num_blocks, 1, 1), THREADS, tensor, out, slabs.address_N, epochs, slabs.given_up, slabs.seen,
        slabs.rank, row_bytes // unit, in_stride // unit, run_bytes // unit,
    )  # fmt: skip


def _small_kernel(layout: SlabLayout) -> CudaKernel:
    return cuda_kernel(
        "peer_exchange_small.cu", "peer_exchange_small", macros=peer_exchange_small_macros(layout), starts_early=True
    )


def _chunk_kernel(layout: SlabLayout, unit: int) -> CudaKernel:
    macros = peer_exchange_macros(layout, unit=unit)
    return cuda_kernel("peer_exchange.cu", "peer_exchange", macros=macros, starts_early=True)
