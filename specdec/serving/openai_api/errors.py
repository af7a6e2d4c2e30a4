"""Errors as the OpenAI API tells them."""

from specdec.serving.api_errors import ApiError
from specdec.serving.openai_api.answer import DONE
from specdec.serving.web.event_stream import event


def error_event(error: ApiError) -> bytes:
    """Tell an error inside of a stream, and end it."""
    return event(error.openai_body()) + DONE
