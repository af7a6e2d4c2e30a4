"""One request: what was asked, and what has become of it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specdec.grammar.progress import GrammarProgress
from specdec.sampling.finish import OutputJudge
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.sampling_rows import RequestSampling
from specdec.sampling.token_logprobs import TokenLogprobs

PRIORITY_STEP_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationStats:
    """How drafting went for one request.

    Attributes:
        num_drafts: Rounds in which at least one draft was verified.
        num_draft_tokens: Drafts verified.
        accepted_per_position: Rounds in which the draft at position i was kept, before any stop cut the run.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts kept."""
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted by a round that had drafts, the bonus token included; None without such a round."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        """Count the rounds of both."""
        longest = max(len(self.accepted_per_position), len(other.accepted_per_position))
        counts = np.zeros((2, longest), dtype=np.int64)
        for row, stats in zip(counts, (self, other), strict=True):
            row[: len(stats.accepted_per_position)] = stats.accepted_per_position
        return SpeculationStats(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            accepted_per_position=tuple(counts.sum(axis=0).tolist()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestUpdate:
    """What one round gave a request.

    Attributes:
        token_ids: Tokens delivered, in order.
        text: Text that became certain with them.
        logprobs: One entry per token where the request asked for them, else None.
        finish_reason: "stop" or "length" on the last update, "cancelled" or "error" where the request ended early.
        stop: The id or the string that ended it, for "stop".
        error: Why, for "error".
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop: int | str | None = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A request as the engine keeps it; the fields below `on_update` change while it is served.

    Attributes:
        request_id: Unique in the engine, in order of arrival.
        prompt_ids: i64 [n], n >= 1.
        params: Sampling parameters with a seed.
        choice_index: Which of the `n` choices this is; enters the noise.
        limit: Tokens of prompt and output at which it ends.
        stop_ids: Ids that end it.
        sampling: How its tokens are drawn, with the history that penalties need.
        judge: Turns emitted tokens into what is delivered, with their text.
        grammar: How far its output has come in the grammar that it must follow; None where it is free.
        priority: A lower number goes first.
        arrived_at: When it came, by `time.monotonic`.
        deadline: When it must have ended, by `time.monotonic`.
        on_update: Called by the thread that runs the round; must not block.
        cache_salt: Its pages are shared with requests of the same one only; empty for those without.
        output_ids: Tokens delivered; while it holds a slot, the slot table has the newest.
        prompt_logprobs: One entry per prompt token but the first, where the request asked for them.
        speculation: Rounds up to the last time it held a slot.
        slot: Row of the slot table while it runs.
        num_cached_tokens: Prompt tokens that a prefix hit supplied at the first admission; -1 before it.
        admitted_at: When it first got a slot, by `time.monotonic`; None before.
        num_preemptions: How often its pages were taken away.
        is_prefill_only: Whether its KV is all that is wanted: it draws no token and ends with its prompt.
        received_hidden_H: Hidden state of its last known token, f32 [H], where its KV was computed elsewhere and is in
            its pages; used once, to draw from.
        finished: Whether the last update was sent.
    """

    request_id: int
    prompt_ids: npt.NDArray[np.int64]
    params: SamplingParams
    choice_index: int
    limit: int
    stop_ids: frozenset[int]
    sampling: RequestSampling
    judge: OutputJudge
    on_update: Callable[[RequestUpdate], None]
    grammar: GrammarProgress | None = None
    priority: int = 0
    arrived_at: float = field(default_factory=time.monotonic)
    deadline: float = math.inf
    cache_salt: bytes = b""
    output_ids: tuple[int, ...] = ()
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    slot: int | None = None
    num_cached_tokens: int = -1
    admitted_at: float | None = None
    num_preemptions: int = 0
    is_prefill_only: bool = False
    received_hidden_H: npt.NDArray[np.float32] | None = None
    finished: bool = False

    @property
    def turn(self) -> float:
        """Its place among all requests: those of an earlier turn get slots first and lose them last.

        A step of priority is worth a minute of waiting. So requests of one priority are served in order of arrival, and
        one of a lower priority is overtaken for a bounded time: by nobody who comes more than a minute later for each
        step between them.
        """
        return self.arrived_at + PRIORITY_STEP_S * self.priority

    @property
    def known_ids(self) -> npt.NDArray[np.int64]:
        """Prompt and output, i64; for a request that holds no slot."""
        return np.concatenate((self.prompt_ids, np.asarray(self.output_ids, dtype=np.int64)))

    @property
    def max_output_tokens(self) -> int:
        """Output tokens at which it ends."""
        return self.limit - len(self.prompt_ids)

    @property
    def is_judged_by_text(self) -> bool:
        """Whether more than stop ids and the limit decides where its output ends."""
        return bool(self.params.stop) or self.params.min_tokens > 0
