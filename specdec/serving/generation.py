"""One request's generation as the event loop sees it: pieces that come, an end, and ways to end it early.

Pieces that nobody has read wait here. There are never more of them than the request may have tokens, so a client that
reads slowly holds up nobody and costs no more than its own output.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from specdec.errors import DeadlineError, RequestError, SpecdecError
from specdec.result import GenerationResult
from specdec.sampling.sampling_params import SamplingParams
from specdec.serving.api_errors import ApiError, api_error_of
from specdec.serving.arrival import Arrival
from specdec.serving.driver import EngineDriver, Piece
from specdec.serving.served_engine import ServedSubmission

_LOG = logging.getLogger("specdec.serving")

Observer = Callable[["Generation", Piece], None]


@dataclass(slots=True)
class ChoiceTiming:
    """When a choice got its tokens, by `time.monotonic`.

    Attributes:
        first_at: The first; None before.
        last_at: The newest piece.
        num_tokens: How many so far.
    """

    first_at: float | None = None
    last_at: float = 0.0
    num_tokens: int = 0


class Generation:
    """All choices of all prompts of one request.

    Made and started by any thread; everything else belongs to the event loop.

    Args:
        driver: Runs them.
        prompts: Token ids.
        params: For each of the prompts.
        cache_salt: Of all prompts; None shares KV with all who give none.
        priority: Of all prompts; a lower number goes first.
        arrival: Of the request.
        timeout_s: Seconds from then on in which it must have ended.

    Attributes:
        num_choices: Prompts x choices of each.
        on_piece: Called with every piece, before anybody can read it.
        on_close: Called once, when it has been closed.

    Raises:
        RequestError: A prompt or the parameters cannot be served.
    """

    def __init__(
        self,
        driver: EngineDriver,
        *,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        cache_salt: str | None,
        priority: int,
        arrival: Arrival,
        timeout_s: float,
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.arrival = arrival
        self._timings = [[ChoiceTiming() for _ in range(params.n)] for _ in prompts]
        self.num_choices = len(prompts) * params.n
        self.on_piece: Observer = lambda _generation, _piece: None
        self.on_close: Callable[[Generation], None] = lambda _generation: None
        self._driver = driver
        self._num_running = self.num_choices
        self._pieces: deque[Piece] = deque()
        self._news = asyncio.Event()
        self._error: ApiError | None = None
        self._is_closed = False
        self._submissions = [
            driver.engine.prepare(
                prompt,
                params,
                on_delta=partial(driver.deliver, self._receive, index),
                cache_salt=cache_salt,
                priority=priority,
                deadline_s=max(0.0, arrival.at + timeout_s - time.monotonic()),
            )
            for index, prompt in enumerate(prompts)
        ]

    def start(self) -> None:
        """Queue all prompts."""
        for submission in self._submissions:
            submission.start()
        self._driver.wake()

    @property
    def is_finished(self) -> bool:
        """Whether every choice has had its last piece."""
        return self._num_running == 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once."""
        return sum(map(len, self.prompts))

    @property
    def num_cached_tokens(self) -> int:
        """Those of them that a prefix hit supplied; 0 of a prompt that has no slot yet."""
        return sum(submission.num_cached_tokens for submission in self._submissions)

    async def news(self, *, timeout_s: float | None = None) -> list[Piece]:
        """Give the pieces that have come since the last call, waiting for the first; none once all were given.

        Args:
            timeout_s: Most seconds to wait.

        Raises:
            ApiError: It failed, was aborted, or took too long.
            TimeoutError: None came in `timeout_s`.
        """
        if not self._pieces and not self.is_finished and self._error is None:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error
        pieces, self._pieces = list(self._pieces), deque()
        return pieces

    def results(self) -> list[GenerationResult]:
        """Give the whole results, one a prompt, once all choices have ended."""
        return [submission.result() for submission in self._submissions]

    def submission(self, prompt_index: int) -> ServedSubmission:
        """Give what the engine knows about one prompt."""
        return self._submissions[prompt_index]

    def timing(self, piece: Piece) -> ChoiceTiming:
        """Give what is known of the choice that a piece belongs to."""
        return self._timings[piece.prompt_index][piece.delta.index]

    def abort(self, error: ApiError) -> None:
        """End it with an error for whoever reads it."""
        if self._error is None and not self.is_finished:
            self._error = error
            self._news.set()
        self.close()

    def close(self) -> None:
        """Cancel what still runs; to be called once, at the latest when nobody reads any more."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self.is_finished:
            self._driver.post(self._cancel)
        self.arrival.log.update(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            completion_tokens=sum(timing.num_tokens for timings in self._timings for timing in timings),
        )
        first = self._timings[0][0].first_at
        if first is not None:
            self.arrival.log["first_token_seconds"] = round(first - self.arrival.at, 6)
        self.on_close(self)

    def _receive(self, piece: Piece) -> None:
        self.on_piece(self, piece)
        if piece.delta.error is not None:
            self._log_failure(piece.delta.error)
            self.abort(api_error_of(piece.delta.error))  # the other choices end with it
        elif not self._is_closed:
            self._pieces.append(piece)
            self._news.set()
        if piece.delta.finish_reason is not None:
            self._num_running -= 1

    def _log_failure(self, error: SpecdecError) -> None:
        if not isinstance(error, DeadlineError | RequestError):
            request_id = self.arrival.request_id
            _LOG.error("a generation failed", exc_info=error, extra={"request_id": request_id, "reason": str(error)})

    def _cancel(self) -> None:
        """Called between two rounds."""
        for submission in self._submissions:
            submission.cancel()
