"""Tools of a request: which the model is shown, which it may call, and whether it must."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.replies.tool_call_reader import may_be_name
from specdec.serving.api_errors import refused

Tool = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """Tools in the form of the OpenAI API.

    Attributes:
        shown: Those that the prompt names, and that calls are parsed for.
        callable: Those that may be called: where a call is required, no other can be.
        is_required: Whether the reply must be a call.
        is_parallel: Whether it may be several.
    """

    shown: Sequence[Tool] = ()
    callable: Sequence[Tool] = ()
    is_required: bool = False
    is_parallel: bool = True


def read_tool_use(
    tools: Sequence[Tool] | None, choice: str | Mapping[str, Any] | None, *, is_parallel: bool
) -> ToolUse:
    """Read `tools` and `tool_choice`.

    With "none" the tools are not shown, so that the model does not call them. With "allowed_tools" only those are shown
    that are allowed.

    Raises:
        ApiError: 400; names the field that is wrong.
    """
    tools = tools or ()
    by_name: dict[str, Tool] = {}
    for place, tool in enumerate(tools):
        name = _check_tool(tool, where=f"tools[{place}]")
        if by_name.setdefault(name, tool) is not tool:
            raise refused("tools", f"tools[{place}].function.name: two tools have the name {name[:64]!r}")
    if choice is None:
        choice = "auto"
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise refused("tool_choice", f"tool_choice must be auto, none, required or an object, got {choice[:64]!r}")
        if choice == "required" and not tools:
            raise refused("tool_choice", "tool_choice is required, but there are no tools")
        if choice == "none":
            return ToolUse()
        return ToolUse(shown=tools, callable=tools, is_required=choice == "required", is_parallel=is_parallel)
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        named = allowed.get("tools") if isinstance(allowed, Mapping) else None
        mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
        if not isinstance(named, list) or not named or mode not in ("auto", "required"):
            raise refused(
                "tool_choice", "tool_choice.allowed_tools must have a mode, auto or required, and a list of tools"
            )
        chosen = [_find(by_name, tool) for tool in named]
        return ToolUse(shown=chosen, callable=chosen, is_required=mode == "required", is_parallel=is_parallel)
    return ToolUse(shown=tools, callable=[_find(by_name, choice)], is_required=True, is_parallel=is_parallel)


def _find(by_name: Mapping[str, Tool], named: Any) -> Tool:
    function = named.get("function") if isinstance(named, Mapping) and named.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise refused(
            "tool_choice", 'tool_choice must name a function: {"type": "function", "function": {"name": ...}}'
        )
    if name not in by_name:
        raise refused("tool_choice", f"tool_choice names {name[:64]!r}, which is none of the tools")
    return by_name[name]


def _check_tool(tool: Tool, *, where: str) -> str:
    """Check one tool; gives its name."""
    if tool.get("type") != "function":
        raise refused("tools", f"{where}.type must be function, got {str(tool.get('type'))[:64]!r}")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise refused("tools", f"{where}.function must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not name or name != name.strip() or "<" in name or not may_be_name(name):
        rule = "one word without '<', of at most 256 characters: no call of another could be told from text"
        raise refused("tools", f"{where}.function.name must be {rule}")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise refused("tools", f"{where}.function.parameters must be a JSON schema, an object")
    if not isinstance(function.get("description") or "", str):
        raise refused("tools", f"{where}.function.description must be a text")
    return name
