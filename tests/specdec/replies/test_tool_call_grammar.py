"""The grammar of a forced call lets through what fits the schemas, and nothing that the parser would read otherwise."""

import json
import random
from typing import Any

import llguidance
import pytest

from specdec.errors import RequestError
from specdec.models.glm.released import locate_checkpoint
from specdec.replies.reply_markup import Marker
from specdec.replies.tool_call_grammar import tool_call_grammar
from tests.support.replies import (
    BFCL_TOOLS,
    Part,
    call_parts,
    delivered,
    function,
    glm_tiny_markup,
    parsed,
    special,
    token_ids,
)

CALL, END_CALL = Marker.CALL, Marker.END_CALL
WEATHER = function(
    "weather",
    city={"type": "string"},
    days={"type": "integer", "minimum": 1},
    unit={"enum": ["C", "F", None]},
    place={"$ref": "#/$defs/Place"},
)
WEATHER["function"]["parameters"] |= {
    "required": ["city"],
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
ODD = function('odd "\\\n東', **{'ke"y\\\n': {"enum": ["", 'a"\\\n']}, "free": {}})
ODD["function"]["parameters"] |= {"required": ["more"], "additionalProperties": {"type": "boolean"}}


def matcher(tools: list[dict[str, Any]], *, is_parallel: bool = True) -> Any:
    tokenizer = llguidance.LLTokenizer((locate_checkpoint("glm-tiny") / "tokenizer.json").read_text(encoding="utf-8"))
    made = llguidance.LLMatcher(tokenizer, tool_call_grammar(glm_tiny_markup(), tools, is_parallel=is_parallel))
    assert made.get_error() == ""
    return made


def fits(tools: list[dict[str, Any]], *parts: Part, is_parallel: bool = True) -> bool:
    """Say whether a reply is one that the grammar allows to end there."""
    made = matcher(tools, is_parallel=is_parallel)
    ids = token_ids(*parts)
    return bool(made.try_consume_tokens(ids) == len(ids) and made.is_accepting())


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "Lisbon"},
        {"city": "東京 </arg_value> <b> \n"},
        {"city": ""},
        {"city": "a", "days": 3, "unit": "C", "place": {"x": 1.5}},
        {"city": "a", "unit": None},
    ],
)
def test_calls_that_fit_are_let_through(arguments: dict[str, Any]) -> None:
    parts = call_parts("weather", arguments)
    assert fits([WEATHER], *parts)
    assert fits([function("other"), WEATHER], *parts, *call_parts("other", {}), *parts)
    assert not fits([function("other")], *parts)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"days": 3},
        {"city": "a", "days": 0},
        {"city": "a", "days": "three"},
        {"city": "a", "unit": "K"},
        {"city": "a", "place": {"y": 1}},
        {"city": "a", "more": 1},
        {"days": 3, "city": "a"},
    ],
)
def test_calls_that_do_not_fit_are_held_back(arguments: dict[str, Any]) -> None:
    assert not fits([WEATHER], *call_parts("weather", arguments))


def test_there_is_one_call_unless_several_are_allowed() -> None:
    call = call_parts("now", {})
    tools = [function("now")]
    assert fits(tools, *call, is_parallel=False)
    assert not fits(tools, *call, *call, is_parallel=False)
    assert fits(tools, *call, *call)
    assert not fits(tools)
    assert not fits(tools, "text ", *call)


def test_names_with_quotes_and_newlines_are_written_as_they_are() -> None:
    name = ODD["function"]["name"]
    assert fits([ODD], *call_parts(name, {'ke"y\\\n': 'a"\\\n', "free": "x", "more": True}))
    assert fits([ODD], *call_parts(name, {'ke"y\\\n': "", "more": True}))
    assert not fits([ODD], *call_parts(name, {'ke"y\\\n': "b", "more": True}))
    assert not fits([ODD], *call_parts(name, {"more": 1}))


def test_a_request_without_functions_cannot_force_a_call() -> None:
    with pytest.raises(RequestError, match="function"):
        tool_call_grammar(glm_tiny_markup(), [{"type": "web_search"}], is_parallel=True)


def test_the_calls_of_a_public_benchmark_are_let_through() -> None:
    for row in map(json.loads, BFCL_TOOLS.read_text(encoding="utf-8").splitlines()):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row["tools"]}
        parts: list[Part] = []
        for call in row["ground_truth"]:
            for name, accepted in call.items():
                given = [key for key in schemas[name]["properties"] if accepted.get(key, [""])[0] != ""]
                parts += call_parts(name, {key: accepted[key][0] for key in given})
        assert fits(row["tools"], *parts)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_grammar_allows_is_a_call_that_the_parser_reads(seed: int) -> None:
    """Drawn at random from the allowed tokens, with a preference for markers, so that values end."""
    made = matcher([WEATHER, function("now")])
    draw = random.Random(seed)
    ids: list[int] = []
    while len(ids) < 300 and not (ids and made.is_accepting()):
        mask = made.compute_bitmask()
        allowed = [i for i in range(3072) if mask[i // 8] >> i % 8 & 1]
        markers = [i for i in allowed if i in glm_tiny_markup().marker_by_id]
        ids.append(draw.choice(markers if markers and draw.random() < 0.5 else allowed))
        assert made.consume_token(ids[-1])
    reply = parsed(delivered([*ids, special("<|observation|>")], [4] * 100), tools=[WEATHER, function("now")])
    assert reply.content == ""
    ((name, arguments),) = reply.calls
    values = json.loads(arguments)
    assert (name == "now" and not values) or isinstance(values["city"], str)
    assert isinstance(values.get("days", 1), int)
    assert values.get("unit") in {"C", "F", None}
