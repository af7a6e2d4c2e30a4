"""What a request is refused with: a status, a type, a field, a code; the APIs differ only in how they write it down."""

import re
from collections.abc import Mapping
from typing import Any

from specdec.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineError,
    OutOfPagesError,
    RankLostError,
    RequestError,
    TransferError,
)

_RETRY_AFTER_S = 1


class ApiError(Exception):
    """A request cannot be answered.

    Attributes:
        status: HTTP status.
        message: What is wrong and what to do about it.
        param: The field that is wrong, None where it is none.
        code: A word for programs, None where the status says all.
        headers: Beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """Kind of the error, as both APIs name kinds."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def openai_body(self) -> dict[str, Any]:
        """Give the body as the OpenAI API has it."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """Give the body as the Anthropic API has it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}


_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def refused(param: str, message: str) -> ApiError:
    """A field is wrong; the message begins with its name."""
    return ApiError(400, message, param=param, code="invalid_value")


def wrong(field: str, rule: str) -> ApiError:
    """A field breaks a rule, which goes on where its name ends: "must be a text"."""
    return refused(field, f"{field} {rule}")


def unavailable(message: str) -> ApiError:
    """Nothing is served now; another server, or this one later, may."""
    return ApiError(503, message, code="unavailable", headers={"retry-after": str(_RETRY_AFTER_S)})


def queue_full(message: str) -> ApiError:
    """Too many requests are here already."""
    return ApiError(429, message, code="queue_full", headers={"retry-after": str(_RETRY_AFTER_S)})


def api_error_of(
    error: BaseException, *, field_of: Mapping[str, str] | None = None, prompt_field: str | None = None
) -> ApiError:
    """Turn what the engine raised into what the client is told.

    Args:
        error: Any exception.
        field_of: Names of request fields by sampling parameter, where they are not the same.
        prompt_field: The field that is wrong where it is no sampling parameter.
    """
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, str(error), param=prompt_field, code="context_length_exceeded")
        case RequestError(parameter=str(parameter)):
            return _of_parameter(str(error), parameter, field_of or {})
        case RequestError():
            return ApiError(400, str(error), param=prompt_field)
        case ConfigError():
            return ApiError(400, str(error))
        case DeadlineError():
            return ApiError(504, str(error), code="timeout")
        case OutOfPagesError() | TransferError():
            return unavailable(str(error))
        case RankLostError():
            return unavailable("the engine is not healthy: the server must be started again")
        case _:
            return ApiError(500, "the server failed to process the request", code="internal_error")


def _of_parameter(message: str, parameter: str, field_of: Mapping[str, str]) -> ApiError:
    """Name the request's field in the place of the sampling parameter that it became."""
    name = re.sub(r"^a key of |\[.*\]$", "", parameter)
    field = field_of.get(name, name)
    if field != name and message.startswith(name):
        message = field + message[len(name) :]
    return refused(field, message)
