"""Agents at a server whose prompts two prefills compute: right replies, and nothing left behind, whatever happens.

Prefills come and go, and clients leave, while sessions of the trace files are played.
"""

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from specdec.bench.workload import Workload
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.handoff import prefill_link
from specdec.models.glm.checkpoint import LoadedCheckpoint
from specdec.prefill.server import PrefillServer
from specdec.ranks.passes import Ranks
from specdec.ranks.rank_setup import build_worker
from specdec.serving.engine_gauges import read_gauges
from tests.support.agent_sessions import SessionRequest, agent_sessions, conversations, replay
from tests.support.engines import FIRST_SPECIAL_ID, Ask, Checkpoints, greedy
from tests.support.first_difference import assert_equal_but_for_narrow_choices
from tests.support.metric_samples import samples
from tests.support.running_server import RunningServer, running_server, wait_until
from tests.support.session_load import SessionLoad
from tests.support.thread_engine import ThreadEngines

MODEL = "parallel_long"
SETTINGS: dict[str, Any] = {"page_size": 4, "max_model_len": 600, "transport": "local", "max_num_requests": 4}
NUM_DRAFTS = 3
_NUM_IDLE_TASKS = 4


def right_sessions(
    engine: Engine, workloads: Sequence[Workload], *, vocab_size: int, num_copies: int
) -> list[list[SessionRequest]]:
    """What one engine alone answers, session by session."""

    def play(workload: Workload, seed: int) -> list[list[SessionRequest]]:
        def answer(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
            return engine.generate(prompt, greedy(num_tokens))[0].token_ids

        return list(replay(workload, answer, vocab_size=vocab_size, seed=seed))

    with ThreadPoolExecutor(4) as pool:
        played = [pool.submit(play, workload, seed) for seed in range(num_copies) for workload in workloads]
        return [session for each in played for session in each.result()]


class PrefillHere:
    """A prefill in this process that can be restarted at its address.

    Attributes:
        address: Where decode groups call.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        checkpoint = checkpoints.load(MODEL)
        config = EngineConfig(num_draft_tokens=0, num_pages=300, prefill_chunk_tokens=32, **SETTINGS)
        worker = build_worker(checkpoint, config, with_draft=True)
        self.engine = Engine(checkpoint, config, tokenizer=checkpoints.tokenizer(), ranks=Ranks(worker))
        self.address = "127.0.0.1:0"
        self._stack = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        door = PrefillServer(self.engine, listen=self.address)
        self.address = door.address
        serving = running_server(
            self.engine,
            read_gauges=partial(read_gauges, self.engine, door),
            prefill=door,
            answers_requests=False,
            drain_timeout_s=0.01,
        )
        self.server = self._stack.enter_context(serving)

    def stop(self) -> None:
        """End it without waiting for the prompts that it computes."""
        self._stack.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()
        self.engine.close()


@contextlib.contextmanager
def decode_of(
    checkpoints: Checkpoints, thread_engines: ThreadEngines, prefills: Sequence[PrefillHere]
) -> Iterator[RunningServer]:
    """A server of two dcp ranks that drafts."""
    given = {**SETTINGS, "num_pages": 160, "num_draft_tokens": NUM_DRAFTS}
    addresses = tuple(prefill.address for prefill in prefills)
    with thread_engines.open(MODEL, tp_size=2, dcp_size=2, prefill=addresses, **given) as ranks:
        ranks.poison()
        engine = ranks.engine(tokenizer=checkpoints.tokenizer())
        with running_server(engine, read_gauges=partial(read_gauges, engine), max_queued_requests=64) as running:
            yield running
        engine.close()


def metrics(server: RunningServer) -> dict[tuple[str, ...], float]:
    with server.client() as client:
        return samples(client.get("/metrics").text)


def is_idle(server: RunningServer) -> bool:
    """Whether nothing runs or waits and no page is held, but for later prompts."""
    found = metrics(server)
    held = [found["specdec:kv_pages", "used"], found["specdec:kv_pages_quarantined",]]
    queues = [found["specdec:num_requests_running",], found["specdec:num_requests_waiting",]]
    return not any(held + queues)


def open_files() -> set[tuple[int, str]]:
    """Descriptors of this process and what they are, but for memory, which FastAPI's caches keep with a server."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            found |= set() if target.startswith("/memfd:") else {(int(descriptor), target)}
    return found


def test_agents_get_the_replies_of_one_engine_while_prefills_and_clients_come_and_go(
    checkpoints: Checkpoints, thread_engines: ThreadEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small one, in one process: prefills are stopped in the middle of their prompts, and started again."""
    monkeypatch.setattr(Ranks, "processes", lambda _ranks: [])  # as if that of a prefill ended with it
    monkeypatch.setattr(prefill_link, "DEAD_WRITER_GRACE_S", 0.5)
    workloads = [agent_sessions(divisor=128, max_context=580), conversations(divisor=32, max_context=300)]
    alone = checkpoints.engine(MODEL, **{**SETTINGS, "transport": None}, num_draft_tokens=NUM_DRAFTS)
    sessions = right_sessions(alone, workloads, vocab_size=FIRST_SPECIAL_ID, num_copies=1)
    threads, files = set(threading.enumerate()), open_files()
    load = play_here(sessions, checkpoints, thread_engines)
    assert load.num_cancelled == load.num_sent // load.cancel_every
    check_replies(load, checkpoints.load(MODEL))
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= threads, "no thread is left")
    wait_until(lambda: open_files() <= files, "no file is left")


def play_here(
    sessions: Sequence[Sequence[SessionRequest]], checkpoints: Checkpoints, thread_engines: ThreadEngines
) -> SessionLoad:
    """Play sessions against two prefills and a decode group in this process, which end with it."""
    first, second = prefills = [PrefillHere(checkpoints) for _ in range(2)]
    with decode_of(checkpoints, thread_engines, prefills) as decode:

        def stop_second() -> None:
            is_back = partial(is_connected_again, decode, first.address)
            wait_until(is_back, "the first prefill is connected again: one of the two must be there")
            second.stop()

        events = {12: first.restart, 25: stop_second, 35: second.start}
        load = SessionLoad(decode.url, cancel_every=10, events=events)
        load.play(sessions, num_clients=4)
        for server in (decode, first.server, second.server):
            wait_until(partial(is_idle, server), "nothing is held any more")
            wait_until(partial(has_few_tasks, server), "no task is left")
        found = metrics(decode)
        assert found["specdec:prefix_cache_hits_total",] > 0.3 * found["specdec:prefix_cache_queries_total",]
        assert found["specdec:spec_decode_num_accepted_tokens_total",] > 0
        assert all(found["specdec:prefill_transfers_total", "arrived", prefill.address] > 5 for prefill in prefills)
        assert all(found["specdec:prefill_connections_total", prefill.address] == 2 for prefill in prefills)
    for prefill in prefills:
        prefill.close()
    return load


def is_connected_again(decode: RunningServer, prefill_address: str) -> bool:
    """Whether a decode group has reached a prefill for the second time."""
    return metrics(decode)["specdec:prefill_connections_total", prefill_address] == 2


def has_few_tasks(server: RunningServer) -> bool:
    """Whether the event loop has the tasks of a server without requests alone: it serves, watches, and answers this."""
    return len(asyncio.all_tasks(server.loop)) <= _NUM_IDLE_TASKS


def check_replies(load: SessionLoad, checkpoint: LoadedCheckpoint) -> None:
    """Check that each reply is the one that a single engine gives."""
    assert len(load.replies) == load.num_sent - load.num_cancelled
    asks = [Ask(request.prompt, greedy(request.num_output_tokens)) for request, _ in load.replies]
    ours = [reply for _, reply in load.replies]
    right = [request.reply for request, _ in load.replies]
    assert_equal_but_for_narrow_choices(checkpoint, asks, ours, right)
