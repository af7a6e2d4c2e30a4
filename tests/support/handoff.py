"""A prefill beside a decode group in one process: engines of thread ranks, with a server and real transports."""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.prefill.server import PrefillServer
from specdec.ranks.passes import Ranks
from specdec.ranks.rank_setup import build_worker
from specdec.ranks.worker import Worker
from tests.support.engines import Checkpoints
from tests.support.faulty_transport import FaultyTransport
from tests.support.thread_engine import ThreadEngines

NEVER_S = 60.0  # a test that waits for this has failed
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


@dataclass
class Prefill:
    """A prefill that serves, and its leading rank with the transport of that."""

    worker: Worker
    engine: Engine
    server: PrefillServer
    transport: FaultyTransport

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def is_at_start(self) -> bool:
        """Whether every page is free, or only kept for later prompts."""
        scheduler = self.engine.core.scheduler
        return scheduler.num_available_pages() == scheduler.allocator.num_pages


class Groups:
    """Opens prefills and decode groups that fit each other."""

    def __init__(self, checkpoints: Checkpoints, thread_engines: ThreadEngines, *, model: str = "parallel") -> None:
        self._model = model
        self._checkpoint = checkpoints.load(model)
        self._engines = thread_engines

    @contextlib.contextmanager
    def prefill(self, **settings: Any) -> Iterator[Prefill]:
        """One of a single rank."""
        given = {"page_size": 4, "max_model_len": 128, "transport": "local", "prefill_chunk_tokens": 8, **settings}
        config = EngineConfig(num_draft_tokens=0, **given)
        worker = build_worker(self._checkpoint, config, with_draft=True)
        assert worker.draft is not None
        for pool in (worker.pool, worker.draft.pool):
            for entry in pool.layout.entries:
                pool.buffer(entry.kind).fill_(0xFF)
        with Engine(self._checkpoint, config, ranks=Ranks(worker)) as engine, self._serving(worker, engine) as prefill:
            yield prefill

    @contextlib.contextmanager
    def prefill_of_two(self) -> Iterator[tuple[Prefill, Worker]]:
        """One of two ranks, with the worker of the second."""
        given: dict[str, Any] = {"transport": "local", "prefill_chunk_tokens": 8, "num_draft_tokens": 0}
        with self._engines.open(self._model, tp_size=2, dcp_size=2, with_draft=True, **given) as ranks:
            ranks.poison()
            with self._serving(ranks.workers[0], ranks.engine()) as prefill:
                yield prefill, ranks.workers[1]

    @contextlib.contextmanager
    def _serving(self, worker: Worker, engine: Engine) -> Iterator[Prefill]:
        assert worker.transfer is not None
        transport = FaultyTransport(worker.transfer.transport, delay_s=0.05)
        worker.transfer.transport = transport
        with serving(engine) as server:
            yield Prefill(worker, engine, server, transport)

    @contextlib.contextmanager
    def decode(self, *prefills: Prefill, **settings: Any) -> Iterator[Engine]:
        given = {"tp_size": 1, "dcp_size": 1, "prefill_timeout_s": NEVER_S, "peer_timeout_s": NEVER_S, **settings}
        addresses = tuple(prefill.address for prefill in prefills)
        with self._engines.open(self._model, prefill=addresses, **given) as ranks:
            ranks.poison()
            engine = ranks.engine()
            try:
                yield engine
            finally:
                engine.close()
