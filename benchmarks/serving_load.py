"""What serving costs beside the model: a server under 1, 8 and 32 streams at once, with and without a model.

The server runs in a process of its own, with the settings of `specdec serve`; `specdec.bench` drives it from this one
with streamed chats, the next one of a stream as soon as one has ended.

    HTTP, fast    an engine without a model: a token for every stream, round after round
    HTTP, paced   the same, 50 rounds a second
    glm-tiny      the model that comes with the package, 3 drafts

CPU is that of the server's process, by 1,000 tokens: of all its threads, and of those that do not run the rounds, which
is HTTP. The client's is of its process, by second: it tells whether the client was the one that was busy. "Outside" is
what is not spent in the passes of the model (drafting, verifying, refreshing, each with its sampling): a share of the
time in which the thread that runs the rounds has work, which leaves scheduling and detokenising; and a share of the CPU
of all threads, which is all that serving costs. "Waits" is the share of the passes in which they do not compute: other
threads have the interpreter lock, or other processes the cores.

Run: python benchmarks/serving_load.py [--way glm-tiny] [--streams 1 8 32] [--json FILE]
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

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps under a tree until the evening comes. "
PROMPT_TOKENS = 64
SHARES = ("outside_of_time", "outside_of_cpu", "waits_of_passes")
TARGET = 0.15  # most of the CPU outside of the model, at 32 streams


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """What is served, and how much of it is asked for.

    Attributes:
        pace_s: Seconds of a round without a model; None serves glm-tiny.
        reply_tokens: Tokens of each reply.
        least_requests: Requests of a run, or
        requests_per_stream: as many for each stream if that is more.
    """

    pace_s: float | None
    reply_tokens: int
    least_requests: int
    requests_per_stream: int

    def num_requests(self, streams: int) -> int:
        """Requests of a run with as many streams at once."""
        return max(self.least_requests, self.requests_per_stream * streams)


WAYS = {
    "HTTP, fast": Way(pace_s=0.0, reply_tokens=256, least_requests=200, requests_per_stream=20),
    "HTTP, paced": Way(pace_s=0.02, reply_tokens=128, least_requests=8, requests_per_stream=6),
    "glm-tiny": Way(pace_s=None, reply_tokens=64, least_requests=8, requests_per_stream=4),
}


class ScriptedEngine:
    """Gives every request the same text, a token a round; what `specdec.serving.served_engine` asks of an engine."""

    def __init__(self, *, pace_s: float) -> None:
        directory = locate_checkpoint("glm-tiny")
        self._tokenizer = Tokenizer(directory / "tokenizer.json")
        self.tokenizer: Tokenizer | None = self._tokenizer
        self.chat_template = load_chat_template(directory)
        self.sampling_defaults: dict[str, Any] = {}
        self.eos_ids = eos_token_ids(directory, ())
        self.max_model_len = 4096
        self.prefill_states: dict[str, str] = {}
        self.running: list[ScriptedSubmission] = []
        self._pace_s = pace_s
        self._next_s = 0.0
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=False)
        self.tokens = [(token_id, detokenizer.push(token_id)) for token_id in self._tokenizer.encode(TEXT)]

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
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        on_delta: Callable[[StreamDelta], None],
        **_: Any,
    ) -> "ScriptedSubmission":
        """Make ready to answer."""
        assert params is not None
        assert params.max_tokens is not None
        return ScriptedSubmission(self, num_prompt=len(prompt), num_tokens=params.max_tokens, on_delta=on_delta)

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Tokenise a prompt."""
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render and tokenise a conversation."""
        assert self.chat_template is not None
        return self._tokenizer.encode(self.chat_template.render(messages, tools=tools, variables=variables))


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
        stats = SpeculationStats()
        choice = Choice(index=0, text="", token_ids=token_ids, finish_reason="length", logprobs=None, speculation=stats)
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


def serve(pipe: Connection, way: Way, max_streams: int) -> None:
    """Serve until SIGTERM; gives a reading of the meter for everything that comes through the pipe."""
    torch.set_num_threads(1)
    engine: Engine | ScriptedEngine
    gauges: Callable[[], EngineGauges] = EngineGauges
    if way.pace_s is None:
        engine = Engine.from_pretrained("glm-tiny", max_num_requests=max_streams, num_draft_tokens=3)
        gauges = partial(read_gauges, engine)
    else:
        engine = ScriptedEngine(pace_s=way.pace_s)
    meter = Meter(engine)
    service = Service(engine, ServerSettings(model_names=("tiny",)), max_running=max_streams)
    serving = Server(service, gauges, host="127.0.0.1", port=0)

    def answer() -> None:
        while pipe.recv():
            pipe.send(meter.read())

    pipe.send(serving.url)
    threading.Thread(target=answer, daemon=True).start()
    serving.run()


async def drive(
    url: str, pipe: Connection, way: Way, *, streams: int, num_requests: int, seed: int
) -> dict[str, float | None]:
    """Send requests and give what the client saw and what the server spent, without the questions before the first."""
    lengths = SyntheticLengths(num_requests=num_requests, input_tokens=PROMPT_TOKENS, output_tokens=way.reply_tokens)
    settings = benchmark.BenchSettings(
        arrivals=Arrivals(kind=ArrivalKind.CLOSED, concurrency=streams),
        objectives=Objectives(),
        prompt_form=PromptForm.CHAT,
        sampling={"temperature": 0, "ignore_eos": True},
        seed=seed,  # other prompts for every run: none is cached
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
    report = result.report
    if report.requests.completed != num_requests:
        raise RuntimeError(f"requests failed: {report.requests.errors}")
    assert report.latency.ttft_ms is not None
    assert report.latency.e2e_ms is not None
    num_tokens = report.tokens.output
    return {
        "streams": streams,
        "requests_per_s": report.throughput.requests_per_s,
        "tokens_per_s": report.throughput.output_tokens_per_s,
        "ttft_p50_ms": report.latency.ttft_ms.p50,
        "ttft_p99_ms": report.latency.ttft_ms.p99,
        "e2e_p50_ms": report.latency.e2e_ms.p50,
        "e2e_p99_ms": report.latency.e2e_ms.p99,
        "cpu_s_per_1000_tokens": spent["process_cpu"] * 1000 / num_tokens,
        "http_cpu_s_per_1000_tokens": (spent["process_cpu"] - spent["rounds_cpu"]) * 1000 / num_tokens,
        "client_cpu": spent["client_cpu"] / report.duration_s,
        "outside_of_time": 1 - spent["model"] / spent["busy"] if way.pace_s is None else None,
        "outside_of_cpu": 1 - spent["model_cpu"] / spent["process_cpu"] if way.pace_s is None else None,
        "waits_of_passes": 1 - spent["model_cpu"] / spent["model"] if way.pace_s is None else None,
    }


def measure(way: Way, streams: Sequence[int]) -> list[dict[str, float | None]]:
    """Measure one way with a fresh server, after a run that does not count."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=serve, args=(child, way, max(streams)), daemon=True)
    process.start()
    try:
        run = partial(drive, pipe.recv(), pipe, way)
        asyncio.run(run(streams=4, num_requests=8, seed=0))
        return [
            asyncio.run(run(streams=number, num_requests=way.num_requests(number), seed=number)) for number in streams
        ]
    finally:
        process.terminate()
        process.join(30)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", choices=list(WAYS), help="measure this one; may be repeated")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="how many at once")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    results = {name: measure(WAYS[name], arguments.streams) for name in arguments.way or WAYS}
    load = os.getloadavg()[0]
    table = Table(title=f"load average {load:.1f}; target outside of the model: {TARGET:.0%} of the CPU at 32 streams")
    columns = ("requests/s", "tokens/s", "TTFT p50", "p99 ms", "whole p50", "p99 ms", "CPU s", "HTTP", "client")
    for column in ("", "streams", *columns, "outside: time", "CPU", "waits"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, rows in results.items():
        for row in rows:
            table.add_row(
                name,
                f"{row['streams']}",
                f"{row['requests_per_s']:.1f}",
                *(f"{row[n]:.0f}" for n in ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "e2e_p50_ms", "e2e_p99_ms")),
                *(f"{row[n]:.3f}" for n in ("cpu_s_per_1000_tokens", "http_cpu_s_per_1000_tokens")),
                f"{row['client_cpu']:.0%}",
                *("" if row[n] is None else f"{row[n]:.1%}" for n in SHARES),
            )
    Console(width=150).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"load_average": load, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
