"""`specdec inspect`: describe a model as tables or as JSON."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from specdec.models.glm.inspection import Inspection


def inspect(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, config.json, or a release such as glm-5.2-fp8.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what a model is: layers, tensors and bytes, KV size, stop tokens, chat template.

    Reads file headers only. A name or a config.json is enough: the tensors are then derived.
    """
    from specdec.models.glm.inspection import inspect_model

    inspection = inspect_model(model)
    if as_json:
        typer.echo(json.dumps(inspection.to_dict(), ensure_ascii=False, indent=2))
        return
    render(inspection, Console())


def render(inspection: "Inspection", console: Console) -> None:
    """Print an inspection as tables."""
    origin = "file headers" if inspection.source == "checkpoint" else "derived from the config"
    model = f"[bold]{escape(inspection.model)}[/bold]"
    console.print(f"{model}  {inspection.model_type}, {inspection.quantisation} ({origin})")
    for table in (_architecture(inspection), _tensors(inspection), _kv(inspection), _text(inspection)):
        console.print(table)
    for title, reasons in (
        ("Config keys not used", inspection.ignored_keys),
        ("Tensors not used", inspection.ignored_tensors),
    ):
        if reasons:
            console.print(_pairs(title, reasons))
    for warning in inspection.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}")


def compact_ranges(layers: list[int]) -> str:
    """Write ascending numbers as ranges: 0-2, 6, 10."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _architecture(inspection: "Inspection") -> Table:
    def layers(schedule: tuple[str, ...], kind: str) -> str:
        chosen = [layer for layer, layer_kind in enumerate(schedule) if layer_kind == kind]
        return f"{len(chosen)}: {compact_ranges(chosen)}" if chosen else "none"

    rows: dict[str, object] = dict(inspection.architecture)
    rows["dense layers"] = layers(inspection.mlp_layer_types, "dense")
    rows["sparse layers"] = layers(inspection.mlp_layer_types, "sparse")
    rows["layers with their own indexer"] = layers(inspection.indexer_types, "full")
    rows["layers that share a selection"] = layers(inspection.indexer_types, "shared")
    rows["MTP layer"] = "present" if inspection.has_mtp else "absent"
    return _pairs("Architecture", rows)


def _tensors(inspection: "Inspection") -> Table:
    table = _table("Tensors", "component", "tensors", "parameters", "bytes")
    for row in inspection.components:
        table.add_row(row.component, f"{row.num_tensors:,}", f"{row.num_parameters:,}", f"{row.size_bytes:,}")
    table.add_section()
    total = f"{inspection.num_tensors:,}", f"{inspection.num_parameters:,}", f"{inspection.size_bytes:,}"
    table.add_row(f"all ({inspection.num_scales:,} scales)", *total)
    return table


def _kv(inspection: "Inspection") -> Table:
    table = _table("KV bytes per token", "format", "target latent", "target index keys", "draft latent")
    for name in ("draft index keys", "all"):
        table.add_column(name, justify="right")
    for kv in inspection.kv_bytes_per_token:
        sizes = (kv.target_latent, kv.target_index_keys, kv.draft_latent, kv.draft_index_keys, kv.total)
        table.add_row(kv.kv_format, *("does not fit" if size is None else f"{size:,}" for size in sizes))
    return table


def _text(inspection: "Inspection") -> Table:
    tokens = [f"{token.token_id}{f' {token.text}' if token.text else ''}" for token in inspection.stop_tokens]
    rows: dict[str, object] = {"stop tokens": ", ".join(tokens) or "none"}
    for key, value in inspection.generation_defaults.items():
        rows[f"default {key}"] = value
    template = inspection.template
    if template is None:
        rows["chat template"] = "none"
    else:
        rows["chat template"] = template.file
        rows["template variables"] = ", ".join(template.variables)
        for label, fact in (
            ("thinking can be switched off", template.can_switch_thinking),
            ("takes a reasoning effort", template.has_reasoning_effort),
            ("can clear past reasoning", template.can_clear_thinking),
            ("takes tools", template.uses_tools),
            ("writes <think>", template.opens_thinking),
            ("needs loop controls", template.needs_loop_controls),
        ):
            rows[label] = "yes" if fact else "no"
    return _pairs("Text", rows)


def _pairs(title: str, rows: Mapping[str, object]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows.items():
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        table.add_row(key, Text(shown))  # a token such as [MASK] would be read as markup
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
