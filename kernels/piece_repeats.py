"""How pieces of memory repeat: as rows at even steps, and in layers at even steps.

Where tokens are interleaved on one side of a transfer, a page has many short pieces, evenly spaced; to name each takes
longer than to copy it. Apart from `copy_pieces`, for plans are made without torch.

X = pieces.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_I64 = npt.NDArray[np.int64]


class Repeats(NamedTuple):
    """Rows of repeated pieces, at even steps: i64 [X] each.

    Attributes:
        count_X: Rows of each piece, >= 1.
        source_step_X: Bytes from the start of a row to that of the next in the source, 0..2^32 - 1.
        destination_step_X: The same in the destination, where rows do not overlap.
    """

    count_X: _I64
    source_step_X: _I64
    destination_step_X: _I64

    def part(self, part: slice) -> "Repeats":
        """Those of some pieces."""
        return Repeats(*(array[part] for array in self))


class Layers(NamedTuple):
    """Layers that all pieces are copied in, at even steps.

    Attributes:
        num_layers: Layers, >= 1.
        source_step: Bytes from a layer to the next in the source.
        destination_step: The same in the destination.
    """

    num_layers: int
    source_step: int
    destination_step: int


ONE_LAYER = Layers(1, 0, 0)
