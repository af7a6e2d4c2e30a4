"""The field `response_format` of a chat."""

from collections.abc import Mapping
from typing import Any

from specdec.serving.api_errors import refused
from specdec.serving.reply_constraint import ReplyFormat

_KINDS = ("text", "json_object", "json_schema")


def read_response_format(given: Mapping[str, Any] | None) -> ReplyFormat | None:
    """Give what an answer must look like; None for any text.

    Raises:
        ApiError: 400; names the field that is wrong.
    """
    if given is None:
        return None
    kind = given.get("type")
    if kind not in _KINDS:
        raise refused(
            "response_format.type", f"response_format.type must be one of {', '.join(_KINDS)}, got {str(kind)[:64]!r}"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return ReplyFormat(schema=None, field="response_format")
    described = given.get("json_schema")
    if not isinstance(described, Mapping):
        raise refused("response_format.json_schema", "response_format.json_schema must be an object with a schema")
    schema = described.get("schema")
    field = "response_format.json_schema.schema"
    if schema is None:
        return ReplyFormat(schema={"type": "object"}, field=field)
    if not isinstance(schema, Mapping):
        raise refused(field, f"{field} must be a JSON schema, an object")
    return ReplyFormat(schema=schema, field=field)
