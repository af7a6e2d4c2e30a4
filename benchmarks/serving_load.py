"""What serving costs beside the model: a server under 1, 8 and 32 streams at once, with and without a model.

The server runs in a process of its own, with the settings of `specdec serve`; `specdec.bench` drives it from this one
with streamed chats, a new one as soon as one has ended.

    HTTP, fast    an engine without a model: a token for every stream, round after round
    HTTP, paced   the same, 50 rounds a second
    glm-tiny      the model that comes with the package, with 3 drafts

CPU ms/token is that of the server's whole process. The last columns say how much of it is spent outside of the passes
of the model (drafting, verifying, refreshing, with sampling): of the time in which the thread that runs the rounds has
work (scheduling, detokenising, and waiting for the interpreter lock), and of the CPU of all threads (that and HTTP).

Run: python benchmarks/serving_load.py [--way glm-tiny] [--streams 32] [--json FILE]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from specdec.bench import benchmark, server
from specdec.bench.arrivals import ArrivalKind, Arrivals
from specdec.bench.measure import Objectives
from specdec.bench.prompt_writer import PromptForm
from specdec.bench.report import Report
from specdec.bench.synthetic import SyntheticLengths, make_synthetic
from specdec.engine import Engine
from specdec.models.glm.released import locate_checkpoint
from specdec.request import SpeculationStats
from specdec.result import Choice, GenerationResult, StreamDelta, Usage
from specdec.sampling.sampling_params import SamplingParams
from specdec.serving.engine_gauges import EngineGauges, read_gauges
from specdec.serving.server import Server
from specdec.serving.service import Service
from specdec.serving.settings import ServerSettings
from specdec.text.chat_template import load_chat_template
from specdec.text.detokenizer import Detokenizer
from specdec.text.tokenizer import Tokenizer, eos_token_ids

WAYS = ("HTTP, fast", "HTTP, paced", "glm-tiny")
PACE_S = 0.02
MAX_STREAMS = 32
PROMPT_TOKENS = 64
REPLY_TOKENS = {"HTTP, fast": 256, "HTTP, paced": 128, "glm-tiny": 64}
REQUESTS_PER_STREAM = {1: 16, 8: 6, 32: 4}
TARGET = 0.15  # of the whole, outside of the model, at 32 streams
TEXT = "</think>The quick brown fox jumps over the lazy dog, and then it sleeps under a tree until the evening comes. "


class ScriptedEngine:
    """Gives every request the same text, a token a round; what `specdec.serving.served_engine` asks of an engine."""

    def __init__(self, *, pace_s: float) -> None:
        directory = locate_checkpoint("glm-tiny")
        self.tokenizer = Tokenizer(directory / "tokenizer.json")
        self.chat_template = load_chat_template(directory)
        self.sampling_defaults: dict[str, Any] = {}
        self.eos_ids = eos_token_ids(directory, ())
        self.max_model_len = 4096
        self.prefill_states: dict[str, str] = {}
        self.running: list[ScriptedSubmission] = []
        self._pace_s = pace_s
        self._next_s = 0.0
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=False)
        self.tokens = [(token_id, detokenizer.push(token_id)) for token_id in self.tokenizer.encode(TEXT)]

    def check(self) -> None:
        """It is always well."""

    def step(self) -> bool:
        """Give every request its next token, after the rest of the time of a round."""
        if not self.running:
            return False
        if self._pace_s:
            time.sleep(max(0.0, self._next_s - time.monotonic()))
            self._next_s = time.monotonic() + self._pace_s
        running = list(self.running)
        for submission in running:
            submission.advance()
        ended = {id(submission) for submission in running if submission.num_left == 0}
        self.running = [submission for submission in self.running if id(submission) not in ended]
        return True

    def prepare(
        self, prompt: Sequence[int], params: SamplingParams, *, on_delta: Callable[[StreamDelta], None], **_: Any
    ) -> "ScriptedSubmission":
        """Make ready to answer."""
        assert params.max_tokens is not None
        return ScriptedSubmission(self, num_prompt=len(prompt), num_tokens=params.max_tokens, on_delta=on_delta)

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Tokenise a prompt."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render and tokenise a conversation."""
        assert self.chat_template is not None
        return self.tokenizer.encode(self.chat_template.render(messages, tools=tools, variables=variables))


