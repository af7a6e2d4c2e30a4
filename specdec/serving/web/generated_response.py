"""An answer that is generated: sent while it is made, or whole once it is there."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specdec.serving.api_errors import ApiError
from specdec.serving.generation import Generation
from specdec.serving.web.client import bound_to_client
from specdec.serving.web.event_stream import EventStream
from specdec.serving.web.json_response import JsonResponse


async def generated_response(
    request: Request,
    generation: Generation,
    answer: AsyncGenerator[bytes, None] | Awaitable[Any],
    *,
    error_event: Callable[[ApiError], bytes],
    headers: Mapping[str, str],
) -> Response:
    """Answer a request with what is generated; waits for it, where it is not streamed.

    Args:
        request: Whose client may leave.
        generation: Closed when it does, and in the end.
        answer: Events of a stream, or one JSON value.
        error_event: How an error is told inside of a stream.
        headers: Beside the usual ones.

    Raises:
        ApiError: The generation failed before anything was sent.
    """
    if isinstance(answer, AsyncGenerator):
        return EventStream(generation, answer, error_event=error_event, headers=headers)
    async with bound_to_client(generation, request.receive):
        return JsonResponse(await answer, headers=headers)
