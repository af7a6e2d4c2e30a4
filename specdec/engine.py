"""The engine: a checkpoint that generates, from any number of threads.

There is no thread of its own. Whoever waits for tokens runs the rounds: one thread at a time drives, the others sleep
until their tokens are there or the driver has its own and leaves.
"""

import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from specdec.assembly import build_core
from specdec.core import EngineCore
from specdec.dcp.communicator import Collective, single_rank_groups
from specdec.dcp.prefix_tree import salt_digest
from specdec.drafting.draft import DraftSource
from specdec.drafting.draft_check import check_source
from specdec.engine_config import EngineConfig
from specdec.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineError,
    RankLostError,
    RequestError,
    RoundError,
    SpecdecError,
    TransferError,
)
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.progress import GrammarProgress
from specdec.handoff.facts import pool_facts
from specdec.handoff.intake import Intake
from specdec.memory.rank_memory import RankMemory
from specdec.models.glm.checkpoint import LoadedCheckpoint
from specdec.models.glm.released import locate_checkpoint
from specdec.models.glm.trace import ForwardTrace
from specdec.ranks.decision_audit import DecisionAudit
from specdec.ranks.passes import Ranks
from specdec.ranks.rank_setup import RankSetup, build_worker, load_rank
from specdec.ranks.start_ranks import start_ranks
from specdec.replies.reply_markup import ReplyMarkup
from specdec.request import Request, RequestUpdate
from specdec.result import BatchError, Choice, GenerationResult, Score, StreamDelta, Usage
from specdec.sampling.finish import FinishRule, OutputJudge
from specdec.sampling.sampling_params import SamplingParams, generation_defaults
from specdec.sampling.sampling_rows import RequestSampling
from specdec.scoring import score_tokens, trace_tokens
from specdec.text.chat_template import ChatTemplate, load_chat_template
from specdec.text.prompt_forms import (
    PROMPT_RULE,
    Message,
    Prompt,
    as_batch,
    check_length,
    messages_of,
    token_ids_of,
)
from specdec.text.tokenizer import Tokenizer, eos_token_ids
from specdec.transfer.messages import Destination, PoolFacts