class ScriptedSubmission:
    """One request to a `ScriptedEngine`."""

    def __init__(
        self, engine: ScriptedEngine, *, num_prompt: int, num_tokens: int, on_delta: Callable[[StreamDelta], None]
    ) -> None:
        self._engine = engine
        self._num_prompt = num_prompt
        self._num_tokens = num_tokens
        self._on_delta = on_delta
        self._tokens = islice(cycle(engine.tokens), num_tokens)
        self.num_left = num_tokens
        self.admitted_at: float | None = None
        self.num_cached_tokens = 0

    def start(self) -> None:
        """Take part from the next round on."""
        self.admitted_at = time.monotonic()
        self._engine.running.append(self)

    def cancel(self) -> None:
        """No client of the benchmark leaves."""

    def advance(self) -> None:
        """Give the next token."""
        token_id, text = next(self._tokens)
        self.num_left -= 1
        reason = None if self.num_left else "length"
        self._on_delta(StreamDelta(index=0, text=text, token_ids=(token_id,), logprobs=None, finish_reason=reason))

    def result(self) -> GenerationResult:
        """Give what the usage is made of."""
        token_ids = tuple(token_id for token_id, _ in islice(cycle(self._engine.tokens), self._num_tokens))
        choice = Choice(
            index=0,
            text="",
            token_ids=token_ids,
            finish_reason="length",
            logprobs=None,
            speculation=SpeculationStats(),
        )
        usage = Usage(
            num_prompt_tokens=self._num_prompt,
            num_completion_tokens=self._num_tokens,
            num_cached_tokens=0,
            num_preemptions=0,
        )
        return GenerationResult(prompt_token_ids=(), choices=(choice,), usage=usage, prompt_logprobs=None)


class Meter:
    """Adds up, from outside, what the thread that runs the rounds spends where.

    It has work from the beginning of a round to the beginning of the next, unless there was nothing to run.
    """

    def __init__(self, engine: Engine | ScriptedEngine) -> None:
        self._busy_s = self._model_s = self._model_cpu_s = 0.0
        self._round_began_s: float | None = None
        self._step = engine.step
        engine.step = self._round  # type: ignore[method-assign]
        if isinstance(engine, Engine):
            worker = engine.core.ranks.worker
            self._run_pass = worker.run
            worker.run = self._pass  # type: ignore[method-assign]

    def read(self) -> dict[str, float]:
        """Give the seconds so far."""
        rounds = next(thread for thread in threading.enumerate() if thread.name == "specdec-rounds")
        assert rounds.ident is not None
        return {
            "busy": self._busy_s,
            "model": self._model_s,
            "model_cpu": self._model_cpu_s,
            "rounds_cpu": time.clock_gettime(time.pthread_getcpuclockid(rounds.ident)),
            "loop_cpu": time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident)),
            "process_cpu": time.process_time(),
        }

    def _round(self) -> bool:
        now = time.perf_counter()
        if self._round_began_s is not None:
            self._busy_s += now - self._round_began_s
        has_run = self._step()
        self._round_began_s = now if has_run else None
        return has_run

    def _pass(self, *arguments: Any, **named: Any) -> Any:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        try:
            return self._run_pass(*arguments, **named)
        finally:
            self._model_s += time.perf_counter() - began_s
            self._model_cpu_s += time.thread_time() - began_cpu_s


