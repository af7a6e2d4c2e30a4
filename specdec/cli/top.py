"""`specdec top`: a live view of running servers."""

import asyncio
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from specdec.cli.top_tables import server_tables
from specdec.errors import ConfigError, SpecdecError

if TYPE_CHECKING:
    from specdec.top.sample import ServerSample
    from specdec.top.watched_server import WatchedServer

_LONGEST_S = 3600.0


def top(
    *,
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="URL", help="Roots of servers (default: http://127.0.0.1:8000).")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one view, as without a terminal, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one sample as a JSON object, and end.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="From one sample to the next.")] = 1.0,
    window: Annotated[
        float, typer.Option(metavar="SECONDS", help="Rates, latencies and shares are those of the time just gone.")
    ] = 10.0,
) -> None:
    """Show what servers do: requests, tokens, latencies, acceptance, pages.

    Reads /metrics, /health and /ready of each. One server is shown in full, several in a row each. A server that is
    gone is asked again until it is back; Ctrl-C ends the view.
    """
    _check_extra()
    for name, value in (("--interval", interval), ("--window", window)):
        if not 0 < value <= _LONGEST_S:
            raise ConfigError(f"{name} must be above 0 and at most {_LONGEST_S:g} seconds, got {value:g}")
    from specdec.top.watch import sample_once
    from specdec.top.watched_server import WatchedServer

    servers = [WatchedServer(url, window_s=window) for url in urls or ("http://127.0.0.1:8000",)]
    console = Console(highlight=False)
    if console.is_terminal and not once and not as_json:
        asyncio.run(_show(servers, console, interval_s=interval))
    samples = asyncio.run(sample_once(servers, interval_s=interval))
    if as_json:
        print(_encode(samples))
    else:
        console.print(server_tables(samples))
    gone = [f"{sample.url} ({sample.detail})" for sample in samples if sample.state == "gone"]
    if gone:
        raise SpecdecError(f"no answer from {', '.join(gone)}: start it, or correct the URL")


async def _show(servers: Sequence["WatchedServer"], console: Console, *, interval_s: float) -> NoReturn:
    from specdec.top.watch import watch

    footer = Text(f"asked every {interval_s:g} s; Ctrl-C ends", style="dim")
    with Live("", console=console, screen=True, auto_refresh=False) as live:

        def show(samples: Sequence["ServerSample"]) -> None:
            live.update(Group(server_tables(samples), footer), refresh=True)

        await watch(servers, show, interval_s=interval_s)


def _encode(samples: Sequence["ServerSample"]) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode({"servers": samples}), indent=2).decode()


def _check_extra() -> None:
    """Refuse to start without the libraries of the extra."""
    try:
        import_module("httpx2")
        import_module("prometheus_client")
    except ModuleNotFoundError as error:
        raise ConfigError(f"specdec top needs {error.name}: install specdec with the extra `serve`") from error
