"""`specdec top` against servers behind sockets."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from rich.console import Console

from specdec.cli.top_tables import server_tables
from specdec.handoff.prefill_link import LinkCounts, LinkState
from specdec.prefill.outgoing import OutgoingCounts, PathCounts
from specdec.request import SpeculationStats
from specdec.serving.engine_gauges import EngineGauges
from specdec.serving.handoff_gauges import DoorGauges, IntakeGauges, PrefillGauges
from specdec.top.activity import Activity, Percentiles, Window
from specdec.top.sample import Pages, PrefillStatus, ServerSample, ServerState
from tests.specdec.cli.conftest import Run
from tests.specdec.cli.test_main import COMMAND
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import running_server
from tests.support.scripted_server import serve_scripted
from tests.support.scripted_status import StatusServer, metrics_text

SOON = ("--interval", 0.01)

ACTIVITY = Activity(
    ended={"stop": 1200, "length": 3, "error": 0},
    prompt_tokens=1_234_567,
    output_tokens=45_678,
    ttft_ms=Percentiles(p50=12.34, p90=99.9, p99=1234.5),
    itl_ms=None,
    queue_ms=Percentiles(p50=0.5, p90=1.0, p99=2.0),
    acceptance_length=2.875,
    acceptance_by_position=[0.9, 0.6, 0.375],
    prefix_hit_rate=0.625,
    num_preemptions=4,
    prefill_prompts={"received": 7, "lost": 0},
    transfers={},
    transfer_bytes=None,
)
WINDOW = Window(
    duration_s=10.2,
    ended_per_s=1.25,
    prompt_tokens_per_s=3000.0,
    output_tokens_per_s=250.5,
    transfer_bytes_per_s=None,
    activity=ACTIVITY,
)
SAMPLE = ServerSample(
    url="http://decode-0:8000",
    state=ServerState.READY,
    model="glm-tiny",
    num_running=5,
    num_waiting=2,
    pages=Pages(used=100, cached=50, free=50, quarantined=3),
    prefills=[PrefillStatus(address="10.0.0.7:7100", state="ready", queued_tokens=1234)],
    window=WINDOW,
    since_start=ACTIVITY,
)
SENDING = ServerSample(
    url="http://prefill-0:8000",
    state=ServerState.READY,
    num_groups=2,
    num_transfers=1,
    window=msgspec.structs.replace(
        WINDOW,
        transfer_bytes_per_s=1_500_000.0,
        activity=msgspec.structs.replace(ACTIVITY, transfers={"done": 3}, transfer_bytes=15_000_000),
    ),
    since_start=msgspec.structs.replace(ACTIVITY, transfers={"done": 9}, transfer_bytes=2_000_000_000),
)
GONE = ServerSample(url="http://decode-1:8000", state=ServerState.GONE, detail="connection \x1b[2J refused [red]")


def shown(*samples: ServerSample, width: int = 100) -> list[str]:
    """The lines of a view, with single blanks."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(server_tables(samples))
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_one_server_is_shown_in_full() -> None:
    lines = shown(SAMPLE)
    for line in (
        "http://decode-0:8000 glm-tiny ready",
        "choices 5 running, 2 waiting",
        "prefill 10.0.0.7:7100 ready 1,234 tokens queued",
        "KV pages 100 used, 50 cached, 50 free, 3 quarantined",
        "█" * 30 + "▒" * 15 + "░" * 15,
        "last 10 s since start",
        "choices ended 1.2/s 1,203",
        "prompt tokens 3,000/s 1,234,567",
        "output tokens 250/s 45,678",
        "ended by reason" + " 1,200 stop, 3 length" * 2,
        "TTFT p50 p90 p99, ms" + " 12.3 99.9 1,234" * 2,
        "ITL p50 p90 p99, ms - -",
        "queue p50 p90 p99, ms" + " 0.5 1.0 2.0" * 2,
        "acceptance length 2.88 2.88",
        "acceptance per position" + " 0.90 0.60 0.38" * 2,
        "prefix hit rate 62.5% 62.5%",
        "preemptions 4 4",
        "prompts of prefills 7 received 7 received",
    ):
        assert line in lines


