"""Write conversations: small talk, questions about Python's built-ins, tool calls and their results.

Everything is drawn from one seed; training and evaluation use different seeds. Reasoning is short and always closed.
"""

import builtins
import inspect
import random
from dataclasses import dataclass
from typing import Any

from . import needles
from .tool_calls import TOOL_NAMES, ToolUse, schema, use_tool
from .words import COLOURS, person, thing

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages ready for the chat template.

    Attributes:
        messages: Turns as an OpenAI client would send them; the last one is the assistant's.
        tools: Schemas offered, possibly none.
        thinking: False when it is rendered with `enable_thinking=False`.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    thinking: bool


def make_conversation(rng: random.Random) -> Conversation:
    """Draw one conversation of one to four exchanges."""
    thinking = rng.random() < 0.75
    names = rng.sample(TOOL_NAMES, rng.randint(1, 3)) if rng.random() < 0.7 else []
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": _system(rng)})
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        draw = rng.random()
        if names and draw < 0.75:
            messages += _tool_exchange(rng, names, thinking=thinking)
        elif draw < 0.8 or not names:
            question, thought, answer = rng.choice((_small_talk, _builtin, _repeat, _list))(rng)
            messages += [{"role": "user", "content": question}, _assistant(answer, thought if thinking else None)]
        else:
            messages += _two_calls(rng, names, thinking=thinking)
    return Conversation(messages=tuple(messages), tools=tuple(schema(n) for n in names), thinking=thinking)


def make_needle(rng: random.Random, *, max_lines: int) -> Conversation:
    """Draw a key-value table with several questions about it."""
    thinking = rng.random() < 0.4
    num_lines = rng.randint(4, max_lines)
    table = needles.make_table(rng, num_lines=num_lines, num_questions=rng.randint(6, 16))
    return Conversation(messages=tuple(needles.table_messages(table, thinking=thinking)), tools=(), thinking=thinking)


def _assistant(content: str, thought: str | None, uses: tuple[ToolUse, ...] = ()) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if thought is not None:
        message["reasoning_content"] = thought
    if uses:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": u.name, "arguments": u.arguments}} for u in uses
        ]
    return message


def _tool_exchange(rng: random.Random, names: list[str], *, thinking: bool) -> list[Message]:
    use = use_tool(rng.choice(names), rng)
    before = rng.choice(_BEFORE)(use, rng) if thinking else None
    after = rng.choice(_AFTER) if thinking else None
    lead = rng.choice(("", "", "", "One moment.", "Let me check.", f"I use {use.name} for that."))
    return [
        {"role": "user", "content": use.request},
        _assistant(lead, before, (use,)),
        {"role": "tool", "content": use.result},
        _assistant(use.reply, after),
    ]


def _two_calls(rng: random.Random, names: list[str], *, thinking: bool) -> list[Message]:
    first, second = use_tool(rng.choice(names), rng), use_tool(rng.choice(names), rng)
    before = f"Two requests: I call {first.name} and {second.name}." if thinking else None
    return [
        {"role": "user", "content": f"{first.request} {second.request}"},
        _assistant("", before, (first, second)),
        {"role": "tool", "content": first.result},
        {"role": "tool", "content": second.result},
        _assistant(f"{first.reply} {second.reply}", "I have both results." if thinking else None),
    ]


def _quote_request(use: ToolUse, rng: random.Random) -> str:
    return (
        f'{rng.choice(("The user says", "The request is", "They ask"))} "{use.request}" The tool for it is {use.name}.'
    )


def _name_argument(use: ToolUse, rng: random.Random) -> str:
    key, value = rng.choice(list(use.arguments.items()))
    return f"{rng.choice(('I need', 'This needs', 'The user wants'))} {use.name} with {key} {value}."


def _list_arguments(use: ToolUse, rng: random.Random) -> str:
    listed = ", ".join(f"{key}: {value}" for key, value in use.arguments.items())
    lead, then = rng.choice(("Arguments", "I found", "Details")), rng.choice(("I call", "Next is", "Now"))
    return f"{lead}: {listed}. {then} {use.name}."


def _plan_only(use: ToolUse, rng: random.Random) -> str:
    return f"{rng.choice(('I should call', 'A job for', 'I can use'))} {use.name}."


_BEFORE = (_quote_request, _name_argument, _list_arguments, _plan_only)
_AFTER = (
    "I have the result.",
    "The tool has answered. I report it.",
    "That is what the user asked for.",
    "Now I can answer.",
    "The result is clear. I tell the user in one sentence.",
)


def _system(rng: random.Random) -> str:
    name = person(rng)
    return rng.choice(
        (f"You are {name}, a helpful assistant.", f"You help {name} with daily work.", "Answer in one short sentence.",
         "You are a careful assistant. Use the tools when they help.")
    )  # fmt: skip


def _small_talk(rng: random.Random) -> tuple[str, str, str]:
    name = person(rng)
    return rng.choice(
        (
            ("Hello!", "The user greets me.", "Hello! How can I help you?"),
            (
                f"Hi, I am {name}.",
                f"The user is {name}. I greet back.",
                f"Hi {name}, nice to meet you. What can I do for you?",
            ),
            ("Thank you!", "The user thanks me.", "You are welcome."),
            (
                "Who are you?",
                "A question about me.",
                "I am glm-tiny, a very small language model. I write Python and call tools.",
            ),
            (f"My name is {name}. What is my name?", f"The name is {name}.", f"Your name is {name}."),
            ("Goodbye.", "The user leaves.", "Goodbye, and have a nice day!"),
        )
    )


def _builtin(rng: random.Random) -> tuple[str, str, str]:
    name, summary = rng.choice(_BUILTINS)
    question = rng.choice((f"What does {name} do in Python?", f"Explain {name}.", f"What is {name} for?"))
    return question, f"A question about {name} in Python.", f"{name}: {summary}"


def _repeat(rng: random.Random) -> tuple[str, str, str]:
    words = " ".join(thing(rng) for _ in range(rng.randint(1, 3)))
    return rng.choice((f"Say {words}.", f"Repeat after me: {words}.")), f"I repeat {words}.", f"{words}"


def _list(rng: random.Random) -> tuple[str, str, str]:
    items = [thing(rng) for _ in range(rng.randint(2, 5))]
    asked = f"Make a list of these: {', '.join(items)}."
    if rng.random() < 0.5:
        return asked, f"A list of {len(items)} things.", "\n".join(f"- {item}" for item in items)
    colour = rng.choice(COLOURS)
    return (
        f"Write a Python list called {colour} with {', '.join(items)}.",
        f"A list named {colour}.",
        f"{colour} = [{', '.join(repr(item) for item in items)}]",
    )


def _summaries() -> tuple[tuple[str, str], ...]:
    """First sentences of the built-ins' documentation (Python Software Foundation License)."""
    found = []
    for name in sorted(dir(builtins)):
        value = getattr(builtins, name)
        if name.startswith("_") or not callable(value):
            continue
        line = (inspect.getdoc(value) or "").strip().split("\n")[0]
        if 12 < len(line) < 90 and not line.startswith(name):
            found.append((name, line))
    for owner in (str, list, dict, set, bytes):
        for name in sorted(vars(owner)):
            line = (inspect.getdoc(getattr(owner, name)) or "").strip().split("\n")[0]
            if not name.startswith("_") and 12 < len(line) < 90:
                found.append((f"{owner.__name__}.{name}", line))
    return tuple(found)


_BUILTINS = _summaries()
