"""One request: what was asked, and what has become of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specdec.sampling_params import SamplingParams
from specdec.sampling_rows import RequestSampling
from specdec.token_logprobs import TokenLogprobs


@dataclass(slots=True)
class SpeculationStats:
    """How drafting went for one request.

    Attributes:
        num_drafts: Rounds in which at least one draft was verified.
        num_draft_tokens: Drafts verified.
        num_accepted_tokens: Drafts kept, before any stop cut the run.
        accepted_per_position: Rounds in which the draft at position i was kept, one entry per draft position.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def record(self, *, num_drafts: int, num_accepted: int) -> None:
        """Count one round; a round without drafts says nothing about drafting."""
        if num_drafts == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        missing = num_drafts - len(self.accepted_per_position)
        self.accepted_per_position += [0] * missing
        for place in range(num_accepted):
            self.accepted_per_position[place] += 1

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted by a round that had drafts, the bonus token included; None without such a round."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestUpdate:
    """What one round gave a request.

    Attributes:
        token_ids: Tokens delivered, in order.
        logprobs: One entry per token where the request asked for them, else None.
        finish_reason: "stop" or "length" on the last update, "cancelled" or "error" where the request ended early.
        error: Why, for "error".
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A request as the engine keeps it; the fields below `on_update` change while it runs.

    Attributes:
        request_id: Unique in the engine, in order of arrival.
        prompt_ids: i64 [n], n >= 1.
        params: Sampling parameters with a seed.
        choice_index: Which of the `n` choices this is; enters the noise.
        sampling: How its tokens are drawn, with the history that penalties need.
        on_update: Called under the engine's lock with every update; must not block.
        output_ids: Tokens delivered so far.
        prompt_logprobs: One entry per prompt token but the first, where the request asked for them.
        slot: Row of the slot table while it runs.
        num_cached_tokens: Prompt tokens that a prefix hit supplied at the first admission; -1 before it.
        num_preemptions: How often its pages were taken away.
    """

    request_id: int
    prompt_ids: npt.NDArray[np.int64]
    params: SamplingParams
    choice_index: int
    sampling: RequestSampling
    on_update: Callable[[RequestUpdate], None]
    output_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    slot: int | None = None
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    finished: bool = False

    @property
    def known_ids(self) -> npt.NDArray[np.int64]:
        """Prompt and output, i64."""
        return np.concatenate((self.prompt_ids, np.asarray(self.output_ids, dtype=np.int64)))