T = TypeVar("T")
Failure = DeadlineError | RequestError | RoundError | RankLostError | TransferError
MAX_PRIORITY = 1_000_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Engine:
    """Generates with a GLM-5.x checkpoint; see `from_pretrained`.

    Every public method may be called from any thread.

    Args:
        checkpoint: The loaded model.
        config: The settings.
        tokenizer: None works with token ids alone.
        chat_template: None refuses messages.
        sampling_defaults: Sampling parameters that the checkpoint suggests.
        eos_ids: Ids that end a text unless `ignore_eos` is set.
        draft_source: Used instead of the checkpoint's MTP layer.
        ranks: What runs the passes; None builds one rank from the checkpoint.

    Attributes:
        core: The rounds and everything they run on, for tools that look inside; not for use while a round runs.
        request_ids: Gives every request its id.
    """

    def __init__(
        self,
        checkpoint: LoadedCheckpoint,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        eos_ids: Sequence[int] | None = None,
        draft_source: DraftSource | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if draft_source is not None:
            check_source(draft_source)
        self.checkpoint = checkpoint
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.sampling_defaults = dict(sampling_defaults or {})
        self.eos_ids = tuple(checkpoint.config.eos_token_ids if eos_ids is None else eos_ids)
        for token_id in self.eos_ids:
            if not 0 <= token_id < checkpoint.config.vocab_size:
                raise ConfigError(
                    f"end-of-sequence id {token_id} is outside the vocabulary of {checkpoint.config.vocab_size}: "
                    "correct eos_token_id in config.json or generation_config.json"
                )
        if ranks is None:
            with_draft = config.num_draft_tokens > 0 and draft_source is None
            ranks = Ranks(build_worker(checkpoint, config, with_draft=with_draft))
        with torch.inference_mode():
            ranks.warm_up()
        self.core: EngineCore = build_core(ranks, config, draft_source=draft_source)
        if config.audit_rate:
            self.core.start_audit(rate=config.audit_rate)
        intake = self._open_intake() if config.prefill else None
        self._close = weakref.finalize(self, _close, ranks, intake)
        self.max_model_len = config.max_model_len or checkpoint.config.max_position_embeddings
        self._turn = threading.Condition()
        self._driver: object | None = None  # stands for the thread that drives, as long as it does
        self._cancelled: deque[_Job] = deque()
        self.request_ids = itertools.count()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        draft_source: DraftSource | None = None,
        draft_kv: bool | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> "Engine":
        """Load a checkpoint.

        Args:
            model: A checkpoint directory, or "glm-tiny" for the one that comes with the package.
            dtype: "float32" or "bfloat16".
            device: Where the model runs.
            draft_source: Used instead of the checkpoint's MTP layer.
            draft_kv: Whether the MTP layer's KV is computed, as a prefill does for others; None where it drafts.
            on_progress: Called with the bytes loaded so far and those of all.
            **settings: Fields of `EngineConfig`, such as num_draft_tokens.

        Raises:
            ConfigError: A setting is not possible, this machine lacks the device, or the model is unknown or not
                implemented.
            CheckpointError: The files are damaged or incomplete.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        unknown = set(settings) - set(EngineConfig.__dataclass_fields__)
        if unknown:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ConfigError(f"unknown engine setting {sorted(unknown)[0]!r}; known are {known}")
        config = EngineConfig(**settings)
        if draft_source is not None:
            check_source(draft_source)
        _check_device(device)
        if not isinstance(model, str | os.PathLike):
            raise ConfigError(f"model must be a checkpoint directory or a name such as glm-tiny, got {model!r}")
        directory = locate_checkpoint(model)
        if draft_kv is None:
            draft_kv = config.num_draft_tokens > 0 and draft_source is None
        setup = RankSetup(directory=directory, dtype=DTYPES[dtype], device=device, config=config, with_draft=draft_kv)
        if config.num_ranks > 1:
            checkpoint, ranks = start_ranks(setup, on_progress=on_progress)
        else:
            checkpoint, worker = load_rank(setup, single_rank_groups(), device=device, on_progress=on_progress)
            ranks = Ranks(worker)
        has_tokenizer = (directory / "tokenizer.json").exists()
        try:
            return cls(
                checkpoint,
                config,
                tokenizer=Tokenizer(directory / "tokenizer.json") if has_tokenizer else None,
                chat_template=load_chat_template(directory),
                sampling_defaults=generation_defaults(directory / "generation_config.json"),
                eos_ids=eos_token_ids(directory, checkpoint.config.eos_token_ids),
                draft_source=draft_source,
                ranks=ranks,
            )
        except BaseException:
            ranks.close()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the other ranks, where there are any; also done when the engine is dropped, and at exit.

        Waits for the pass that another thread runs. Requests that have not ended by then fail.
        """
        self.core.ranks.refuse()
        self._drive(self._close)

    def check(self) -> None:
        """Say whether the engine can serve; does not wait, also while a round runs.

        Raises:
            RankLostError: A rank failed, died or stopped: nothing can be served until the engine is made anew. Or the
                engine was closed, and with it its other ranks.
        """
        self.core.ranks.check()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[GenerationResult]:
        """Generate for one prompt or a batch of prompts; waits for all of them.

        Args:
            prompts: A text, token ids, or a conversation (messages with "role" and "content"); or a sequence of these.
            params: For all prompts, or one for each; None takes the checkpoint's defaults.
            cache_salt: Of all prompts; they share the KV of equal beginnings with requests of the same one only, and
                those without a salt among each other.

        Returns:
            One result a prompt, in order.

        Raises:
            RequestError: A prompt or its parameters cannot be served, and nothing has run; or its bans left no token.
            RoundError: The only prompt failed for another cause than itself.
            BatchError: Some prompts failed while they ran; it holds the results of the others.
            RankLostError: A rank failed, died or stopped.
        """
        batch = as_batch(prompts)
        given: Any = params  # whatever the annotation says
        each = list(given) if isinstance(given, list | tuple) else [given] * len(batch)
        if len(each) != len(batch):
            raise RequestError(f"params must be one for all or one for each prompt, got {len(each)} for {len(batch)}")
        jobs = [self._job(prompt, asked, cache_salt=cache_salt) for prompt, asked in zip(batch, each, strict=True)]
        try:
            for job in jobs:
                self._submit(job)
            for job in jobs:
                while not job.is_drained:
                    self._advance(job)
                    job.drop_news()
        finally:
            for job in jobs:
                self._cancel(job)
        failures = {place: job.failure for place, job in enumerate(jobs) if job.failure is not None}
        for failure in failures.values():
            if isinstance(failure, RankLostError):
                raise failure
        if len(jobs) == 1 and failures:
            raise failures[0]
        if failures:
            raise BatchError(failures, [None if job.failure is not None else job.result() for job in jobs])
        return [job.result() for job in jobs]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> "GenerationStream":
        """Generate for one prompt and hand out pieces as they come.

        The request is queued at once and runs while any thread waits for tokens. Closing the stream, leaving its
        `with` block or dropping it cancels what still runs and frees all it held.

        Args:
            prompt: A text, token ids, or a conversation.
            params: None takes the checkpoint's defaults.
            cache_salt: See `generate`.

        Raises:
            RequestError: The prompt or its parameters cannot be served.
        """
        job = self._job(prompt, params, cache_salt=cache_salt)
        try:
            self._submit(job)
            return GenerationStream(job, self._deltas(job), lambda: self._cancel(job))
        except BaseException:
            self._cancel(job)  # nobody has the stream that could
            raise

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_delta: Callable[[StreamDelta], None],
        cache_salt: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> "Submission":
        """Make ready to generate for one prompt, for callers that run the rounds themselves with `step`.

        It takes part in rounds once it is started. Neither waits for a round.

        Args:
            prompt: A text, token ids, or a conversation.
            params: None takes the checkpoint's defaults.
            on_delta: Called with every piece, by whatever thread runs the round or ends the request; must neither
                block nor call the engine. The last piece of each choice has a `finish_reason`.
            cache_salt: See `generate`.
            priority: A lower number gets a slot sooner and loses its pages later; see `Request.turn`.
            deadline_s: Seconds from now in which it must have ended; else it ends with a `DeadlineError`, within one
                round, whether it waits or runs. None gives it all the time.

        Raises:
            RequestError: The prompt or its parameters cannot be served.
        """
        job = self._job(
            prompt, params, on_delta=on_delta, cache_salt=cache_salt, priority=priority, deadline_s=deadline_s
        )
        return Submission(self, job)

    def score(self, token_ids: Sequence[int], *, with_logits: bool = False) -> Score:
        """Compute the log-probability of every token of a sequence but the first.

        Args:
            token_ids: The sequence.
            with_logits: Also give the model's logits of every row, which takes 4 bytes x tokens x vocabulary.

        Raises:
            RequestError: The ids are no integers, none, too many, or outside the vocabulary.
            OutOfPagesError: Running requests hold the pages it would need.
        """
        prompt_ids = self._sequence(token_ids)
        return self._drive(lambda: score_tokens(self.core, prompt_ids, with_logits=with_logits))

    def trace(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, ForwardTrace]:
        """Give the logits of every row of a sequence, f32 [T, V], and what the model chose in them.

        Raises:
            RequestError: The ids are no integers, none, too many, or outside the vocabulary.
            OutOfPagesError: Running requests hold the pages it would need.
        """
        prompt_ids = self._sequence(token_ids)
        return self._drive(lambda: trace_tokens(self.core, prompt_ids))

    def step(self) -> bool:
        """Run one round, for callers that drive the engine themselves; False when there was nothing to do."""
        return self._drive(self.core.step)

    def between_rounds(self, work: Callable[[], T]) -> T:
        """Do something with `core` while nobody else does; waits for the round that runs."""
        return self._drive(work)

    def start_audit(self, *, rate: float) -> DecisionAudit:
        """Count from now on how often a rank's own decision is not the first rank's; gives the counts, which go on.

        Args:
            rate: Share of the rounds that are compared.

        Raises:
            ConfigError: The share is no number in 0..1.
        """
        return self._drive(lambda: self.core.start_audit(rate=rate))

    def record_collectives(self, is_recording: bool) -> list[list[Collective]]:
        """Begin or end the record of collectives; gives what every rank recorded since it began, by rank."""
        return self._drive(lambda: self.core.ranks.record_collectives(is_recording))

    def report_lines(self) -> tuple[str, ...]:
        """Lines for a log: what was loaded, what computes it, what the memory of a rank goes to."""
        return (self.checkpoint.report.summary(), str(self.core.ranks.worker.kernels), *self.memory.report_lines())

    @property
    def memory(self) -> RankMemory:
        """What each rank holds: weights and pools by component, as planned and allocated."""
        return self.core.ranks.worker.memory

    @property
    def pool_facts(self) -> PoolFacts:
        """What another engine must have in common with this one to exchange KV."""
        layouts = self.core.ranks.worker.memory.pools.layouts
        return pool_facts(layouts, self.checkpoint, latent_norm_eps=self.config.latent_norm_eps)

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles the grammars of requests; made at the first use, which takes a second for a vocabulary of 155,000.

        Raises:
            RequestError: The checkpoint has no tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError("grammar: needs the checkpoint's tokenizer.json, which is missing", parameter="grammar")
        markup = ReplyMarkup.of(self.tokenizer, end_ids=self.eos_ids)
        return GrammarCompiler(markup, vocab_size=self.checkpoint.config.vocab_size)

    @property
    def intake(self) -> Intake | None:
        """Prompts that prefills compute; None where they are computed here."""
        intake = self.core.intake
        assert intake is None or isinstance(intake, Intake)
        return intake

    @property
    def prefill_states(self) -> dict[str, str]:
        """States of the prefills, by address; none where prompts are computed here. Does not wait."""
        return {} if self.intake is None else {link.address: link.state.value for link in self.intake.links}

    def kv_pages(self) -> tuple[int, int]:
        """Count KV pages: (free or only kept for later prompts, all). Not exact while a round runs."""
        if self.core.intake is not None:
            self._drive(self.core.take_in)  # pages that nothing writes to any more are free
        scheduler = self.core.scheduler
        return scheduler.num_available_pages(), scheduler.allocator.num_pages

    def encode(self, prompt: Prompt) -> list[int]:
        """Give the token ids of a prompt as the model will see it.

        Raises:
            RequestError: The prompt is of no known form, or the checkpoint cannot read that form.
        """
        if isinstance(prompt, str):
            return self._text_tokenizer().encode(prompt)
        messages = messages_of(prompt)
        return token_ids_of(prompt, rule=PROMPT_RULE) if messages is None else self.apply_chat_template(messages)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Give the token ids of a prompt that can be served: not empty, with room for an output, all in the vocabulary.

        Raises:
            RequestError: It cannot be.
        """
        if isinstance(prompt, str):
            check_length(prompt, self._text_tokenizer(), max_tokens=self.max_model_len - 1)
        token_ids = self.encode(prompt)
        self._check_ids(token_ids, max_len=self.max_model_len - 1)
        return token_ids

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Give the token ids of a conversation, to be used as a prompt.

        Args:
            messages: Turns with "role" and "content", as in the OpenAI chat API.
            tools: Functions that may be called, in the same API's form.
            variables: More of what the checkpoint's template reads, such as enable_thinking.

        Raises:
            RequestError: The checkpoint has no template, the template cannot render the conversation, or the result is
                far too long for a prompt.
        """
        if self.chat_template is None:
            raise RequestError("the checkpoint has no chat template: give the prompt as text or token ids")
        text = self.chat_template.render(messages, tools=tools, variables=variables)
        check_length(text, self._text_tokenizer(), max_tokens=self.max_model_len - 1)
        return self._text_tokenizer().encode(text)

    def _open_intake(self) -> Intake:
        """Meet the prefills.

        Raises:
            ConfigError: One of them refuses this engine.
        """
        config, ranks = self.config, self.core.ranks
        assert config.transport is not None
        facts = self.pool_facts
        with torch.inference_mode():
            addresses = ranks.addresses()
        intake = Intake(
            config.prefill,
            allocator=self.core.scheduler.allocator,
            facts=facts,
            destination=Destination(
                facts=facts,
                tp_size=config.tp_size,
                dcp_size=config.dcp_size,
                num_pages=ranks.worker.pool.num_pages,
                page_ids=b"",
                addresses=addresses,
            ),
            transport=config.transport.value,
            hidden_size=self.checkpoint.config.hidden_size,
            timeout_s=config.prefill_timeout_s,
            peer_timeout_s=config.peer_timeout_s,
            await_device=ranks.await_device,
        )
        self.core.intake = self.core.scheduler.prompt_source = intake
        return intake

    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer.json: give the prompt as token ids")
        return self.tokenizer

    def _sequence(self, token_ids: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Give the ids of a sequence that the model can read."""
        given = token_ids_of(token_ids, rule="the sequence must be a list of token ids")
        self._check_ids(given, max_len=self.max_model_len)
        return np.array(given, dtype=np.int64)

    def _check_ids(self, token_ids: list[int], *, max_len: int) -> None:
        vocab_size = self.checkpoint.config.vocab_size
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        if len(token_ids) > max_len:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens, at most {max_len} fit into max_model_len "
                f"{self.max_model_len}: shorten it"
            )
        for place, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                raise RequestError(f"prompt token {place} must be an id in 0..{vocab_size - 1}, got {token_id}")

    def _job(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        cache_salt: str | None = None,
        on_delta: Callable[[StreamDelta], None] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> "_Job":
        """Check a prompt and its parameters and make its requests, without starting them."""
        arrived_at = time.monotonic()
        self.check()
        _check_turn(priority, deadline_s)
        if params is None:
            params = SamplingParams.with_defaults({}, self.sampling_defaults)
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, as in SamplingParams(temperature=0), got {type(params).__name__}"
            )
        vocab_size = self.checkpoint.config.vocab_size
        params.check(vocab_size=vocab_size)
        if params.stop:
            self._text_tokenizer()
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise RequestError("cache_salt must be a text that is not empty", parameter="cache_salt")
        salt = b"" if cache_salt is None else salt_digest(cache_salt)
        prompt_ids = np.array(self.prompt_ids(prompt), dtype=np.int64)
        params = params.with_fresh_seed()
        room = self.max_model_len - len(prompt_ids)
        rule = FinishRule.of(params, eos_token_ids=self.eos_ids, max_tokens=room)
        progress = self._progress(params, prompt_ids.tolist())
        job = _Job(prompt_ids, params, on_delta=on_delta)
        for choice_index in range(params.n):
            sampling = RequestSampling(
                params,
                choice=choice_index,
                prompt_ids=prompt_ids.tolist(),
                stop_ids=rule.stop_ids,
                vocab_size=vocab_size,
            )
            job.add(
                Request(
                    request_id=next(self.request_ids),
                    prompt_ids=prompt_ids,
                    # The prompt's log-probabilities are the same for every choice.
                    params=params if choice_index == 0 else replace(params, prompt_logprobs=None),
                    choice_index=choice_index,
                    limit=len(prompt_ids) + rule.max_tokens,
                    stop_ids=rule.stop_ids,
                    sampling=sampling,
                    judge=OutputJudge(params, rule, self.tokenizer),
                    on_update=job.receiver(choice_index),
                    grammar=None if progress is None else progress.restart(),
                    cache_salt=salt,
                    priority=priority,
                    arrived_at=arrived_at,
                    deadline=math.inf if deadline_s is None else arrived_at + deadline_s,
                )
            )
        return job

    def _progress(self, params: SamplingParams, prompt_ids: list[int]) -> GrammarProgress | None:
        """Give the progress of a reply that has no token yet in the grammar asked for; None for a free reply."""
        if params.grammar is None:
            return None
        end_ids = {*self.eos_ids, *params.stop_token_ids}
        return self.grammars.begin(params.grammar, prompt_ids=prompt_ids, end_ids=end_ids)

    def _submit(self, job: "_Job") -> None:
        """Queue a job; it takes part from the next round on."""
        self.core.scheduler.waiting.add(*job.requests)

    def _cancel(self, job: "_Job") -> None:
        """End what of a job still runs: now, or after the round that another thread runs.

        May be called inside of a round or of another cancellation, since a stream may be dropped anywhere; the job then
        ends after that.
        """
        if job.is_finished:
            return
        self._cancelled.append(job)
        with self._turn:
            if self._driver is None:
                self._drive(lambda: None)

    def _deltas(self, job: "_Job") -> Iterator[StreamDelta]:
        """Hand out a job's pieces until it ends; raises when it fails."""
        while not job.is_drained:
            self._advance(job)
            for delta in job.take_news():
                if delta.finish_reason == "error" and job.failure is not None:
                    self._cancel(job)  # its other choices end with it
                    raise job.failure
                yield delta

    def _advance(self, job: "_Job") -> None:
        """Return once a job has news: sleep while another thread runs rounds, else run one."""
        with self._turn:
            self._turn.wait_for(lambda: job.has_news or self._driver is None)
        if not job.has_news:
            self._drive(lambda: job.has_news or self.core.step())

    def _drive(self, run: Callable[[], T]) -> T:
        """Do something that only one thread may do at a time; waits for its turn."""
        turn = object()
        try:
            with self._turn:
                self._turn.wait_for(lambda: self._driver is None)
                self._driver = turn
            with torch.inference_mode():
                return run()
        finally:
            self._end_turn(turn)

    def _end_turn(self, turn: object) -> None:
        """End the jobs that were cancelled meanwhile, then let another thread drive; nothing if it was not taken."""
        if self._driver is not turn:
            return
        with self._turn:
            try:
                while self._cancelled:
                    for request in self._cancelled[0].requests:
                        self.core.cancel(request)
                    self._cancelled.popleft()  # not before: what an interrupt leaves is ended after the next turn
            finally:
                self._driver = None
                self._turn.notify_all()


class GenerationStream(Iterator[StreamDelta]):
    """The pieces of one generation; iterate it, close it early, or use it as a context manager.

    A stream that is dropped is closed.
    """

    def __init__(self, job: "_Job", deltas: Iterator[StreamDelta], cancel: Callable[[], None]) -> None:
        self._job = job
        self._deltas = deltas
        self._cancel = cancel

    def __next__(self) -> StreamDelta:
        return next(self._deltas)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> "GenerationStream":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs; nothing after the end."""
        self._cancel()

    def result(self) -> GenerationResult:
        """Give the whole result; runs what is left of the generation first."""
        for _ in self._deltas:
            pass
        if self._job.failure is not None:
            raise self._job.failure
        return self._job.result()


class Submission:
    """A generation whose pieces go to a callback; see `Engine.prepare`. Once started it runs, kept or not."""

    def __init__(self, engine: Engine, job: "_Job") -> None:
        self._engine = engine
        self._job = job

    def start(self) -> None:
        """Queue it; to be called once."""
        self._engine._submit(self._job)

    @property
    def admitted_at(self) -> float | None:
        """When the first choice got a slot, by `time.monotonic`; None before."""
        return self._job.requests[0].admitted_at

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that a prefix hit supplied to the first choice; 0 before it is admitted."""
        return max(0, self._job.requests[0].num_cached_tokens)

    def cancel(self) -> None:
        """End what still runs: now, or after the round that another thread runs; nothing after the end."""
        self._engine._cancel(self._job)

    def result(self) -> GenerationResult:
        """Give the whole result of a generation that is finished: every choice has had its last piece.

        Raises:
            RequestError: The bans left no token to draw.
            DeadlineError: Its deadline came first.
            RoundError: It failed for another cause than itself.
            TransferError: Its prompt did not arrive.
            RankLostError: A rank failed, died or stopped.
        """
        if not self._job.is_finished:
            raise AssertionError("the generation still runs")
        if self._job.failure is not None:
            raise self._job.failure
        return self._job.result()


class _Job:
    """The requests of one prompt and the updates they have received.

    Args:
        prompt_ids: The prompt, i64 [n].
        params: With a seed.
        on_delta: Takes the pieces; None keeps them as news.
    """

    def __init__(
        self,
        prompt_ids: "np.ndarray[tuple[int], np.dtype[np.int64]]",
        params: SamplingParams,
        *,
        on_delta: Callable[[StreamDelta], None] | None = None,
    ) -> None:
        self.params = params
        self.requests: list[Request] = []
        self._prompt_ids = prompt_ids
        self._news: deque[StreamDelta] = deque()
        self._on_delta = self._news.append if on_delta is None else on_delta
        self._updates: list[list[RequestUpdate]] = []
        self._running: set[int] = set()

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self._running.add(len(self._updates))
        self._updates.append([])

    def receiver(self, index: int) -> Callable[[RequestUpdate], None]:
        def receive(update: RequestUpdate) -> None:
            self._updates[index].append(update)
            delta = StreamDelta(
                index=index,
                text=update.text,
                token_ids=update.token_ids,
                logprobs=update.logprobs,
                finish_reason=update.finish_reason,
                stop=update.stop,
                error=_failure_of(self.requests[index], update),
            )
            self._on_delta(delta)  # first: whoever sees that the job has finished finds its last piece
            if update.finish_reason is not None:
                self._running.discard(index)
                self._let_go(index)

        return receive

    def _let_go(self, index: int) -> None:
        """Drop what would lead back here from a choice that has ended: prompts are long, and so is a cycle's life."""
        self.requests[index].on_update = _nobody
        if not self._running:
            self._on_delta = _nobody

    @property
    def has_news(self) -> bool:
        return bool(self._news) or self.is_finished

    @property
    def is_finished(self) -> bool:
        return not self._running

    @property
    def is_drained(self) -> bool:
        return self.is_finished and not self._news

    def take_news(self) -> Iterator[StreamDelta]:
        while self._news:
            yield self._news.popleft()

    def drop_news(self) -> None:
        """Forget the pieces; the updates they came from stay."""
        self._news.clear()

    @property
    def failure(self) -> Failure | None:
        """Why a request of the job failed, the first of its choices that did; None while none has."""
        for request, updates in zip(self.requests, self._updates, strict=True):
            if updates and (failure := _failure_of(request, updates[-1])) is not None:
                return failure
        return None

    def result(self) -> GenerationResult:
        choices = tuple(
            Choice(
                index=request.choice_index,
                text="".join(update.text for update in updates),
                token_ids=tuple(itertools.chain.from_iterable(update.token_ids for update in updates)),
                finish_reason=updates[-1].finish_reason or "cancelled",
                logprobs=None
                if self.params.logprobs is None
                else tuple(itertools.chain.from_iterable(update.logprobs or () for update in updates)),
                speculation=request.speculation,
            )
            for request, updates in zip(self.requests, self._updates, strict=True)
        )
        first = self.requests[0]
        return GenerationResult(
            prompt_token_ids=tuple(self._prompt_ids.tolist()),
            choices=choices,
            usage=Usage(
                num_prompt_tokens=len(self._prompt_ids),
                num_completion_tokens=sum(len(choice.token_ids) for choice in choices),
                num_cached_tokens=max(0, first.num_cached_tokens),
                num_preemptions=sum(request.num_preemptions for request in self.requests),
            ),
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(first.prompt_logprobs),
        )


def _failure_of(request: Request, update: RequestUpdate) -> Failure | None:
    """Say why an update ends a request in an error; None where it does not."""
    error = update.error
    if error is None or isinstance(error, DeadlineError | RequestError | RoundError | TransferError):
        return error
    failure: RoundError | RankLostError
    if isinstance(error, RankLostError):
        failure = RankLostError(str(error))
    else:
        kind = "" if isinstance(error, SpecdecError) else type(error).__name__
        reason = ": ".join(part for part in (kind, str(error)) if part)
        failure = RoundError(f"request {request.request_id} failed in a round: {reason}")
    failure.__cause__ = error
    return failure


def _nobody(_news: object) -> None:
    """Take what nobody waits for."""


def _close(ranks: Ranks, intake: Intake | None) -> None:
    if intake is not None:
        intake.close()
    ranks.close()


def _check_turn(priority: Any, deadline_s: Any) -> None:
    """Refuse what is no priority or no deadline, whatever the annotations say."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority must be an integer in -{MAX_PRIORITY}..{MAX_PRIORITY}, got {priority!r}", parameter="priority"
        )
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if deadline_s is not None and not (is_number and deadline_s >= 0):
        raise RequestError(f"deadline_s must be a number of seconds >= 0, got {deadline_s!r}", parameter="deadline_s")


def _check_device(device: str) -> None:
    """Refuse a device that this machine does not have, which torch says in as many ways as there are devices."""
    try:
        is_real = torch.empty(0, device=device).device.type != "meta"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise ConfigError(f"device {device} cannot be used here: {reason}") from error
    if not is_real:
        raise ConfigError(f"device {device} cannot be used here: it holds no values")