def serve(pipe: Connection, way: str) -> None:
    """Serve until SIGTERM; gives a reading of the meter for everything that comes through the pipe."""
    torch.set_num_threads(1)
    if way == "glm-tiny":
        engine = Engine.from_pretrained("glm-tiny", max_num_requests=MAX_STREAMS, num_draft_tokens=3)
        gauges = partial(read_gauges, engine)
    else:
        engine = ScriptedEngine(pace_s=PACE_S if way == "HTTP, paced" else 0.0)
        gauges = EngineGauges
    meter = Meter(engine)
    service = Service(engine, ServerSettings(model_names=("tiny",)), max_running=MAX_STREAMS)
    serving = Server(service, gauges, host="127.0.0.1", port=0)

    def answer() -> None:
        while pipe.recv() is not None:
            pipe.send(meter.read())

    pipe.send(serving.url)
    threading.Thread(target=answer, daemon=True).start()
    serving.run()


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One row: what the client saw, and what the server spent on it."""

    way: str
    streams: int
    report: Report
    server_s: Mapping[str, float]
    client_cpu_s: float

    def figures(self) -> dict[str, float | None]:
        """Give the numbers of the row."""
        report, spent = self.report, self.server_s
        assert report.latency.ttft_ms is not None
        assert report.latency.e2e_ms is not None
        has_model = spent["model"] > 0
        return {
            "requests_per_s": report.throughput.requests_per_s,
            "tokens_per_s": report.throughput.output_tokens_per_s,
            "ttft_p50_ms": report.latency.ttft_ms.p50,
            "ttft_p99_ms": report.latency.ttft_ms.p99,
            "e2e_p50_ms": report.latency.e2e_ms.p50,
            "e2e_p99_ms": report.latency.e2e_ms.p99,
            "server_cpu_ms_per_token": spent["process_cpu"] * 1e3 / report.tokens.output,
            "client_cpu_share": self.client_cpu_s / report.duration_s,
            "outside_of_rounds_time": 1 - spent["model"] / spent["busy"] if has_model else None,
            "outside_of_rounds_cpu": 1 - spent["model_cpu"] / spent["rounds_cpu"] if has_model else None,
            "outside_of_cpu": 1 - spent["model_cpu"] / spent["process_cpu"] if has_model else None,
        }


async def drive(url: str, pipe: Connection, way: str, *, streams: int, num_requests: int, seed: int) -> Load:
    """Send requests and measure, without what the client asks before the first."""
    lengths = SyntheticLengths(
        num_requests=num_requests, input_tokens=PROMPT_TOKENS, output_tokens=REPLY_TOKENS[way]
    )
    settings = benchmark.BenchSettings(
        arrivals=Arrivals(kind=ArrivalKind.CLOSED, concurrency=streams),
        objectives=Objectives(),
        prompt_form=PromptForm.CHAT,
        sampling={"temperature": 0, "ignore_eos": True},
        seed=seed,  # no prompt is cached
    )
    began: dict[str, float] = {}

    def read() -> dict[str, float]:
        pipe.send("read")
        return {**pipe.recv(), "client_cpu": time.process_time()}

    client = server.Server(url)
    try:
        result = await benchmark.run_benchmark(
            client,
            make_synthetic(lengths, seed=seed),
            settings,
            on_facts=lambda _facts: began.update(read()),
            on_record=lambda _record: None,
        )
    finally:
        await client.close()
    spent = {name: value - began[name] for name, value in read().items()}
    if result.report.requests.completed != num_requests:
        raise RuntimeError(f"{way}: requests failed: {result.report.requests.errors}")
    return Load(way=way, streams=streams, report=result.report, client_cpu_s=spent.pop("client_cpu"), server_s=spent)


def measure(way: str, streams: Sequence[int]) -> list[Load]:
    """Measure one way with a fresh server, after a run that does not count."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=serve, args=(child, way), daemon=True)
    process.start()
    try:
        url = pipe.recv()
        drive_it = partial(drive, url, pipe, way)
        asyncio.run(drive_it(streams=4, num_requests=8, seed=0))
        return [
            asyncio.run(drive_it(streams=number, num_requests=number * REQUESTS_PER_STREAM.get(number, 4), seed=number))
            for number in streams
        ]
    finally:
        process.terminate()
        process.join(30)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", choices=WAYS, help="measure this one; may be repeated")
    parser.add_argument("--streams", type=int, nargs="+", default=list(REQUESTS_PER_STREAM), help="at once")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    loads = [load for way in arguments.way or WAYS for load in measure(way, arguments.streams)]
    results = [{"way": load.way, "streams": load.streams, **load.figures()} for load in loads]
    table = Table(title=f"chats in streams, load average {os.getloadavg()[0]:.1f}")
    columns = ("engine", "streams", "requests/s", "tokens/s", "TTFT p50", "p99 ms", "whole p50", "p99 ms")
    for column in (*columns, "CPU ms/token", "client CPU", "outside: time", "CPU"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for load in loads:
        figures = load.figures()
        latencies = [f"{figures[name]:.1f}" for name in ("ttft_p50_ms", "ttft_p99_ms", "e2e_p50_ms", "e2e_p99_ms")]
        shares = [figures[name] for name in ("client_cpu_share", "outside_of_rounds_time", "outside_of_cpu")]
        table.add_row(
            load.way,
            str(load.streams),
            f"{figures['requests_per_s']:.1f}",
            f"{figures['tokens_per_s']:.0f}",
            *latencies,
            f"{figures['server_cpu_ms_per_token']:.3f}",
            *("" if share is None else f"{share:.1%}" for share in shares),
        )
    Console(width=140).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
