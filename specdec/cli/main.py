"""The `specdec` command: its subcommands, and how errors become exit codes.

Exit codes: 0; 2 for flags and requests that cannot be served; 3 for a checkpoint that cannot be used; 4 when a rank
failed, died or stopped; 130 after Ctrl-C; 1 for anything else. An error is one line on standard error.

Where `torchrun` started the command as one of several ranks, rank 0 runs it. The others follow its engines and end with
its exit code.

What takes time to import is imported inside of `main`, so that Ctrl-C has its exit code from the beginning.
"""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from specdec.errors import CheckpointError, ConfigError, RankLostError, RequestError, SpecdecError
from specdec.ranks.place import launched_place

EXIT_OTHER = 1
EXIT_USAGE = 2
EXIT_CHECKPOINT = 3
EXIT_RANK_LOST = 4
EXIT_INTERRUPTED = 130

_TRACEBACK = "--traceback"


def main(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code."""
    shows_traceback = _TRACEBACK in arguments  # wherever it stands, before the command or behind it
    given = [argument for argument in arguments if argument != _TRACEBACK]
    try:
        from specdec.cli.app import app

        if sys.stdout is None:
            raise OSError("standard output is closed: nothing could be printed")
        status: Any = app(given or ["--help"], prog_name="specdec", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has left, as `head` does; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OTHER
    except Exception as error:
        if shows_traceback:
            raise
        return _fail(error)
    return status if isinstance(status, int) else 0


def run() -> NoReturn:
    """Run the command line of the process; the entry point of the package."""
    try:
        place = launched_place()
        if place is not None and place.rank > 0:
            from specdec.ranks.follower import follow_until_dismissed

            _leave(follow_until_dismissed(place))
    except Exception as error:
        _leave(_fail(error))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
    try:
        exit_code = main(sys.argv[1:])
    except Exception:  # its traceback was asked for
        traceback.print_exc()
        exit_code = EXIT_OTHER
    if place is not None:
        from specdec.ranks.rank_group import dismiss_followers

        dismiss_followers(place, exit_code=exit_code)
    _leave(exit_code)


def _leave(exit_code: int) -> NoReturn:
    """End the process at once: everything is closed, and threads of a broken collective abort an interpreter's end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # left by its reader, closed, or never there
            stream.flush()
    os._exit(exit_code)


def _fail(error: Exception) -> int:
    """Say in one line what is wrong; gives the exit code."""
    print(f"specdec: {_message(error)}", file=sys.stderr)
    return _exit_code(error)


def _message(error: Exception) -> str:
    from typer import TyperException

    if isinstance(error, TyperException):
        context = getattr(error, "ctx", None)
        command = "specdec" if context is None else context.command_path
        return f"{error.format_message().rstrip('.')} (see {command} --help)"
    message = " ".join(str(error).split())
    if isinstance(error, SpecdecError | OSError):
        return message
    return f"{type(error).__name__}: {message} (specdec {_TRACEBACK} ... shows where)"


def _exit_code(error: Exception) -> int:
    from typer import TyperException

    if isinstance(error, TyperException):
        return error.exit_code
    if isinstance(error, ConfigError | RequestError):
        return EXIT_USAGE
    if isinstance(error, RankLostError):
        return EXIT_RANK_LOST
    return EXIT_CHECKPOINT if isinstance(error, CheckpointError) else EXIT_OTHER
