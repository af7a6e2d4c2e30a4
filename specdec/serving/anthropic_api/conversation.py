"""Messages of the Anthropic API, rewritten as messages that templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.serving.api_errors import wrong


def conversation_of(
    system: str | Sequence[Mapping[str, Any]] | None, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Rewrite a conversation: blocks become contents, reasoning, calls and messages of tools.

    Raises:
        ApiError: 400; names the field that is wrong.
    """
    rewritten: list[dict[str, Any]] = []
    if system:
        rewritten.append({"role": "system", "content": _text_of(system, where="system")})
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{where}.role", f"must be user, assistant or system, got {str(role)[:64]!r}")
        if isinstance(content, str):
            rewritten.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise wrong(f"{where}.content", "must be a text or a list of blocks")
        elif role == "assistant":
            rewritten.append(_assistant(content, where=f"{where}.content"))
        elif role == "user":
            rewritten += _user(content, where=f"{where}.content")
        else:
            rewritten.append({"role": role, "content": _text_of(content, where=f"{where}.content")})
    if messages and messages[-1].get("role") == "assistant":
        raise wrong("messages", "must not end with the assistant: a reply cannot be continued")
    return rewritten


def _user(blocks: Sequence[Any], *, where: str) -> list[dict[str, Any]]:
    """Give a message for each result of a tool, and for each run of text between them."""
    rewritten: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        at = f"{where}[{place}]"
        kind = _kind(block, at)
        if kind == "tool_result":
            call_id, content = block.get("tool_use_id"), block.get("content")
            if not isinstance(call_id, str):
                raise wrong(f"{at}.tool_use_id", "must be a text")
            text = "" if content is None else _text_of(content, where=f"{at}.content")
            rewritten.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif kind == "text":
            if not rewritten or rewritten[-1]["role"] != "user":
                rewritten.append({"role": "user", "content": []})
            rewritten[-1]["content"].append({"type": "text", "text": _text(block, "text", at)})
        else:
            raise wrong(f"{at}.type", f"must be text or tool_result, got {kind[:64]!r}")
    return rewritten or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[Any], *, where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        at = f"{where}[{place}]"
        match _kind(block, at):
            case "text":
                texts.append(_text(block, "text", at))
            case "thinking":
                thoughts.append(_text(block, "thinking", at))
            case "redacted_thinking":
                pass  # nobody here can read it
            case "tool_use":
                if not isinstance(block.get("input"), Mapping):
                    raise wrong(f"{at}.input", "must be an object")
                function = {"name": _text(block, "name", at), "arguments": json.dumps(block["input"])}
                calls.append({"id": _text(block, "id", at), "type": "function", "function": function})
            case kind:
                raise wrong(f"{at}.type", f"must be text, thinking or tool_use, got {kind[:64]!r}")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text_of(content: Any, *, where: str) -> str:
    """Join a content of nothing but text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "must be a text or a list of blocks")
    texts = []
    for place, block in enumerate(content):
        at = f"{where}[{place}]"
        if (kind := _kind(block, at)) != "text":
            raise wrong(f"{at}.type", f"must be text, got {kind[:64]!r}")
        texts.append(_text(block, "text", at))
    return "".join(texts)


def _kind(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise wrong(f"{where}.type", "must be a text")
    return kind


def _text(block: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(block.get(name), str):
        raise wrong(f"{where}.{name}", "must be a text")
    text: str = block[name]
    return text
