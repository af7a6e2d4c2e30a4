"""The one thread that runs the engine's rounds, and what passes between it and the event loop.

The thread runs rounds while there is work and sleeps otherwise. Pieces travel to the event loop once a round, all
together: a wake-up for each of 32 streams would cost more than what they carry. What must not happen inside of a round,
such as a cancellation, is posted and done before the next one.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from specdec.result import StreamDelta
from specdec.serving.served_engine import ServedEngine

T = TypeVar("T")
_LOG = logging.getLogger("specdec.serving")


class Piece(NamedTuple):
    """What a round gave one choice of one prompt.

    Attributes:
        prompt_index: Which prompt of its request.
        delta: Tokens and text; `delta.index` is the choice.
        made_at: When, by `time.monotonic`.
    """

    prompt_index: int
    delta: StreamDelta
    made_at: float


Receiver = Callable[[Piece], None]
Turn = Callable[[], float | None]


class EngineDriver:
    """Runs an engine in a thread of its own.

    Args:
        engine: Nobody else may step it.
        turn: Runs a round and what else there is to do between two; gives the seconds after which it must be called
            again where nothing was posted, None where it need not. None runs rounds of the engine.

    Attributes:
        failure: What ended the thread, which nothing that a request does can; None while it is well.
    """

    def __init__(self, engine: ServedEngine, *, turn: Turn | None = None) -> None:
        self.engine = engine
        self._turn = turn or self._step
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: list[tuple[Receiver, Piece]] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="specdec-rounds", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop, *, on_failure: Callable[[], None]) -> None:
        """Begin.

        Args:
            loop: Pieces are received on it.
            on_failure: Called on it should the thread end by itself.
        """
        self._loop = loop
        self._on_failure = on_failure
        self._thread.start()

    def stop(self) -> None:
        """End after the round that runs; waits for that."""
        self._is_stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Say whether requests can be served; does not wait.

        Raises:
            RankLostError: A rank is gone.
            RuntimeError: The thread has ended.
        """
        self.engine.check()
        if self.failure is not None:
            raise RuntimeError(f"the thread that runs the rounds has ended: {type(self.failure).__name__}")

    def wake(self) -> None:
        """Have the engine looked at: something was submitted."""
        self._posted.put(lambda: None)

    def post(self, action: Callable[[], None]) -> None:
        """Have something done between two rounds; it must not raise."""
        self._posted.put(action)

    def call(self, read: Callable[[], T]) -> "Future[T]":
        """Have something read between two rounds."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(read())
                except Exception as error:
                    future.set_exception(error)

        self._posted.put(run)
        return future

    def deliver(self, receiver: Receiver, prompt_index: int, delta: StreamDelta) -> None:
        """Take a piece for a receiver on the event loop; called inside of a round or of a posted action."""
        self._outbox.append((receiver, Piece(prompt_index, delta, time.monotonic())))

    def _run(self) -> None:
        wait_s: float | None = 0.0
        try:
            while not self._is_stopping:
                self._do_posted(wait_s=wait_s)
                wait_s = self._turn()
                self._send()
            self._do_posted(wait_s=0.0)  # whatever was cancelled meanwhile
        except BaseException as error:
            self.failure = error
            _LOG.exception("the thread that runs the rounds has ended")
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._on_failure)

    def _step(self) -> float | None:
        return 0.0 if self.engine.step() else None

    def _do_posted(self, *, wait_s: float | None) -> None:
        """Do what was posted, waiting for the first of it: `wait_s` at most, None for as long as it takes."""
        try:
            action = self._posted.get(block=wait_s != 0.0, timeout=wait_s or None)
            while True:
                action()
                action = self._posted.get_nowait()
        except queue.Empty:
            return

    def _send(self) -> None:
        """Hand the pieces over; nobody waits for them once the loop is closed."""
        if not self._outbox or self._loop is None or self._loop.is_closed():
            return
        pieces, self._outbox = self._outbox, []
        self._loop.call_soon_threadsafe(_receive, pieces)


def _receive(pieces: list[tuple[Receiver, Piece]]) -> None:
    for receiver, piece in pieces:
        receiver(piece)
