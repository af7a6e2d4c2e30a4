"""What a reply is held to: a form of its answer, calls of tools and nothing else, one call instead of several."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import RequestError
from specdec.grammar.grammar import Grammar, GrammarKind
from specdec.replies.reply_markup import ReplyMarkup
from specdec.replies.tool_call_grammar import tool_call_grammar
from specdec.serving.api_errors import api_error_of
from specdec.serving.tool_use import ToolUse


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyFormat:
    """A form of the answer: one JSON value.

    Attributes:
        schema: What it must be; None for any object.
        field: The request's field that says so.
    """

    schema: Mapping[str, Any] | None
    field: str


def reply_grammar(tools: ToolUse, reply_format: ReplyFormat | None, markup: ReplyMarkup) -> Grammar | None:
    """Give the grammar of a reply, which begins behind its reasoning; None where it is free.

    Where a call is required, the reply is calls and nothing else. Where tools may be called and an answer has a form,
    the reply is either calls or such an answer. Where tools may be called and that is all, it is free.

    Raises:
        ApiError: 400; names the field whose schema cannot be followed.
    """
    is_bound = tools.is_required or reply_format is not None
    try:
        if not is_bound:
            return None
        if reply_format is None or tools.is_required:
            return Grammar.tool_calls(markup, tools.callable, is_parallel=tools.is_parallel)
        if tools.shown:
            return _calls_or_answer(tools, reply_format, markup)
        return Grammar.json_object() if reply_format.schema is None else Grammar.json_schema(reply_format.schema)
    except RequestError as error:
        has_tool_fault = bool(tools.shown) and _has_fault(tools, markup)
        field = "tools" if has_tool_fault else grammar_field(tools, reply_format)
        raise api_error_of(error, field_of={"grammar": field}) from error


def grammar_field(tools: ToolUse, reply_format: ReplyFormat | None) -> str:
    """Give the request's field that a grammar comes of: the form of the answer, where it may be one."""
    return "tools" if reply_format is None or tools.is_required else reply_format.field


def ends_with_call(tools: ToolUse, grammar: Grammar | None) -> bool:
    """Whether the end of a call must end the reply, since there may be one at most and no grammar knows it."""
    return bool(tools.shown) and not tools.is_parallel and grammar is None


def _has_fault(tools: ToolUse, markup: ReplyMarkup) -> bool:
    try:
        Grammar.tool_calls(markup, tools.callable, is_parallel=tools.is_parallel)
    except RequestError:
        return True
    return False


def _calls_or_answer(tools: ToolUse, reply_format: ReplyFormat, markup: ReplyMarkup) -> Grammar:
    calls = tool_call_grammar(markup, tools.callable, is_parallel=tools.is_parallel)
    schema = {"type": "object"} if reply_format.schema is None else dict(reply_format.schema)
    rules = f"start: answer | {calls.removeprefix('start: ')}answer: %json {json.dumps(schema)}\n"
    return Grammar(kind=GrammarKind.TOOL_CALLS, source=rules)
