"""`specdec plan`: how much context fits, as tables with bars or as JSON."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.cli.engine_options import PAGE_SIZE_OPTION, SHARE_OPTIONS
from specdec.cli.memory_size import parse_memory_size
from specdec.cli.option_table import OptionTable, TableOption, takes_options
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.memory.memory_plan import Choice, MemoryPlan

_BAR_WIDTH = 16

MEMORY_OPTIONS = OptionTable(
    "Memory of one rank",
    (
        TableOption(
            name="gpu_memory",
            type=str,
            help="Memory of one device, as in 141GiB or 80GB.",
            metavar="SIZE",
            parse=parse_memory_size,
        ),
        TableOption(
            name="static_fraction",
            type=float,
            help="Share of it for weights, pools and reserve; the rest is for activations and graphs [default: 0.85].",
        ),
        TableOption(
            name="reserve",
            type=str,
            help="Kept free within that share, for graphs and workspace [default: 0].",
            metavar="SIZE",
            parse=parse_memory_size,
        ),
        TableOption(
            name="pool_bytes",
            type=str,
            help="Size of the pools, instead of what the weights leave.",
            metavar="SIZE",
            parse=parse_memory_size,
        ),
    ),
)

LAYOUT_OPTIONS = OptionTable(
    "Layout",
    (
        *SHARE_OPTIONS,
        TableOption(
            name="kv_format",
            type=str,
            help="float32, bfloat16, fp8 or fp8_packed; follows the weights where not given.",
            metavar="FORMAT",
        ),
        TableOption(
            name="weight_format",
            type=str,
            help="float32, bfloat16 or fp8 (blocks with their scales); the checkpoint's where not given.",
            metavar="FORMAT",
        ),
        TableOption(name="draft", type=bool, switches_off=True, help="Plan no draft pool."),
        TableOption(
            name="index_keys",
            type=str,
            help="sharded, or replicated, which is a price only [default: sharded].",
            metavar="PLACEMENT",
        ),
        PAGE_SIZE_OPTION,
    ),
)

REQUEST_OPTIONS = OptionTable(
    "Requests",
    (
        TableOption(
            name="max_model_len", type=int, help="Most tokens of a request; the model's limit where not given."
        ),
        TableOption(
            name="context", type=int, help="Tokens of each request of the batch that is asked for [default: 131072]."
        ),
    ),
)


@takes_options(settings=(MEMORY_OPTIONS, LAYOUT_OPTIONS, REQUEST_OPTIONS))
def plan(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, config.json, or a release such as glm-5.2-fp8.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Show how much context fits: bytes of each rank, tokens, batch, and what each choice costs.

    Nothing is allocated; of a checkpoint only file headers are read. The engine allocates by the same arithmetic.
    """
    from specdec.memory.memory_plan import MemoryPlanner, MemorySettings

    if "pool_bytes" in settings and "gpu_memory" not in settings:
        for option in MEMORY_OPTIONS.options:
            if option.name in settings and option.name in ("reserve", "static_fraction"):
                raise ConfigError(
                    f"{option.flag} is a part of --gpu-memory: with --pool-bytes alone it says nothing, drop one"
                )
    planner = MemoryPlanner.of_model(model)
    memory_plan = planner.plan(MemorySettings(**settings))
    choices = planner.choices(memory_plan)
    if as_json:
        typer.echo(json.dumps(_to_dict(model, memory_plan, choices), indent=2))
        return
    console = Console()
    console.print(f"[bold]{escape(model)}[/bold]  {_heading(memory_plan)}")
    for table in (_memory(memory_plan), _capacity(memory_plan), _choices(choices)):
        console.print(table)
    for note in memory_plan.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}")


def _heading(plan: "MemoryPlan") -> str:
    settings = plan.settings
    ranks = f"cp {settings.cp_size}" if settings.cp_size > 1 else f"tp {settings.tp_size}, dcp {settings.dcp_size}"
    return (
        f"{ranks}, {settings.weight_format} weights, {settings.kv_format} KV, draft {'on' if settings.draft else 'off'}"
    )


