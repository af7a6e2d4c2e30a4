"""What a tool's JSON schema says about the type of an argument.

The markup writes a string as it is and everything else as JSON, so `1` may be a number or the string "1": only the
schema tells. What a schema leaves open is taken as open, never as a fault: arguments are typed here, not validated.
"""

import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_MOST_NESTING = 32  # what is nested deeper may be anything; no walk of a schema recurses further


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """What an argument may be.

    Attributes:
        json_types: Names of the JSON types; "number" comes with "integer".
        strings: Strings that the schema lists by `enum` or `const`.
    """

    json_types: frozenset[str]
    strings: frozenset[str] = frozenset()

    def __or__(self, other: "ArgumentType") -> "ArgumentType":
        return ArgumentType(self.json_types | other.json_types, self.strings | other.strings)

    def __and__(self, other: "ArgumentType") -> "ArgumentType":
        return ArgumentType(self.json_types & other.json_types, self.strings | other.strings)


ANYTHING = ArgumentType(JSON_TYPES)
_NOTHING = ArgumentType(frozenset())


class ToolSchemas:
    """The schemas of the tools of a request.

    Args:
        tools: As in the OpenAI API; what is no function is passed over.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.by_name: dict[str, ToolSchema] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self.by_name.setdefault(function["name"], ToolSchema(function.get("parameters")))

    def argument_type(self, tool: str, key: str) -> ArgumentType:
        """Give the type of one argument; anything for a tool that nobody described."""
        return self.by_name[tool].argument_type(key) if tool in self.by_name else ANYTHING


class ToolSchema:
    """The schema of one tool's arguments; looks at every definition in it once, however they refer to each other.

    Args:
        parameters: The JSON schema of an object; anything else describes nothing.
    """

    def __init__(self, parameters: Any) -> None:
        self._root = parameters
        self._type_by_reference: dict[str, ArgumentType] = {}

    def argument_type(self, key: str) -> ArgumentType:
        """Give the type of one argument; anything for an argument that nobody described."""
        of_key = _NOTHING
        for schema in self.schemas_of(key):
            of_key |= self._type_of(schema)
        return of_key if of_key.json_types else ANYTHING

    def schemas_of(self, key: str) -> list[Any]:
        """Give the schemas of one argument: its own, else that of arguments without a name, else none."""
        root = self._follow(self._root)
        additional = [root["additionalProperties"]] if _has(root, "additionalProperties") else []
        return self.properties().get(key, additional)

    def properties(self) -> dict[str, list[Any]]:
        """Give the schemas of every property, in order; several where the object is composed of others."""
        found: dict[str, list[Any]] = {}
        for schema in self._objects("allOf", "anyOf", "oneOf"):
            properties = schema.get("properties")
            for key, of_key in properties.items() if isinstance(properties, Mapping) else ():
                found.setdefault(key, []).append(of_key)
        return found

    def required(self) -> list[str]:
        """Give the names of the properties that are always there."""
        named = [name for schema in self._objects("allOf") for name in _items(schema, "required")]
        return list(dict.fromkeys(name for name in named if isinstance(name, str)))

    def definitions(self) -> dict[str, Any]:
        """Give what references in the schema of a property may point to."""
        return {name: self._root[name] for name in ("$defs", "definitions") if _has(self._root, name)}

    def _objects(self, *keywords: str) -> Iterator[Mapping[str, Any]]:
        """Walk the schemas that an object is composed of by some keywords, each once."""
        waiting = [self._root]
        seen: set[int] = set()
        while waiting:
            schema = self._follow(waiting.pop())
            if isinstance(schema, Mapping) and id(schema) not in seen:
                seen.add(id(schema))
                yield schema
                waiting += [branch for keyword in keywords for branch in _items(schema, keyword)][::-1]

    def _type_of(self, schema: Any, *, nesting: int = 0) -> ArgumentType:
        """Give the type that a schema allows."""
        if not isinstance(schema, Mapping) or nesting > _MOST_NESTING:
            return ANYTHING
        allowed = ANYTHING
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._type_by_reference:
                self._type_by_reference[reference] = ANYTHING  # for a definition that refers to itself
                self._type_by_reference[reference] = self._type_of(self._resolve(reference), nesting=nesting + 1)
            allowed &= self._type_by_reference[reference]
        if names := _type_names(schema):
            allowed &= ArgumentType(names)
        listed = _items(schema, "enum") or ([schema["const"]] if "const" in schema else [])
        if listed:
            strings = frozenset(value for value in listed if isinstance(value, str))
            allowed &= ArgumentType(frozenset(map(json_type_of, listed)), strings)
        for branch in _items(schema, "allOf"):
            allowed &= self._type_of(branch, nesting=nesting + 1)
        for keyword in ("anyOf", "oneOf"):
            if branches := _items(schema, keyword):
                either = _NOTHING
                for branch in branches:
                    either |= self._type_of(branch, nesting=nesting + 1)
                allowed &= either
        if schema.get("nullable") is True:
            allowed |= ArgumentType(frozenset({"null"}))
        return allowed

    def _follow(self, schema: Any) -> Any:
        for _ in range(_MOST_NESTING):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                return schema
            schema = self._resolve(schema["$ref"])
        return None

    def _resolve(self, reference: str) -> Any:
        """Follow a JSON pointer into this schema; None for any other reference."""
        if not reference.startswith("#"):
            return None
        found = self._root
        for step in urllib.parse.unquote(reference[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and name in map(str, range(len(found))):
                found = found[int(name)]
            else:
                return None
        return found


def json_type_of(value: Any) -> str:
    """Name the JSON type of a parsed value; a number written without fraction and exponent is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _has(schema: Any, keyword: str) -> bool:
    return isinstance(schema, Mapping) and keyword in schema


def _type_names(schema: Mapping[str, Any]) -> frozenset[str]:
    """Give the types that `type` names, one or a list; none if it names none that JSON has."""
    named = schema.get("type")
    names = {named} if isinstance(named, str) else set(filter(_is_text, _items(schema, "type")))
    if "number" in names:
        names.add("integer")
    return JSON_TYPES & names


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _items(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []
