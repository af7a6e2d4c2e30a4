"""Servers that are asked again and again, on a clock that jumps."""

import asyncio
from collections.abc import Sequence

import httpx2
import pytest

from specdec.errors import ConfigError
from specdec.top.sample import ServerSample, ServerState
from specdec.top.watch import sample_once, watch
from specdec.top.watched_server import WatchedServer
from tests.support.scripted_server import ScriptedTransport
from tests.support.scripted_status import StatusServer, metrics_text
from tests.support.virtual_time import run_virtually

URL = "http://tiny:8000"


def watched(server: StatusServer, url: str = URL) -> WatchedServer:
    return WatchedServer(url, window_s=10.0, transport=ScriptedTransport(server))


def tokens(count: float, **settings: float) -> str:
    return metrics_text({"generation_tokens_total": count}, **settings)


class Enough(Exception):  # noqa: N818
    """Ends a watch."""


def watch_for(
    num_views: int, *servers: WatchedServer, change: dict[int, object] | None = None
) -> list[list[ServerSample]]:
    """Watch until there were so many views."""
    views: list[list[ServerSample]] = []

    def take(samples: Sequence[ServerSample]) -> None:
        views.append(list(samples))
        action = (change or {}).get(len(views))
        if callable(action):
            action()
        if len(views) == num_views:
            raise Enough

    with pytest.raises(Enough):
        run_virtually(watch(servers, take, interval_s=2.0))
    return views


def test_once_is_two_samples_an_interval_apart() -> None:
    server = StatusServer(metrics=[tokens(100), tokens(160)])
    (sample,) = run_virtually(sample_once([watched(server)], interval_s=3.0))
    assert (sample.url, sample.state, sample.model) == (URL, ServerState.READY, "tiny")
    assert sample.window is not None
    assert (sample.window.duration_s, sample.window.output_tokens_per_s) == (3.0, 20.0)
    assert sample.since_start is not None
    assert sample.since_start.output_tokens == 160


def test_a_server_that_goes_and_comes_back_is_asked_all_the_time() -> None:
    server = StatusServer(
        metrics=[tokens(100, started_at_s=1.0), tokens(120, started_at_s=1.0), tokens(6, started_at_s=2.0)]
    )
    changes = {2: lambda: setattr(server, "is_down", True), 5: lambda: setattr(server, "is_down", False)}
    views = watch_for(6, watched(server), change=changes)
    assert [view[0].state for view in views] == ["ready", "ready", "gone", "gone", "gone", "ready"]
    gone = views[3][0]
    assert (gone.detail, gone.window, gone.num_running) == ("connection refused", None, None)
    back = views[5][0]
    assert back.num_restarts == 1
    assert back.window is not None
    assert (back.window.duration_s, back.window.activity.output_tokens) == (10.0, 20 + 6)
    assert back.window.output_tokens_per_s == 2.6


def test_a_server_that_hangs_does_not_hold_up_the_others() -> None:
    class Hanging(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            if hangs:
                await asyncio.sleep(5.0)
                raise httpx2.ReadTimeout("", request=request)
            return await inner.handle_async_request(request)

    hangs = False
    inner = ScriptedTransport(StatusServer())
    hanging = WatchedServer("http://slow", window_s=10.0, transport=Hanging())
    server = StatusServer()

    def hang() -> None:
        nonlocal hangs
        hangs = True

    views = watch_for(9, hanging, watched(server), change={2: hang})
    assert [view[0].state for view in views if view[0].state == "gone"]
    assert views[-1][0].detail == "ReadTimeout"
    assert server.asked.count("/metrics") > 5


@pytest.mark.parametrize(
    ("answers", "state", "detail"),
    [
        ({}, "ready", ""),
        ({"/ready": (503, "the server is shutting down")}, "not ready", "the server is shutting down"),
        ({"/ready": (503, "")}, "not ready", "HTTP 503"),
        ({"/ready": (404, "no such path")}, "ready", ""),
        ({"/health": (503, "the engine is not healthy")}, "unhealthy", "the engine is not healthy"),
        ({"/metrics": (404, "no such path")}, "ready", "no metrics: /metrics answers HTTP 404"),
    ],
)
def test_states(answers: dict[str, tuple[int, str]], state: str, detail: str) -> None:
    (sample,) = run_virtually(sample_once([watched(StatusServer(answers=answers))], interval_s=1.0))
    assert (sample.state, sample.detail) == (state, detail)


def test_something_else_on_metrics_is_no_metrics() -> None:
    (sample,) = run_virtually(sample_once([watched(StatusServer(metrics=["<html>"]))], interval_s=1.0))
    assert (sample.state, sample.since_start) == ("ready", None)
    assert sample.detail == "no metrics: /metrics answers HTTP 200"


def test_the_end_of_an_api_root_is_left_away() -> None:
    server = StatusServer()
    run_virtually(sample_once([watched(server, f"{URL}/v1/")], interval_s=1.0))
    assert server.asked == ["/health", "/ready", "/metrics"] * 2


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", ""])
def test_addresses_that_are_none_of_http_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must begin with http"):
        WatchedServer(url, window_s=1.0)


@pytest.mark.parametrize("url", ["http://a:b", "http://[::1"])
def test_addresses_that_cannot_be_used_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        WatchedServer(url, window_s=1.0)
