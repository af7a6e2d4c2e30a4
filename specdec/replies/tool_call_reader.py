"""One tool call, from the marker that opens it to the one that closes it, as pieces of a JSON object.

    name<arg_key>key</arg_key><arg_value>value</arg_value>  ->  {"key": value}

Strings are written piece by piece, other values when they are complete; what has been written is never taken back.
That decides how slips of a model are read:

- A key that was written already is dropped with its value: the first value stands.
- A value ends at `</arg_value>` only; every other marker in it is text.
- Elsewhere a call also ends at the next `<tool_call>` and at the end of the turn, and text that is neither a name, a
  key nor a value is dropped, as is a key without a value.
- A name is one word. What follows `<tool_call>` and is none was no call, and is given back as text.
"""

import json
from enum import Enum, auto
from typing import NoReturn

from specdec.replies.reply_markup import Marker
from specdec.replies.tool_schemas import ArgumentType, ToolSchemas, json_type_of

WHITE_SPACE = " \t\r\n"
_MOST_NAME_CHARACTERS = 256

# By its first character: what types a JSON value that is no string may have, and what it may consist of; None for what
# only the complete value tells.
_NUMBER = (frozenset({"integer", "number"}), frozenset("0123456789+-.eE" + WHITE_SPACE))
_BY_FIRST_CHARACTER: dict[str, tuple[frozenset[str], frozenset[str] | None]] = {
    "{": (frozenset({"object"}), None),
    "[": (frozenset({"array"}), None),
    "t": (frozenset({"boolean"}), frozenset("true" + WHITE_SPACE)),
    "f": (frozenset({"boolean"}), frozenset("false" + WHITE_SPACE)),
    "n": (frozenset({"null"}), frozenset("null" + WHITE_SPACE)),
    **dict.fromkeys("-0123456789", _NUMBER),
}


class _Place(Enum):
    NAME = auto()
    BETWEEN_ARGUMENTS = auto()
    KEY = auto()
    BEFORE_VALUE = auto()
    VALUE = auto()


class ToolCallReader:
    """Reads one call.

    Attributes:
        name: The function's, once it is known.
        is_over: Whether the call is complete; nothing of the reply after it belongs to it.
        is_refused: Whether it turned out to be no call; `given_back` is its text.
    """

    def __init__(self, tools: ToolSchemas) -> None:
        self._tools = tools
        self._place = _Place.NAME
        self._raw = ""
        self._key = ""
        self._keys: set[str] = set()
        self._value: _ValueWriter | None = None  # None for a value that is dropped
        self.name: str | None = None
        self.is_over = False
        self.is_refused = False

    @property
    def is_in_value(self) -> bool:
        """Whether every marker but the one that ends the value is text."""
        return self._place is _Place.VALUE

    @property
    def given_back(self) -> str:
        """The text of what was read so far, for a call without a name."""
        return Marker.CALL.value + self._raw

    def take_text(self, text: str) -> str:
        """Take text and give the JSON that it adds to the arguments."""
        match self._place:
            case _Place.NAME:
                self._raw += text
                self.is_refused = not may_be_name(self._raw)
            case _Place.KEY:
                self._key += text
            case _Place.VALUE if self._value is not None:
                return self._value.push(text)
        return ""

    def take_marker(self, marker: Marker) -> str:
        """Take a marker and give the JSON that it adds to the arguments."""
        if self._place is _Place.VALUE:
            return self._end_value() if marker is Marker.END_VALUE else self.take_text(marker.value)
        opening = ""
        if self._place is _Place.NAME:
            opening = self._end_name(marker)
            if self.is_refused:
                return ""
        match marker:
            case Marker.KEY:
                self._key, self._place = "", _Place.KEY
            case Marker.END_KEY if self._place is _Place.KEY:
                self._place = _Place.BEFORE_VALUE
            case Marker.VALUE if self._place in {_Place.KEY, _Place.BEFORE_VALUE}:
                return self._begin_value()
            case Marker.END_CALL | Marker.CALL | Marker.SPECIAL:
                self.is_over = True
                return opening + "}"
        return opening

    def _end_name(self, marker: Marker) -> str:
        name = self._raw.strip(WHITE_SPACE)
        if not name or marker not in {Marker.KEY, Marker.END_CALL, Marker.CALL, Marker.SPECIAL}:
            self.is_refused = True
            return ""
        self.name, self._place = name, _Place.BETWEEN_ARGUMENTS
        return "{"

    def _begin_value(self) -> str:
        assert self.name is not None
        self._place = _Place.VALUE
        key = self._key.strip(WHITE_SPACE)
        if key in self._keys:
            self._value = None
            return ""
        separator = ", " if self._keys else ""
        self._keys.add(key)
        self._value = _ValueWriter(self._tools.argument_type(self.name, key))
        return f"{separator}{_json_string(key)}: {self._value.begin()}"

    def _end_value(self) -> str:
        self._place = _Place.BETWEEN_ARGUMENTS
        return "" if self._value is None else self._value.finish()


class _ValueWriter:
    """Writes one value as JSON: a string at once, anything else when it is complete.

    The text of a string is the string itself. So a text that is JSON is read as JSON where the type allows what it is,
    unless that is a string; otherwise it is a string where the type allows one, and else what it looks like.
    """

    def __init__(self, argument_type: ArgumentType) -> None:
        self._type = argument_type
        self._may_be_string = "string" in argument_type.json_types
        self._is_string = argument_type.json_types == {"string"}
        self._held: list[str] = []
        self._is_blank = True
        self._characters: frozenset[str] | None = None

    def begin(self) -> str:
        """Give what is certain before any text."""
        return '"' if self._is_string else ""

    def push(self, text: str) -> str:
        """Take the next text and give the JSON that is certain with it."""
        if self._is_string:
            return _json_string(text)[1:-1]
        self._held.append(text)
        if self._may_be_string and not self._may_be_json(text):
            self._is_string = True
            return _json_string("".join(self._held))[:-1]
        return ""

    def finish(self) -> str:
        """Give the rest, once the value is complete."""
        if self._is_string:
            return '"'
        text = "".join(self._held)
        json_text = text.strip(WHITE_SPACE)
        json_type = _type_of_json(json_text)
        is_listed = self._may_be_string and text in self._type.strings
        if json_type in self._type.json_types and not is_listed:
            return json_text
        return _json_string(text) if self._may_be_string or json_type is None else json_text

    def _may_be_json(self, text: str) -> bool:
        """Say whether the text so far may begin a JSON value that the type allows and that is no string."""
        if self._is_blank:
            text = text.lstrip(WHITE_SPACE)
            if not text:
                return True
            self._is_blank = False
            json_types, self._characters = _BY_FIRST_CHARACTER.get(text[0], (frozenset(), None))
            if json_types.isdisjoint(self._type.json_types):
                return False
        return self._characters is None or self._characters.issuperset(text)


def may_be_name(text: str) -> bool:
    """Whether a call may begin like this: one word of at most 256 printable characters, or white space before it."""
    name = text.strip(WHITE_SPACE)
    return len(text) <= _MOST_NAME_CHARACTERS and (not name or (name.isprintable() and " " not in name))


def _type_of_json(text: str) -> str | None:
    """Name the type of a JSON text; None if it is no JSON. Numbers are not converted, so they may have any size."""
    try:
        value = json.loads(text, parse_int=lambda _: 0, parse_float=lambda _: 0.0, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return json_type_of(value)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
