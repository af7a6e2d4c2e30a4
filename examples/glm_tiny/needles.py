"""Key-value tables with questions: the answer can only be copied from one line far back.

The user's message is `Remember this table.`, one `key = value` line each, and `What is the value of KEY?`; the reply is
`KEY = VALUE`. Several questions follow each other in training, because only the answers teach anything.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .words import COLOURS, NOUNS, made_up_word

INTRODUCTION = "Remember this table."


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table and the order in which its lines are asked for.

    Attributes:
        lines: (key, value) pairs, keys distinct, in table order.
        asked: Indices into `lines`, one per question.
    """

    lines: tuple[tuple[str, str], ...]
    asked: tuple[int, ...]


def make_table(rng: random.Random, *, num_lines: int, num_questions: int, depth: float | None = None) -> Table:
    """Draw a table; with `depth` (0 the first line, 1 the last) the one question is about the line at that depth."""
    key_style, value_style = rng.choice(_KEY_STYLES), rng.choice(_VALUE_STYLES)
    keys: dict[str, None] = {}
    while len(keys) < num_lines:
        keys[key_style(rng)] = None
    lines = tuple((key, value_style(rng)) for key in keys)
    if depth is not None:
        return Table(lines=lines, asked=(round(depth * (num_lines - 1)),))
    return Table(lines=lines, asked=tuple(rng.sample(range(num_lines), min(num_questions, num_lines))))


def table_messages(table: Table, *, thinking: bool) -> list[dict[str, Any]]:
    """Give the conversation: the table with the first question, then one question a turn."""
    body = "\n".join(f"{key} = {value}" for key, value in table.lines)
    messages: list[dict[str, Any]] = []
    for turn, index in enumerate(table.asked):
        key, value = table.lines[index]
        question = f"What is the value of {key}?"
        content = f"{INTRODUCTION}\n{body}\n{question}" if turn == 0 else question
        messages.append({"role": "user", "content": content})
        reply: dict[str, Any] = {"role": "assistant", "content": f"{key} = {value}"}
        if thinking:
            reply["reasoning_content"] = f"I look for the line of {key}."
        messages.append(reply)
    return messages


def _two_words(rng: random.Random) -> str:
    return f"{rng.choice(COLOURS)}_{rng.choice(NOUNS)}"


def _word_and_number(rng: random.Random) -> str:
    return f"{rng.choice(NOUNS)}_{rng.randint(10, 99)}"


def _invented(rng: random.Random) -> str:
    return made_up_word(rng) if rng.random() < 0.3 else f"{rng.choice(NOUNS)}_{made_up_word(rng)}"


def _digits(rng: random.Random) -> str:
    return str(rng.randint(1000, 9999))


def _word(rng: random.Random) -> str:
    return rng.choice(NOUNS)


def _word_pair(rng: random.Random) -> str:
    return f"{rng.choice(COLOURS)} {rng.choice(NOUNS)}"


_KEY_STYLES: tuple[Callable[[random.Random], str], ...] = (_two_words, _two_words, _word_and_number, _invented)
_VALUE_STYLES: tuple[Callable[[random.Random], str], ...] = (_digits, _digits, _word, _word_pair)
