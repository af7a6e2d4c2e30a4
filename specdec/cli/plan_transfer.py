"""`specdec plan-transfer`: what a hand-off from prefill to decode would move, as tables, JSON or a figure."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.cli.engine_options import DECODE_RANK_OPTIONS, PAGE_SIZE_OPTION
from specdec.cli.option_table import OptionTable, TableOption, takes_options
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.cli.transfer_report import EntryReport, TransferReport

_RANKS_ACROSS = 4  # what 80 columns hold

PROMPT_OPTIONS = OptionTable(
    "Prompt",
    (
        TableOption(name="tokens", type=int, help="Tokens of the prompt [default: 32768]."),
        TableOption(name="prefix", type=int, help="Tokens of it that decode has already [default: 0]."),
    ),
)

SIDE_OPTIONS = OptionTable(
    "Prefill and decode",
    (
        TableOption(
            name="source",
            type=str,
            help="Prefill ranks: cp:N split by layers, pp:N pipeline stages (pp:NxT of T ranks each), "
            "tp:N all on each, dcp:N pages spread [default: cp:8].",
            metavar="SIDE",
        ),
        *DECODE_RANK_OPTIONS,
        TableOption(
            name="kv_format",
            type=str,
            help="float32, bfloat16, fp8 or fp8_packed [default: bfloat16].",
            metavar="FORMAT",
        ),
        PAGE_SIZE_OPTION,
        TableOption(
            name="layout",
            type=str,
            help="Order of the pools: page-major, which is the engine's, or layer-major [default: page-major].",
            metavar="LAYOUT",
        ),
    ),
)


@takes_options(settings=(PROMPT_OPTIONS, SIDE_OPTIONS))
def plan_transfer(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, config.json, or a release such as glm-5.2-fp8.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Also draw the matrices into this file.")] = None,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Show what moves from each prefill rank to each decode rank: layers, bytes, descriptors.

    The plan is the one that a transfer makes, for fresh pools; nothing is loaded or sent.
    """
    from specdec.cli.transfer_figure import draw_report
    from specdec.cli.transfer_report import TransferSettings, report_as_dict, report_transfer

    report = report_transfer(model, TransferSettings(**settings))
    if svg is not None:
        try:
            svg.write_text(draw_report(model, report))
        except OSError as error:
            raise ConfigError(f"--svg: cannot write {svg}: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps(report_as_dict(model, report), indent=2))
        return
    console = Console()
    console.print(f"[bold]{escape(model)}[/bold]  {_heading(report)}")
    console.print(_summary(report))
    for entry in report.entries:
        for table in _matrices(entry):
            console.print(table)


def _heading(report: "TransferReport") -> str:
    settings = report.settings
    layers = ",".join(map(str, report.source_layers))
    return (
        f"{settings.source} (layers {layers}) to tp {settings.tp_size}, dcp {settings.dcp_size}; tokens "
        f"{settings.prefix:,} to {settings.tokens - 1:,}, {settings.kv_format.value} KV, {settings.layout}"
    )


def _summary(report: "TransferReport") -> Table:
    from specdec.memory.rank_memory import size_text

    table = Table(title="What moves", title_justify="left", collapse_padding=True)
    table.add_column("entries", no_wrap=True)
    for name in ("layers", "paths", "descriptors", "a rank", "in all", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in report.entries:
        table.add_row(
            entry.kind,
            str(entry.num_layers),
            str(entry.num_paths),
            f"{int(entry.descriptors_SD.sum()):,}",
            size_text(int(entry.bytes_SD.sum(axis=0).max())),
            size_text(entry.total_bytes),
            f"{entry.share:.1%}",
        )
    size = size_text(report.hidden_state_bytes)
    table.add_row("hidden state", "", "", "", "", size, "")
    table.caption = "a rank: the decode rank that receives most; share: of everything sent everywhere"
    return table


def _matrices(entry: "EntryReport") -> Iterator[Table]:
    """Source ranks down, destination ranks across, as many tables as it takes."""
    from specdec.memory.rank_memory import size_text

    num_destinations = entry.bytes_SD.shape[1]
    for begin in range(0, num_destinations, _RANKS_ACROSS):
        destinations = range(begin, min(begin + _RANKS_ACROSS, num_destinations))
        table = Table(title=f"{entry.kind}: bytes and descriptors", title_justify="left")
        table.add_column("from")
        table.add_column("layers", justify="right")
        for destination in destinations:
            table.add_column(f"to {destination}", justify="right", no_wrap=True)
        for source in range(len(entry.bytes_SD)):
            sizes = [int(entry.bytes_SD[source, destination]) for destination in destinations]
            if not any(sizes):
                continue
            counts = [int(entry.descriptors_SD[source, destination]) for destination in destinations]
            layers = sorted({int(entry.layers_SD[source, destination]) for destination in destinations} - {0})
            cells = (f"{size_text(size)}\n{count:,}" if size else "" for size, count in zip(sizes, counts, strict=True))
            table.add_row(f"rank {source}", ", ".join(map(str, layers)), *cells)
        yield table
