"""Block-FP8 weights: one float32 scale for each block of 128 by 128 values.

    value[r, c] = q[r, c] * scale_inv[r // 128, c // 128]

Blocks are counted from row 0 and column 0 of the whole matrix, and the last one of either axis may be short; a slice of
the matrix therefore keeps the global row and column of its first value. Despite its name the scale is multiplied.
Source: the weight format of DeepSeek-V3 (arXiv:2412.19437, section 3.3), as `FineGrainedFP8` in transformers writes it.

R = rows, C = columns of the slice; I, J = blocks of the whole matrix.
"""

import torch

BLOCK_SIZE = 128


def dequantise_block_fp8(
    q_RC: torch.Tensor, scale_inv_IJ: torch.Tensor, *, first_row: int, first_col: int, out_RC: torch.Tensor
) -> None:
    """Write the values of a slice of a block-FP8 matrix into `out_RC`.

    Works one row of blocks at a time, so that beyond the output it needs memory for 128 rows only.

    Args:
        q_RC: The slice, float8_e4m3fn, any strides.
        scale_inv_IJ: Scales of the whole matrix, float32.
        first_row: Row of the whole matrix where the slice begins.
        first_col: Column of the whole matrix where it begins.
        out_RC: Receives the products, computed in float32 and rounded once to its dtype; same device.
    """
    num_rows, num_cols = q_RC.shape
    block_of_C = torch.arange(first_col, first_col + num_cols, device=q_RC.device) // BLOCK_SIZE
    start = 0
    while start < num_rows:
        block = (first_row + start) // BLOCK_SIZE
        end = min(num_rows, (block + 1) * BLOCK_SIZE - first_row)
        out_RC[start:end] = q_RC[start:end].float().mul_(scale_inv_IJ[block, block_of_C])
        start = end
