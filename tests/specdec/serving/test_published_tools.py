"""Published tools at a server with a model: their schemas are taken, and what is called fits them.

The rows are described in `tests/data/README.md`. glm-tiny has never seen such tools: a reply that must be a call is
one by its grammar alone.
"""

import json
import random
from typing import Any

import jsonschema_rs
import pytest

from specdec.engine import Engine
from specdec.grammar.grammar import Grammar
from specdec.grammar.grammar_rows import grammar_rows
from specdec.replies.reply_markup import ReplyMarkup
from tests.support.replies import BFCL_TOOLS, Part, call_parts, token_ids
from tests.support.running_server import RunningServer

pytestmark = pytest.mark.xdist_group("glm_tiny_server")

ROWS: list[dict[str, Any]] = [json.loads(line) for line in BFCL_TOOLS.read_text(encoding="utf-8").splitlines()]
SAMPLE = {row["id"] for row in random.Random(7).sample(ROWS, 3)}
MAX_TOKENS = 40


def rows() -> list[Any]:
    """All rows; those outside of the sample belong to the full run."""
    marks = pytest.mark.full
    return [pytest.param(row, id=row["id"], marks=() if row["id"] in SAMPLE else marks) for row in ROWS]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("row", rows())
def test_published_tools_are_called_by_their_schemas(
    tiny_server: RunningServer, row: dict[str, Any], choice: str
) -> None:
    body = {"messages": row["messages"], "tools": row["tools"], "tool_choice": choice, "max_tokens": MAX_TOKENS}
    with tiny_server.client() as client:
        answer = client.post("/v1/chat/completions", json={**body, "reasoning_effort": "none", "seed": 1})
    assert answer.status_code == 200, answer.text
    (reply,) = answer.json()["choices"]
    calls = reply["message"].get("tool_calls", [])
    assert reply["finish_reason"] in ("stop", "length", "tool_calls")
    functions = {tool["function"]["name"]: tool["function"] for tool in row["tools"]}
    if choice == "required":
        assert not reply["message"]["content"] or reply["finish_reason"] == "length"  # cut inside of a name
        assert calls or reply["finish_reason"] == "length"
        ended = calls if reply["finish_reason"] == "tool_calls" else calls[:-1]  # the limit may have cut the last one
        for call in ended:
            parameters = functions[call["function"]["name"]]["parameters"]
            jsonschema_rs.validator_for(parameters).validate(json.loads(call["function"]["arguments"]))


@pytest.mark.parametrize("row", rows())
def test_right_calls_of_published_tools_are_allowed(glm_tiny: Engine, row: dict[str, Any]) -> None:
    """The grammar that the engine compiles, with its whole vocabulary, lets every call pass that counts as right."""
    assert glm_tiny.tokenizer is not None
    markup = ReplyMarkup.of(glm_tiny.tokenizer, end_ids=glm_tiny.eos_ids)
    grammar = Grammar.tool_calls(markup, row["tools"], is_parallel=True)
    progress = glm_tiny.grammars.begin(grammar, prompt_ids=[5], end_ids=glm_tiny.eos_ids)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row["tools"]}
    parts: list[Part] = []
    for name, accepted in (pair for call in row["ground_truth"] for pair in call.items()):
        given = [key for key in schemas[name]["properties"] if accepted.get(key, [""])[0] != ""]
        parts += call_parts(name, {key: accepted[key][0] for key in given})
    ids = [*token_ids(*parts), min(glm_tiny.eos_ids)]
    rows = grammar_rows([progress], [ids])
    assert rows is not None
    assert len(rows.row_R) == len(ids) + 1  # a row behind a token that is not allowed cannot be reached
