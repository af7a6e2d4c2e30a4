"""Linear maps whose result for a row does not depend on the rows beside it.

    linear(x)_TO       = x_TI . w_OI
    head_linear(x)_TAO = x_TAI . w_AIO           one matrix a head

A matrix product picks its inner order by the shape it is given: on a CPU with AVX-512 a float32 row among 24 differs in
its last bits from the same row among 8. So rows are taken in blocks, and every block is a product of one fixed shape;
only the number of blocks in the batch varies.

A bfloat16 product on a CPU is computed in float32 and rounded once: processors without bfloat16 instructions take 8
times longer over it otherwise, and the sum is float32 either way.

T = rows, a multiple of `ROW_MULTIPLE`; I and O = features in and out; A = heads; B = blocks; M = rows of a block.
"""

import torch

from specdec.kernels.batched_product import batched_product
from specdec.kernels.row_padding import ROW_MULTIPLE


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Multiply rows by a weight of the same dtype: [T, O]."""
    x_BMI = widened(x_TI).view(-1, ROW_MULTIPLE, x_TI.shape[1])
    out_BMO = batched_product(x_BMI, widened(weight_OI).t().expand(len(x_BMI), -1, -1))
    return out_BMO.view(len(x_TI), -1).to(x_TI.dtype)


def head_linear(x_TAI: torch.Tensor, weight_AIO: torch.Tensor) -> torch.Tensor:
    """Multiply each head of each row by the head's own weight: [T, A, O]."""
    weight_AIO = widened(weight_AIO)
    blocks = [torch.bmm(x_MAI.transpose(0, 1), weight_AIO) for x_MAI in widened(x_TAI).split(ROW_MULTIPLE)]
    return torch.cat(blocks, dim=1).transpose(0, 1).to(x_TAI.dtype)


def widened(operand: torch.Tensor) -> torch.Tensor:
    """Give an operand in the dtype its product is computed in: float32 for bfloat16 on a CPU, else its own."""
    return operand.float() if operand.dtype is torch.bfloat16 and operand.device.type == "cpu" else operand
