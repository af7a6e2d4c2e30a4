"""Memory that a rank lets its peers write into: where the kernels that meet there keep what.

    flags    [64, N]          u32     epoch of the last chunk that a block has had from a rank
    chunks   [N, 64, 2, C]    bytes   a block's chunk from each rank, for odd and even epochs
    pairs    [2, N, 2, U, 16] bytes   halves of units of 16 bytes from each rank, two words each beside the epoch
    words    [W, 2, N, P]     bytes   values of a row's part from each rank, likewise

Every rank of a group has a slab of this layout, zeros at first, and has mapped those of all others. Epochs count from
one and lie beside it, in memory of the rank alone.

N = ranks, C = bytes of a chunk, U = most units of a small row, W = blocks for rows, P = bytes of a row's part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.kernels.errors import ConfigError

MAX_RANKS = 8
NUM_BLOCKS = 64  # that share a large row: as many as keep the links of a GPU busy, and find room on it together
THREADS = 256  # of a block that moves bytes
NUM_PARTS = 8  # blocks that share a row of values
MAX_FEATURES = 6144
SMALL_UNIT_BYTES = 16
# What a rank sends to all others together, where one more byte would go by another way.
_MOST_SENT_SMALL = 512 << 10  # it travels twice; beyond, a flag behind the bytes is cheaper
_MOST_SENT = 16 << 20  # beyond, a library's rings are as good
_MOST_ROWS_SENT = 128  # beyond, a gather, a sum and a norm are as fast
_CHUNKS_SENT = 128 << 10  # of one block, together
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """Sizes and offsets in bytes.

    Attributes:
        num_ranks: N, 2..8.
    """

    num_ranks: int

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= MAX_RANKS:
            raise ConfigError(f"ranks that write into each other's memory must be 2..{MAX_RANKS}, got {self.num_ranks}")

    @property
    def num_peers(self) -> int:
        """N - 1."""
        return self.num_ranks - 1

    @property
    def most_row_bytes(self) -> int:
        """Most bytes that one rank may have for another in an exchange."""
        return _MOST_SENT // self.num_peers

    @property
    def chunk_bytes(self) -> int:
        """C."""
        return _CHUNKS_SENT // self.num_peers // _PAGE * _PAGE

    @property
    def chunks_at(self) -> int:
        """Behind the flags."""
        return -(-NUM_BLOCKS * self.num_ranks * 4 // _PAGE) * _PAGE

    @property
    def most_small_units(self) -> int:
        """U."""
        return _MOST_SENT_SMALL // self.num_peers // _PAGE * _PAGE // SMALL_UNIT_BYTES

    @property
    def num_small_blocks(self) -> int:
        """Of the largest small rows: a thread has a unit of one of them."""
        return -(-self.num_ranks * self.most_small_units // THREADS)

    @property
    def pairs_at(self) -> int:
        """Behind the chunks."""
        return self.chunks_at + self.num_ranks * NUM_BLOCKS * 2 * self.chunk_bytes

    @property
    def max_rows(self) -> int:
        """Most rows that are added up at once."""
        return _MOST_ROWS_SENT // self.num_peers

    @property
    def num_row_blocks(self) -> int:
        """W."""
        return self.max_rows * NUM_PARTS

    @property
    def words_bytes(self) -> int:
        """P: two bytes a value, and as many beside them."""
        return MAX_FEATURES // NUM_PARTS * 4

    @property
    def words_at(self) -> int:
        """Behind the pairs."""
        return self.pairs_at + 2 * self.num_ranks * self.most_small_units * 2 * SMALL_UNIT_BYTES

    @property
    def num_bytes(self) -> int:
        """Of a slab."""
        return self.words_at + self.num_row_blocks * 2 * self.num_ranks * self.words_bytes


class PeerSlabs:
    """The slabs of a group as one rank sees them; what its kernels are given. For one stream at a time.

    Args:
        addresses: Where this rank has each slab, its own among them.
        rank: Of this one.
        device: Its GPU.

    Attributes:
        layout: Of each slab.
        rank: Of this one.
        address_N: Of each slab, i64, on the device.
        chunk_epochs: Last epoch of each block that passes on chunks, i32.
        pair_epochs: Likewise of small rows.
        row_epochs: Likewise of rows that are added up.
        given_up: Not 0 once no kernel is to wait for peers any more: i32 [1] of the host that the device can read.
        seen: How often warps asked for it, and whether one has seen it: i32 [2].
    """

    def __init__(self, addresses: Sequence[int], *, rank: int, device: torch.device) -> None:
        def epochs(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.layout = SlabLayout(len(addresses))
        self.rank = rank
        self.address_N = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.chunk_epochs = epochs(NUM_BLOCKS)
        self.pair_epochs = epochs(self.layout.num_small_blocks)
        self.row_epochs = epochs(self.layout.num_row_blocks)
        self.seen = torch.zeros(2, dtype=torch.int32, device=device)
        self.given_up = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._given_up = self.given_up.numpy()

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` was called."""
        return bool(self._given_up[0])

    def give_up(self) -> None:
        """Let kernels that wait for peers end, now and later; what they give means nothing. Any thread may call."""
        self._given_up[0] = 1
