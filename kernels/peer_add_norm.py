"""Add up what each rank has of some rows, add the residual and normalise: one launch on the GPUs of one host.

    delta_TH  = delta of rank 0 + delta of rank 1 + ...    in rank order, each sum rounded to bfloat16
    sum_TH    = x_TH + delta_TH                            rounded to bfloat16
    normed_TH = sum / sqrt(mean(sum^2) + eps), rounded to bfloat16, * weight  rounded to bfloat16

T = rows, H = features. It is `add_rms_norm` of `sum_in_order`, with its bits on every rank: squares are added in the
order of that kernel's warps, and a row knows nothing of its neighbours. Every rank sends its rows to all others, whole:
the shortest way where rows are few.
Source: "one-shot" all-reduce with a fused norm, as in TensorRT-LLM's `allReduceFusion`.
"""

import torch

from specdec.kernels.add_rms_norm import add_rms_norm_ref
from specdec.kernels.cuda_program import Macros, cuda_kernel
from specdec.kernels.peer_slab import MAX_FEATURES, NUM_PARTS, PeerSlabs, SlabLayout
from specdec.kernels.sum_in_order import sum_in_order
from specdec.kernels.tensor_check import check_tensor

_LANES = 32
_STEP_FEATURES = NUM_PARTS * _LANES * 8


def peer_add_norm_ref(
    x_TH: torch.Tensor, delta_NTH: torch.Tensor, weight_H: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Define `peer_add_norm`: the sum and the normed rows, given what all N ranks have."""
    sum_TH, normed_TH, _ = add_rms_norm_ref(x_TH, sum_in_order(delta_NTH), weight_H, eps=eps)
    return sum_TH, normed_TH


def takes_rows(layout: SlabLayout, num_rows: int, num_features: int) -> bool:
    """Whether there can be so many rows of so many features."""
    return num_rows <= layout.max_rows and num_features <= MAX_FEATURES and num_features % _STEP_FEATURES == 0


def peer_add_norm_macros(layout: SlabLayout, *, num_features: int) -> Macros:
    """Constants of the kernel."""
    return (
        ("RANKS", layout.num_ranks), ("FEATURES", num_features),
        ("WORDS_AT", layout.words_at), ("WORDS_BYTES", layout.words_bytes),
    )  # fmt: skip


def peer_add_norm(
    x_TH: torch.Tensor,
    delta_TH: torch.Tensor,
    weight_H: torch.Tensor,
    slabs: PeerSlabs,
    *,
    eps: float,
    normed_TH: torch.Tensor,
) -> None:
    """Add over the ranks and norm, on the current stream; all ranks of the group call alike.

    Args:
        x_TH: Residual stream, bfloat16 [T, H], contiguous, as `takes_rows` wants it; becomes the sum.
        delta_TH: This rank's part of what a layer adds to it, like `x_TH`; it stays as it is.
        weight_H: Scale of the norm, bfloat16 [H].
        slabs: Of the group.
        eps: Added to the mean square.
        normed_TH: Receives the norm, like `x_TH`.

    Raises:
        ValueError: A tensor has another shape or dtype, or there are too many rows.
    """
    (num_rows, num_features), layout = x_TH.shape, slabs.layout
    if not takes_rows(layout, num_rows, num_features):
        raise ValueError(
            f"{layout.num_ranks} ranks add up to {layout.max_rows} rows, whose features are a multiple of "
            f"{_STEP_FEATURES} up to {MAX_FEATURES}, got {num_rows} of {num_features}"
        )
    for name, tensor in (("x_TH", x_TH), ("delta_TH", delta_TH), ("normed_TH", normed_TH)):
        check_tensor(name, tensor, torch.bfloat16, (num_rows, num_features), alignment=16)
    check_tensor("weight_H", weight_H, torch.bfloat16, (num_features,), alignment=16)
    if num_rows:
        macros = peer_add_norm_macros(layout, num_features=num_features)
        cuda_kernel("peer_add_norm.cu", "peer_add_norm", macros=macros, starts_early=True)(
            (num_rows * NUM_PARTS, 1, 1), layout.num_ranks * _LANES, x_TH, delta_TH, weight_H, normed_TH,
            slabs.address_N, slabs.row_epochs, slabs.given_up, slabs.seen, slabs.rank, eps,
        )  # fmt: skip
