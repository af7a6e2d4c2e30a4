"""`specdec audit`: does a model give the same on one rank and on many, speculation off and on?"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specdec.cli.demo_prompt import DEMO_PROMPT
from specdec.cli.engine_options import CACHE_OPTIONS, MODEL_OPTIONS, RANK_OPTIONS, SCHEDULE_OPTIONS, engine_settings
from specdec.cli.option_table import takes_options
from specdec.cli.prompts import Conversation, PromptSpec, errors_name, read_prompts
from specdec.errors import ConfigError, RequestError
from specdec.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec.audit import AuditedRun
    from specdec.engine import Engine

_PROMPT = "Prompts (else a set of lengths cut from a piece of code)"


@takes_options(engine=(MODEL_OPTIONS, RANK_OPTIONS, CACHE_OPTIONS, SCHEDULE_OPTIONS))
def audit(
    *,
    model: Annotated[str, typer.Option(help="Checkpoint directory, or glm-tiny.")],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", rich_help_panel=_PROMPT, help="One prompt.")] = None,
    batch: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", rich_help_panel=_PROMPT, help="Prompts, as in generate.")
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Drafts per round with speculation on.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 32,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every prompt.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
    engine: Mapping[str, Any],
) -> None:
    """Compare one rank with --tp-size and --dcp-size ranks, speculation off and on.

    Compares tokens, logits, selected positions, each rank's own decisions before they agree, and the collectives of
    every rank; on a GPU, where rounds stay there in graphs, what each rank drew in each of them. Exit code 1 if
    anything is inconsistent; a first difference of tokens between one rank and many is excused where the choice hung on
    less than 1e-4, or on the kernels of a GPU than the logits of its row moved.
    """
    if prompt is not None and batch is not None:
        raise ConfigError("give --prompt or --batch, or neither; got both")
    specs = None
    if prompt is not None or batch is not None:
        specs = read_prompts(text=prompt, token_ids=None, messages=None, batch=batch, source=None)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    from specdec.audit import audit as run_audit
    from specdec.engine import Engine

    settings = {**engine_settings(engine), "num_draft_tokens": num_draft_tokens}
    if settings.get("tp_size", 1) < 2:
        raise ConfigError("an audit compares one rank with several: give --tp-size, and --dcp-size for sharded KV")
    _check_sizes(model, settings)
    alone = {name: value for name, value in settings.items() if name not in ("tp_size", "dcp_size")}
    console = Console(stderr=True, highlight=False)
    start = partial(Engine.from_pretrained, model)
    with start(**{**alone, "num_draft_tokens": 0, "logits_noise": 0.0}) as reader:
        prompts = _prompts(reader, specs, max_tokens=max_tokens)
    del reader  # its memory goes before that of the next comes
    lengths = ", ".join(str(len(each)) for each in prompts)
    console.print(f"{len(prompts)} prompts of {lengths} tokens", style="dim", soft_wrap=True)
    runs = run_audit(start, prompts, params, settings=settings)
    is_consistent = all(run.is_consistent for run in runs)
    if as_json:
        record = {"model": model, "is_consistent": is_consistent, "runs": [_record(run) for run in runs]}
        print(json.dumps(record))
    else:
        _print_table(runs, Console(highlight=False))
    if not is_consistent:
        raise typer.Exit(1)


def _check_sizes(model: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings that no engine of the model could have, before the first one is loaded."""
    from specdec.engine_config import EngineConfig
    from specdec.models.glm.config import GlmConfig
    from specdec.models.glm.parallel_sizes import check_parallel_sizes
    from specdec.models.glm.released import locate_model

    fields = EngineConfig.__dataclass_fields__
    config = EngineConfig(**{name: value for name, value in settings.items() if name in fields})
    check_parallel_sizes(
        GlmConfig.from_file(locate_model(model).config_path),
        tp_size=config.tp_size,
        dcp_size=config.dcp_size,
        expert_split=config.expert_split,
    )


