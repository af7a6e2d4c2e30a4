"""Run an engine on a checkpoint with GLM-5.2's real dimensions, whole on one Hopper GPU, and compare what it says.

    with drafts    K drafts a round, rounds as one CUDA graph
    without        no drafts: the texts must be the same, token by token
    torch          the definitions on widened weights: the first token's likeliest ids must be nearly the same

Run: python benchmarks/real_engine.py DIR [--write] [--json FILE]. `--write` makes the checkpoint of real_checkpoint.py
first (24.9 GB, four layers and the MTP layer). The exit code is 1 where texts differ.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from specdec.engine import Engine
from specdec.result import GenerationResult
from specdec.sampling.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.real_checkpoint import write_checkpoint

NUM_DRAFT_TOKENS = 5
PROMPT_LENGTHS = (4000, 2047, 500, 64, 63, 1)  # more than the indexer chooses, at its border, around a page
NUM_TOKENS = 96
MAX_MODEL_LEN = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one engine did.

    Attributes:
        name: How it ran.
        load_s: Seconds until it could serve.
        alone_tokens_per_s: Of the first prompt alone, prompt left out.
        together_tokens_per_s: Of all prompts together, prompts included.
        acceptance_length: Tokens of a round and request.
        lines: What it says of itself.
        token_ids: Of each prompt.
        top_ids: Likeliest first ids of each prompt.
    """

    name: str
    load_s: float
    alone_tokens_per_s: float
    together_tokens_per_s: float
    acceptance_length: float
    lines: tuple[str, ...]
    token_ids: list[tuple[int, ...]]
    top_ids: list[tuple[int, ...]]


def prompts() -> list[list[int]]:
    """Random ids, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 150_000, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def params() -> list[SamplingParams]:
    """Every other prompt is drawn with a temperature."""
    return [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7 * (index % 2), seed=index, ignore_eos=True)
        for index in range(len(PROMPT_LENGTHS))
    ]


def run(name: str, directory: Path, num_draft_tokens: int, **settings: Any) -> Run:
    """Load an engine, let it generate."""
    started = time.perf_counter()
    engine = Engine.from_pretrained(
        directory, dtype="bfloat16", device="cuda:0", num_draft_tokens=num_draft_tokens, max_model_len=MAX_MODEL_LEN,
        max_num_requests=8, num_pages=1024, **settings,
    )  # fmt: skip
    load_s = time.perf_counter() - started
    with engine:
        first = engine.generate(prompts(), SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True))
        started = time.perf_counter()
        results = engine.generate(prompts(), params())
        together_s = time.perf_counter() - started
        alone = _alone_s(engine)
        stats = engine.core.slots.speculation()
        lines = engine.report_lines()
    del engine
    torch.cuda.empty_cache()
    return Run(
        name=name,
        load_s=load_s,
        alone_tokens_per_s=1 / alone,
        together_tokens_per_s=len(results) * NUM_TOKENS / together_s,
        acceptance_length=1 + stats.num_accepted_tokens / max(stats.num_drafts, 1),
        lines=lines,
        token_ids=[result.choices[0].token_ids for result in results],
        top_ids=[_top_ids(result) for result in first],
    )


def _alone_s(engine: Engine) -> float:
    """Seconds of a token of one greedy request: the difference of a long and a short reply to a cached prompt."""
    seconds = []
    for max_tokens in (16, 16, 16 + 4 * NUM_TOKENS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        engine.generate(prompts()[0], SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
        seconds.append(time.perf_counter() - started)
    return (seconds[2] - seconds[1]) / (4 * NUM_TOKENS)


def _top_ids(result: GenerationResult) -> tuple[int, ...]:
    logprobs = result.choices[0].logprobs
    assert logprobs is not None
    return tuple(token_id for token_id, _ in logprobs[0].top)


def main() -> None:
    """Write, run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", help="the checkpoint; without it nothing is run")
    parser.add_argument("--write", action="store_true", help="make it first")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    if arguments.directory is None or not torch.cuda.is_available():
        print("no GPU or no checkpoint: nothing to run")
        return
    if arguments.write:
        started = time.perf_counter()
        size = write_checkpoint(arguments.directory, device="cuda")
        print(f"wrote {size / 1e9:.1f} GB in {time.perf_counter() - started:.1f} s")
    runs = [
        run(f"{NUM_DRAFT_TOKENS} drafts", arguments.directory, NUM_DRAFT_TOKENS),
        run("no drafts", arguments.directory, 0),
        run("torch, no drafts", arguments.directory, 0, kernels="torch"),
    ]
    for line in runs[0].lines:
        print(line)
    table = Table(title=f"prompts of {', '.join(map(str, PROMPT_LENGTHS))} tokens, {NUM_TOKENS} generated each")
    for column in ("engine", "load s", "tok/s alone", "tok/s together", "acceptance length", "same text", "same top 5"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for each in runs:
        same = sum(mine == theirs for mine, theirs in zip(each.token_ids, runs[0].token_ids, strict=True))
        shared = sum(len(set(a) & set(b)) for a, b in zip(each.top_ids, runs[0].top_ids, strict=True))
        table.add_row(
            each.name,
            f"{each.load_s:.1f}",
            f"{each.alone_tokens_per_s:.0f}",
            f"{each.together_tokens_per_s:.0f}",
            f"{each.acceptance_length:.2f}",
            f"{same} of {len(PROMPT_LENGTHS)}",
            f"{shared} of {5 * len(PROMPT_LENGTHS)}",
        )
    Console(width=160).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in runs], indent=1) + "\n")
    if runs[0].token_ids != runs[1].token_ids:
        print("drafts changed the text", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
