"""`specdec prefill` as a process of its own whose writes and passes go wrong as a test wants it.

`python -m tests.support.faulty_prefill prefill FLAGS` is `specdec prefill FLAGS`, but the transport of its leading rank
is wrapped in a `FaultyTransport`. Each line on its standard input is a command, answered by a line on standard output:

    faults NAME...     the next writes suffer these, as `FaultyTransport.faults`; "none" is no fault
    release            what is held is passed on
    hold NUMBER        the pass that comes after so many others does not begin
    fail NUMBER WHEN   that pass fails, "before" it runs or "after" it has run
    go                 the pass that is held begins, and nothing is planned for passes any more
    state              nothing happens

The answer is the state of the process after it, `PrefillState`.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from specdec.engine import Engine
from specdec.prefill import server
from specdec.ranks import rank_setup
from specdec.ranks.worker import Worker
from specdec.transfer.transport import Transport, open_transport
from tests.support.faulty_transport import Fault, FaultyTransport


class PrefillState(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill process says of itself.

    Attributes:
        num_free_pages: Pages that nobody holds.
        num_pages: All.
        num_requests: Prompts that run or wait.
        num_passes: Passes that have begun since one was planned to be held or to fail.
        is_held: Whether a pass is held.
        num_writes: Writes that were posted.
        num_faults_left: Faults that no write has suffered yet.
        num_started: Transfers begun.
        num_done: Complete ones.
        num_failed: Failed ones.
    """

    num_free_pages: int
    num_pages: int
    num_requests: int
    num_passes: int
    is_held: bool
    num_writes: int
    num_faults_left: int
    num_started: int
    num_done: int
    num_failed: int


class FaultyPrefill:
    """The process, as a test sees it.

    Attributes:
        process: The process.
        address: Where it listens.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.address = process.stdout.readline().strip()
        assert self.address

    def say(self, *words: object) -> None:
        """Give a last command, whose answer may not come any more."""
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def tell(self, *words: object) -> PrefillState:
        """Give a command; gives its answer."""
        self.say(*words)
        assert self.process.stdout is not None
        return msgspec.json.decode(self.process.stdout.readline(), type=PrefillState)

    def script(self, *faults: Fault | None) -> None:
        """Let the next writes suffer these."""
        self.tell("faults", *(("none" if fault is None else fault.name) for fault in faults))

    @property
    def state(self) -> PrefillState:
        """How it stands."""
        return self.tell("state")

    @property
    def is_at_start(self) -> bool:
        """Whether it computes nothing, and every page is free."""
        state = self.state
        return state.num_requests == 0 and state.num_free_pages == state.num_pages


@contextmanager
def faulty_prefill(*flags: str, listen: str = "127.0.0.1:0") -> Iterator[FaultyPrefill]:
    """Start a prefill of glm-tiny that lets itself be told what goes wrong."""
    command = [sys.executable, "-m", __name__, "prefill", "--model", "glm-tiny", "--listen", listen, *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield FaultyPrefill(process)
        finally:
            process.kill()


class _Passes:
    """Target passes of the leading rank, of which one may be held or fail."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.is_held = False
        self._planned: tuple[int, str] | None = None
        self._news = threading.Condition()

    def plan(self, number: int, what: str) -> None:
        with self._news:
            self.num_begun, self._planned = 0, (number, what)

    def go(self) -> None:
        with self._news:
            self._planned = None
            self._news.notify_all()

    def make_faulty(self, worker_class: type[Worker]) -> None:
        """Let the passes of a class of workers be held and fail."""
        verify = worker_class.verify

        def faulty_verify(worker: Worker, task: Any) -> Callable[[], Any]:
            what = self._begin()
            run = verify(worker, task)
            if what == "before":
                raise ZeroDivisionError("as the test wants it")

            def run_and_fail() -> Any:
                verified = run()
                if what == "after":
                    raise ZeroDivisionError("as the test wants it")
                return verified

            return run_and_fail

        worker_class.verify = faulty_verify  # type: ignore[method-assign, assignment]

    def _begin(self) -> str | None:
        """Count a pass, and wait where it is to be held; gives when it is to fail."""
        with self._news:
            what = self._planned[1] if self._planned is not None and self._planned[0] == self.num_begun else None
            if what == "hold":
                self.is_held = True
                self._news.wait_for(lambda: self._planned is None)
                self.is_held = False
            self.num_begun += 1
        return what


class _Commanded(server.PrefillServer):
    """A prefill that does what its standard input says."""

    def __init__(self, engine: Engine, *, listen: str) -> None:
        super().__init__(engine, listen=listen)
        threading.Thread(target=self._obey, name="commands", daemon=True).start()

    def _obey(self) -> None:
        for line in sys.stdin:
            command, *words = line.split()
            match command:
                case "faults":
                    faults = [None if word == "none" else Fault[word] for word in words]
                    for transport in _transports:
                        transport.faults.clear()
                        transport.faults.extend(faults)
                case "release":
                    for transport in _transports:
                        transport.release()
                case "hold":
                    _passes.plan(int(words[0]), command)
                case "fail":
                    _passes.plan(int(words[0]), words[1])
                case "go":
                    _passes.go()
                case "state":
                    pass
            print(msgspec.json.encode(self._state()).decode(), flush=True)

    def _state(self) -> PrefillState:
        scheduler = self._engine.core.scheduler
        return PrefillState(
            num_free_pages=scheduler.num_available_pages(),
            num_pages=scheduler.allocator.num_pages,
            num_requests=len(scheduler.candidates()),
            num_passes=_passes.num_begun,
            is_held=_passes.is_held,
            num_writes=sum(len(transport.writes) for transport in _transports),
            num_faults_left=sum(len(transport.faults) for transport in _transports),
            num_started=self.counts.num_started,
            num_done=self.counts.num_done,
            num_failed=self.counts.num_failed,
        )


_passes = _Passes()
_transports: list[FaultyTransport] = []


def _open_faulty(name: str, **options: Any) -> Transport:
    _transports.append(FaultyTransport(open_transport(name, **options)))
    return _transports[-1]


if __name__ == "__main__":
    from specdec.cli.main import run

    rank_setup.open_transport = _open_faulty  # type: ignore[attr-defined]
    server.PrefillServer = _Commanded  # type: ignore[misc, assignment]
    _passes.make_faulty(Worker)
    run()
