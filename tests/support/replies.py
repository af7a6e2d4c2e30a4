"""Replies for tests: written with markers, delivered as the engine does, and put together again."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.models.glm.released import locate_checkpoint
from specdec.replies.reply_markup import Marker, ReplyMarkup
from specdec.replies.reply_parser import ReplyParser
from specdec.sampling.finish import FinishRule, OutputJudge
from specdec.sampling.sampling_params import SamplingParams
from specdec.text.tokenizer import Tokenizer, eos_token_ids

Part = str | Marker | int
Push = tuple[Sequence[int], str]

BFCL_TOOLS = Path(__file__).parents[1] / "data" / "bfcl_tools.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What the deltas of one reply join to; `calls` are names and arguments."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    num_reasoning_tokens: int
    has_unfinished_call: bool = False


@functools.cache
def glm_tiny_markup() -> ReplyMarkup:
    """Give the markup of glm-tiny, whose added tokens are those of the releases."""
    directory = locate_checkpoint("glm-tiny")
    return ReplyMarkup.of(Tokenizer(directory / "tokenizer.json"), end_ids=eos_token_ids(directory, ()))


def token_ids(*parts: Part) -> list[int]:
    """Write a reply: markers and ids as they are, text of ordinary tokens alone, also where it looks like a marker."""
    markup = glm_tiny_markup()
    ids: list[int] = []
    for part in parts:
        match part:
            case Marker():
                ids.append(markup.id_by_marker[part])
            case str():
                whole = markup.tokenizer.encode(part)
                has_marker = not markup.marker_by_id.keys().isdisjoint(whole)
                ids += [i for character in part for i in markup.tokenizer.encode(character)] if has_marker else whole
            case _:
                ids.append(part)
    return ids


def special(token: str) -> int:
    """Give the id of a special token."""
    token_id = glm_tiny_markup().tokenizer.token_id(token)
    assert token_id is not None
    return token_id


def call_parts(name: str, arguments: Mapping[str, Any]) -> list[Part]:
    """Write a call as the templates do: strings as they are, everything else as JSON."""
    parts: list[Part] = [Marker.CALL, name]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parts += [Marker.KEY, key, Marker.END_KEY, Marker.VALUE, text, Marker.END_VALUE]
    return [*parts, Marker.END_CALL]


def delivered(
    ids: Sequence[int],
    run_lengths: Iterable[int],
    *,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    max_tokens: int | None = None,
) -> list[Push]:
    """Deliver ids as the engine does: in accepted runs, up to where the reply ends, with the text that is certain."""
    markup = glm_tiny_markup()
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids, max_tokens=max_tokens, skip_special_tokens=False)
    end_ids = eos_token_ids(locate_checkpoint("glm-tiny"), ())
    rule = FinishRule.of(params, eos_token_ids=end_ids, max_tokens=len(ids) + 1)
    judge = OutputJudge(params, rule, markup.tokenizer)
    pushes: list[Push] = []
    begin = 0
    for length in run_lengths:
        delivery = judge.push(ids[begin : begin + length])
        begin += length
        pushes.append((delivery.token_ids, delivery.text))
        if delivery.finish.finish_reason is not None or begin >= len(ids):
            break
    return [*pushes, ((), judge.flush())]


def parsed(
    pushes: Iterable[Push],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    starts_in_reasoning: bool = False,
    parses_tool_calls: bool = True,
    markup: ReplyMarkup | None = None,
) -> Reply:
    """Push all and join the deltas; each call must have its name first and once, and calls must come in order."""
    parser = ReplyParser(
        markup or glm_tiny_markup(),
        tools=tools,
        starts_in_reasoning=starts_in_reasoning,
        parses_tool_calls=parses_tool_calls,
    )
    deltas = []
    num_pushed = 0
    for ids, text in pushes:
        deltas.append(parser.push(ids, text))
        num_pushed += len(ids)
        assert parser.num_reasoning_tokens <= num_pushed
    deltas.append(parser.finish())
    names: list[str] = []
    arguments: list[str] = []
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        if piece.index == len(names):
            assert piece.name is not None
            names.append(piece.name)
            arguments.append("")
        assert piece.index == len(names) - 1
        assert piece.name is None or not arguments[-1]
        arguments[-1] += piece.arguments
    assert parser.has_tool_calls == bool(names)
    return Reply(
        reasoning="".join(delta.reasoning for delta in deltas),
        content="".join(delta.content for delta in deltas),
        calls=tuple(zip(names, arguments, strict=True)),
        num_reasoning_tokens=parser.num_reasoning_tokens,
        has_unfinished_call=parser.has_unfinished_call,
    )


def function(name: str, **properties: Any) -> dict[str, Any]:
    """Describe a tool as in the OpenAI API."""
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }
