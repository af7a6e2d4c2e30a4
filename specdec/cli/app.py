"""The subcommands of `specdec` and the options in front of them.

The commands import the engine when they run, so that `specdec --help` does not load torch.
"""

from importlib import metadata
from typing import Annotated

import typer

from specdec.cli.audit import audit
from specdec.cli.bench import bench
from specdec.cli.demo import demo
from specdec.cli.generate import generate
from specdec.cli.inspect import inspect
from specdec.cli.plan import plan
from specdec.cli.plan_transfer import plan_transfer
from specdec.cli.prefill import prefill
from specdec.cli.score import score
from specdec.cli.serve import serve
from specdec.cli.top import top

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (generate, serve, prefill, score, inspect, plan, plan_transfer, audit, bench, top, demo):
    app.command()(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"specdec {metadata.version('specdec')}")
        raise typer.Exit


@app.callback()
def root(
    *,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding for GLM-5.x checkpoints."""
    # Both are dealt with elsewhere: `main` takes the first out of the command line, a callback prints the version.
