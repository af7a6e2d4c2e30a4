"""`specdec score`: how likely the model finds given tokens."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from specdec.cli.engine_options import CACHE_OPTIONS, MODEL_OPTIONS, RANK_OPTIONS
from specdec.cli.loading import load_engine
from specdec.cli.option_table import takes_options
from specdec.cli.prompts import STDIN, read_standard_input
from specdec.cli.token_id_list import parse_token_ids
from specdec.errors import ConfigError, SpecdecError


@takes_options(engine=(MODEL_OPTIONS, RANK_OPTIONS, CACHE_OPTIONS))
def score(
    *,
    model: Annotated[str, typer.Option(help="Checkpoint directory, or glm-tiny.")],
    ids: Annotated[str, typer.Option(metavar="ID,ID,...", help="The tokens; - reads them from standard input.")],
    logits: Annotated[
        str | None,
        typer.Option(metavar="FILE.npz", help="Write token_ids, logprobs and the raw logits [tokens, vocabulary]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    engine: Mapping[str, Any],
) -> None:
    """Print the log-probability of every token but the first, under the model's own distribution."""
    token_ids = parse_token_ids(read_standard_input() if ids == STDIN else ids, flag="--ids")
    path = None if logits is None else _writable(logits)
    settings = {"max_num_requests": 1, "num_draft_tokens": 0, **engine}
    result = load_engine(model, settings, console=Console(stderr=True)).score(token_ids, with_logits=path is not None)
    if path is not None and result.logits_TV is not None:
        with path.open("wb") as file:  # numpy adds .npz to a name that lacks it, but not to a file
            np.savez(file, token_ids=result.token_ids, logprobs=result.logprobs, logits=result.logits_TV)
    for place, logprob in enumerate(result.logprobs, start=1):
        if not math.isfinite(logprob):
            raise SpecdecError(
                f"the log-probability of token {place}, id {result.token_ids[place]}, is {logprob}: the model's logits "
                "are not finite, check the checkpoint"
            )
    total = sum(result.logprobs)
    if as_json:
        record = {
            "token_ids": list(result.token_ids),
            "logprobs": list(result.logprobs),
            "sum_logprob": total,
            "mean_logprob": total / len(result.logprobs) if result.logprobs else None,
        }
        print(json.dumps(record, allow_nan=False))
        return
    for token_id, logprob in zip(result.token_ids[1:], result.logprobs, strict=True):
        print(f"{token_id}\t{logprob:.6f}")


def _writable(name: str) -> Path:
    """Give the path of a file that can be written, which is asked before anything is computed."""
    path = Path(name)
    if not name or path.is_dir():
        raise ConfigError(f"--logits takes the name of a file, as in logits.npz; got {name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"--logits {name}: cannot be written: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--logits {name}: cannot be written: permission denied")
    return path
