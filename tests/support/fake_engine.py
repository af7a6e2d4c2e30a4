"""An engine without a model: it says what it is told to, a few tokens a round, and fails when it is told to."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from specdec.errors import ContextLengthError, DeadlineError, RequestError, RoundError, SpecdecError
from specdec.models.glm.released import locate_checkpoint
from specdec.request import SpeculationStats
from specdec.result import Choice, GenerationResult, StreamDelta, Usage
from specdec.sampling.finish import FinishRule, OutputJudge
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.token_logprobs import TokenLogprobs
from specdec.text.chat_template import ChatTemplate, load_chat_template
from specdec.text.tokenizer import Tokenizer, eos_token_ids

END = "<|user|>"


@cache
def glm_tiny_texts() -> tuple[Tokenizer, ChatTemplate]:
    directory = locate_checkpoint("glm-tiny")
    template = load_chat_template(directory)
    assert template is not None
    return Tokenizer(directory / "tokenizer.json"), template


@dataclass(eq=False)
class FakeChoice:
    """One choice that runs, waits or has ended."""

    index: int
    judge: OutputJudge
    rest: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


class FakeSubmission:
    """What the server has of a prompt."""

    def __init__(
        self,
        engine: "FakeEngine",
        prompt: Sequence[int],
        params: SamplingParams,
        on_delta: Callable[[StreamDelta], None],
        *,
        deadline: float,
    ) -> None:
        self._engine = engine
        self.deadline = deadline
        self.prompt = list(prompt)
        self.params = params
        self.on_delta = on_delta
        self.admitted_at: float | None = None
        self.num_cached_tokens = 0
        rule = FinishRule.of(params, eos_token_ids=engine.eos_ids, max_tokens=engine.max_model_len - len(self.prompt))
        reply = engine.reply(self.prompt)
        self.choices = [
            FakeChoice(index, OutputJudge(params, rule, engine.tokenizer), list(reply)) for index in range(params.n)
        ]

    def start(self) -> None:
        self._engine.running.append(self)

    def _tell(self, delta: StreamDelta) -> None:
        self.on_delta(delta)
        if not self.is_running:  # nothing leads back to the reader any more
            self.on_delta = lambda _delta: None

    @property
    def is_running(self) -> bool:
        return any(choice.finish_reason is None for choice in self.choices)

    def cancel(self) -> None:
        self._engine.num_cancelled += self.is_running
        self._end("cancelled", None)

    def fail(self, error: SpecdecError) -> None:
        self._end("error", error)

    def _end(self, reason: str, error: SpecdecError | None) -> None:
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason = reason
                self._tell(
                    StreamDelta(
                        index=choice.index, text="", token_ids=(), logprobs=None, finish_reason=reason, error=error
                    )
                )

    def advance(self, num_tokens: int) -> None:
        """Deliver the next tokens of every choice."""
        for choice in self.choices:
            if choice.finish_reason is not None:
                continue
            run, choice.rest = choice.rest[:num_tokens], choice.rest[num_tokens:]
            delivery = choice.judge.push(run)
            choice.token_ids += delivery.token_ids
            choice.text += delivery.text
            choice.finish_reason = delivery.finish.finish_reason
            self._tell(
                StreamDelta(
                    index=choice.index,
                    text=delivery.text,
                    token_ids=delivery.token_ids,
                    logprobs=self._logprobs(delivery.token_ids),
                    finish_reason=delivery.finish.finish_reason,
                    stop=delivery.finish.stop,
                )
            )

    def result(self) -> GenerationResult:
        choices = tuple(
            Choice(
                index=choice.index,
                text=choice.text,
                token_ids=tuple(choice.token_ids),
                finish_reason=choice.finish_reason or "",
                logprobs=None,
                speculation=SpeculationStats(num_drafts=1, num_draft_tokens=3, accepted_per_position=(1, 1, 0)),
            )
            for choice in self.choices
        )
        return GenerationResult(
            prompt_token_ids=tuple(self.prompt),
            choices=choices,
            usage=Usage(
                num_prompt_tokens=len(self.prompt),
                num_completion_tokens=sum(len(choice.token_ids) for choice in choices),
                num_cached_tokens=self.num_cached_tokens,
                num_preemptions=0,
            ),
            prompt_logprobs=None,
        )

    def _logprobs(self, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...] | None:
        if self.params.logprobs is None:
            return None
        minus_infinity = float("-inf")
        top = tuple((token_id, -1.0 - token_id) for token_id in range(self.params.logprobs))
        return tuple(
            TokenLogprobs(token_id=each, logprob=minus_infinity, top=top, raw_logprob=minus_infinity, raw_top=top)
            for each in token_ids
        )


class FakeEngine:
    """Says `text` to everybody.

    Attributes:
        text: What it says; special tokens written out in it are tokens.
        tokens_per_round: Of each choice.
        gate: Rounds wait while it is not set.
        is_stepped: Whether a round closes the gate behind itself.
        failure: Raised by the next rounds for every request, as an error of theirs.
        lost: Raised by `check`, and by whatever needs it.
        prefill_states: Of the prefills that it does not have.
        running: What was started and has not ended.
        prepared: Prompts and parameters that were asked for.
        salts: That came with them.
        priorities: That came with them.
    """

    def __init__(self, text: str = "</think>Hello, world!" + END, *, max_model_len: int = 2048) -> None:
        self.tokenizer: Tokenizer | None
        self.chat_template: ChatTemplate | None
        self.tokenizer, self.chat_template = glm_tiny_texts()
        self.sampling_defaults: dict[str, Any] = {}
        self.eos_ids = eos_token_ids(locate_checkpoint("glm-tiny"), ())
        self.max_model_len = max_model_len
        self.prefill_states: dict[str, str] = {}
        self.text = text
        self.tokens_per_round = 2
        self.gate = threading.Event()
        self.gate.set()
        self.is_stepped = False
        self.failure: SpecdecError | None = None
        self.lost: SpecdecError | None = None
        self.running: list[FakeSubmission] = []
        self.prepared: list[tuple[list[int], SamplingParams]] = []
        self.salts: list[str | None] = []
        self.priorities: list[int] = []
        self.num_steps = 0
        self.num_cancelled = 0

    def reply(self, prompt: Sequence[int]) -> list[int]:
        assert self.tokenizer is not None
        ids = self.tokenizer.encode(self.text)
        return ids * (1 + self.max_model_len // max(1, len(ids)))

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def step(self) -> bool:
        self.num_steps += 1
        self.running = [each for each in self.running if each.is_running]
        if not self.running:
            return False
        given_up_at = time.monotonic() + 30
        while not self.gate.wait(timeout=0.01) and time.monotonic() < given_up_at:
            if self._end_late():
                return True
        if self.is_stepped:
            self.gate.clear()
        for submission in self.running:
            submission.admitted_at = submission.admitted_at or time.monotonic()
            if self.failure is None:
                submission.advance(self.tokens_per_round)
            else:
                submission.fail(self.failure)
        self.running = [each for each in self.running if each.is_running]
        return True

    def _end_late(self) -> bool:
        late = [each for each in self.running if each.deadline <= time.monotonic()]
        for submission in late:
            submission.fail(DeadlineError("request 0 still ran after all the time it was given"))
        return bool(late)

    def prepare(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        on_delta: Callable[[StreamDelta], None],
        cache_salt: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> FakeSubmission:
        self.check()
        assert self.tokenizer is not None
        params = params or SamplingParams()
        params.check(vocab_size=self.tokenizer.vocab_size)
        ids = self.prompt_ids(prompt)
        self.prepared.append((ids, params))
        self.salts.append(cache_salt)
        self.priorities.append(priority)
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        return FakeSubmission(self, ids, params, on_delta, deadline=deadline)

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        assert self.tokenizer is not None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        if len(ids) >= self.max_model_len:
            raise ContextLengthError(f"the prompt has {len(ids)} tokens, at most {self.max_model_len - 1} fit")
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < self.tokenizer.vocab_size:
                raise RequestError(f"prompt token {place} must be an id in the vocabulary, got {token_id}")
        return ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        assert self.tokenizer is not None
        assert self.chat_template is not None
        return self.tokenizer.encode(self.chat_template.render(messages, tools=tools, variables=variables))


BROKEN_ROUND = RoundError("request 0 failed in a round: a secret of the user")