def _components(plan: "MemoryPlan") -> Iterator[tuple[str, dict[str, int]]]:
    """Sections of the memory of a rank."""
    yield "weights", plan.rank.weights_by_component
    yield "pools", plan.rank.pools_by_component
    rest = {}
    if plan.settings.reserve:
        rest["reserve"] = plan.settings.reserve
    if plan.unplanned_bytes is not None:
        rest["beyond the static fraction"] = plan.unplanned_bytes
    if rest:
        yield "rest", rest


def _memory(plan: "MemoryPlan") -> Table:
    from specdec.memory.rank_memory import size_text

    table = Table(title="Memory of each rank", title_justify="left")
    table.add_column("component")
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", no_wrap=True)
    total = sum(size for _, sizes in _components(plan) for size in sizes.values())
    largest = max(size for _, sizes in _components(plan) for size in sizes.values())
    for section, sizes in _components(plan):
        for name, size in sizes.items():
            table.add_row(name, size_text(size), f"{size / total:.1%}", _bar(size, largest))
        if section != "rest":
            table.add_row(f"all {section}", size_text(sum(sizes.values())), f"{sum(sizes.values()) / total:.1%}")
        table.add_section()
    table.add_row("all", size_text(total), "100.0%")
    return table


def _capacity(plan: "MemoryPlan") -> Table:
    pools = plan.rank.pools
    table = Table(title="Context over all ranks", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in (
        ("tokens in total", plan.num_tokens),
        ("tokens of one request, at most", plan.max_request_tokens),
        (f"largest batch at {plan.context:,} tokens", plan.largest_batch),
        ("bytes of a rank per token", pools.layouts.bytes_per_token),
        ("page ids", pools.num_page_ids),
        ("target pages of a rank", pools.num_pages),
        ("draft pages of a rank", pools.num_draft_pages),
        ("draft_pool_token_multiplier", pools.layouts.draft_pool_token_multiplier),
    ):
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:,.2f}")
    return table


def _choices(choices: "tuple[Choice, ...]") -> Table:
    from specdec.memory.rank_memory import size_text

    table = Table(title="The same plan with one choice changed", title_justify="left")
    table.add_column("choice")
    for name in ("pools", "tokens", "batch"):
        table.add_column(name, justify="right")
    table.add_column("", no_wrap=True)
    plans = [choice.plan for choice in choices if choice.plan is not None]
    largest = max(plan.num_tokens for plan in plans)
    setting = choices[0].setting
    for choice in choices:
        if choice.setting != setting:
            table.add_section()
        setting = choice.setting
        name = f"{setting} {choice.value}"
        if choice.plan is None:
            table.add_row(name, "", "", "", "impossible")
            continue
        plan = choice.plan
        cells = (size_text(plan.rank.pools.size_bytes), f"{plan.num_tokens:,}", f"{plan.largest_batch:,}")
        style = "bold" if choice.is_current else None
        table.add_row(f"{name} *" if choice.is_current else name, *cells, _bar(plan.num_tokens, largest), style=style)
    table.caption = "* as planned"
    return table


def _bar(size: int, largest: int) -> str:
    """Draw a size in eighths of a character."""
    eighths = round(8 * _BAR_WIDTH * size / largest)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def _to_dict(model: str, plan: "MemoryPlan", choices: "tuple[Choice, ...]") -> dict[str, Any]:
    """As JSON types."""
    return {
        "model": model,
        "settings": asdict(plan.settings),
        "rank_bytes": dict(_components(plan)),
        **_capacity_dict(plan),
        "choices": [
            {
                "setting": choice.setting,
                "value": choice.value,
                "is_current": choice.is_current,
                "fault": choice.fault or None,
                "capacity": None if choice.plan is None else _capacity_dict(choice.plan),
            }
            for choice in choices
        ],
        "notes": list(plan.notes),
    }


def _capacity_dict(plan: "MemoryPlan") -> dict[str, Any]:
    pools = plan.rank.pools
    return {
        "weight_bytes": plan.rank.weight_bytes,
        "pool_bytes": pools.size_bytes,
        "bytes_per_token": pools.layouts.bytes_per_token,
        "draft_pool_token_multiplier": pools.layouts.draft_pool_token_multiplier,
        "num_page_ids": pools.num_page_ids,
        "num_target_pages": pools.num_pages,
        "num_draft_pages": pools.num_draft_pages,
        "num_tokens": plan.num_tokens,
        "max_request_tokens": plan.max_request_tokens,
        "context": plan.context,
        "largest_batch": plan.largest_batch,
    }
