"""What a request took, in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from specdec.request import SpeculationStats
from specdec.result import GenerationResult


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUsage:
    """Tokens of all prompts and choices of one request.

    Attributes:
        prompt: Tokens of the prompts, each counted once.
        cached: Those of them that a prefix hit supplied.
        completion: Tokens delivered, over all choices.
        reasoning: Those of them that are reasoning.
        accepted: Those of them that were drafts.
        rejected: Drafts that are not part of the output: not accepted, or behind its end.
    """

    prompt: int
    cached: int
    completion: int
    reasoning: int
    accepted: int
    rejected: int

    @classmethod
    def of(cls, results: Sequence[GenerationResult], *, num_reasoning_tokens: int = 0) -> "TokenUsage":
        """Add up the results of a request, one a prompt."""
        choices = [choice for result in results for choice in result.choices]
        drafting = reduce(add, (choice.speculation for choice in choices), SpeculationStats())
        # Drafts count as accepted before a stop cuts the run that they are part of.
        accepted = sum(min(choice.speculation.num_accepted_tokens, len(choice.token_ids)) for choice in choices)
        return cls(
            prompt=sum(result.usage.num_prompt_tokens for result in results),
            cached=sum(result.usage.num_cached_tokens for result in results),
            completion=sum(result.usage.num_completion_tokens for result in results),
            reasoning=num_reasoning_tokens,
            accepted=accepted,
            rejected=drafting.num_draft_tokens - accepted,
        )
