"""A request's body: read within limits of size and time, then decoded, with errors that name the field."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from specdec.serving.api_errors import ApiError, refused

S = TypeVar("S", bound=msgspec.Struct)

_MOST_FIELDS_NAMED = 16
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CLIENT_GONE_STATUS = 499  # nobody is told, but the log has it


def client_gone() -> ApiError:
    """The client has left, so that whatever is done for it ends."""
    return ApiError(CLIENT_GONE_STATUS, "the client has closed the connection")


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read a JSON body.

    Raises:
        ApiError: 415 for another type of content, 413 for too many bytes, 408 for a body that comes too slowly, 499 for
            a client that leaves before the end.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"the content-type must be application/json, got {content_type[:64]!r}")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(announced, max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in _chunks(request.receive):
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(f"more than {max_bytes}", max_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive in {timeout_s:g} s", code="timeout", headers={"connection": "close"}
        ) from None
    return bytes(body)


def decode_body(body: bytes, kind: type[S]) -> tuple[S, list[str]]:
    """Decode a JSON object.

    Args:
        body: The bytes.
        kind: What its fields must be. Fields that it does not have are ignored.

    Returns:
        The request, and the names of the fields that were ignored; null counts as not given.

    Raises:
        ApiError: 400; names the field that is wrong.
    """
    try:
        fields = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
        raise ApiError(400, f"the body must be JSON: {_lower(str(error))}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        request = msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _field_error(str(error)) from error
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return request, [name for name, value in fields.items() if name not in known and value is not None]


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Give the header that names ignored fields; a name that is no plain word stands as `?`."""
    if not names:
        return {}
    plain = [name if _PLAIN_NAME.fullmatch(name) else "?" for name in names[:_MOST_FIELDS_NAMED]]
    return {"x-specdec-ignored-fields": ", ".join(plain)}


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_gone()
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _field_error(text: str) -> ApiError:
    """Say with the field's name what `msgspec` says with a path behind it."""
    text, _, path = text.partition(" - at `")
    field = path.removesuffix("`").removeprefix("$").removeprefix(".").replace("[...]", "")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        field = f"{field}.{missing[1]}" if field else missing[1]
        return ApiError(400, f"{field} is required", param=field, code="missing_field")
    return refused(field, f"{field}: {_lower(text).replace('`', '')}")


def _too_large(size: str, max_bytes: int) -> ApiError:
    """Refuse a body; the HTTP library takes in what is still sent of it, so that the client gets to the answer."""
    return ApiError(413, f"the body has {size} bytes, at most {max_bytes} are taken", code="body_too_large")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
