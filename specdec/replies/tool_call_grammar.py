"""What a reply must look like to call a tool: a grammar in the Lark dialect of llguidance, as text.

    start: call+
    call: <tool_call> ("name" <arg_key> "key" </arg_key> <arg_value> value </arg_value> ...) </tool_call>

Markers are written as token ids, so no text can stand for one. The grammar is narrower than what the parser reads:
arguments come in the order of the schema, each at most once, and only those that it names.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.errors import RequestError
from specdec.replies.reply_markup import Marker, ReplyMarkup
from specdec.replies.tool_schemas import ToolSchema, ToolSchemas


def tool_call_grammar(markup: ReplyMarkup, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> str:
    """Give the grammar of a reply behind its reasoning that calls some of the tools and says nothing else.

    Strings are raw text in the markup, so their `pattern`, `format` and length are not enforced. Nor is what an object
    composed by `anyOf` or `oneOf` asks of several arguments at once.

    Args:
        markup: The checkpoint's; it has the markers of calls.
        tools: The tools that may be called, as in the OpenAI API: all of them, or the one that was named.
        is_parallel: Whether there may be several calls; else there is one.

    Raises:
        RequestError: None of the tools is a function.
    """
    schemas = ToolSchemas(tools).by_name
    if not schemas:
        raise RequestError("tools must hold a function that can be called")
    rules = [
        f"start: call{'+' if is_parallel else ''}",
        f"call: {_token(markup, Marker.CALL)} ({_choice(f'tool_{i}' for i in range(len(schemas)))}) "
        f"{_token(markup, Marker.END_CALL)}",
        "TEXT: /(?s:.*)/",
    ]
    for i, (name, schema) in enumerate(schemas.items()):
        required = schema.required()
        keys = dict.fromkeys((*schema.properties(), *required))
        arguments = [f"tool_{i}_argument_{j}{'' if key in required else '?'}" for j, key in enumerate(keys)]
        rules.append(f"tool_{i}: {_literal(name)} {' '.join(arguments)}")
        rules += [f"tool_{i}_argument_{j}: {_argument(markup, schema, key)}" for j, key in enumerate(keys)]
    return "\n".join(rules) + "\n"


def _argument(markup: ReplyMarkup, schema: ToolSchema, key: str) -> str:
    before, between, after = (
        _token(markup, Marker.KEY),
        f"{_token(markup, Marker.END_KEY)} {_token(markup, Marker.VALUE)}",
        _token(markup, Marker.END_VALUE),
    )
    return f"{before} {_literal(key)} {between} ({_value(schema, key)}) {after}"


def _value(schema: ToolSchema, key: str) -> str:
    of_key = schema.argument_type(key)
    if "string" in of_key.json_types and not of_key.strings:
        return "TEXT"  # which takes in any other JSON as well
    choices = [_literal(text) for text in sorted(of_key.strings)] if "string" in of_key.json_types else []
    if of_key.json_types != {"string"}:
        described = {"anyOf": schema.schemas_of(key)}
        no_string = {"type": sorted(of_key.json_types - {"string"})}
        choices.append(f"%json {json.dumps({**schema.definitions(), 'allOf': [described, no_string]})}")
    return _choice(choices)


def _choice(alternatives: Iterator[str] | list[str]) -> str:
    return " | ".join(alternatives)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _token(markup: ReplyMarkup, marker: Marker) -> str:
    return f"<[{markup.id_by_marker[marker]}]>"
