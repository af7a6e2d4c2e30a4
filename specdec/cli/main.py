"""The `specdec` command: its subcommands, and how errors become exit codes.

Exit codes: 0; 2 for flags and requests that cannot be served; 3 for a checkpoint that cannot be used; 130 after Ctrl-C;
1 for anything else. An error is one line on standard error.

The commands import the engine when they run, so that `specdec --help` does not load torch.
"""

import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any, NoReturn

import typer

from specdec.cli.audit import audit
from specdec.cli.demo import demo
from specdec.cli.generate import generate
from specdec.cli.inspect import inspect
from specdec.cli.plan import plan
from specdec.cli.score import score
from specdec.errors import CheckpointError, ConfigError, RequestError, SpecdecError

EXIT_OTHER = 1
EXIT_USAGE = 2
EXIT_CHECKPOINT = 3

_TRACEBACK = "--traceback"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (generate, score, inspect, plan, audit, demo):
    app.command()(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"specdec {metadata.version('specdec')}")
        raise typer.Exit


@app.callback()
def root(
    *,
    traceback: Annotated[bool, typer.Option(_TRACEBACK, help="Show where an error was raised.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding for GLM-5.x checkpoints."""
    # Both are dealt with outside: `main` catches the errors, and the version is printed by its callback.


def main(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code."""
    try:
        status: Any = app(list(arguments) or ["--help"], prog_name="specdec", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has left, as `head` does; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OTHER
    except Exception as error:
        if _TRACEBACK in arguments:
            raise
        print(f"specdec: {_message(error)}", file=sys.stderr)
        return _exit_code(error)
    return status if isinstance(status, int) else 0


def run() -> NoReturn:
    """Run the command line of the process; the entry point of the package."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
    sys.exit(main(sys.argv[1:]))


def _message(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        command = "specdec" if context is None else context.command_path
        return f"{error.format_message().rstrip('.')} (see {command} --help)"
    message = " ".join(str(error).split())
    if isinstance(error, SpecdecError | OSError):
        return message
    return f"{type(error).__name__}: {message} (specdec {_TRACEBACK} ... shows where)"


def _exit_code(error: Exception) -> int:
    if isinstance(error, typer.TyperException):
        return error.exit_code
    if isinstance(error, ConfigError | RequestError):
        return EXIT_USAGE
    return EXIT_CHECKPOINT if isinstance(error, CheckpointError) else EXIT_OTHER
