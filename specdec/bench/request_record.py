"""What became of one request, and the times that are read from it.

A chunk is a server-sent event that carries tokens; a speculative server sends a run of several in one.

    TTFT         first chunk - sent
    E2E latency  end of the stream - sent
    TPOT         (last chunk - first chunk) / (tokens - 1)
    ITL, chunk   time between two chunks that follow each other
    ITL, token   the same time shared evenly by the tokens of the later chunk; tokens that come in the first chunk
                 beside the first token waited 0, so that the mean over a request is its TPOT
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    UNFINISHED = "unfinished"  # the run ended before it did


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUsage:
    """Numbers of tokens as the server counted them; None where it did not say.

    Attributes:
        num_prompt: Tokens of the prompt.
        num_output: Tokens of the reply.
        num_cached: Prompt tokens that a prefix cache had.
        num_accepted: Draft tokens that were accepted.
        num_rejected: Draft tokens that were not.
    """

    num_prompt: int | None = None
    num_output: int | None = None
    num_cached: int | None = None
    num_accepted: int | None = None
    num_rejected: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One request; times are seconds on the clock of the run.

    Attributes:
        request_index: Place in the workload.
        session: Its name.
        category: Kind of question, or "".
        outcome: How it ended.
        error_kind: Of a failed request, else "".
        error_detail: What was said about it.
        finish_reason: As the server gave it, or "".
        num_planned_prompt: Tokens of the prompt as planned; None for text.
        num_planned_output: Tokens that were asked for.
        due_s: When it should have been sent.
        sent_s: When it was.
        ended_s: When the stream ended.
        chunks_s: When each chunk came.
        tokens_per_chunk: Tokens of each; None where the server does not tell and they are not one each.
        usage: What the server counted.
    """

    request_index: int
    session: str
    category: str
    outcome: Outcome
    error_kind: str = ""
    error_detail: str = ""
    finish_reason: str = ""
    num_planned_prompt: int | None
    num_planned_output: int
    due_s: float
    sent_s: float
    ended_s: float
    chunks_s: tuple[float, ...] = ()
    tokens_per_chunk: tuple[int, ...] | None = None
    usage: TokenUsage = TokenUsage()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt: counted by the server, else as planned."""
        return self.usage.num_prompt or self.num_planned_prompt or 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the reply: counted by the server, else those of the chunks, else one for each chunk."""
        if self.usage.num_output is not None:
            return self.usage.num_output
        return len(self.chunks_s) if self.tokens_per_chunk is None else sum(self.tokens_per_chunk)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None if there was none."""
        return self.chunks_s[0] - self.sent_s if self.chunks_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token behind the first; None for fewer than two tokens."""
        if not self.chunks_s or self.num_output_tokens < 2:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Time to the end of the reply."""
        return self.ended_s - self.sent_s

    @property
    def start_delay_s(self) -> float:
        """How late it was sent, because the client was busy."""
        return self.sent_s - self.due_s

    def chunk_gaps_s(self) -> list[float]:
        """Inter-token latencies by chunk: one fewer than chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunks_s)]

    def token_gaps_s(self) -> Iterator[float]:
        """Inter-token latencies by token: one fewer than tokens; none where the tokens of a chunk are not known."""
        if not self.tokens_per_chunk:
            return
        yield from [0.0] * (self.tokens_per_chunk[0] - 1)
        for gap_s, num_tokens in zip(self.chunk_gaps_s(), self.tokens_per_chunk[1:], strict=True):
            yield from [gap_s / num_tokens] * num_tokens
