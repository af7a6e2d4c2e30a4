"""Prompts for decode groups and a prefill process of few pages, and what comes of them."""

from typing import Any

from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.result import StreamDelta
from specdec.sampling.sampling_params import SamplingParams

# A prompt of full length needs every page of the prefill: where one comes back, none was lost before.
FLAGS = ("--max-model-len", "128", "--page-size", "8", "--num-pages", "16", "--prefill-chunk-tokens", "24")
SETTINGS: dict[str, Any] = {"max_model_len": 256, "page_size": 8, "num_pages": 64, "prefix_cache": False}

Texts = dict[int, tuple[int, ...]]  # what one engine gives, by length of the prompt


def prompt_of(num_tokens: int) -> list[int]:
    return [5 + 7 * (num_tokens + place) % 211 for place in range(num_tokens)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


class Asked:
    """A prompt that a group was given, and what has come of it."""

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams) -> None:
        self.prompt = prompt
        self.token_ids: tuple[int, ...] = ()
        self.error: SpecdecError | None = None
        self.is_over = False
        self._submission = engine.prepare(prompt, params, on_delta=self._take)
        self._submission.start()

    def give_up(self) -> None:
        self._submission.cancel()

    def _take(self, delta: StreamDelta) -> None:
        self.token_ids += delta.token_ids
        self.error = delta.error
        self.is_over = delta.finish_reason is not None
