"""`specdec serve`: answer requests of the OpenAI and the Anthropic API."""

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli.engine_options import DRAFT_KV_OPTION, ENGINE_OPTIONS, engine_settings
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
            help="Size of a request's body [default: 32MiB].",
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

_ROLE_OPTIONS = OptionTable(
    "Prefill and decode apart",
    (
        TableOption(
            name="role",
            type=str,
            help="prefill (compute prompts for decode groups), decode (answer with prompts that the servers of "
            "--prefill compute) or both (answer, and compute prompts for groups, too).",
            metavar="ROLE",
        ),
        TableOption(
            name="handoff_listen",
            type=str,
            help="Where decode groups call, with role prefill or both; port 0 takes a free one [default: 127.0.0.1:0].",
            metavar="HOST:PORT",
        ),
    ),
)
_ENGINE_OPTIONS = (*ENGINE_OPTIONS, OptionTable("Prompts for decode groups", (DRAFT_KV_OPTION,)))


@takes_options(server=(_SERVER_OPTIONS, _ROLE_OPTIONS), engine=_ENGINE_OPTIONS)
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

    Prints the address on standard output once it can be called, and with role prefill or both a second line with the
    address for decode groups, which belongs on a private network. The log, JSON lines without any text of users, goes
    to standard error.
    """
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"specdec serve needs the package {package}: pip install 'specdec[serve]'")
    from specdec.serving.roles import read_role, settings_of_role
    from specdec.serving.settings import ServerSettings

    role, listen = read_role(server.get("role")), server.get("handoff_listen")
    chosen = settings_of_role(role, engine_settings(engine), listens=listen is not None)
    limits = {name: value for name, value in server.items() if name in ServerSettings.__dataclass_fields__}
    settings = ServerSettings(
        model_names=tuple(server.get("served_model_name", (model,))),
        api_keys=tuple(api_key or ()),
        allowed_origins=tuple(server.get("allow_origin", ())),
        **limits,
    )
    console = Console(stderr=True)
    with load_engine(model, chosen, console=console) as loaded:
        from specdec.prefill.server import PrefillServer
        from specdec.serving.engine_gauges import read_gauges
        from specdec.serving.server import Server
        from specdec.serving.service import Service
        from specdec.serving.web.json_log import log_to_stderr

        serves_groups = role is not None and role.serves_groups
        door = PrefillServer(loaded, listen=listen or "127.0.0.1:0") if serves_groups else None
        service = Service(
            loaded,
            settings,
            max_running=loaded.config.max_num_requests,
            prefill=door,
            answers_requests=role is None or role.answers_requests,
        )
        serving = Server(service, partial(read_gauges, loaded, door), host=host, port=port)
        for line in loaded.report_lines():
            console.print(line, style="dim", highlight=False, soft_wrap=True)
        log_to_stderr()
        print(serving.url, flush=True)
        if door is not None:
            print(door.address, flush=True)
        serving.run()
