"""`specdec demo`: the same greedy text with speculation off and on, and how fast each of them is."""

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specdec.cli.demo_prompt import DEMO_PROMPT
from specdec.cli.engine_options import MODEL_OPTIONS
from specdec.cli.loading import load_engine
from specdec.cli.option_table import takes_options
from specdec.errors import ConfigError
from specdec.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec.engine import Engine
    from specdec.request import SpeculationStats

_ROUND_STYLES = ("cyan", "green")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One timed generation.

    Attributes:
        token_ids: What was generated.
        seconds: From the first token, which the prompt's own pass gives, to the last.
        num_timed_tokens: Tokens that came within `seconds`.
        speculation: How drafting went.
    """

    token_ids: tuple[int, ...]
    seconds: float
    num_timed_tokens: int
    speculation: "SpeculationStats"

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding."""
        return self.num_timed_tokens / self.seconds


@takes_options(engine=(MODEL_OPTIONS,))
def demo(
    *,
    model: Annotated[str, typer.Option(help="Checkpoint directory, or glm-tiny.")] = "glm-tiny",
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Drafts per round with speculation on.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate.")] = 160,
    repeats: Annotated[int, typer.Option(min=1, help="Timed generations of each kind; the median counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text and table.")] = False,
    engine: Mapping[str, Any],
) -> None:
    """Show that speculation gives the same text sooner.

    Continues a piece of Python code, greedily, with speculation off and on in turns, and fails if the outputs differ.
    """
    console = Console(quiet=as_json, highlight=False)
    on = load_engine(
        model, {**engine, "num_draft_tokens": num_draft_tokens, "max_num_requests": 1}, console=Console(stderr=True)
    )
    off = _without_speculation(on)
    num_prompt_tokens = len(on.encode(DEMO_PROMPT))
    if num_prompt_tokens + max_tokens > on.max_model_len:
        most = on.max_model_len - num_prompt_tokens
        raise ConfigError(f"--max-tokens must be at most {most} for this model and prompt, got {max_tokens}")
    console.print(f"[bold]{model}[/bold] continues {num_prompt_tokens} tokens of code:\n")
    console.print(DEMO_PROMPT, style="dim", markup=False, end="", soft_wrap=True)
    # The first run of each warms up; it is the one that is watched.
    first = _generate(on, max_tokens=max_tokens, console=console)
    console.print("\n")
    outputs = {first.token_ids, _generate(off, max_tokens=max_tokens).token_ids}
    runs: dict[str, list[Run]] = {"off": [], "on": []}
    for _ in range(repeats):
        for name, which in (("off", off), ("on", on)):
            runs[name].append(_generate(which, max_tokens=max_tokens))
    outputs |= {run.token_ids for each in runs.values() for run in each}
    speed = {name: statistics.median(run.tokens_per_second for run in each) for name, each in runs.items()}
    record = {
        "model": model,
        "num_draft_tokens": num_draft_tokens,
        "num_prompt_tokens": num_prompt_tokens,
        "num_new_tokens": len(first.token_ids),
        "tokens_per_second": {name: round(value, 1) for name, value in speed.items()},
        "speedup": round(speed["on"] / speed["off"], 2),
        "acceptance_length": first.speculation.acceptance_length,
        "acceptance_per_position": _acceptance_per_position(first.speculation),
        "outputs_equal": len(outputs) == 1,
    }
    if as_json:
        print(json.dumps(record))
    else:
        _print_table(record, console)
    if len(outputs) != 1:
        raise typer.Exit(1)


def _without_speculation(engine: "Engine") -> "Engine":
    """Give an engine over the same weights that does not draft."""
    from specdec.engine import Engine

    return Engine(
        engine.checkpoint,
        replace(engine.config, num_draft_tokens=0),
        tokenizer=engine.tokenizer,
        chat_template=engine.chat_template,
        sampling_defaults=engine.sampling_defaults,
        eos_ids=engine.eos_ids,
    )


def _generate(engine: "Engine", *, max_tokens: int, console: Console | None = None) -> Run:
    """Generate once; `console` shows the text as it comes, the tokens of each round in one colour."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    times, counts = [], []
    with engine.stream(DEMO_PROMPT, params) as stream:
        for delta in stream:
            times.append(time.perf_counter())
            counts.append(len(delta.token_ids))
            if console is not None:
                console.print(delta.text, style=_ROUND_STYLES[len(times) % 2], markup=False, end="", soft_wrap=True)
        result = stream.result()
    return Run(
        token_ids=result.token_ids,
        seconds=times[-1] - times[0],
        num_timed_tokens=sum(counts[1:]),
        speculation=result.speculation,
    )


def _acceptance_per_position(stats: "SpeculationStats") -> list[float]:
    """Fraction of rounds that kept the draft at each position."""
    return [round(count / stats.num_drafts, 3) for count in stats.accepted_per_position]


def _print_table(record: Mapping[str, Any], console: Console) -> None:
    table = Table(title="greedy, batch 1, decoding only", title_justify="left")
    table.add_column("speculation")
    for column in ("tokens/s", "acceptance length", "acceptance per position"):
        table.add_column(column, justify="right")
    speed = record["tokens_per_second"]
    table.add_row("off", f"{speed['off']:.1f}", "1.00", "")
    per_position = " ".join(f"{value:.2f}" for value in record["acceptance_per_position"])
    drafts = f"on, {record['num_draft_tokens']} drafts"
    table.add_row(drafts, f"{speed['on']:.1f}", f"{record['acceptance_length']:.2f}", per_position)
    console.print(table)
    count = record["num_new_tokens"]
    if record["outputs_equal"]:
        console.print(f"outputs equal: [bold green]yes[/bold green], all {count} tokens")
    else:
        console.print("outputs equal: [bold red]no[/bold red]")
    console.print(f"speed-up: [bold]{record['speedup']:.2f}x[/bold]")
