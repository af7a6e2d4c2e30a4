"""Server-sent events: an answer that is sent while it is made."""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.serving.api_errors import ApiError, api_error_of
from specdec.serving.driver import Piece
from specdec.serving.generation import Generation
from specdec.serving.web.body import CLIENT_GONE_STATUS
from specdec.serving.web.client import bound_to_client

_LOG = logging.getLogger("specdec.serving")
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: proxies see that the connection lives, clients see nothing
KEEP_ALIVE_S = 15.0


def event(data: Any, *, name: str | None = None) -> bytes:
    """Write one event; without a name it is of the default kind."""
    body = msgspec.json.encode(data)
    return b"data: " + body + b"\n\n" if name is None else b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


async def pieces_or_silence(generation: Generation) -> list[Piece] | None:
    """Give the next pieces of a generation: none of them after `KEEP_ALIVE_S` without any, None behind the last.

    Raises:
        ApiError: The generation failed.
    """
    try:
        return await generation.news(timeout_s=KEEP_ALIVE_S) or None
    except TimeoutError:
        return []


class EventStream(Response):
    """Sends the events of one generation.

    Nothing is sent before the first events are there, so that what fails at once has its own status. Sending waits for
    the client: what it does not take is not read from the generation.

    Args:
        generation: Closed when the client leaves.
        events: Bytes of one or several events each.
        error_event: How an error is told inside of a stream.
        headers: Beside the usual ones.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        events: AsyncGenerator[bytes, None],
        *,
        error_event: Callable[[ApiError], bytes],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._generation = generation
        self._events = events
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; raises what goes wrong before anything was sent."""
        async with bound_to_client(self._generation, receive):
            chunk = await anext(self._events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            failure: ApiError | None = None
            try:
                while True:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    chunk = await anext(self._events)
            except StopAsyncIteration:
                chunk = b""
            except Exception as error:
                failure = api_error_of(error)
                scope["state"]["log"]["stream_error"] = failure.status
                if failure is not error and failure.status == 500:
                    _LOG.exception("a stream failed", extra={"request_id": scope["state"]["request_id"]})
                chunk = self._error_event(failure)
            finally:
                await self._events.aclose()
            if failure is not None and failure.status == CLIENT_GONE_STATUS:
                return
            await send({"type": "http.response.body", "body": chunk, "more_body": False})