def test_a_server_of_decode_groups_shows_what_it_sends() -> None:
    lines = shown(SENDING)
    assert "hand-off 2 decode groups, 1 transfers running" in lines
    assert "transfers 3 done 9 done" in lines
    assert "bytes sent 1.5 MB/s 2.0 GB" in lines
    assert "prefill-0:8000 - - 3,000 250 12.3 1,234 - 2.88 62% - 1.5 MB" in shown(SENDING, GONE)


def test_what_little_is_used_is_seen() -> None:
    sample = ServerSample(
        url="http://a", state=ServerState.READY, pages=Pages(used=1, cached=0, free=9999, quarantined=0)
    )
    assert "█" + "░" * 59 in shown(sample)


def test_several_servers_have_a_row_each() -> None:
    lines = shown(SAMPLE, GONE)
    assert "decode-0:8000 5 2 3,000 250 12.3 1,234 - 2.88 62% 50%" in lines
    assert "decode-1:8000" + " -" * 9 in lines
    assert "decode-1:8000 gone: connection ?[2J refused [red]" in lines
    assert "rates, latencies in ms and shares of the last 10 s" in lines


def test_a_row_fits_into_80_columns() -> None:
    lines = shown(SENDING, SAMPLE, width=80)
    assert "prefill-0:8000 - - 3,000 250 12.3 1,234 - 2.88 62% - 1.5 MB" in lines
    assert "decode-0:8000 5 2 3,000 250 12.3 1,234 - 2.88 62% 50% -" in lines


def test_restarts_are_told() -> None:
    sample = ServerSample(url="http://a", state=ServerState.NOT_READY, detail="it drains", num_restarts=2)
    assert "http://a not ready: it drains started again 2 times" in shown(sample)


@pytest.mark.parametrize("options", [(), ("--once",)])
def test_a_view_without_a_terminal_is_printed_once(run: Run, options: tuple[str, ...]) -> None:
    server = StatusServer(metrics=[metrics_text({"generation_tokens_total": count}) for count in (100, 160)])
    with serve_scripted(server) as url:
        outcome = run("top", url, *SOON, *options)
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert f"{url}  tiny  ready" in outcome.out
    assert "160" in outcome.out
    assert "\x1b" not in outcome.out
    assert server.asked.count("/metrics") == 2


def test_a_server_that_is_gone_is_an_error_behind_the_view(run: Run) -> None:
    with serve_scripted(StatusServer()) as url:
        outcome = run("top", url, "http://127.0.0.1:1", *SOON)
    assert outcome.exit_code == 1
    assert "127.0.0.1:1  gone: " in outcome.out
    assert outcome.err.startswith("specdec: no answer from http://127.0.0.1:1 (")
    assert outcome.err.endswith("): start it, or correct the URL\n")


