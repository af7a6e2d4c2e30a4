"""A prefill and a decode group in processes of their own: the text, and what is left when one of them stops or dies.

Tags such as B47 are explained in `tests/INVARIANTS.md`.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from specdec.engine import Engine
from specdec.errors import SpecdecError, TransferError
from specdec.handoff.prefill_link import LinkState
from specdec.sampling.sampling_params import SamplingParams
from tests.support.prefill_process import prefill_process
from tests.support.transfer_peer import open_or_skip

pytestmark = pytest.mark.xdist_group("handoff_processes")

SETTINGS = {"max_model_len": 1024, "page_size": 16, "prefix_cache": False}
FLAGS = ("--max-model-len", "1024", "--page-size", "16", "--prefill-chunk-tokens", "16", "--no-prefix-cache")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHORT, LONG = list(range(5, 70)), [5 + i % 200 for i in range(900)]
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def expected() -> dict[int, tuple[int, ...]]:
    """What an engine that computes its prompts itself gives, by length of the prompt."""
    with Engine.from_pretrained("glm-tiny", **SETTINGS) as engine:
        return {len(prompt): answer(engine, prompt) for prompt in (SHORT, LONG)}


def answer(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    return engine.generate(prompt, GREEDY)[0].choices[0].token_ids


def decode(address: str, *, transport: str = "local") -> Engine:
    return Engine.from_pretrained("glm-tiny", prefill=[address], transport=transport, peer_timeout_s=1.5, **SETTINGS)


@pytest.fixture(params=["local", *(pytest.param(name, marks=pytest.mark.full) for name in ("mooncake", "nixl"))])
def transport(request: pytest.FixtureRequest) -> str:
    """One that both sides can open here."""
    name: str = request.param
    open_or_skip(name).close()
    return name


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def all_pages_are_free(engine: Engine) -> bool:
    free, total = engine.kv_pages()
    return free == total


class Asked:
    """A prompt that a thread waits for."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        self.error: SpecdecError | None = None
        self._engine, self._prompt = engine, prompt
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: engine.intake is not None and engine.intake.links[0].num_tokens > 0)

    def _run(self) -> None:
        try:
            answer(self._engine, self._prompt)
        except SpecdecError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def test_layer_split_prefill_serves_and_ends_in_order(expected: dict[int, tuple[int, ...]], transport: str) -> None:
    with prefill_process(*FLAGS, "--cp-size", "2", "--transport", transport) as (process, address):
        with decode(address, transport=transport) as engine:
            assert answer(engine, SHORT) == expected[len(SHORT)]
            assert all_pages_are_free(engine)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_faults_of_a_prefill_fail_a_request_and_nothing_else(
    expected: dict[int, tuple[int, ...]], transport: str
) -> None:
    """B47, B49, B52: stopped, killed in the middle of a prompt, started again at the same address."""
    flags = *FLAGS, "--transport", transport
    with prefill_process(*flags) as (process, address):
        engine = decode(address, transport=transport)
        assert engine.intake is not None
        link = engine.intake.links[0]
        assert answer(engine, LONG) == expected[len(LONG)]

        asked = Asked(engine, LONG)
        process.send_signal(signal.SIGSTOP)
        asked.join()
        assert isinstance(asked.error, TransferError)
        assert "no sign of life" in str(asked.error)
        assert not all_pages_are_free(engine)  # it may go on at any moment, and write
        with pytest.raises(TransferError, match="silent"):
            answer(engine, SHORT)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: all_pages_are_free(engine))
        assert answer(engine, SHORT) == expected[len(SHORT)]

        asked = Asked(engine, LONG)
        process.kill()
        asked.join()
        assert isinstance(asked.error, TransferError)
        assert "was lost" in str(asked.error)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    with prefill_process(*flags, listen=address):
        wait_until(lambda: link.state is LinkState.READY)
        assert answer(engine, LONG) == expected[len(LONG)]
        wait_until(lambda: all_pages_are_free(engine))
        assert engine.intake.counts.num_held_pages == 0
        engine.close()


def test_prefill_outlives_a_decode_group_that_dies(expected: dict[int, tuple[int, ...]], transport: str) -> None:
    program = (
        "import sys\nfrom specdec import Engine, SamplingParams\n"
        f"engine = Engine.from_pretrained('glm-tiny', prefill=sys.argv[1:], transport={transport!r}, **{SETTINGS!r})\n"
        f"engine.stream({LONG!r}, SamplingParams(max_tokens=4))\nprint('asked', flush=True)\n"
        "while True:\n    engine.step()\n"
    )
    with prefill_process(*FLAGS, "--transport", transport) as (process, address):
        with subprocess.Popen([sys.executable, "-c", program, address], stdout=subprocess.PIPE, text=True) as group:
            assert group.stdout is not None
            assert group.stdout.readline() == "asked\n"
            time.sleep(0.3)
            group.kill()
        with decode(address, transport=transport) as engine:
            assert answer(engine, SHORT) == expected[len(SHORT)]
        assert process.poll() is None
