"""The server under test, over HTTP: what can be asked of it, and whether it is there."""

from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from specdec.errors import ConfigError, SpecdecError

CONNECT_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 30.0
_DETAIL_LENGTH = 300


class ServerGoneError(SpecdecError):
    """The server cannot be reached: start it, or correct its address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer that is not streamed.

    Attributes:
        status: HTTP status.
        fields: The JSON object of the body; empty if it is none.
        text: The body.
    """

    status: int
    fields: dict[str, Any]
    text: str

    @property
    def is_ok(self) -> bool:
        """Whether the request was served."""
        return self.status == 200

    @property
    def detail(self) -> str:
        """What the server said, shortened: the message of an OpenAI error, else the body."""
        return error_detail(self.text)


class Server:
    """An OpenAI-compatible server.

    Args:
        url: Root of its paths; "/v1" at the end is left away.
        api_key: Sent as a bearer token; None for none.
        transport: What carries the requests; None for the network.

    Raises:
        ConfigError: The address is none of HTTP.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url must begin with http:// or https://, got {url!r}")
        try:
            self.client = httpx2.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                # How long a reply may take is a limit of each request, not of each read.
                timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
                transport=transport,
                trust_env=False,  # a proxy would be measured too
            )
        except (httpx2.InvalidURL, UnicodeEncodeError) as error:
            raise ConfigError(f"--url {url!r} or the API key cannot be used: {error}") from error

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> Answer:
        """Send a small request, GET without a body and POST with one, and wait for all of the answer.

        Raises:
            ServerGoneError: There was no answer.
        """
        method = "GET" if body is None else "POST"
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            response = await self.client.request(
                method, path, content=content, headers=headers, timeout=_PROBE_TIMEOUT_S
            )
        except httpx2.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ServerGoneError(f"{self.url} cannot be reached ({reason}): start it, or correct --url") from error
        try:
            fields = msgspec.json.decode(response.content, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            fields = {}
        return Answer(status=response.status_code, fields=fields, text=response.text)

    async def fault(self) -> str:
        """Why the server cannot be reached; "" if it answers, whatever it says."""
        try:
            await self.ask("v1/models")
        except ServerGoneError as error:
            return str(error)
        return ""

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()


def error_detail(body: str) -> str:
    """Give the message of an OpenAI error, else the body itself, shortened."""
    detail: Any = body
    try:
        fields = msgspec.json.decode(body)
        detail = fields["error"]["message"]
    except (msgspec.MsgspecError, LookupError, TypeError, RecursionError):
        pass
    return " ".join(str(detail).split())[:_DETAIL_LENGTH]