def test_a_served_engine_tells_every_figure(run: Run) -> None:
    """What `specdec serve` counts has the names that are read here."""
    gauges = EngineGauges(
        num_running=3,
        num_waiting=2,
        num_pages=10,
        num_free_pages=5,
        num_cached_pages=1,
        num_quarantined_pages=2,
        num_preemptions=7,
        speculation=SpeculationStats(num_drafts=4, num_draft_tokens=8, accepted_per_position=(3, 1)),
        intake=IntakeGauges(
            prefills=(
                PrefillGauges(
                    address="10.0.0.7:7100", state=LinkState.READY, num_queued_tokens=70, counts=LinkCounts()
                ),
            ),
            prompts_by_outcome={"received": 6, "lost": 1},
            wait_s=1.5,
        ),
        door=DoorGauges(
            num_groups=2,
            num_running=1,
            counts=OutgoingCounts(num_started=5, num_done=4, paths={(0, 1, "target latents"): PathCounts(num_bytes=9)}),
        ),
    )
    with running_server(FakeEngine(), read_gauges=lambda: gauges) as running, running.client() as client:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8}
        assert client.post("/v1/completions", json=body).status_code == 200
        outcome = run("top", running.url, "--json", *SOON)
    assert outcome.exit_code == 0, outcome.err
    (server,) = json.loads(outcome.out)["servers"]
    assert (server["url"], server["state"], server["model"]) == (running.url, "ready", "tiny")
    assert (server["num_running"], server["num_waiting"]) == (3, 2)
    assert server["pages"] == {"used": 4, "cached": 1, "free": 5, "quarantined": 2}
    told = server["since_start"]
    assert told["ended"] == {"stop": 1}
    assert (told["prompt_tokens"], told["output_tokens"], told["num_preemptions"]) == (3, 8, 7)
    assert (told["acceptance_length"], told["acceptance_by_position"]) == (2.0, [0.75, 0.25])
    assert told["prefix_hit_rate"] == 0.0
    assert told["prefill_prompts"] == {"received": 6, "lost": 1}
    assert (told["transfers"], told["transfer_bytes"]) == ({"started": 5, "done": 4, "failed": 0}, 9)
    assert server["prefills"] == [{"address": "10.0.0.7:7100", "state": "ready", "queued_tokens": 70}]
    assert (server["num_groups"], server["num_transfers"]) == (2, 1)
    assert all(told[name]["p99"] > 0 for name in ("ttft_ms", "itl_ms", "queue_ms"))
    assert server["window"]["output_tokens_per_s"] == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("localhost:8000",), "the URL of a server must begin with http:// or https://, got 'localhost:8000'"),
        (("--interval", 0), "--interval must be above 0 and at most 3600 seconds, got 0"),
        (("--interval", "nan"), "--interval must be above 0 and at most 3600 seconds, got nan"),
        (("--window", 1e9), "--window must be above 0 and at most 3600 seconds, got 1e+09"),
    ],
)
def test_what_cannot_be_watched_is_said(run: Run, options: tuple[object, ...], message: str) -> None:
    outcome = run("top", *options)
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert message in outcome.err


def test_a_missing_library_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    outcome = run("top")
    assert outcome.exit_code == 2
    assert "specdec top needs httpx2: install specdec with the extra `serve`" in outcome.err


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._here, there = pty.openpty()
        command = [sys.executable, "-c", COMMAND, *arguments]
        self.process = subprocess.Popen(command, stdin=there, stdout=there, stderr=subprocess.PIPE, text=True)
        os.close(there)
        self.screen = ""
        threading.Thread(target=self._read).start()

    def _read(self) -> None:
        try:
            while data := os.read(self._here, 65536):
                self.screen += data.decode(errors="replace")
        except OSError:  # how the end of a terminal reads
            os.close(self._here)

    def wait_for(self, text: str) -> None:
        """Wait until it was written behind what was waited for before."""
        deadline = time.monotonic() + 60
        while text not in self.screen:
            assert time.monotonic() < deadline, f"never shown: {text}"
            time.sleep(0.01)
        self.screen = self.screen.partition(text)[2]


def test_a_terminal_shows_a_server_that_goes_and_comes_back_until_ctrl_c() -> None:
    server = StatusServer()
    with serve_scripted(server) as url:
        terminal = Terminal("top", url, "--interval", "0.05")
        terminal.wait_for("ready")
        server.is_down = True
        terminal.wait_for("gone")
        server.is_down = False
        terminal.wait_for("ready")
        terminal.wait_for("asked every 0.05 s; Ctrl-C ends")
        terminal.process.send_signal(signal.SIGINT)
        _, err = terminal.process.communicate(timeout=60)
    assert (terminal.process.returncode, err) == (130, "")
    terminal.wait_for("\x1b[?1049l")  # the terminal has its own screen again
