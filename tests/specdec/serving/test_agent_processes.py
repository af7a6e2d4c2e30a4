"""A thousand requests of agents at a deployment of processes: right replies, and the processes are as they were.

Two prefills and a decode group of two ranks serve glm-tiny; one prefill is killed in the middle and started again.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from specdec.engine import Engine
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.released import locate_checkpoint
from tests.specdec.serving.test_agent_deployment import check_replies, right_sessions
from tests.support.agent_sessions import agent_sessions, conversations
from tests.support.metric_samples import samples
from tests.support.processes import children_of
from tests.support.running_server import wait_until
from tests.support.session_load import SessionLoad

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("serve_processes")]

NUM_COPIES = 20  # of 50 requests
SETTINGS: dict[str, Any] = {"max_model_len": 1100, "page_size": 16}
FLAGS = ("--model", "glm-tiny", "--max-model-len", "1100", "--page-size", "16", "--max-num-requests", "8")
VOCAB_SIZE = 3000
MEBIBYTE = 1 << 20
NUM_WORKERS = 8  # threads that read requests; each starts when it is first needed
MOST_MORE = (0, NUM_WORKERS, 16 * MEBIBYTE)  # open files, threads and memory


@dataclass
class Process:
    """A server, and what the kernel knows of it."""

    process: subprocess.Popen[str]
    addresses: list[str]

    @property
    def url(self) -> str:
        return self.addresses[0]

    @property
    def pids(self) -> list[int]:
        """It and its ranks."""
        return [self.process.pid, *sorted(children_of(self.process.pid))]

    def count(self, directory: str) -> list[int]:
        """Entries of a directory of /proc, by process: "fd" for open files, "task" for threads."""
        return [len(os.listdir(f"/proc/{pid}/{directory}")) for pid in self.pids]

    def resident_bytes(self) -> list[int]:
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids]
        return [count * os.sysconf("SC_PAGE_SIZE") for count in pages]

    def holdings(self) -> list[list[int]]:
        """Open files, threads and memory, by process."""
        return [self.count("fd"), self.count("task"), self.resident_bytes()]

    def metrics(self) -> dict[tuple[str, ...], float]:
        return samples(httpx.get(f"{self.url}/metrics", timeout=60).text)

    def is_idle(self) -> bool:
        """Whether nothing runs or waits, and no page is held, but for later prompts."""
        found = self.metrics()
        held = [found["specdec:kv_pages", "used"], found["specdec:kv_pages_quarantined",]]
        queues = [found["specdec:num_requests_running",], found["specdec:num_requests_waiting",]]
        return not any(held + queues)


def start(*flags: str, num_lines: int) -> Process:
    command = [sys.executable, "-m", "specdec", "serve", *FLAGS, "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return Process(process, [process.stdout.readline().strip() for _ in range(num_lines)])


@contextmanager
def running(*flags: str, num_lines: int) -> Iterator[Process]:
    server = start(*flags, num_lines=num_lines)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait(timeout=60)


class Prefill:
    """A prefill that is killed and started again at its address."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._listen = "127.0.0.1:0"
        self.start()
        self._listen = self.server.addresses[1]

    def start(self) -> None:
        flags = ("--role", "prefill", "--handoff-listen", self._listen, "--num-pages", "256")
        self.server = self._stack.enter_context(running(*flags, num_lines=2))

    def kill(self) -> None:
        self.server.process.send_signal(signal.SIGKILL)
        self.server.process.wait(timeout=60)

    @property
    def address(self) -> str:
        return self._listen


def test_a_thousand_requests_leave_nothing_behind() -> None:
    workloads = [agent_sessions(divisor=64, max_context=1080), conversations(divisor=16, max_context=400)]
    with Engine.from_pretrained("glm-tiny", num_draft_tokens=3, **SETTINGS) as alone:
        sessions = right_sessions(alone, workloads, vocab_size=VOCAB_SIZE, num_copies=NUM_COPIES)
    num_requests = sum(map(len, sessions))
    assert num_requests == 1000
    with ExitStack() as stack:
        prefills = [Prefill(stack) for _ in range(2)]
        handoff = [word for prefill in prefills for word in ("--prefill", prefill.address)]
        ranks = ("--role", "decode", "--tp-size", "2", "--dcp-size", "2", "--num-draft-tokens", "3")
        decode = stack.enter_context(running(*ranks, "--num-pages", "160", *handoff, num_lines=1))
        early = play(decode, sessions[: len(sessions) // 3], {})
        settle(decode, prefills)
        survivors = {"decode": decode, "prefill": prefills[1].server}  # the other prefill is killed
        before = {name: server.holdings() for name, server in survivors.items()}
        late_sessions = sessions[len(sessions) // 3 :]
        num_late = sum(map(len, late_sessions))
        events = {num_late // 3: prefills[0].kill, num_late // 2: prefills[0].start}
        late = play(decode, late_sessions, events)
        settle(decode, prefills)
        found = decode.metrics()
        after = {name: server.holdings() for name, server in survivors.items()}
        assert found["specdec:prefill_connections_total", prefills[0].address] == 2
        for name in survivors:
            for was_each, became_each, most in zip(before[name], after[name], MOST_MORE, strict=True):
                for was, became in zip(was_each, became_each, strict=True):
                    assert became <= was + most, (name, before, after)
        for server in (decode, *(prefill.server for prefill in prefills)):
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=60) == 0
    checkpoint = load_checkpoint(locate_checkpoint("glm-tiny"), dtype=torch.float32)
    for load in (early, late):
        assert load.num_cancelled == load.num_sent // load.cancel_every
        check_replies(load, checkpoint)


def play(decode: Process, sessions: Sequence[Any], events: dict[int, Any]) -> SessionLoad:
    load = SessionLoad(decode.url, cancel_every=10, events=events)
    load.play(sessions, num_clients=8)
    return load


def settle(decode: Process, prefills: Sequence[Prefill]) -> None:
    """Wait until nothing runs and nothing is held."""
    for server in (decode, *(prefill.server for prefill in prefills)):
        wait_until(server.is_idle, "nothing is held any more", timeout_s=60)
