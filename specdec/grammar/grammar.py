"""What the text of a reply must be: the schema or the expression, and where in the reply it begins."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from specdec.errors import RequestError
from specdec.grammar.definition import json_schema_definition, regex_definition, tool_calls_definition
from specdec.grammar.llguidance import fault_in
from specdec.replies.reply_markup import ReplyMarkup
from specdec.replies.tool_call_grammar import tool_call_grammar

MAX_SOURCE_CHARACTERS = 100_000  # of a schema of nothing but optional members, which takes a second to compile


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """The texts that a reply may be.

    Checked on construction, as far as that is possible without a vocabulary. Errors are `RequestError`.

    Attributes:
        kind: How it is written.
        source: The JSON schema, as JSON, the regular expression, or what `tool_call_grammar` gives; "" for any JSON
            object.
        begins_after_reasoning: Whether a reply that begins inside the reasoning is free until its `</think>`. If not,
            and in a reply that does not begin there, the first token belongs to the grammar.
    """

    kind: GrammarKind
    source: str = ""
    begins_after_reasoning: bool = True

    def __post_init__(self) -> None:
        if self.kind not in list(GrammarKind):
            raise _refused(f"kind must be one of {', '.join(GrammarKind)}, got {self.kind!r}")
        object.__setattr__(self, "kind", GrammarKind(self.kind))
        if not isinstance(self.begins_after_reasoning, bool):
            raise _refused(f"begins_after_reasoning must be true or false, got {self.begins_after_reasoning!r}")
        if not isinstance(self.source, str):
            raise _refused(f"source must be a text, got {type(self.source).__name__}")
        if len(self.source) > MAX_SOURCE_CHARACTERS:
            raise _refused(f"{self.kind} must have at most {MAX_SOURCE_CHARACTERS} characters, got {len(self.source)}")
        if any("\ud800" <= character <= "\udfff" for character in self.source):
            raise _refused(f"{self.kind} must be valid Unicode, without a lone surrogate")
        try:
            fault = fault_in(self.definition())
        except ValueError as error:
            raise _refused(f"{self.kind} {error}") from error
        if fault is not None:
            raise _refused(f"{self.kind} cannot be followed: {fault}")

    @classmethod
    def json_object(cls, *, begins_after_reasoning: bool = True) -> "Grammar":
        """Any JSON object."""
        return cls(kind=GrammarKind.JSON_OBJECT, begins_after_reasoning=begins_after_reasoning)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool, *, begins_after_reasoning: bool = True) -> "Grammar":
        """JSON that a schema describes, with the members of objects in the order in which the schema names them."""
        try:
            source = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused(f"json_schema must be a JSON value: {error}") from error
        return cls(kind=GrammarKind.JSON_SCHEMA, source=source, begins_after_reasoning=begins_after_reasoning)

    @classmethod
    def regex(cls, pattern: str, *, begins_after_reasoning: bool = True) -> "Grammar":
        """Texts that a regular expression matches as a whole."""
        return cls(kind=GrammarKind.REGEX, source=pattern, begins_after_reasoning=begins_after_reasoning)

    @classmethod
    def tool_calls(cls, markup: ReplyMarkup, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> "Grammar":
        """Calls of tools and nothing else, behind the reasoning.

        Args:
            markup: The checkpoint's; it has the markers of calls.
            tools: The tools that may be called, as in the OpenAI API.
            is_parallel: Whether there may be several calls.

        Raises:
            RequestError: None of the tools is a function, or the schema of one cannot be followed.
        """
        try:
            source = tool_call_grammar(markup, tools, is_parallel=is_parallel)
        except RecursionError as error:
            raise _refused("tool_calls must be readable, got schemas that lie too deep in each other") from error
        return cls(kind=GrammarKind.TOOL_CALLS, source=source)

    def definition(self) -> str:
        """Give the definition for the grammar library.

        Raises:
            ValueError: The source cannot be one; says what it must be.
        """
        match self.kind:
            case GrammarKind.JSON_OBJECT:
                return json_schema_definition('{"type": "object"}')
            case GrammarKind.JSON_SCHEMA:
                return json_schema_definition(self.source)
            case GrammarKind.REGEX:
                return regex_definition(self.source)
            case GrammarKind.TOOL_CALLS:
                return tool_calls_definition(self.source)


def _refused(rule: str) -> RequestError:
    return RequestError(f"grammar: {rule}", parameter="grammar")
