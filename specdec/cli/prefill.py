"""`specdec prefill`: compute prompts for decode groups, and write their KV into the groups' memory."""

import signal
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli.engine_options import (
    CACHE_OPTIONS,
    DRAFT_KV_OPTION,
    MODEL_OPTIONS,
    RANK_OPTIONS,
    SCHEDULE_OPTIONS,
    TRANSPORT_OPTION,
)
from specdec.cli.loading import load_engine
from specdec.cli.option_table import OptionTable, takes_options

_SERVER_OPTIONS = OptionTable("Transfer", (TRANSPORT_OPTION, DRAFT_KV_OPTION))


@takes_options(engine=(MODEL_OPTIONS, RANK_OPTIONS, CACHE_OPTIONS, SCHEDULE_OPTIONS, _SERVER_OPTIONS))
def prefill(
    *,
    model: Annotated[str, typer.Option(help="Checkpoint directory, or glm-tiny.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where decode groups call; port 0 takes a free one.")
    ] = "127.0.0.1:0",
    engine: Mapping[str, Any],
) -> None:
    """Serve decode groups until SIGTERM.

    Prints the address on standard output once it can be called; a decode group is started with --prefill ADDRESS.
    Whoever reaches that address can have prompts computed: listen on a private network.
    """
    console = Console(stderr=True)
    settings = {"transport": "local", "num_draft_tokens": 0, "draft_kv": True, **engine}
    loaded = load_engine(model, settings, console=console)
    from specdec.prefill.server import PrefillServer

    with loaded:
        server = PrefillServer(loaded, listen=listen)
        signal.signal(signal.SIGTERM, lambda _number, _frame: server.stop())
        for line in loaded.report_lines():
            console.print(line, style="dim", highlight=False, soft_wrap=True)
        print(server.address, flush=True)
        server.serve()
        counts = server.counts
        console.print(
            f"{counts.num_done} of {counts.num_started} prompts handed over, {counts.num_failed} failed",
            style="dim",
            highlight=False,
        )
