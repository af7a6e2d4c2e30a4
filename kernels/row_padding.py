"""Row counts in whole blocks, as the products of `specdec.kernels.linear` take them."""

import torch
import torch.nn.functional as F

ROW_MULTIPLE = 8


def padded_rows(num_rows: int) -> int:
    """Return the smallest multiple of `ROW_MULTIPLE` that is at least `num_rows`, and at least one block."""
    return max(ROW_MULTIPLE, -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE)


def pad_rows(x_TH: torch.Tensor) -> torch.Tensor:
    """Append zero rows so that the first dim is `padded_rows(T)`; returns `x_TH` itself where nothing is missing."""
    missing = padded_rows(x_TH.shape[0]) - x_TH.shape[0]
    return x_TH if missing == 0 else F.pad(x_TH, (0, 0) * (x_TH.ndim - 1) + (0, missing))
