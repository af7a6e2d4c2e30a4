"""What a generation gives back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.errors import SpecdecError
from specdec.request import SpeculationStats
from specdec.sampling.token_logprobs import TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens of one prompt and of all its choices.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        num_completion_tokens: Tokens delivered, the one that stopped the text included, over all choices.
        num_cached_tokens: Prompt tokens that a prefix hit supplied to the first choice.
        num_preemptions: How often pages ran out and a choice was computed again, over all choices.
    """

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_preemptions: int

    @property
    def num_total_tokens(self) -> int:
        """Prompt and completion."""
        return self.num_prompt_tokens + self.num_completion_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One completion of a prompt.

    Attributes:
        index: Which of the `n` choices.
        text: Text of the completion, without special tokens and stop strings unless they were asked for.
        token_ids: Tokens delivered.
        finish_reason: "stop", "length" or "cancelled".
        logprobs: One entry per token where they were asked for.
        speculation: How drafting went.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None
    speculation: SpeculationStats


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """The completions of one prompt; `text`, `token_ids`, `finish_reason` and `speculation` are those of the first.

    Attributes:
        prompt_token_ids: The prompt as the model saw it.
        choices: `n` completions.
        usage: Token counts.
        prompt_logprobs: One entry per prompt token but the first, where they were asked for.
    """

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] | None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def speculation(self) -> SpeculationStats:
        """How drafting went for the first choice."""
        return self.choices[0].speculation


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamDelta:
    """One piece of a streamed generation.

    Attributes:
        index: The choice it belongs to.
        text: Text that became certain.
        token_ids: Tokens delivered; their text may come with a later piece.
        logprobs: One entry per token where they were asked for.
        finish_reason: Set on the last piece of a choice.
        stop: The id or the string that ended it, for "stop".
        error: Why it failed, for "error"; a stream raises it instead.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str | None
    stop: int | str | None = None
    error: SpecdecError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How likely the model finds a sequence.

    Attributes:
        token_ids: The sequence, T ids.
        logprobs: Log-probability of every token but the first, T - 1 values.
        logits_TV: The model's logits of every row, float32 [T, V]; None where they were not asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    logits_TV: npt.NDArray[np.float32] | None


def speculation_record(stats: SpeculationStats) -> dict[str, Any]:
    """Give the statistics under their published names."""
    return {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "accepted_per_position": list(stats.accepted_per_position),
        "acceptance_length": stats.acceptance_length,
    }


class BatchError(SpecdecError):
    """Some prompts of a batch failed while they ran, the others did not.

    Attributes:
        failures: The error of each failed prompt, by its place in the batch.
        results: The results of the others; None where a prompt failed.
    """

    def __init__(self, failures: Mapping[int, SpecdecError], results: Sequence[GenerationResult | None]) -> None:
        place, error = next(iter(failures.items()))
        super().__init__(f"{len(failures)} of {len(results)} prompts failed; prompt {place}: {error}")
        self.failures = dict(failures)
        self.results = list(results)
