"""The body of `/v1/messages`, and what it asks for in terms of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from specdec.serving.anthropic_api.conversation import conversation_of
from specdec.serving.api_errors import refused
from specdec.serving.chat import ChatTask
from specdec.serving.messages import check_messages
from specdec.serving.reply_constraint import ReplyFormat
from specdec.serving.thinking import ThinkingWish
from specdec.serving.tool_use import ToolUse, read_tool_use

_FIELD_OF = {"stop": "stop_sequences"}
_THINKING = {"enabled": True, "adaptive": None, "between_tools": None, "disabled": False}


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The fields that a prompt is made of.

    Attributes:
        model: A served name; may be left out.
        messages: The conversation.
        system: What comes before it.
        tools: Tools that may be called.
        tool_choice: "auto", "any", "tool" with a name, or "none".
        thinking: Whether to think, where the checkpoint's template reads it; a budget has no effect.
        output_config: How much to think, and what the answer must look like.
        cache_salt: Keeps KV that is reused to requests that give the same; not of the API.
        priority: A lower number goes first; not of the API.
        timeout_s: Seconds in which it must have ended, where that is less than the server's; not of the API.
    """

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout_s: float | None = None

    def task(self) -> ChatTask:
        """Give what is asked for.

        Raises:
            ApiError: 400; names the field that is wrong.
        """
        config = self.output_config or {}
        effort = config.get("effort")
        if effort is not None and not isinstance(effort, str):
            raise refused("output_config.effort", "output_config.effort must be a text")
        return ChatTask(
            messages=check_messages(conversation_of(self.system, self.messages)),
            tools=_tool_use(self.tools, self.tool_choice),
            thinking=ThinkingWish(_wants_thinking(self.thinking), effort),
            reply_format=_reply_format(config.get("format")),
            sampling=self.sampling(),
            field_of=_FIELD_OF,
            cache_salt=self.cache_salt,
            priority=self.priority or 0,
            timeout_s=self.timeout_s,
            call_prefix="toolu_",
        )

    def sampling(self) -> dict[str, Any]:
        """Give the sampling parameters by name; a prompt alone has none."""
        return {}


class MessagesRequest(CountTokensRequest, kw_only=True):
    """What a request for a message asks for.

    Attributes:
        max_tokens: Most tokens of the reply.
        stop_sequences: Strings that end it.
        temperature: See `SamplingParams`.
        top_p: See `SamplingParams`.
        top_k: See `SamplingParams`.
        stream: Whether the answer comes as server-sent events.
    """

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Give the sampling parameters by name; None where a field was not given."""
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def _wants_thinking(thinking: Mapping[str, Any] | None) -> bool | None:
    if thinking is None:
        return None
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in _THINKING:
        raise refused("thinking.type", f"thinking.type must be one of {', '.join(_THINKING)}, got {str(kind)[:64]!r}")
    return _THINKING[kind]


def _reply_format(given: Any) -> ReplyFormat | None:
    if given is None:
        return None
    schema = given.get("schema") if isinstance(given, Mapping) and given.get("type") == "json_schema" else None
    if not isinstance(schema, Mapping):
        raise refused("output_config.format", "output_config.format must have the type json_schema and a schema")
    return ReplyFormat(schema=schema, field="output_config.format.schema")


def _tool_use(tools: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None) -> ToolUse:
    converted = [_tool(tool, where=f"tools[{place}]") for place, tool in enumerate(tools or ())]
    if choice is None:
        return read_tool_use(converted, "auto", is_parallel=True)
    is_parallel = choice.get("disable_parallel_tool_use") is not True
    match choice.get("type"):
        case "auto" | "none" as kind:
            return read_tool_use(converted, kind, is_parallel=is_parallel)
        case "any":
            return read_tool_use(converted, "required", is_parallel=is_parallel)
        case "tool":
            named = {"type": "function", "function": {"name": choice.get("name")}}
            return read_tool_use(converted, named, is_parallel=is_parallel)
        case other:
            rule = "tool_choice.type must be one of auto, any, tool, none"
            raise refused("tool_choice.type", f"{rule}, got {str(other)[:64]!r}")


def _tool(tool: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Write a tool as the OpenAI API has it, which templates are made for."""
    if tool.get("type") not in (None, "custom"):
        raise refused("tools", f"{where}.type must be custom: tools run at the client, got {str(tool['type'])[:64]!r}")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
