"""The `specdec` command: its subcommands, and how errors become exit codes.

Exit codes: 0; 2 for flags and requests that cannot be served; 3 for a damaged checkpoint; 130 after Ctrl-C; 1 for
anything else. Errors are one line on standard error.

The commands import the engine when they run: `specdec --help` loads no torch.
"""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from specdec.cli.demo import demo
from specdec.cli.generate import generate
from specdec.cli.inspect import inspect
from specdec.cli.score import score
from specdec.errors import CheckpointError, ConfigError, RequestError

EXIT_USAGE = 2
EXIT_CHECKPOINT = 3
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="specdec",
    help="Speculative decoding for GLM-5.x checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, score, inspect, demo):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"specdec {version('specdec')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    *,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the command."""
    context.obj = {"traceback": traceback}


def main(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code."""
    try:
        status: Any = app(list(arguments), standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _leave_closed_pipe()
    except Exception as error:
        if "--traceback" in arguments:
            raise
        print(f"specdec: {_message(error)}", file=sys.stderr)
        return _exit_code(error)
    return status if isinstance(status, int) else 0
