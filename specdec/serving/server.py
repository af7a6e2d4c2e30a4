"""A served engine from its first connection to its last: listen, serve, drain, end."""

import asyncio
import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn

from specdec.serving.api_errors import unavailable
from specdec.serving.app import create_app
from specdec.serving.engine_gauges import EngineGauges
from specdec.serving.service import Service
from specdec.serving.web.connection import TimedConnection, listen

_KEEP_ALIVE_S = 75  # longer than the minute after which proxies drop idle connections
_WATCH_S = 0.5
_LAST_ANSWERS_S = 2.0
_SWITCH_INTERVAL_S = 0.001


class Server:
    """Serves one engine over HTTP.

    Args:
        service: What is served; not used for another server.
        read_gauges: Reads the engine, between two rounds.
        host: Address to listen on.
        port: 0 takes a free one.

    Attributes:
        url: Where it can be called.

    Raises:
        ConfigError: The address cannot be listened on.
    """

    def __init__(self, service: Service, read_gauges: Callable[[], EngineGauges], *, host: str, port: int) -> None:
        self._service = service
        self._door = listen(host, port)
        bound_host, bound_port = self._door.getsockname()[:2]
        self.url = f"http://[{bound_host}]:{bound_port}" if ":" in bound_host else f"http://{bound_host}:{bound_port}"
        self._uvicorn = _SignallessServer(
            uvicorn.Config(
                create_app(service, read_gauges),
                http=_connection_class(service.settings.client_timeout_s),
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._draining: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._is_interrupted = False

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, which drain; a second one ends at once. For the main thread.

        Raises:
            KeyboardInterrupt: It was SIGINT.
            RankLostError: A rank is gone.
        """
        switch_interval = sys.getswitchinterval()
        # The event loop gets its turn while a round computes in Python; with the default it waits for 5 ms each time.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            asyncio.run(self._run_with_signals())
        finally:
            sys.setswitchinterval(switch_interval)
        if self._is_interrupted:
            raise KeyboardInterrupt

    async def serve(self) -> None:
        """Serve until `drain`.

        Raises:
            RankLostError: A rank is gone.
        """
        watching = asyncio.create_task(self._watch())
        try:
            await self._uvicorn.serve(sockets=[self._door])
        finally:
            watching.cancel()
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Let no request in any more, and end once those that run have ended or their time is up.

        Told twice, end at once. Called on the event loop.
        """
        self._service.drain()
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._draining.cancel()
            self._end(last_answers_s=0.0)

    async def _run_with_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        await self.serve()

    def _interrupt(self) -> None:
        self._is_interrupted = True
        self.drain()

    async def _drain(self) -> None:
        deadline = time.monotonic() + self._service.settings.drain_timeout_s
        while self._service.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._end(last_answers_s=max(_LAST_ANSWERS_S, deadline - time.monotonic()))

    async def _watch(self) -> None:
        """End once nothing can be served any more; requests have failed by then."""
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                self._service.driver.check()
            except Exception as error:
                self._failure = error
                self._service.admission.is_draining = True
                self._end(last_answers_s=_LAST_ANSWERS_S)
                return

    def _end(self, *, last_answers_s: float) -> None:
        """Abort what still runs, and close the connections once their answers are sent."""
        self._service.admission.abort_all(unavailable("the server is shutting down"))
        self._uvicorn.config.timeout_graceful_shutdown = math.ceil(last_answers_s)
        self._uvicorn.should_exit = True


class _SignallessServer(uvicorn.Server):
    """Leaves signals to us: the library's way of handling them ends with the signal, not with exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


def _connection_class(client_timeout_s: float) -> type[TimedConnection]:
    return type("Connection", (TimedConnection,), {"client_timeout_s": client_timeout_s})
