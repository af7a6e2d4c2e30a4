"""Rows so far apart that 32 bits do not count their values."""

import torch


def far_rows(rows: torch.Tensor) -> torch.Tensor:
    """Copy rows to where the last begins 2^31 values behind the first; memory between them is not touched.

    Args:
        rows: [T, ...], three or more: 32 bits hold the step from one to the next, but not its product with a row.
    """
    step = -(-(1 << 31) // (8 * (len(rows) - 1))) * 8  # a multiple of 16 bytes for two-byte values
    memory = rows.new_empty(step * (len(rows) - 1) + rows[0].numel())
    far = memory.as_strided(rows.shape, (step, *rows[0].contiguous().stride()))
    return far.copy_(rows)
