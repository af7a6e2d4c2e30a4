"""The outermost layer: every request has an id, a line in the log, and an answer whatever happens inside."""

import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serving.api_errors import api_error_of

_LOG = logging.getLogger("specdec.serving")
_PLAIN_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds by machines


class RequestLog:
    """Wraps an application.

    The id is the client's `x-request-id` where that is a plain word, else a fresh one; it comes back under that name.
    The line has numbers, names and the path: nothing that a user wrote. Layers inside add to it through
    `scope["state"]["log"]`.

    Args:
        app: What is inside.
        on_response: Called with the status of every answer.
    """

    def __init__(self, app: ASGIApp, *, on_response: Callable[[int], None]) -> None:
        self._app = app
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(scope)
        state["arrived_at"] = arrived_at = time.monotonic()
        state["log"] = fields = dict[str, Any]()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            _LOG.error("a request failed", exc_info=error, extra={"request_id": request_id})
            if status == 0:
                await _send_internal_error(send_with_id, error)
        finally:
            self._on_response(status)
            quiet = scope["path"] in _QUIET_PATHS and status < 400
            _LOG.log(
                logging.DEBUG if quiet else logging.INFO,
                "request",
                extra={
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"][:128],
                    "status": status,
                    "seconds": round(time.monotonic() - arrived_at, 6),
                    **fields,
                },
            )


def _request_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode("ascii") if _PLAIN_ID.fullmatch(given) else secrets.token_hex(16)


async def _send_internal_error(send: Send, error: Exception) -> None:
    failure = api_error_of(error)
    body = msgspec.json.encode(failure.openai_body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": failure.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
