"""Products of pairs of matrices, whose bits do not depend on how many pairs there are.

    out_BMN = x_BMK . y_BKN

On a CPU with several threads the library behind `torch.bmm` gives each of several products to one thread, but splits a
single one over all of them, which takes another inner order: that one is computed twice instead.

B = pairs.
"""

import torch


def batched_product(x_BMK: torch.Tensor, y_BKN: torch.Tensor) -> torch.Tensor:
    """Multiply each pair: [B, M, N], of the dtype of both."""
    if len(x_BMK) == 1 and x_BMK.device.type == "cpu" and torch.get_num_threads() > 1:
        return torch.bmm(x_BMK.expand(2, -1, -1), y_BKN.expand(2, -1, -1))[:1]
    return torch.bmm(x_BMK, y_BKN)
