"""What a schema says about the type of an argument."""

from typing import Any

import pytest

from specdec.replies.tool_schemas import ANYTHING, JSON_TYPES, ToolSchema, ToolSchemas

DEFINITIONS = {
    "Text": {"type": "string"},
    "Count": {"type": "integer"},
    "Tree": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}}]},
    "Loop": {"$ref": "#/$defs/Loop"},
    "a/b~c d": {"type": "boolean"},
}


@pytest.mark.parametrize(
    ("schema", "json_types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "integer"}, {"integer"}),
        ({"type": "number"}, {"integer", "number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": "float"}, JSON_TYPES),
        ({"type": ["any", "string", 1]}, {"string"}),
        ({"type": {"a": 1}}, JSON_TYPES),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]}, JSON_TYPES),
        ({"enum": [1, 2]}, {"integer"}),
        ({"type": "string", "enum": ["1", 2]}, {"string"}),
        ({"const": "1"}, {"string"}),
        ({"const": None}, {"null"}),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"string", "integer"}),
        ({"oneOf": [{"type": "array"}, {"const": False}]}, {"array", "boolean"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        ({"type": ["string", "null"], "anyOf": [{"type": "string"}, {"type": "array"}]}, {"string"}),
        ({"allOf": [{"type": "string"}, {"type": "array"}]}, JSON_TYPES),  # nothing fits: nothing is known
        ({"$ref": "#/$defs/Text"}, {"string"}),
        ({"anyOf": [{"$ref": "#/$defs/Text"}, {"$ref": "#/$defs/Count"}]}, {"string", "integer"}),
        ({"$ref": "#/$defs/Tree"}, {"null", "object"}),
        ({"$ref": "#/$defs/Loop"}, JSON_TYPES),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, {"boolean"}),
        ({"$ref": "#/properties/other/anyOf/1"}, {"array"}),
        ({"$ref": "#/properties/other/anyOf/7"}, JSON_TYPES),
        ({"$ref": "#/$defs/Missing"}, JSON_TYPES),
        ({"$ref": "https://example.com/schema"}, JSON_TYPES),
        ({"$ref": "#"}, {"object"}),
        ({"anyOf": []}, JSON_TYPES),
        ({"anyOf": "a"}, JSON_TYPES),
        (True, JSON_TYPES),
        (None, JSON_TYPES),
        ({}, JSON_TYPES),
    ],
)
def test_types_of_an_argument(schema: Any, json_types: set[str]) -> None:
    other = {"anyOf": [{}, {"type": "array"}]}
    parameters = {"type": "object", "properties": {"key": schema, "other": other}, "$defs": DEFINITIONS}
    assert ToolSchema(parameters).argument_type("key").json_types == json_types


def test_strings_that_are_listed_are_known() -> None:
    schema = {"anyOf": [{"enum": ["a", 1]}, {"const": "b"}, {"type": "null"}]}
    assert ToolSchema({"properties": {"key": schema}}).argument_type("key").strings == {"a", "b"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/Args", "$defs": {"Args": {"properties": {"key": {"type": "integer"}}}}},
        {"allOf": [{"properties": {"other": {}}}, {"properties": {"key": {"type": "integer"}}}]},
        {"anyOf": [{"$ref": "#/anyOf/1"}, {"properties": {"key": {"type": "integer"}}}]},
        {"properties": {"other": {}}, "additionalProperties": {"type": "integer"}},
    ],
)
def test_arguments_are_found_where_objects_are_composed(parameters: dict[str, Any]) -> None:
    assert ToolSchema(parameters).argument_type("key").json_types == {"integer"}


@pytest.mark.parametrize("parameters", [None, [], "object", {}, {"properties": []}, {"properties": {"key": 1}}])
def test_a_tool_that_describes_nothing_takes_anything(parameters: Any) -> None:
    assert ToolSchema(parameters).argument_type("key") == ANYTHING


def test_tools_that_are_no_functions_are_passed_over() -> None:
    tools: list[dict[str, Any]] = [
        {"type": "web_search"},
        {"function": 1},
        {"function": {"name": 2}},
        {"function": {"name": "f"}},
    ]
    schemas = ToolSchemas(tools)
    assert list(schemas.by_name) == ["f"]
    assert schemas.argument_type("g", "key") == ANYTHING


def test_schemas_that_refer_to_themselves_in_every_way_take_no_time() -> None:
    """Every definition has many ways into the next one: a walk of all paths would never end."""
    step = {f"D{i}": {"anyOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 20, "properties": {}} for i in range(100)}
    parameters = {"$ref": "#/$defs/D0", "properties": {}, "$defs": {**step, "D100": {"type": "string"}}}
    assert ToolSchema(parameters).argument_type("key") == ANYTHING
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(900):
        nested = {"anyOf": [nested]}
    assert ToolSchema({"properties": {"key": nested}}).argument_type("key") == ANYTHING
    by_reference = ToolSchema({"properties": {"key": {"$ref": "#/$defs/D90"}}, "$defs": parameters["$defs"]})
    assert by_reference.argument_type("key").json_types == {"string"}
