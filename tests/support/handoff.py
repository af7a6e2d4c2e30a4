"""A prefill beside a decode group in one process: engines of thread ranks, with a server and real transports."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.engine import Engine
from specdec.prefill.server import PrefillServer

_END_TIMEOUT_S = 30


@contextmanager
def serving(engine: Engine) -> Iterator[PrefillServer]:
    """Serve decode groups with an engine, in a thread; fails where the server fails."""
    server = PrefillServer(engine)
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve, name="prefill server", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(_END_TIMEOUT_S)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
