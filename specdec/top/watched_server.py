"""A server that is asked again and again how it is."""

import asyncio

import httpx2

from specdec.bench.server import error_detail
from specdec.errors import ConfigError
from specdec.top.history import History
from specdec.top.reading import Reading, parse_metrics
from specdec.top.sample import ServerSample, ServerState

_TIMEOUT_S = 5.0  # longer than a server may wait for the end of a round before it answers


class WatchedServer:
    """One server.

    Args:
        url: Root of its paths; "/v1" at the end is left away.
        window_s: What is counted is that of this many seconds.
        transport: What carries the questions; None for the network.

    Raises:
        ConfigError: The address is none of HTTP.
    """

    def __init__(self, url: str, *, window_s: float, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"the URL of a server must begin with http:// or https://, got {url!r}")
        self._history = History(window_s)
        try:
            self._client = httpx2.AsyncClient(
                base_url=self.url, timeout=_TIMEOUT_S, transport=transport, trust_env=False
            )
        except (httpx2.InvalidURL, UnicodeEncodeError) as error:
            raise ConfigError(f"the URL {url!r} of a server cannot be used: {error}") from error

    async def sample(self) -> ServerSample:
        """Ask it once."""
        try:
            state, detail = await self._ask_state()
            metrics = await self._client.get("metrics")
        except httpx2.HTTPError as error:
            return ServerSample(
                url=self.url,
                state=ServerState.GONE,
                detail=str(error) or type(error).__name__,
                num_restarts=self._history.num_restarts,
            )
        reading = _read(metrics)
        if reading is None:
            detail = detail or f"no metrics: /metrics answers HTTP {metrics.status_code}"
            return ServerSample(url=self.url, state=state, detail=detail, num_restarts=self._history.num_restarts)
        self._history.add(reading)
        return ServerSample.of(self.url, state, detail, self._history)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask_state(self) -> tuple[ServerState, str]:
        """Give the state and why it is so. A server without /ready takes requests while it is healthy."""
        health = await self._client.get("health")
        if not health.is_success:
            return ServerState.UNHEALTHY, error_detail(health.text) or f"HTTP {health.status_code}"
        ready = await self._client.get("ready")
        if ready.is_success or ready.status_code == httpx2.codes.NOT_FOUND:
            return ServerState.READY, ""
        return ServerState.NOT_READY, error_detail(ready.text) or f"HTTP {ready.status_code}"


def _read(metrics: httpx2.Response) -> Reading | None:
    if not metrics.is_success:
        return None
    try:
        return parse_metrics(metrics.text, read_at_s=asyncio.get_running_loop().time())
    except ValueError:
        return None
