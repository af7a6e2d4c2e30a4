"""What the server needs of an engine, and no more: tests serve engines without a model through it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from specdec.result import GenerationResult, StreamDelta
from specdec.sampling.sampling_params import SamplingParams
from specdec.text.chat_template import ChatTemplate
from specdec.text.tokenizer import Tokenizer


class ServedSubmission(Protocol):
    """One prompt and what becomes of it; see `specdec.engine.Submission`."""

    def start(self) -> None:
        """Queue it."""

    @property
    def admitted_at(self) -> float | None:
        """When it got a slot, by `time.monotonic`; None before."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that a prefix hit supplied; 0 before it is admitted."""

    def cancel(self) -> None:
        """End what still runs."""

    def result(self) -> GenerationResult:
        """Give the whole result of a generation that is finished; raises what it failed of."""


class ServedEngine(Protocol):
    """An engine as the server sees it; see `specdec.engine.Engine`.

    Attributes:
        tokenizer: None works with token ids alone.
        chat_template: None refuses messages.
        sampling_defaults: What the checkpoint suggests.
        eos_ids: Ids that end a text.
        max_model_len: Most tokens of a request, prompt and output.
    """

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    sampling_defaults: dict[str, Any]
    eos_ids: tuple[int, ...]
    max_model_len: int

    @property
    def prefill_states(self) -> Mapping[str, str]:
        """States of the prefills that compute the prompts, by address; none where that is done here."""

    def check(self) -> None:
        """Raise where nothing can be served any more; does not wait."""

    def step(self) -> bool:
        """Run one round; False when there was nothing to do."""

    def prepare(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        on_delta: Callable[[StreamDelta], None],
        cache_salt: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> ServedSubmission:
        """Make ready to generate for one prompt."""

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Give the token ids of a prompt that can be served."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Give the token ids of a conversation."""
