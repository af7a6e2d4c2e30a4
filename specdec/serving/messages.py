"""Messages as templates read them: roles that they know, and contents of text."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.serving.api_errors import refused, wrong

_ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check the messages of a chat and give them as a template reads them.

    "developer" is another word for "system". Everything that is not checked here is passed on as it is.

    Raises:
        ApiError: 400; names the field that is wrong.
    """
    if not messages:
        raise refused("messages", "messages must not be empty")
    return [_message(message, where=f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {str(role)[:64]!r}")
    checked = {**message, "role": "system" if role == "developer" else role}
    content = message.get("content")
    if isinstance(content, list):
        checked["content"] = [_part(part, where=f"{where}.content[{i}]") for i, part in enumerate(content)]
    elif not isinstance(content, str) and not (role == "assistant" and content is None):
        raise wrong(f"{where}.content", "must be a text or a list of parts")
    calls = message.get("tool_calls")
    if calls is not None:
        if role != "assistant" or not isinstance(calls, list):
            raise wrong(f"{where}.tool_calls", "must be a list, in a message of the assistant")
        for i, call in enumerate(calls):
            _check_call(call, where=f"{where}.tool_calls[{i}]")
    if not isinstance(message.get("tool_call_id") or "", str):
        raise wrong(f"{where}.tool_call_id", "must be a text")
    for name in ("reasoning_content", "reasoning"):
        if not isinstance(message.get(name) or "", str):
            raise wrong(f"{where}.{name}", "must be a text")
    return checked


def _part(part: Any, *, where: str) -> dict[str, str]:
    """Give a part of a content; a refusal is text that the assistant has said."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal"):
        raise wrong(f"{where}.type", f"must be text, the only kind that the model reads, got {str(kind)[:64]!r}")
    if not isinstance(part.get(kind), str):
        raise wrong(f"{where}.{kind}", "must be a text")
    return {"type": "text", "text": part[kind]}


def _check_call(call: Any, *, where: str) -> None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong(f"{where}.function", "must be an object with the name of a function")
