"""Which rank of a layer-split group stores the KV of which layer."""

import itertools


def split_layers(num_layers: int, num_ranks: int) -> tuple[range, ...]:
    """Contiguous layers of each rank, as even as they can be, longer runs first; ranks beyond the layers get none.

    78 layers over 8 ranks are 10, 10, 10, 10, 10, 10, 9, 9.
    """
    least, num_longer = divmod(num_layers, num_ranks)
    bounds = [rank * least + min(rank, num_longer) for rank in range(num_ranks + 1)]
    return tuple(range(begin, end) for begin, end in itertools.pairwise(bounds))
