"""A grammar is data that can be sent and kept, and it is refused by what is wrong with it."""

import json
import pickle
from typing import Any

import msgspec
import pytest

from specdec.errors import RequestError
from specdec.grammar.grammar import MAX_SOURCE_CHARACTERS, Grammar, GrammarKind
from specdec.models.glm.released import locate_checkpoint
from specdec.replies.reply_markup import ReplyMarkup
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.sampling_rows import RequestSampling
from specdec.text.tokenizer import Tokenizer
from tests.support.grammars import FORECAST, SCHEMAS


def glm_tiny_markup() -> ReplyMarkup:
    return ReplyMarkup.of(Tokenizer(locate_checkpoint("glm-tiny") / "tokenizer.json"))


def test_grammar_is_data() -> None:
    grammar = Grammar.json_schema(FORECAST, begins_after_reasoning=False)
    again = Grammar.json_schema(json.loads(json.dumps(FORECAST)), begins_after_reasoning=False)
    assert grammar == again
    assert hash(grammar) == hash(again)
    assert pickle.loads(pickle.dumps(grammar)) == grammar
    assert msgspec.convert(msgspec.to_builtins(grammar), Grammar) == grammar
    assert grammar != Grammar.json_schema(FORECAST)
    assert Grammar(kind="regex", source="a") == Grammar.regex("a")  # type: ignore[arg-type]


def test_schemas_keep_the_order_of_their_members() -> None:
    assert Grammar.json_schema({"b": {}, "a": {}}).source != Grammar.json_schema({"a": {}, "b": {}}).source


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_schemas_of_many_kinds_can_be_followed(schema: Any) -> None:
    assert Grammar.json_schema(schema).kind is GrammarKind.JSON_SCHEMA


BAD_SCHEMAS: dict[str, tuple[Any, str]] = {
    "unknown type": ({"type": "whole"}, "json_schema cannot be followed: Invalid type: whole"),
    "no schema": ([1], r"json_schema must be an object or a truth value, got '\[1\]'"),
    "no value": ({1, 2}, "json_schema must be a JSON value: "),
    "not a number": ({"const": float("nan")}, "json_schema must be a JSON value: "),
    "lone surrogate": ({"const": "\ud800"}, "json_schema must be valid Unicode"),
    "nothing": (False, "Unsatisfiable schema"),
    "contradiction": ({"type": "string", "enum": [1, 2]}, "Unsatisfiable schema"),
    "not": ({"not": {"type": "string"}}, 'Unimplemented keys: \\["not"\\]'),
    "if": ({"if": {}, "then": {}}, 'Unimplemented keys: \\["if", "then"\\]'),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "oneOf that may overlap": ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "oneOf"),
    "format": ({"type": "string", "format": "colour"}, "Unknown format: colour"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "back reference": ({"type": "string", "pattern": r"(a)\1"}, "backreferences are not supported"),
    "broken pattern": ({"type": "string", "pattern": "("}, "unclosed group"),
    "elsewhere": ({"$ref": "http://localhost/schema.json"}, "does not fetch resources"),
    "missing": ({"$ref": "#/$defs/a"}, "a"),
}


@pytest.mark.parametrize("name", BAD_SCHEMAS)
def test_schema_is_refused_by_its_fault(name: str) -> None:
    schema, message = BAD_SCHEMAS[name]
    with pytest.raises(RequestError, match=r"(?s)^grammar: .*" + message) as caught:
        Grammar.json_schema(schema)
    assert caught.value.parameter == "grammar"
    assert "x-guidance" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kind": "lark"}, "kind must be one of json_object, json_schema, regex, tool_calls, got 'lark'"),
        ({"kind": ["regex"]}, "kind must be one of"),
        ({"kind": "regex", "source": b"a"}, "source must be a text, got bytes"),
        ({"kind": "regex", "source": "a" * (MAX_SOURCE_CHARACTERS + 1)}, "regex must have at most 100000 characters"),
        ({"kind": "regex", "source": "["}, "regex cannot be followed: .*unclosed character class"),
        ({"kind": "regex", "source": r"\bword"}, "regex cannot be followed: "),
        ({"kind": "json_schema", "source": "{"}, "json_schema must be JSON: "),
        ({"kind": "json_schema", "source": "[" * 50_000}, "json_schema must be readable"),
        ({"kind": "json_schema", "source": '{"minimum": 1e999}'}, "json_schema must be JSON: "),
        ({"kind": "json_schema", "source": f'{{"minimum": {"9" * 5000}}}'}, "json_schema must be JSON: "),
        ({"kind": "json_object", "begins_after_reasoning": 1}, "begins_after_reasoning must be true or false, got 1"),
    ],
)
def test_grammar_is_refused_by_its_fault(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"(?s)^grammar: {message}"):
        Grammar(**asked)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubling(depth: int) -> dict[str, Any]:
    twice = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, depth)}
    return {"$defs": {"d0": {}, **twice}, "$ref": f"#/$defs/d{depth - 1}"}


