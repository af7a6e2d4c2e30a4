"""Send partial attention to the ranks that keep its heads and merge it there: one launch on the GPUs of one host.

    out_TAL, lse_TA = merge_shards of every rank's out_TGL and lse_TG, for the heads that this rank keeps

T = query rows of B requests, N = ranks, A = heads that a rank keeps, G = N * A heads in rank order, L = values of a
head's output. It is `pack_states`, an exchange and `merge_shards`, with their bits and without their messages: a rank
writes what it has of its peers' heads into their slabs, and merges its own out of its slab. Few heads travel as words
that say themselves that they have come, more in chunks with a flag behind each, as in `peer_exchange`, with whose
exchanges they take turns.
Source: "Helix Parallelism" (arXiv:2507.07120), whose exchange is one all-to-all over heads; the protocols are NCCL's.
"""

import torch

from specdec.kernels.cuda_program import CudaKernel, Macros, cuda_kernel
from specdec.kernels.lse_merge import AttentionState
from specdec.kernels.peer_slab import NUM_BLOCKS, THREADS, PeerSlabs, SlabLayout
from specdec.kernels.shard_merge import merge_shards_ref
from specdec.kernels.tensor_check import check_tensor

_LANE_VALUES = 8  # of a thread


def peer_merge_ref(
    out_NTGL: torch.Tensor, lse_NTG: torch.Tensor, *, first_owner_B: torch.Tensor, rank: int
) -> AttentionState:
    """Define `peer_merge`: what a rank keeps, in float32, given what all N ranks have."""
    num_heads = lse_NTG.shape[2] // len(lse_NTG)
    own = slice(rank * num_heads, (rank + 1) * num_heads)
    return merge_shards_ref(out_NTGL[:, :, own], lse_NTG[:, :, own], first_owner_B=first_owner_B)


def takes_states(layout: SlabLayout, num_rows: int, num_heads: int, num_values: int) -> bool:
    """Whether there can be so many rows of so many heads G, with so many values each."""
    lanes, rest = divmod(num_values, _LANE_VALUES)
    if num_heads % layout.num_ranks or rest or THREADS % lanes:
        return False
    return num_rows * (num_heads // layout.num_ranks) * _head_bytes(num_values) <= layout.most_row_bytes


def is_few(layout: SlabLayout, num_rows: int, num_heads: int, num_values: int) -> bool:
    """Whether so many rows travel as words that say themselves that they have come."""
    return num_rows * (num_heads // layout.num_ranks) * (num_values // _LANE_VALUES + 1) <= layout.most_small_units


def peer_merge_macros(layout: SlabLayout, *, num_heads: int, num_values: int) -> Macros:
    """Constants of the kernel.

    Args:
        layout: Of the slabs.
        num_heads: A.
        num_values: L.
    """
    return (
        ("RANKS", layout.num_ranks), ("HEADS", num_heads), ("VALUES", num_values), ("THREADS", THREADS),
        ("BLOCKS", NUM_BLOCKS), ("CHUNK", layout.chunk_bytes), ("CHUNKS_AT", layout.chunks_at),
    )  # fmt: skip


def peer_merge_small_macros(layout: SlabLayout, *, num_heads: int, num_values: int) -> Macros:
    """Constants of the kernel for few rows."""
    return (
        ("RANKS", layout.num_ranks), ("HEADS", num_heads), ("VALUES", num_values), ("THREADS", THREADS),
        ("BLOCKS", layout.num_small_blocks), ("MOST_UNITS", layout.most_small_units), ("PAIRS_AT", layout.pairs_at),
    )  # fmt: skip


def peer_merge(
    out_TGL: torch.Tensor,
    lse_TG: torch.Tensor,
    slabs: PeerSlabs,
    *,
    first_owner_B: torch.Tensor,
    out_TAL: torch.Tensor,
    lse_TA: torch.Tensor,
) -> None:
    """Exchange and merge, on the current stream; all ranks of the group call alike.

    Args:
        out_TGL: Outputs over this rank's keys, bfloat16, contiguous, as `takes_states` wants them.
        lse_TG: Their natural LSEs, float32, contiguous; -inf for a row without keys, whose output may be anything.
        slabs: Of the group.
        first_owner_B: Rank that the sums of each request's rows begin with, i64 in 0..N - 1; requests have as many rows
            each.
        out_TAL: Receives the merged outputs of this rank's heads, bfloat16, contiguous.
        lse_TA: Receives their natural LSEs, float32, contiguous.

    Raises:
        ValueError: A tensor has another shape or dtype, or there is too much of it.
    """
    (num_rows, num_heads, num_values), layout = out_TGL.shape, slabs.layout
    if not takes_states(layout, num_rows, num_heads, num_values):
        raise ValueError(
            f"{layout.num_ranks} ranks merge heads that they divide, whose values are 8 times a divisor of {THREADS}, "
            f"and of which each has up to {layout.most_row_bytes} bytes for each other, got {tuple(out_TGL.shape)}"
        )
    kept = num_heads // layout.num_ranks
    check_tensor("out_TGL", out_TGL, torch.bfloat16, out_TGL.shape, alignment=16)
    check_tensor("lse_TG", lse_TG, torch.float32, (num_rows, num_heads))
    check_tensor("out_TAL", out_TAL, torch.bfloat16, (num_rows, kept, num_values), alignment=16)
    check_tensor("lse_TA", lse_TA, torch.float32, (num_rows, kept))
    check_tensor("first_owner_B", first_owner_B, torch.int64, (len(first_owner_B),))
    if not len(first_owner_B) or num_rows % len(first_owner_B):
        raise ValueError(f"{num_rows} rows are not those of {len(first_owner_B)} requests with as many each")
    if not num_rows:
        return
    sizes = {"num_heads": kept, "num_values": num_values}
    num_blocks = -(-num_rows * kept * num_values // (_LANE_VALUES * THREADS))
    if is_few(layout, num_rows, num_heads, num_values):
        kernel, epochs = _kernel("peer_merge_small", peer_merge_small_macros(layout, **sizes)), slabs.pair_epochs
    else:
        kernel, epochs = _kernel("peer_merge", peer_merge_macros(layout, **sizes)), slabs.chunk_epochs
        num_blocks = min(NUM_BLOCKS, num_blocks)
    kernel(
        (num_blocks, 1, 1), THREADS, out_TGL, lse_TG, first_owner_B, out_TAL, lse_TA, slabs.address_N, epochs,
        slabs.given_up, slabs.seen, slabs.rank, num_rows, num_rows // len(first_owner_B),
    )  # fmt: skip


def _head_bytes(num_values: int) -> int:
    """Of a head's output and LSE."""
    return 2 * num_values + 4


def _kernel(name: str, macros: Macros) -> CudaKernel:
    return cuda_kernel(f"{name}.cu", name, macros=macros, starts_early=True)
