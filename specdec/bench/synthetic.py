"""Prompts of chosen lengths, without a trace."""

from dataclasses import dataclass

import numpy as np

from specdec.bench.workload import BlockNumbering, Blocks, PlannedRequest, Session, Workload
from specdec.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticLengths:
    """What the prompts and replies measure.

    Attributes:
        num_requests: How many, each a session of its own.
        input_tokens: Tokens of a prompt, the shared ones among them.
        output_tokens: Tokens to ask for.
        shared_tokens: Tokens that all prompts begin with.
        spread: Lengths are drawn evenly from 1 - spread to 1 + spread times those above, 0 to 1; shared tokens stay.
    """

    num_requests: int
    input_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("num_requests", 1), ("input_tokens", 1), ("output_tokens", 1), ("shared_tokens", 0)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if not 0 <= self.spread <= 1:
            raise ConfigError(f"--length-spread must be between 0 and 1, got {self.spread}")
        if self.shared_tokens > self.input_tokens:
            raise ConfigError(
                f"--shared-tokens are a part of the prompt, at most --input-tokens {self.input_tokens}; "
                f"got {self.shared_tokens}"
            )


def make_synthetic(lengths: SyntheticLengths, *, seed: int) -> Workload:
    """Make prompts that share their beginning and nothing else."""
    numbering = BlockNumbering()
    shared_number = numbering.fresh()
    random = np.random.default_rng(seed)
    sessions = []
    for index in range(lengths.num_requests):
        num_input = max(lengths.shared_tokens, _drawn(random, lengths.input_tokens, lengths.spread))
        pieces = []
        if lengths.shared_tokens:
            num_shared = lengths.shared_tokens
            pieces.append(Blocks(block_numbers=(shared_number,), block_tokens=num_shared, num_tokens=num_shared))
        if num_own := num_input - lengths.shared_tokens:
            pieces.append(numbering.fresh_run(num_own))
        request = PlannedRequest(
            index=index,
            prompt=tuple(pieces),
            num_output_tokens=_drawn(random, lengths.output_tokens, lengths.spread),
        )
        sessions.append(Session(name=str(index), start_s=None, requests=(request,)))
    return Workload(kind="synthetic", sessions=tuple(sessions), num_blocks=numbering.num_blocks)


def _drawn(random: np.random.Generator, mean: int, spread: float) -> int:
    return max(1, round(mean * (1 + spread * random.uniform(-1, 1))))
