"""The `specdec` command: its subcommands, and how errors become exit codes.

Exit codes: 0; 2 for flags and requests that cannot be served; 3 for a checkpoint that cannot be used; 4 when a rank
failed, died or stopped; 130 after Ctrl-C; 1 for anything else. An error is one line on standard error.

Where `torchrun` started the command as one of several ranks, rank 0 runs it. The others follow its engines and end with
its exit code.

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
from specdec.errors import CheckpointError, ConfigError, RankLostError, RequestError, SpecdecError
from specdec.ranks.place import launched_place

EXIT_OTHER = 1
EXIT_USAGE = 2
EXIT_CHECKPOINT = 3
EXIT_RANK_LOST = 4

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
        return _fail(error)
    return status if isinstance(status, int) else 0


def run() -> NoReturn:
    """Run the command line of the process; the entry point of the package."""
    try:
        place = launched_place()
        if place is not None and place.rank > 0:
            from specdec.ranks.follower import follow_until_dismissed

            sys.exit(follow_until_dismissed(place))
    except Exception as error:
        sys.exit(_fail(error))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
    exit_code = main(sys.argv[1:])
    if place is not None:
        from specdec.ranks.rank_group import dismiss_followers

        dismiss_followers(place, exit_code=exit_code)
    sys.exit(exit_code)


def _fail(error: Exception) -> int:
    """Say in one line what is wrong; gives the exit code."""
    print(f"specdec: {_message(error)}", file=sys.stderr)
    return _exit_code(error)


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
    if isinstance(error, RankLostError):
        return EXIT_RANK_LOST
    return EXIT_CHECKPOINT if isinstance(error, CheckpointError) else EXIT_OTHER
