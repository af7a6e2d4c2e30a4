"""Shrink the lengths of a trace to what a small model can hold, leaving alone what is shared with what."""

from dataclasses import dataclass

from specdec.bench.workload import BlockNumbering, Blocks
from specdec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LengthScale:
    """Divides numbers of tokens.

    A block shrinks as a whole, so that prompts share as many blocks as before. Nothing becomes shorter than one token:
    with a divisor above the block size of the trace, prompts stay longer than asked for.

    Attributes:
        divisor: At least 1, which leaves lengths as they are.
    """

    divisor: float = 1.0

    def __post_init__(self) -> None:
        if not self.divisor >= 1:
            raise ConfigError(f"--scale-length must be at least 1: lengths are divided by it; got {self.divisor}")

    def tokens(self, num_tokens: int) -> int:
        """The scaled number of tokens, at least 1."""
        return max(1, round(num_tokens / self.divisor))

    def blocks(
        self, hash_ids: list[int], *, scope: str, block_size: int, num_tokens: int, numbering: BlockNumbering
    ) -> tuple[Blocks, ...]:
        """Give a prompt that a trace describes by an id for each of its blocks.

        Args:
            hash_ids: One for each block; the part of a block at the end of the prompt may have one or none.
            scope: Where equal ids mean equal blocks.
            block_size: Tokens of a block in the trace.
            num_tokens: Tokens of the prompt in the trace.
            numbering: Gives the numbers.

        Raises:
            ValueError: The number of ids does not fit the number of tokens.
        """
        num_whole, num_rest = divmod(num_tokens, block_size)
        num_blocks = num_whole + (num_rest > 0)
        if not num_whole <= len(hash_ids) <= num_blocks:
            raise ValueError(
                f"{num_tokens} tokens are {num_blocks} blocks of {block_size}, but there are {len(hash_ids)} hash_ids"
            )
        block_tokens = self.tokens(block_size)
        has_rest = len(hash_ids) > num_whole
        pieces = []
        if hash_ids:
            pieces.append(
                Blocks(
                    block_numbers=tuple(numbering.of(scope, hash_id) for hash_id in hash_ids),
                    block_tokens=block_tokens,
                    num_tokens=num_whole * block_tokens + (self.tokens(num_rest) if has_rest else 0),
                )
            )
        if num_rest and not has_rest:
            pieces.append(numbering.fresh_run(self.tokens(num_rest)))
        return tuple(pieces)
