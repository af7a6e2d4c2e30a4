"""Parameters that stay in block-FP8, as the checkpoint stores them, for kernels that multiply them so.

A matrix keeps its e4m3 bytes; beside it, under its name and `.scale`, stand its scales, one row of them for 64 rows of
the matrix: pieces of several tensors, each with blocks of its own, stand below one another in it, and the last block of
a tensor may be short (kv_a has 576 rows).

R = rows of a matrix, C = columns, J = ceil(R / 64), B = C / 128.
"""

from collections.abc import Collection

import torch

from specdec.kernels.block_fp8 import BLOCK_SIZE
from specdec.kernels.block_fp8_linear import SCALE_ROWS
from specdec.kernels.errors import ConfigError
from specdec.models.glm.parameters import ParameterPlan, Piece

SCALE = ".scale"
_TAKEN_APART = "kv_b_proj"  # absorbed head by head, in a dtype that is multiplied as it is


def stays_fp8(plan: ParameterPlan, quantised: Collection[str]) -> bool:
    """Tell whether a parameter is made of quantised tensors alone and multiplied whole.

    Args:
        plan: The parameter.
        quantised: Names of the checkpoint tensors that have scales.
    """
    return not plan.name.endswith(_TAKEN_APART) and all(piece.tensor in quantised for piece in plan.pieces)


def scale_shape(plan: ParameterPlan) -> tuple[int, int]:
    """Shape of a parameter's scales: (J, B), rows counted over all leading axes.

    Raises:
        ConfigError: A piece begins or ends inside of a block of scales, or inside of 64 rows with another behind it.
    """
    for number, piece in enumerate(plan.pieces):
        is_last = number + 1 == len(plan.pieces)
        bounds = {
            "its first row": (piece.first_row, SCALE_ROWS),
            "its place": (piece.target_row, SCALE_ROWS),
            "its first column": (piece.first_col, BLOCK_SIZE),
            "its columns": (piece.num_cols, BLOCK_SIZE),
            "its rows": (0 if is_last else piece.num_rows, SCALE_ROWS),
        }
        for what, (value, multiple) in bounds.items():
            if value % multiple:
                raise ConfigError(
                    f"{plan.name} cannot stay in FP8: of {piece.tensor} {what} must be a multiple of {multiple}, got "
                    f"{value}; take a tp_size that cuts between blocks of {BLOCK_SIZE}"
                )
    return -(-plan.num_rows // SCALE_ROWS), plan.shape[-1] // BLOCK_SIZE


def copy_scales(piece: Piece, scale_inv_IK: torch.Tensor, scale_JB: torch.Tensor) -> None:
    """Write the scales of one piece into those of its parameter.

    Args:
        piece: The piece, as `scale_shape` has found it fit.
        scale_inv_IK: Scales of the whole tensor, a row for each 128 rows, float32.
        scale_JB: Scales of the whole parameter.
    """
    first = piece.target_row // SCALE_ROWS
    row_of_J = (piece.first_row + SCALE_ROWS * torch.arange(-(-piece.num_rows // SCALE_ROWS))) // BLOCK_SIZE
    first_col = piece.first_col // BLOCK_SIZE
    columns = slice(first_col, first_col + piece.num_cols // BLOCK_SIZE)
    scale_JB[first : first + len(row_of_J)] = scale_inv_IK[row_of_J, columns].to(scale_JB.device)