def patterns(count: int) -> dict[str, Any]:
    return {"patternProperties": {f"^{i}[a-z]+$": {} for i in range(count)}}


ANY_TREE = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"additionalProperties": {"$ref": "#"}}]}
ANY_PRODUCT = {"allOf": [{"anyOf": [{"properties": {f"{i}": {"const": j}}} for j in range(9)]} for i in range(9)]}


# Each takes minutes, or all memory, or the stack, where nobody looks.
HOSTILE: dict[str, tuple[Any, str | None]] = {
    "deep": (nested(900), "recursion limit exceeded"),
    "endless": ({"$ref": "#"}, None),
    "circle": ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, None),
    "recursive": (ANY_TREE, None),
    "doubling": (doubling(40), None),
    "products": (ANY_PRODUCT, "schema too large"),
    "long enum": ({"enum": [f"value {i}" for i in range(20_000)]}, "at most 100000 characters"),
    "many patterns": (patterns(101), "at most 100 patternProperties in all, got 101"),
    "patterns in parts": ({"anyOf": [patterns(51)] * 2}, "at most 100 patternProperties in all, got 102"),
    "large divisor": ({"type": "integer", "multipleOf": 999_983}, "multipleOf .* at most 100000, got 999983"),
    "many divisors": ({"properties": {f"{i}": {"multipleOf": 9.973} for i in range(11)}}, "got 109703"),
    "round divisor": ({"type": "integer", "multipleOf": 10**9}, None),
    "many items": ({"type": "array", "minItems": 10**9}, None),
    "long string": ({"type": "string", "minLength": 10**6, "maxLength": 10**9}, None),
    "catastrophic pattern": ({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}, None),
    "counting pattern": ({"type": "string", "pattern": "^(.*a.{200}|.*b.{201})$"}, None),
    "nested counts": ({"type": "string", "pattern": "^(((a{1,100}){1,100}){1,100}){1,100}$"}, None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schema_is_dealt_with_at_once(name: str) -> None:
    schema, message = HOSTILE[name]
    if message is None:
        Grammar.json_schema(schema)
        return
    with pytest.raises(RequestError, match=f"(?s)^grammar: json_schema .*{message}"):
        Grammar.json_schema(schema)


def test_library_options_in_a_schema_have_no_effect() -> None:
    with pytest.raises(RequestError, match="Unimplemented keys"):
        Grammar.json_schema({"not": {}, "x-guidance": {"lenient": True}})


def test_tool_schemas_are_checked_where_they_are_and_not_in_names() -> None:
    def tool(name: str, schema: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"properties": {"value": schema}}}}

    markup = glm_tiny_markup()
    named_like_a_schema = tool('a | %json {"multipleOf": 999983} "\\', {"enum": ["%json {}", '%json "', 1]})
    grammar = Grammar.tool_calls(markup, [named_like_a_schema], is_parallel=True)
    definition = json.loads(grammar.definition())["grammars"][1]["lark_grammar"]
    assert definition.count('"x-guidance"') == 1
    assert json.dumps(named_like_a_schema["function"]["name"]) in definition
    with pytest.raises(RequestError, match=r"grammar: tool_calls must have values of multipleOf .* got 999983"):
        Grammar.tool_calls(markup, [tool("a", {"type": "integer", "multipleOf": 999_983})], is_parallel=True)
    for depth, message in ((200, "recursion limit exceeded"), (100_000, "tool_calls must be readable")):
        with pytest.raises(RequestError, match=f"grammar: .*{message}"):
            Grammar.tool_calls(markup, [tool("a", {**nested(depth), "type": "array"})], is_parallel=True)
    with pytest.raises(RequestError, match=r"grammar: tool_calls cannot be followed: .*Unimplemented keys: \[.not.\]"):
        Grammar.tool_calls(markup, [tool("a", {"type": "integer", "not": {}})], is_parallel=True)


def test_sampling_parameters_take_a_grammar_and_nothing_else() -> None:
    params = SamplingParams(grammar=Grammar.json_object())
    assert hash(params) == hash(SamplingParams(grammar=Grammar.json_object()))
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(RequestError, match="grammar must be a Grammar") as caught:
        SamplingParams(grammar={"type": "json_object"})  # type: ignore[arg-type]
    assert caught.value.parameter == "grammar"


def test_ranks_are_not_sent_the_grammar() -> None:
    params = SamplingParams(temperature=0, grammar=Grammar.json_schema({"const": "x" * 10_000}))
    sampling = RequestSampling(params, choice=0, prompt_ids=[1], stop_ids=(), vocab_size=8)
    assert len(pickle.dumps(sampling)) < 5_000
