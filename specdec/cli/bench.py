"""`specdec bench`: measure an OpenAI-compatible server under the load of a trace."""

import asyncio
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specdec.cli.bench_options import (
    ARRIVAL_OPTIONS,
    LIMIT_OPTIONS,
    OBJECTIVE_OPTIONS,
    REQUEST_OPTIONS,
    SYNTHETIC_OPTIONS,
)
from specdec.cli.bench_tables import report_tables
from specdec.cli.option_table import takes_options
from specdec.errors import ConfigError, SpecdecError

if TYPE_CHECKING:
    from specdec.bench.benchmark import BenchResult, BenchSettings
    from specdec.bench.request_record import RequestRecord
    from specdec.bench.server_facts import ServerFacts
    from specdec.bench.workload import Workload

_SERVER = "Server"
_REPORT = "Report"


@takes_options(
    synthetic=(SYNTHETIC_OPTIONS,),
    limits=(LIMIT_OPTIONS,),
    arrivals=(ARRIVAL_OPTIONS,),
    requests=(REQUEST_OPTIONS,),
    objectives=(OBJECTIVE_OPTIONS,),
)
def bench(
    *,
    workload: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE.jsonl]",
            help="Mooncake trace, agent sessions, TraceLab replay, or questions; its first line tells which.",
        ),
    ] = None,
    url: Annotated[str, typer.Option(rich_help_panel=_SERVER, help="Its root.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(rich_help_panel=_SERVER, help="Name of the model (default: the first it names).")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(rich_help_panel=_SERVER, envvar="OPENAI_API_KEY", show_envvar=True, help="Bearer token."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_REPORT, help="Print one JSON object instead of tables.")
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=_REPORT, help="Draw latencies and load over time: .png or .svg."),
    ] = None,
    save_requests: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", rich_help_panel=_REPORT, help="Write a line for each request."),
    ] = None,
    synthetic: Mapping[str, Any],
    limits: Mapping[str, Any],
    arrivals: Mapping[str, Any],
    requests: Mapping[str, Any],
    objectives: Mapping[str, Any],
) -> None:
    """Replay a workload against a server and report latencies, throughput, goodput, acceptance and prefix hits.

    Prompts are rebuilt from the block ids of a trace, so that they share what they shared when it was recorded.
    Requests that fail are counted. Ctrl-C ends the run and reports what there is.
    """
    _check_extra(has_figure=figure is not None)
    for path in (figure, save_requests):
        if path is not None and not path.parent.is_dir():  # not to be found out after the run
            raise ConfigError(f"{path}: cannot be written: there is no directory {path.parent}")
    from specdec.bench.load_run import End
    from specdec.bench.record_file import write_records
    from specdec.bench.report import as_json as encode
    from specdec.cli.bench_settings import make_settings, make_workload

    if figure is not None:
        from specdec.bench.figure import check_figure_path, draw_figure

        check_figure_path(figure)
    planned = make_workload(workload, synthetic, limits, seed=requests.get("seed", 0))
    settings = make_settings(
        planned,
        source="" if workload is None else str(workload),
        model=model,
        arrivals=arrivals,
        requests=requests,
        objectives=objectives,
        scale_length=limits.get("scale_length", 1.0),
    )
    result = asyncio.run(_run(url, api_key, planned, settings))
    report = result.report
    if as_json:
        print(encode(report))
    else:
        Console(highlight=False).print(report_tables(report))
    if save_requests is not None:
        write_records(save_requests, result.records, begin_s=result.begin_s)
    if figure is not None:
        title = f"{report.server.model}: {report.workload.kind} {report.workload.source}, {report.load.arrivals}"
        draw_figure(figure, result.records, begin_s=result.begin_s, objectives=settings.objectives, title=title)
    if report.end == End.INTERRUPTED:
        raise KeyboardInterrupt
    if report.end == End.SERVER_GONE:
        raise SpecdecError(f"the run ended early: {report.end_detail}")
    if report.requests.completed == 0:
        raise SpecdecError("no request completed: what is above says why")


def _check_extra(*, has_figure: bool) -> None:
    """Refuse to start without the libraries of the extra."""
    try:
        import_module("httpx2")
        import_module("prometheus_client")
        if has_figure:
            import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise ConfigError(f"specdec bench needs {error.name}: install specdec with the extra `bench`") from error


async def _run(url: str, api_key: str | None, workload: "Workload", settings: "BenchSettings") -> "BenchResult":
    from specdec.bench.benchmark import run_benchmark
    from specdec.bench.server import Server

    console = Console(stderr=True, highlight=False)
    server = Server(url, api_key=api_key)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    num_requests = sum(1 for _ in workload.requests)
    task = progress.add_task("requests", total=num_requests, failed=0)
    num_failed = 0

    def show_facts(facts: "ServerFacts") -> None:
        console.print(
            f"{num_requests:,} requests in {len(workload.sessions):,} sessions ({workload.kind}) to {facts.model}, "
            f"prompts as {facts.form}, {settings.arrivals.kind} arrivals",
            style="dim",
            soft_wrap=True,
        )
        num_too_long = _count_longer(workload, facts.max_model_len)
        if num_too_long:
            console.print(
                f"{num_too_long:,} of them need more than the {facts.max_model_len:,} tokens of {facts.model}: "
                "--scale-length makes them shorter, --max-context leaves them out",
                style="yellow",
                soft_wrap=True,
            )

    def show_record(record: "RequestRecord") -> None:
        nonlocal num_failed
        num_failed += bool(record.error_kind)
        progress.update(task, advance=1, failed=num_failed)

    try:
        with progress:
            return await run_benchmark(server, workload, settings, on_facts=show_facts, on_record=show_record)
    finally:
        await server.close()


def _count_longer(workload: "Workload", max_model_len: int | None) -> int:
    if max_model_len is None:
        return 0
    return sum(
        (request.num_prompt_tokens or 0) + request.num_output_tokens > max_model_len for request in workload.requests
    )
