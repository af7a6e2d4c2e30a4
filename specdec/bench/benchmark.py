"""A benchmark from the first question to the server to the report."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from specdec.bench import measure
from specdec.bench.arrivals import Arrivals
from specdec.bench.load_run import End, LoadRun
from specdec.bench.measure import Objectives
from specdec.bench.prompt_writer import PromptForm, PromptWriter
from specdec.bench.report import SCHEMA_VERSION, LoadReport, Report, ServerReport, WorkloadReport
from specdec.bench.request_record import RequestRecord
from specdec.bench.reusable_prefix import count_reusable_tokens
from specdec.bench.sender import Sender
from specdec.bench.server import Server, ServerGoneError
from specdec.bench.server_counters import ServerCounters, read_counters
from specdec.bench.server_facts import ServerFacts, ask_server
from specdec.bench.workload import Blocks, PlannedRequest, Workload
from specdec.errors import ConfigError

_WARMUP_TOKENS = 64  # of a prompt whose tokens are not known


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """What a benchmark does, apart from its workload.

    Attributes:
        arrivals: When sessions start.
        objectives: What counts as good.
        model: Name of the model; None takes the first that the server names.
        prompt_form: How prompts are sent; None for the best that works.
        vocab_size: Token ids below it may be sent; None asks the server.
        sampling: What every request asks for beside its prompt and number of tokens, such as temperature.
        timeout_s: Seconds that a reply may take.
        num_warmup: Requests to send before, one after the other; each is as long as one of the workload and shares
            nothing with it. They are not in the report: what is wrong with them is seen again in the run.
        seed: Of the filler and of arrivals by chance.
        source: Where the workload is from, for the report.
        scale_length: What its lengths were divided by, for the report.
    """

    arrivals: Arrivals
    objectives: Objectives
    model: str | None = None
    prompt_form: PromptForm | None = None
    vocab_size: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    num_warmup: int = 0
    seed: int = 0
    source: str = ""
    scale_length: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """A report, and what it was made from.

    Attributes:
        report: The report.
        records: Of the requests, in the order of their ends.
        begin_s: When the run began, on the clock of the records.
    """

    report: Report
    records: tuple[RequestRecord, ...]
    begin_s: float


async def run_benchmark(
    server: Server,
    workload: Workload,
    settings: BenchSettings,
    *,
    on_facts: Callable[[ServerFacts], None],
    on_record: Callable[[RequestRecord], None],
) -> BenchResult:
    """Ask the server, warm it up, run the workload, and report.

    Cancelling the task while the workload runs ends the run and gives the report so far; so does a server that is gone.

    Args:
        server: Stays open.
        workload: What to send.
        settings: All else.
        on_facts: Told how prompts will be sent, before the first is.
        on_record: Told of every request of the workload when it has ended.

    Raises:
        ConfigError: The settings do not fit the workload or the server.
        ServerGoneError: The server could not be reached before the run began.
        SpecdecError: It answers with errors to everything.
    """
    if not workload.sessions:
        raise ConfigError("no request is left to send: raise --max-requests or --max-context")
    num_blocks = workload.num_blocks + settings.num_warmup
    records: list[RequestRecord] = []

    def keep(record: RequestRecord) -> None:
        records.append(record)
        on_record(record)

    settings.arrivals.start_times_s(workload, seed=settings.seed)  # refuses what does not fit before anything is sent
    facts = await ask_server(
        server,
        model=settings.model,
        form=settings.prompt_form,
        vocab_size=settings.vocab_size,
        has_text=workload.has_text,
    )
    on_facts(facts)
    writer = PromptWriter(facts.form, vocabulary=facts.vocabulary, num_blocks=num_blocks, seed=settings.seed)
    fields = {"model": facts.model, "stream": True, **facts.stream_fields, **settings.sampling}
    sender = Sender(server, writer, fields=fields, timeout_s=settings.timeout_s)
    await _warm_up(sender, workload, settings.num_warmup)
    counters = await read_counters(server)
    run = LoadRun(
        workload,
        settings.arrivals,
        seed=settings.seed,
        send=sender.send,
        server_fault=server.fault,
        on_record=keep,
    )
    begin_s = asyncio.get_running_loop().time()
    end = await run.run()
    try:
        counted = (await read_counters(server)).since(counters)
    except ServerGoneError:
        counted = ServerCounters({})
    report = _report(workload, settings, records, counted, end=end, run=run, server=_describe(server, facts))
    return BenchResult(report=report, records=tuple(records), begin_s=begin_s)


async def _warm_up(sender: Sender, workload: Workload, num_requests: int) -> None:
    for place, request in enumerate(islice(cycle(workload.requests), num_requests)):
        num_tokens = request.num_prompt_tokens or _WARMUP_TOKENS
        number = workload.num_blocks + place
        blocks = Blocks(block_numbers=(number,), block_tokens=num_tokens, num_tokens=num_tokens)
        planned = PlannedRequest(index=place, prompt=(blocks,), num_output_tokens=request.num_output_tokens)
        await sender.send(planned, session="warm-up", replies={}, due_s=0.0, on_record=_ignore)


def _ignore(record: RequestRecord) -> None:
    del record


def _describe(server: Server, facts: ServerFacts) -> ServerReport:
    return ServerReport(url=server.url, model=facts.model, prompt_form=facts.form)


def _report(
    workload: Workload,
    settings: BenchSettings,
    records: list[RequestRecord],
    counted: ServerCounters,
    *,
    end: End,
    run: LoadRun,
    server: ServerReport,
) -> Report:
    requests = list(workload.requests)
    num_prompt_tokens = None if workload.has_text else sum(request.num_prompt_tokens or 0 for request in requests)
    reusable_share = count_reusable_tokens(workload) / num_prompt_tokens if num_prompt_tokens else None
    arrivals = settings.arrivals
    done = measure.completed(records)
    seconds = measure.duration_s(records)
    return Report(
        schema_version=SCHEMA_VERSION,
        end=end,
        end_detail=run.fault,
        duration_s=seconds,
        num_warmup=settings.num_warmup,
        server=server,
        workload=WorkloadReport(
            kind=workload.kind,
            source=settings.source,
            num_sessions=len(workload.sessions),
            num_requests=len(requests),
            planned_prompt_tokens=num_prompt_tokens,
            planned_output_tokens=sum(request.num_output_tokens for request in requests),
            scale_length=settings.scale_length,
        ),
        load=LoadReport(
            arrivals=arrivals.kind,
            rate_per_s=arrivals.rate_per_s,
            concurrency=arrivals.concurrency,
            speed=arrivals.speed,
            max_think_time_s=arrivals.max_think_time_s,
            seed=settings.seed,
        ),
        requests=measure.count_requests(records, num_planned=len(requests), num_skipped=run.num_skipped),
        tokens=measure.count_tokens(done),
        throughput=measure.measure_throughput(done, seconds),
        latency=measure.measure_latency(done),
        goodput=measure.measure_goodput(records, settings.objectives, seconds),
        prefix=measure.measure_prefix(done, counted, reusable_share=reusable_share),
        acceptance=measure.measure_acceptance(done, counted),
        categories=measure.measure_categories(done),
    )
