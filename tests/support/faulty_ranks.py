"""Engines whose ranks are real processes and fail where a test wants it.

`open_engine` starts followers as the engine does, but of this module: `python -m tests.support.faulty_ranks DIRECTORY`
serves as `specdec.ranks.follower` does, and around each part of a pass looks into the directory for a fault that it is
to have there. The leader has its faults in the test's own process.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.ranks.follower import main
from specdec.ranks.rank_setup import RankSetup
from specdec.ranks.start_ranks import start_ranks
from specdec.ranks.worker import Worker

_OUT_OF_MEMORY = "out of memory, as the test wants it"


class Faults:
    """What the ranks of one engine are to suffer.

    Args:
        directory: Where it is written down, one file a rank.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def plan(self, rank: int, *, where: str, what: str) -> None:
        """Let a rank fail once.

        Args:
            rank: Which one.
            where: "place verify" is before anything of that pass was exchanged, "run verify" in front of its first
                collective but that one in which all ranks said that they can go on, "end verify" behind its last one.
            what: "MemoryError", "OutOfMemoryError", "RuntimeError", "KeyboardInterrupt", "kill", "stop" or "hang".
        """
        path = self.directory / f"rank-{rank}"
        path.with_suffix(".new").write_text(f"{where}:{what}")
        path.with_suffix(".new").rename(path)

    def commit(self, rank: int, where: str) -> None:
        """Fail, if that is planned for here."""
        path = self.directory / f"rank-{rank}"
        if not path.exists() or not (plan := path.read_text()).startswith(f"{where}:"):
            return
        path.unlink()
        what = plan.partition(":")[2]
        if what in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        elif what == "hang":
            time.sleep(3600)
        else:
            raise _ERRORS[what](_OUT_OF_MEMORY if "Memory" in what else "a fault, as the test wants it")


_ERRORS: dict[str, type[BaseException]] = {
    "MemoryError": MemoryError,
    "OutOfMemoryError": torch.OutOfMemoryError,
    "RuntimeError": RuntimeError,
    "KeyboardInterrupt": KeyboardInterrupt,
}


def make_faulty(faults: Faults, worker_class: type[Worker]) -> None:
    """Have the passes of a class of workers look for faults."""
    for name in ("propose", "verify", "observe"):
        setattr(worker_class, name, _faulty(faults, name, getattr(worker_class, name)))


def _faulty(faults: Faults, name: str, place: Callable[[Worker, Any], Callable[[], Any]]) -> Callable[..., Any]:
    def place_with_faults(self: Worker, argument: Any) -> Callable[[], Any]:
        rank = self.groups.tp.rank
        faults.commit(rank, f"place {name}")
        run = place(self, argument)

        def run_with_faults() -> Any:
            faults.commit(rank, f"run {name}")
            result = run()
            faults.commit(rank, f"end {name}")
            return result

        return run_with_faults

    return place_with_faults


class FaultyEngine:
    """An engine and what its ranks are to suffer.

    Attributes:
        engine: The engine.
        faults: To be planned.
    """

    def __init__(self, model: Path, directory: Path, **settings: Any) -> None:
        self.faults = Faults(directory)
        config = EngineConfig(**settings)
        setup = RankSetup(
            directory=model,
            dtype=torch.float32,
            device="cpu",
            config=config,
            with_draft=config.num_draft_tokens > 0,
        )
        checkpoint, ranks = start_ranks(
            setup, follower_command=[sys.executable, "-m", "tests.support.faulty_ranks", str(directory)]
        )
        leaders = type("FaultyWorker", (Worker,), {})
        make_faulty(self.faults, leaders)
        ranks.worker.__class__ = leaders
        self.engine = Engine(checkpoint, config, ranks=ranks)


@contextmanager
def open_engine(model: Path, directory: Path, **settings: Any) -> Iterator[FaultyEngine]:
    """Start an engine of several ranks on the checkpoint `model`, and close it at the end."""
    faulty = FaultyEngine(model, directory, **settings)
    try:
        yield faulty
    finally:
        faulty.engine.close()


if __name__ == "__main__":
    make_faulty(Faults(Path(sys.argv.pop(1))), Worker)
    code = main()
    sys.stderr.flush()
    os._exit(code)
