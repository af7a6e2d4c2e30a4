"""What the grammar library is told for each kind of grammar.

Definitions are the library's JSON form: a list of grammars of which the first is the whole text and names the others.
"""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

# Between the parts of a JSON text: a space, or a line break and 8 levels of 4 spaces. A model that does not know how
# to go on would write white space for ever.
_WHITE_SPACE = r" |\r?\n[ \t]{0,32}"
# The library would allow only the one token with which its tokenizer begins a text that is certain.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
# The library reads a regular expression between slashes on one line.
_INLINE = {"/": r"\/", "\n": r"\n"}
_STRING_OR_SCHEMA = re.compile(r'"(?:[^"\\]|\\.)*"|%json ')
_DECODER = json.JSONDecoder()
_TOO_DEEP = "must be readable, got lists and objects that lie too deep in each other"
# Half a second of compiling each: it compares every pattern with every other, and keeps a state for each residue.
_MOST_PATTERNS = 100
_MOST_RESIDUES = 100_000


def json_schema_definition(source: str) -> str:
    """Define the JSON texts that a schema describes; members of an object come in the schema's order.

    Args:
        source: The schema, as JSON.

    Raises:
        ValueError: It is no JSON or no schema, or would take long to compile; says what it must be.
    """
    try:
        schema = json.loads(source)
        json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"must be JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if not isinstance(schema, dict | bool):
        raise ValueError(f"must be an object or a truth value, got {source[:40]!r}")
    _check_work(schema)
    return _definition({"json_schema": _with_bounded_space(schema)})


def regex_definition(source: str) -> str:
    """Define the texts that a regular expression matches as a whole."""
    inline = re.sub(r"\\?[/\n]|\\.", lambda match: _INLINE.get(match[0][-1], match[0]), source)
    return _definition({"lark_grammar": f"start: TEXT\nTEXT: /{inline}/"})


def tool_calls_definition(source: str) -> str:
    """Define replies that call tools.

    Args:
        source: What `specdec.replies.tool_call_grammar` gives.

    Raises:
        ValueError: A schema in it would take long to compile; says what it must be.
    """
    pieces, place, schemas = [], 0, []
    for found in _STRING_OR_SCHEMA.finditer(source):
        if found.start() < place or not found[0].startswith("%json"):
            continue  # inside a schema, or a string
        try:
            schema, end = _DECODER.raw_decode(source, found.end())
        except RecursionError as error:
            raise ValueError(_TOO_DEEP) from error
        schemas.append(schema)
        pieces += [source[place : found.end()], json.dumps(_with_bounded_space(schema), ensure_ascii=False)]
        place = end
    _check_work(schemas)
    return _definition({"lark_grammar": "".join((*pieces, source[place:]))})


def _with_bounded_space(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    if schema is False:
        return schema
    return {**({} if schema is True else schema), "x-guidance": {"whitespace_pattern": _WHITE_SPACE}}


def _definition(body: Mapping[str, Any]) -> str:
    start = {"name": "start", "lark_grammar": f"{_NO_FORCING}start: @body\n"}
    return json.dumps({"grammars": [start, {"name": "body", **body}]}, ensure_ascii=False)


def _check_work(schema: Any) -> None:
    """Refuse what would keep the library busy for long, since its own limits do not see it."""
    num_patterns, num_residues = 0, 0
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, dict):
            continue
        waiting += node.values()
        patterns, divisor = node.get("patternProperties"), node.get("multipleOf")
        num_patterns += len(patterns) if isinstance(patterns, dict) else 0
        num_residues += _num_residues(divisor)
    if num_patterns > _MOST_PATTERNS:
        raise ValueError(f"must have at most {_MOST_PATTERNS} patternProperties in all, got {num_patterns}")
    if num_residues > _MOST_RESIDUES:
        raise ValueError(
            f"must have values of multipleOf whose digits, read as whole numbers, add up to at most {_MOST_RESIDUES}, "
            f"got {num_residues}"
        )


def _num_residues(divisor: object) -> int:
    """Read the digits of a divisor as a whole number: 7 for 0.07 and for 700."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not math.isfinite(divisor):
        return 0
    return int("".join(map(str, Decimal(repr(divisor)).normalize().as_tuple().digits)))
