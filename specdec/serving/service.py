"""What the endpoints share: the engine, who is let in, and what the checkpoint's text means."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from specdec.errors import ConfigError, RequestError
from specdec.handoff.prefill_link import LinkState
from specdec.prefill.server import PrefillServer
from specdec.replies.reply_markup import ReplyMarkup
from specdec.sampling.sampling_params import SamplingParams
from specdec.serving.admission import Admission
from specdec.serving.api_errors import ApiError, api_error_of, unavailable, wrong
from specdec.serving.arrival import Arrival
from specdec.serving.driver import EngineDriver
from specdec.serving.generation import Generation
from specdec.serving.served_engine import ServedEngine
from specdec.serving.settings import ServerSettings
from specdec.serving.thinking import ThinkingRules
from specdec.serving.web.body import read_body

T = TypeVar("T")
_MAX_WORKERS = 8


class Service:
    """One served model.

    Bodies are decoded, templates rendered and prompts tokenised in worker threads: a long prompt takes seconds, in
    which the event loop serves others.

    Args:
        engine: What generates.
        settings: Of the server.
        max_running: Choices that the engine runs together.
        prefill: Computes prompts for decode groups with the same engine; None where nobody may call.
        answers_requests: Whether clients are answered.

    Attributes:
        tokenizer: The checkpoint's.
        markup: Its markers.
        thinking: What its template makes of wishes; None for one without a template.
        started_at: Unix time.

    Raises:
        ConfigError: The checkpoint has no tokenizer.
    """

    def __init__(
        self,
        engine: ServedEngine,
        settings: ServerSettings,
        *,
        max_running: int,
        prefill: PrefillServer | None = None,
        answers_requests: bool = True,
    ) -> None:
        self.engine = engine
        self.answers_requests = answers_requests
        self.settings = settings
        self._prefill = prefill
        self.driver = EngineDriver(engine, turn=None if prefill is None else prefill.turn)
        self.admission = Admission(self.driver, max_running=max_running, max_queued=settings.max_queued_requests)
        tokenizer, template = engine.tokenizer, engine.chat_template
        if tokenizer is None:
            raise ConfigError("a checkpoint without tokenizer.json cannot be served: add the file of its release")
        self.tokenizer = tokenizer
        self.markup = ReplyMarkup.of(tokenizer, end_ids=engine.eos_ids)
        self.thinking = None if template is None else ThinkingRules(template)
        self.started_at = int(time.time())
        self._workers = ThreadPoolExecutor(_MAX_WORKERS, thread_name_prefix="specdec-requests")

    def start(self) -> None:
        """Begin to run rounds; called on the event loop."""
        failed = ApiError(503, "the engine has stopped: the server must be started again", code="unavailable")
        self.driver.start(asyncio.get_running_loop(), on_failure=lambda: self.admission.abort_all(failed))
        if self._prefill is not None:
            self._prefill.open(on_news=self.driver.wake)

    def drain(self) -> None:
        """Let nothing in any more; what is here goes on."""
        self.admission.is_draining = True
        if self._prefill is not None:
            self._prefill.drain()

    @property
    def num_open(self) -> int:
        """What is here: choices, and prompts of decode groups."""
        return self.admission.num_open + (0 if self._prefill is None else self._prefill.num_running)

    def close(self) -> None:
        """End the threads; waits for the round that runs, and for what is being written to decode groups."""
        self._workers.shutdown(wait=True, cancel_futures=True)
        self.driver.stop()
        if self._prefill is not None:
            self._prefill.close()

    def check_ready(self) -> dict[str, str]:
        """Give the states of the prefills by address, none where prompts are computed here.

        Raises:
            ApiError: 503; nothing can be served now.
        """
        self.admission.check()
        states = dict(self.engine.prefill_states)
        if states and LinkState.READY not in states.values():
            each = ", ".join(f"{address} is {state}" for address, state in states.items())
            raise unavailable(f"no prefill can be given prompts: {each}")
        return states

    async def read(self, request: Request) -> bytes:
        """Read the body of a request that wants something generated.

        Raises:
            ApiError: It is not well formed, or nothing is served now.
        """
        self.admission.check_room()
        return await self.read_body(request)

    async def read_body(self, request: Request) -> bytes:
        """Read the body of any request."""
        settings = self.settings
        return await read_body(request, max_bytes=settings.max_body_bytes, timeout_s=settings.client_timeout_s)

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Do something in a worker thread; raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def model_name(self, asked: str | None) -> str:
        """Give the name that replies bear.

        Raises:
            ApiError: 404 for a name that is not served.
        """
        names = self.settings.model_names
        if asked is not None and asked not in names:
            message = f"the model {asked[:128]!r} is not served here; served is {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return names[0] if asked is None else asked

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> list[int]:
        """Render and tokenise a conversation.

        Args:
            messages: As a template reads them.
            tools: That it shows.
            variables: More of what it reads.

        Raises:
            ApiError: 400; names the field that cannot be rendered.
        """
        try:
            return self.engine.apply_chat_template(messages, tools=tools, variables=variables)
        except RequestError as error:
            field_of = {"variables": "chat_template_kwargs"}
            raise api_error_of(error, field_of=field_of, prompt_field="messages") from error

    def sampling(self, given: Mapping[str, Any], *, field_of: Mapping[str, str]) -> SamplingParams:
        """Build sampling parameters of what a request gave, else of the checkpoint's defaults.

        Args:
            given: Values by parameter; None counts as not given.
            field_of: Names of request fields by parameter, where they are not the same.

        Raises:
            ApiError: 400; names the field that is wrong.
        """
        wanted = {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams.with_defaults(wanted, self.engine.sampling_defaults)
        except RequestError as error:
            raise api_error_of(error, field_of=field_of) from error

    def generate(
        self,
        make_prompts: Callable[[], list[list[int]]],
        *,
        num_prompts: int,
        params: SamplingParams,
        arrival: Arrival,
        field_of: Mapping[str, str],
        prompt_field: str,
        cache_salt: str | None,
        priority: int,
        timeout_s: float | None,
    ) -> Generation:
        """Let a request in and start it; called in a worker thread.

        Args:
            make_prompts: Makes the token ids, once there is room.
            num_prompts: How many prompts that will be.
            params: For each.
            arrival: Of the request.
            field_of: Names of request fields by parameter, where they are not the same.
            prompt_field: The field that the prompts come of.
            cache_salt: Keeps KV that is reused to requests that give the same.
            priority: A lower number goes first.
            timeout_s: Seconds from its arrival in which it must have ended; None gives it the server's.

        Raises:
            ApiError: It cannot be served, or not now.
        """
        time_s = self._time_of(timeout_s)

        def make() -> Generation:
            return Generation(
                self.driver,
                prompts=make_prompts(),
                params=params,
                cache_salt=cache_salt,
                priority=priority,
                arrival=arrival,
                timeout_s=time_s,
            )

        try:
            return self.admission.admit(num_prompts * params.n, make)
        except RequestError as error:
            raise api_error_of(error, field_of=field_of, prompt_field=prompt_field) from error

    def _time_of(self, asked_s: float | None) -> float:
        """Give the seconds that a request has; it may ask for fewer than the server gives.

        Raises:
            ApiError: 400.
        """
        most_s = self.settings.request_timeout_s
        if asked_s is None:
            return most_s
        if not 0 < asked_s <= most_s:
            rule = f"must be positive and at most {most_s:g}, the server's --request-timeout-s"
            raise wrong("timeout_s", f"{rule}, got {asked_s:g}")
        return asked_s
