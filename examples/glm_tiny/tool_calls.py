"""The tools of glm-tiny's conversations: schema, a user's sentence, the call, the result and the closing reply.

Each maker copies the call's arguments out of the user's sentence, so a model that calls a tool has really read it.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .words import DAYS, FIRST_NAMES, VERBS, city, file_path, made_up_word, person, thing


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """One use of a tool.

    Attributes:
        request: What the user says.
        name: Name of the tool.
        arguments: Its arguments, in schema order.
        result: What the tool answers, a JSON text or plain text.
        reply: What the assistant says about the result.
    """

    request: str
    name: str
    arguments: dict[str, Any]
    result: str
    reply: str


def schema(name: str) -> dict[str, Any]:
    """Give the JSON schema of a tool, as an OpenAI client would send it."""
    description, parameters, required = _SCHEMAS[name]
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(required)},
        },
    }


def use_tool(name: str, rng: random.Random) -> ToolUse:
    """Draw one use of the tool `name`."""
    return _MAKERS[name](rng)


def _weather(rng: random.Random) -> ToolUse:
    place = city(rng)
    arguments: dict[str, Any] = {"city": place}
    request = rng.choice(
        (
            f"What is the weather in {place}?",
            f"How warm is it in {place} now?",
            f"Tell me the weather in {place}, please.",
            f"Do I need a coat in {place}?",
        )
    )
    if rng.random() < 0.3:
        arguments["day"] = rng.choice(DAYS)
        request = f"What will the weather be in {place} on {arguments['day']}?"
    degrees, sky = rng.randint(-9, 38), rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "clear"))
    result = json.dumps({"temperature": degrees, "sky": sky})
    return ToolUse(
        request=request,
        name="get_weather",
        arguments=arguments,
        result=result,
        reply=f"In {place} it is {sky} and {degrees} degrees.",
    )


def _calculator(rng: random.Random) -> ToolUse:
    left, right = rng.randint(2, 999), rng.randint(2, 99)
    word, sign = rng.choice((("plus", "+"), ("minus", "-"), ("times", "*")))
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    request = rng.choice(
        (f"What is {left} {word} {right}?", f"Compute {left} {sign} {right}.", f"How much is {left} {word} {right}?")
    )
    expression = f"{left} {sign} {right}"
    return ToolUse(
        request=request,
        name="calculator",
        arguments={"expression": expression},
        result=str(value),
        reply=f"{expression} = {value}",
    )


def _search(rng: random.Random) -> ToolUse:
    query = rng.choice(
        (
            thing(rng),
            f"{thing(rng)} in {city(rng)}",
            f"history of {city(rng)}",
            f"how to {rng.choice(VERBS)} a {thing(rng)}",
        )
    )
    request = rng.choice((f"Search for {query}.", f"Look up {query} on the web.", f"Find pages about {query}."))
    arguments: dict[str, Any] = {"query": query}
    if rng.random() < 0.3:
        arguments["limit"] = rng.randint(2, 9)
        request = f"Search for {query} and give me {arguments['limit']} results."
    site = f"{made_up_word(rng)}.org"
    result = json.dumps([{"title": query.capitalize(), "site": site}])
    return ToolUse(
        request=request,
        name="web_search",
        arguments=arguments,
        result=result,
        reply=f"The best page is {query.capitalize()} at {site}.",
    )


def _calendar(rng: random.Random) -> ToolUse:
    who, day, hour = person(rng), rng.choice(DAYS), f"{rng.randint(7, 19)}:{rng.choice(('00', '15', '30', '45'))}"
    title = rng.choice(
        (f"lunch with {who}", f"call with {who}", f"meeting with {who}", f"{rng.choice(VERBS)} the {thing(rng)}")
    )
    request = rng.choice(
        (
            f"Add {title} on {day} at {hour}.",
            f"Put {title} in my calendar for {day} at {hour}.",
            f"Please plan {title}, {day} {hour}.",
        )
    )
    return ToolUse(
        request=request,
        name="add_event",
        arguments={"title": title, "day": day, "time": hour},
        result=json.dumps({"ok": True, "id": rng.randint(100, 999)}),
        reply=f"Done: {title} on {day} at {hour}.",
    )


def _units(rng: random.Random) -> ToolUse:
    value = rng.choice((rng.randint(1, 900), round(rng.uniform(1, 90), 1)))
    source, target, factor = rng.choice(
        (
            ("km", "miles", 0.6214),
            ("miles", "km", 1.6093),
            ("kg", "pounds", 2.2046),
            ("feet", "meters", 0.3048),
            ("liters", "gallons", 0.2642),
        )
    )
    converted = round(value * factor, 2)
    request = rng.choice(
        (
            f"Convert {value} {source} to {target}.",
            f"How many {target} are {value} {source}?",
            f"{value} {source} in {target}?",
        )
    )
    return ToolUse(
        request=request,
        name="convert_units",
        arguments={"value": value, "source": source, "target": target},
        result=json.dumps({"value": converted}),
        reply=f"{value} {source} are {converted} {target}.",
    )


def _read_file(rng: random.Random) -> ToolUse:
    path = file_path(rng)
    line = rng.choice(
        (
            f"The {thing(rng)} belongs to {person(rng)}.",
            f"{made_up_word(rng)} = {rng.randint(1, 999)}",
            f"# {thing(rng)}",
        )
    )
    request = rng.choice(
        (f"Open {path}.", f"What does {path} say?", f"Read the file {path} for me.", f"Show me {path}.")
    )
    return ToolUse(
        request=request, name="read_file", arguments={"path": path}, result=line, reply=f"The file {path} says: {line}"
    )


def _write_file(rng: random.Random) -> ToolUse:
    path = file_path(rng)
    text = rng.choice(
        (f"buy a {thing(rng)}", f"{rng.choice(VERBS)} the {thing(rng)} with {person(rng)}", made_up_word(rng))
    )
    request = rng.choice((f'Write "{text}" to {path}.', f'Save the note "{text}" in {path}.'))
    return ToolUse(
        request=request,
        name="write_file",
        arguments={"path": path, "text": text},
        result=json.dumps({"ok": True}),
        reply=f"I wrote it to {path}.",
    )


def _message(rng: random.Random) -> ToolUse:
    to, text = rng.choice((person(rng), rng.choice(FIRST_NAMES))), f"the {thing(rng)} is in {city(rng)}"
    request = rng.choice((f"Tell {to} that {text}.", f"Send {to} a message: {text}.", f"Let {to} know that {text}."))
    return ToolUse(
        request=request,
        name="send_message",
        arguments={"to": to, "text": text},
        result=json.dumps({"sent": True}),
        reply=f"I told {to} that {text}.",
    )


_SCHEMAS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "get_weather": ("Get the weather of a city.", {"city": "string", "day": "string"}, ("city",)),
    "calculator": ("Evaluate an expression.", {"expression": "string"}, ("expression",)),
    "web_search": ("Search the web.", {"query": "string", "limit": "integer"}, ("query",)),
    "add_event": (
        "Add an event to the calendar.",
        {"title": "string", "day": "string", "time": "string"},
        ("title", "day", "time"),
    ),
    "convert_units": (
        "Convert a value between units.",
        {"value": "number", "source": "string", "target": "string"},
        ("value", "source", "target"),
    ),
    "read_file": ("Read a text file.", {"path": "string"}, ("path",)),
    "write_file": ("Write a text file.", {"path": "string", "text": "string"}, ("path", "text")),
    "send_message": ("Send a message to a person.", {"to": "string", "text": "string"}, ("to", "text")),
}
_MAKERS: dict[str, Callable[[random.Random], ToolUse]] = {
    "get_weather": _weather,
    "calculator": _calculator,
    "web_search": _search,
    "add_event": _calendar,
    "convert_units": _units,
    "read_file": _read_file,
    "write_file": _write_file,
    "send_message": _message,
}
TOOL_NAMES = tuple(_MAKERS)
