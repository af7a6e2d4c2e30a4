"""`specdec generate`: continue prompts, as text or as JSON."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from specdec.cli.engine_options import ENGINE_OPTIONS, engine_settings
from specdec.cli.generation_records import choice_record, delta_record
from specdec.cli.loading import load_engine
from specdec.cli.option_table import takes_options
from specdec.cli.prompts import Conversation, PromptSpec, errors_name, read_prompts
from specdec.cli.sampling_options import SAMPLING_OPTIONS
from specdec.errors import ConfigError, RequestError, RoundError
from specdec.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec.engine import Engine, GenerationStream
    from specdec.result import GenerationResult

_PROMPT = "Prompt (exactly one)"


@takes_options(engine=ENGINE_OPTIONS, sampling=(SAMPLING_OPTIONS,))
def generate(
    *,
    source: Annotated[str | None, typer.Argument(metavar="[-]", help="Read the prompt from standard input.")] = None,
    model: Annotated[str, typer.Option(help="Checkpoint directory, or glm-tiny.")],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", rich_help_panel=_PROMPT, help="The prompt.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="ID,ID,...", rich_help_panel=_PROMPT, help="The prompt as token ids.")
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", rich_help_panel=_PROMPT, help="A conversation, for the chat template."),
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            rich_help_panel=_PROMPT,
            help="Prompts that run together: a line has prompt, prompt_ids or messages, and sampling parameters.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each choice of each prompt.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print what is certain as soon as it is.")] = False,
    engine: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> None:
    """Continue one or several prompts.

    The text goes to standard output, everything else to standard error.
    A flag that is not given leaves the checkpoint's own default.
    """
    specs = read_prompts(text=prompt, token_ids=prompt_ids, messages=messages, batch=batch, source=source)
    given = [{"seed": secrets.randbits(32), **sampling, **spec.sampling} for spec in specs]
    params = _with_defaults(specs, given, {})  # refuses what is wrong before anything is loaded
    if stream and len(specs) > 1:
        raise ConfigError(f"--stream prints one prompt at a time, {batch} has {len(specs)}: leave it out")
    if stream and not as_json and params[0].n > 1:
        raise ConfigError(f"--stream prints one choice at a time, n is {params[0].n}: add --json, or leave it out")
    if not as_json:
        _refuse_logprobs(specs, params)
    console = Console(stderr=True)
    loaded = load_engine(model, engine_settings(engine), console=console)
    params = _with_defaults(specs, given, loaded.sampling_defaults)
    start = time.perf_counter()
    with loaded, ExitStack() as stack:
        # All of them start before the first round, so that they run together.
        streams = [stack.enter_context(_start(loaded, spec, each)) for spec, each in zip(specs, params, strict=True)]
        if not as_json:
            for line in loaded.report_lines():
                console.print(line, style="dim", highlight=False, soft_wrap=True)
        results: list[GenerationResult] = []
        failures: list[RequestError | RoundError] = []
        for index, (spec, running) in enumerate(zip(specs, streams, strict=True)):
            try:
                with errors_name(spec.origin):
                    if stream:
                        _print_pieces(running, as_json=as_json)
                    results.append(running.result())
            except (RequestError, RoundError) as error:  # the other prompts of a batch go on
                failures.append(error)
                if as_json:
                    print(json.dumps({"request_index": index, "error": str(error)}, ensure_ascii=False), flush=True)
                continue
            if as_json:
                _print_records(results[-1], request_index=index, params=params[index])
            elif not stream:
                _print_texts(results[-1], request_index=index, is_only=len(specs) == 1 and params[index].n == 1)
    if (counts := loaded.core.audit) is not None:
        num_decisions = counts.num_decisions * loaded.config.tp_size
        console.print(
            f"audit: {counts.num_disagreements} of {num_decisions} decisions of ranks differed, in "
            f"{counts.num_audited} of {counts.num_rounds} rounds",
            style="dim" if counts.num_disagreements == 0 else "bold red",
            highlight=False,
            soft_wrap=True,
        )
    if results and not as_json:
        summary = _summary(results, seconds=time.perf_counter() - start)
        console.print(summary, style="dim", highlight=False, soft_wrap=True)
    if failures:
        others = f" ({len(failures)} of {len(specs)} prompts failed)" if len(specs) > 1 else ""
        raise type(failures[0])(f"{failures[0]}{others}")


def _refuse_logprobs(specs: Sequence[PromptSpec], params: Sequence[SamplingParams]) -> None:
    for spec, each in zip(specs, params, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(each, name) is not None:
                where = f"{spec.origin}: {name}" if name in spec.sampling else f"--{name.replace('_', '-')}"
                raise ConfigError(f"{where} is printed with --json only: add --json, or leave it out")


def _with_defaults(
    specs: Sequence[PromptSpec], given: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[SamplingParams]:
    """Sampling parameters of each prompt: what was given for it, else the default."""
    params = []
    for spec, each in zip(specs, given, strict=True):
        with errors_name(spec.origin):
            params.append(SamplingParams.with_defaults(each, defaults))
    return params


def _start(engine: "Engine", spec: PromptSpec, params: SamplingParams) -> "GenerationStream":
    with errors_name(spec.origin):
        if isinstance(spec.prompt, Conversation):
            chat = spec.prompt
            prompt_ids = engine.apply_chat_template(chat.messages, tools=chat.tools, variables=chat.variables)
        else:
            prompt_ids = engine.prompt_ids(spec.prompt)
        return engine.stream(prompt_ids, params)


def _print_pieces(stream: "GenerationStream", *, as_json: bool) -> None:
    for delta in stream:
        if as_json:
            print(json.dumps(delta_record(delta), ensure_ascii=False), flush=True)
        else:
            print(delta.text, end="", flush=True)
    if not as_json:
        print(flush=True)


def _print_records(result: "GenerationResult", *, request_index: int, params: SamplingParams) -> None:
    for choice in result.choices:
        record = choice_record(result, choice, request_index=request_index, seed=params.seed)
        print(json.dumps(record, ensure_ascii=False, allow_nan=False), flush=True)


def _print_texts(result: "GenerationResult", *, request_index: int, is_only: bool) -> None:
    for choice in result.choices:
        if not is_only:
            print(f"--- prompt {request_index}, choice {choice.index}")
        print(choice.text, flush=True)


def _summary(results: "list[GenerationResult]", *, seconds: float) -> str:
    """One line about all of them."""
    choices = [choice for result in results for choice in result.choices]
    num_prompt_tokens = sum(result.usage.num_prompt_tokens for result in results)
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    reasons = ", ".join(sorted({choice.finish_reason for choice in choices}))
    line = f"{num_prompt_tokens} prompt + {num_tokens} new tokens in {seconds:.2f} s ({reasons})"
    length = reduce(add, (choice.speculation for choice in choices)).acceptance_length
    return line if length is None else f"{line}, acceptance length {length:.2f}"
