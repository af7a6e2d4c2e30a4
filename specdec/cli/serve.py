"""`specdec serve`: answer requests of the OpenAI and the Anthropic API."""

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli.engine_options import ENGINE_OPTIONS
from specdec.cli.loading import load_engine
from specdec.cli.memory_size import parse_memory_size
from specdec.cli.option_table import OptionTable, TableOption, takes_options
from specdec.errors import ConfigError

_NEEDED = ("fastapi", "prometheus_client", "uvicorn")

_SERVER_OPTIONS = OptionTable(
    "Server",
    (
        TableOption(
            name="served_model_name",
            type=list[str],
            help="Name of the model in the API; repeatable [default: --model].",
            metavar="NAME",
        ),
        TableOption(name="max_queued_requests", type=int, help="Requests that may wait for a slot [default: 256]."),
        TableOption(
            name="max_body_bytes",
            type=str,
            help="Size of a request's body [default: 64MiB].",
            metavar="SIZE",
            parse=parse_memory_size,
        ),
        TableOption(
            name="request_timeout_s", type=float, help="Seconds from a request's arrival to its end [default: 3600.0]."
        ),
        TableOption(
            name="client_timeout_s",
            type=float,
            help="Seconds in which a client must send its request, and take more of the answer [default: 60.0].",
        ),
        TableOption(
            name="drain_timeout_s", type=float, help="Seconds that requests get to end after SIGTERM [default: 30.0]."
        ),
        TableOption(
            name="allow_origin",
            type=list[str],
            help="Origin of web pages that may call the API; repeatable. None may by default.",
            metavar="ORIGIN",
        ),
    ),
)


@takes_options(server=(_SERVER_OPTIONS,), engine=ENGINE_OPTIONS)
def serve(
    *,
    model: Annotated[str, typer.Option(help="Checkpoint directory, or glm-tiny.")],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", envvar="SPECDEC_API_KEY", help="Key that opens the API; repeatable."),
    ] = None,
    server: Mapping[str, Any],
    engine: Mapping[str, Any],
) -> None:
    """Answer requests of the OpenAI and the Anthropic API until SIGTERM.

    Prints the address on standard output once it can be called; the log, JSON lines without any text of users, goes to
    standard error.
    """
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"specdec serve needs the package {package}: pip install 'specdec[serve]'")
    from specdec.serving.settings import ServerSettings

    limits = {name: value for name, value in server.items() if name in ServerSettings.__dataclass_fields__}
    settings = ServerSettings(
        model_names=tuple(server.get("served_model_name", (model,))),
        api_keys=tuple(api_key or ()),
        allowed_origins=tuple(server.get("allow_origin", ())),
        **limits,
    )
    console = Console(stderr=True)
    with load_engine(model, engine, console=console) as loaded:
        from specdec.serving.engine_gauges import read_gauges
        from specdec.serving.server import Server
        from specdec.serving.service import Service
        from specdec.serving.web.json_log import log_to_stderr

        service = Service(loaded, settings, max_running=loaded.config.max_num_requests)
        serving = Server(service, partial(read_gauges, loaded), host=host, port=port)
        for line in (loaded.checkpoint.report.summary(), *loaded.memory.report_lines()):
            console.print(line, style="dim", highlight=False, soft_wrap=True)
        log_to_stderr()
        print(serving.url, flush=True)
        serving.run()
