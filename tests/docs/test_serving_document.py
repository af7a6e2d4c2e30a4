"""docs/serving.md names everything that can be asked of a server, and nothing else."""

import re
from pathlib import Path

import pytest
import typer
from fastapi.routing import APIRoute

from specdec.cli.app import app
from specdec.serving.anthropic_api.request import MessagesRequest
from specdec.serving.anthropic_api.routes import anthropic_routes
from specdec.serving.engine_gauges import EngineGauges
from specdec.serving.metric_names import METRICS, MetricName
from specdec.serving.metrics import ServerMetrics
from specdec.serving.openai_api.chat_request import ChatRequest
from specdec.serving.openai_api.completion_request import CompletionRequest
from specdec.serving.openai_api.routes import openai_routes
from specdec.serving.openai_api.text_routes import text_routes
from specdec.serving.service import Service
from specdec.serving.settings import ServerSettings
from specdec.serving.status import status_routes
from tests.support.fake_engine import FakeEngine

DOCUMENT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
NAMED = set(re.findall(r"[`\s](--?[a-z][a-z-]*)", DOCUMENT))


def flags(command: str) -> list[list[str]]:
    """The flags of each option of a command, the one it is known by first."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    options = [each for each in group.commands[command].params if each.param_type_name == "option"]
    return [option.opts for option in options if "--help" not in option.opts]


@pytest.mark.parametrize("command", ["serve", "bench", "top"])
def test_every_option_is_named(command: str) -> None:
    assert {given[0] for given in flags(command)} <= NAMED


def test_every_flag_that_is_named_exists() -> None:
    known = {flag for command in ("serve", "bench", "top") for given in flags(command) for flag in given}
    assert {flag for flag in NAMED if flag.startswith("--")} <= known


def test_every_endpoint_is_named() -> None:
    service = Service(FakeEngine(), ServerSettings(model_names=("tiny",)), max_running=1)
    metrics = ServerMetrics(service.driver, EngineGauges, model_name="tiny")
    routers = [
        ("/v1", openai_routes(service)),
        ("/v1", anthropic_routes(service)),
        ("", text_routes(service)),
        ("", status_routes(service, metrics)),
    ]
    routes = {
        f"{method} {prefix}{re.sub('{.*}', 'NAME', route.path)}"
        for prefix, router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert routes == set(re.findall(r"`((?:GET|POST) /\S+)`", DOCUMENT))


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest, MessagesRequest])
def test_every_field_is_named(request_type: type) -> None:
    named = set(re.findall(r"`(\w+)[`:]", DOCUMENT))
    assert set(request_type.__struct_fields__) <= named


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_metrics_are_mapped_as_the_code_says(metric: MetricName) -> None:
    (row,) = re.findall(rf"^\| `{metric.name}` \| (.*) \|$", DOCUMENT, re.MULTILINE)
    kind, meaning, vllm, sglang = row.split(" | ")
    assert (kind, vllm.strip()) == (metric.kind, "the same" if metric.vllm else "")
    labels = f" Labels: {', '.join(f'`{label}`' for label in metric.labels)}." if metric.labels else ""
    assert meaning == metric.help + labels
    assert sglang.replace("`", "").strip() == metric.sglang