def _prompts(engine: "Engine", specs: Sequence[PromptSpec] | None, *, max_tokens: int) -> list[list[int]]:
    """Token ids of the given prompts, or of lengths around page borders and beyond `index_topk`."""
    if specs is not None:
        prompts = []
        for spec in specs:
            with errors_name(spec.origin):
                if spec.sampling:
                    name = next(iter(spec.sampling))
                    raise RequestError(f"an audit asks the same of every prompt, with its own flags: leave out {name}")
                given = spec.prompt
                if isinstance(given, Conversation):
                    given = engine.apply_chat_template(given.messages, tools=given.tools, variables=given.variables)
                prompts.append(engine.prompt_ids(given))
        return prompts
    page_size, topk = engine.config.page_size, engine.checkpoint.config.index_topk
    lengths = {1, page_size - 1, page_size, page_size + 1, 2 * page_size + 1, topk - 1, topk + page_size + 1}
    longest = engine.max_model_len - max_tokens
    if longest < 1:
        raise ConfigError(
            f"--max-tokens must leave room for a prompt and be at most {engine.max_model_len - 1}, got {max_tokens}"
        )
    code_ids = engine.encode(DEMO_PROMPT)
    code_ids *= -(-longest // len(code_ids))
    return [code_ids[:length] for length in sorted(lengths) if 0 < length <= longest]


def _record(run: "AuditedRun") -> dict[str, Any]:
    return {**asdict(run), "is_consistent": run.is_consistent}


def _print_table(runs: "Sequence[AuditedRun]", console: Console) -> None:
    table = Table(title="compared with one rank without drafts", title_justify="left")
    table.add_column("")
    for run in runs:
        drafts = f"{run.num_draft_tokens} drafts" if run.num_draft_tokens else "no drafts"
        table.add_column(f"tp {run.tp_size} dcp {run.dcp_size}\n{drafts}", justify="right")
    facts = {
        "tokens": _tokens,
        "logit distance": lambda run: f"{run.max_logit_distance:.1e}",
        "selected sets": _selected_sets,
        "own decisions": lambda run: _differing(sum(run.disagreements_per_rank), run.num_decisions * run.tp_size),
        "acceptance length": lambda run: "" if run.acceptance_length is None else f"{run.acceptance_length:.2f}",
        "collectives/round": lambda run: f"{run.collectives_per_rank[0] / max(1, run.num_rounds):.0f}",
        "same on all ranks": lambda run: "yes" if run.is_sequence_equal else "NO",
    }
    if any(run.on_device is not None for run in runs):
        facts |= {
            "rounds on the device": lambda run: str(run.on_device.num_rounds) if run.on_device else "none",
            "decisions there": _decisions_on_device,
        }
    for name, fact in facts.items():
        table.add_row(name, *map(fact, runs))
    console.print(table)
    for run in runs:
        for difference in run.differences:
            verdict = "excused" if difference.is_excused else "[bold red]not excused[/bold red]"
            console.print(
                f"tp {run.tp_size} dcp {run.dcp_size}, {run.num_draft_tokens} drafts, prompt {difference.prompt}: "
                f"output token {difference.position} is {difference.found}, not {difference.expected}; the reference "
                f"chose by {difference.gap:.1e}, excused below {difference.limit:.1e}: {verdict}",
                soft_wrap=True,
            )
        for line in _inexcusable(run):
            console.print(f"tp {run.tp_size} dcp {run.dcp_size}, {run.num_draft_tokens} drafts: {line}", soft_wrap=True)
    if any(run.num_selections is None for run in runs):
        console.print(
            "the kernels give no selected positions: these are not compared, and logits only in rows that tokens were "
            "drawn from; kernels torch compares all",
            soft_wrap=True,
        )
    is_consistent = all(run.is_consistent for run in runs)
    console.print("consistent: " + ("[bold green]yes[/bold green]" if is_consistent else "[bold red]no[/bold red]"))


def _tokens(run: "AuditedRun") -> str:
    if not run.differences:
        return f"{run.num_tokens} equal"
    num_excused = sum(difference.is_excused for difference in run.differences)
    return f"{len(run.differences)} prompts differ" + (f" ({num_excused} excused)" if num_excused else "")


def _selected_sets(run: "AuditedRun") -> str:
    return "not given" if run.num_selections is None else _differing(run.num_selection_differences, run.num_selections)


def _decisions_on_device(run: "AuditedRun") -> str:
    rounds = run.on_device
    if rounds is None:
        return ""
    return _differing(sum(rounds.disagreements_per_rank), rounds.num_decisions * run.tp_size)


def _inexcusable(run: "AuditedRun") -> Iterator[str]:
    """Say what no narrow choice explains."""
    from specdec.audit import ROW_ERROR

    if run.changed_by_drafts:
        yield f"drafts changed the tokens of prompts {', '.join(map(str, run.changed_by_drafts))}"
    if run.on_device is not None and run.on_device.other_texts:
        numbers = ", ".join(map(str, run.on_device.other_texts))
        yield f"rounds on the device gave other tokens than passes for prompts {numbers}"
    if not run.max_row_error < ROW_ERROR:  # also where a logit is NaN
        yield f"logits of a row are off by {run.max_row_error:.2f} of their norm, above {ROW_ERROR:g}"


def _differing(count: int, total: int) -> str:
    return f"{count} of {total} differ" if count else f"{total} equal"
