"""Tokens for the blocks of a workload: the same for equal block numbers, and told apart as early as possible.

    token(n, j) = digit_j(n) + shift_j   mod V     j < D: base-V digits of the block's number, the lowest first
                  mix(seed, n, j)        mod V     j >= D

n = block number, j = place in the block, V = size of the vocabulary, D = digits that every number below `num_blocks`
fits in. So two blocks of at least D tokens are equal only if they are the same block, and of two prompts that part, the
tokens differ within D tokens, mostly at once: the blocks at a parting were numbered one after the other.
"""

import numpy as np
import numpy.typing as npt

from specdec.bench.workload import Blocks
from specdec.errors import ConfigError


class Filler:
    """Makes the tokens of blocks.

    Args:
        vocab_size: Tokens to choose from, at least 2.
        num_blocks: Block numbers are below it.
        seed: Another seed gives other tokens, 0 to 2**63.

    Raises:
        ConfigError: There is nothing to choose from.
    """

    def __init__(self, *, vocab_size: int, num_blocks: int, seed: int) -> None:
        if vocab_size < 2:
            raise ConfigError(f"prompts need a vocabulary of at least 2 tokens, got {vocab_size}")
        self._vocab_size = np.uint64(vocab_size)
        self._seed = np.uint64(seed)
        self.num_digits = 1
        while vocab_size**self.num_digits < num_blocks:
            self.num_digits += 1

    def tokens(self, blocks: Blocks) -> npt.NDArray[np.int64]:
        """Give places in the vocabulary, i64 [blocks.num_tokens]."""
        numbers_B1 = np.array(blocks.block_numbers, dtype=np.uint64)[:, None]
        places_T = np.arange(blocks.block_tokens, dtype=np.uint64)
        tokens_BT = self._mix(numbers_B1, places_T)
        digits_B = numbers_B1[:, 0]
        for place in range(min(self.num_digits, blocks.block_tokens)):
            shift = self._mix(np.zeros(1, dtype=np.uint64), np.array([place], dtype=np.uint64))
            tokens_BT[:, place] = digits_B % self._vocab_size + shift
            digits_B = digits_B // self._vocab_size
        return (tokens_BT % self._vocab_size).astype(np.int64).reshape(-1)[: blocks.num_tokens]

    def _mix(self, numbers: npt.NDArray[np.uint64], places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Pseudo-random below the size of the vocabulary: SplitMix64's finisher over a sum of odd multiples."""
        state = numbers * np.uint64(0x9E3779B97F4A7C15) + places * np.uint64(0xD1B54A32D192ED03)
        state = state + np.array([self._seed]) * np.uint64(0xA24BAED4963EE407)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = (state ^ (state >> np.uint64(31))) % self._vocab_size
        return mixed
