"""Which requests are let in: a bounded number of them, and none while the server drains.

Counted are choices, since each takes a slot of the engine: as many as run together, and a bounded queue behind them.
"""

import threading
from collections.abc import Callable

from specdec.serving.api_errors import ApiError, queue_full, unavailable
from specdec.serving.driver import EngineDriver
from specdec.serving.generation import Generation, Observer


class Admission:
    """Lets requests in, and knows those that are here. Requests enter from any thread, and leave on the event loop.

    Args:
        driver: Runs them.
        max_running: Choices that the engine runs together.
        max_queued: Choices that may wait behind them.

    Attributes:
        is_draining: Whether no request is let in any more.
        num_open: Choices that are here.
        on_piece: Sees every piece of every request, on the event loop.
    """

    def __init__(self, driver: EngineDriver, *, max_running: int, max_queued: int) -> None:
        self._driver = driver
        self._max_running = max_running
        self._max_queued = max_queued
        self._lock = threading.Lock()
        self._generations: set[Generation] = set()
        self.is_draining = False
        self.num_open = 0
        self.on_piece: Observer = lambda _generation, _piece: None

    def check(self) -> None:
        """Refuse whatever comes while nothing can be served.

        Raises:
            ApiError: 503.
        """
        if self.is_draining:
            raise unavailable("the server is shutting down")
        try:
            self._driver.check()
        except Exception as error:
            raise unavailable("the engine is not healthy: the server must be started again") from error

    def check_room(self) -> None:
        """Refuse what comes while there is no room for anything, before it is read.

        Raises:
            ApiError: 429, 503.
        """
        self.check()
        with self._lock:
            self._refuse_beyond(self.num_open + 1)

    def admit(self, num_choices: int, make: Callable[[], Generation]) -> Generation:
        """Let a request in and start it.

        Args:
            num_choices: That it asks for.
            make: Makes its generation once there is room, so that nothing is tokenised for a request without.

        Raises:
            ApiError: 400 for more choices than could ever be here, 429 for more than there is room for now, 503.
        """
        self.check()
        most = self._max_running + self._max_queued
        if num_choices > most:
            raise ApiError(
                400,
                f"the request asks for {num_choices} completions, prompts times n; at most {most} can be here at once",
                code="too_many_completions",
            )
        with self._lock:
            self._refuse_beyond(self.num_open + num_choices)
            self.num_open += num_choices
        try:
            generation = make()
        except BaseException:
            self._leave(num_choices)
            raise
        generation.on_piece = self.on_piece
        generation.on_close = self._close
        with self._lock:
            self._generations.add(generation)
        generation.start()
        return generation

    def abort_all(self, error: ApiError) -> None:
        """End every request that is here with an error."""
        with self._lock:
            generations = list(self._generations)
        for generation in generations:
            generation.abort(error)

    def _refuse_beyond(self, num_choices: int) -> None:
        if num_choices > self._max_running + self._max_queued:
            raise queue_full(
                f"{self.num_open} completions run or wait here, at most {self._max_queued} may wait behind "
                f"{self._max_running} that run: try again later"
            )

    def _close(self, generation: Generation) -> None:
        with self._lock:
            self._generations.discard(generation)
        self._leave(generation.num_choices)

    def _leave(self, num_choices: int) -> None:
        with self._lock:
            self.num_open -= num_choices
