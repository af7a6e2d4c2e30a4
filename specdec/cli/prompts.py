"""Where the prompts of `specdec generate` come from: a flag, standard input, a conversation, or a batch file."""

import json
import reprlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.cli.token_id_list import parse_token_ids
from specdec.errors import ConfigError, RequestError, RoundError
from specdec.grammar.grammar import Grammar
from specdec.models.glm.json_files import repeated_key

STDIN = "-"
_PROMPT_KEYS = ("prompt", "prompt_ids", "messages")
_CONVERSATION_KEYS = ("messages", "tools", "chat_template_kwargs")
_GRAMMAR_KEYS = ("json_schema", "json_object", "regex")
_MAX_DIGITS = 18  # of a token id; Python reads no number of thousands


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What the checkpoint's chat template turns into a prompt.

    Attributes:
        messages: Turns as in the OpenAI chat API.
        tools: Functions that may be called, in the same API's form; None where there are none.
        variables: More of what the template reads, such as enable_thinking.
    """

    messages: list[Mapping[str, Any]]
    tools: list[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSpec:
    """One prompt.

    Attributes:
        prompt: A text, token ids, or a conversation.
        origin: Where it was found, for messages about it; "" where that is obvious.
        sampling: Sampling parameters that were given for this prompt alone.
    """

    prompt: str | list[int] | Conversation
    origin: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def errors_name(origin: str) -> Iterator[None]:
    """Put the origin of a prompt before the message of an error that is about it."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{origin}: {error}" if origin else str(error)) from error
    except RoundError as error:
        raise RoundError(f"{origin}: {error}" if origin else str(error)) from error


def read_prompts(
    *,
    text: str | None,
    token_ids: str | None,
    messages: Path | None,
    batch: Path | None,
    source: str | None,
) -> list[PromptSpec]:
    """Read the prompts of a command line, of which exactly one way must be given.

    Args:
        text: The prompt itself.
        token_ids: Its ids.
        messages: JSON file with a list of messages, or an object with messages, tools and chat_template_kwargs.
        batch: JSON lines, one prompt each.
        source: "-" for a text on standard input.

    Raises:
        ConfigError: None or several are given, or a file cannot be read.
        RequestError: A file or standard input holds no such prompt.
    """
    if source not in (None, STDIN):
        raise ConfigError(f"unexpected argument {source!r}: give a prompt with --prompt, or {STDIN} for standard input")
    ways = {"--prompt": text, "--prompt-ids": token_ids, "--messages": messages, "--batch": batch, STDIN: source}
    given = [way for way, value in ways.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ConfigError(f"give exactly one of {', '.join(ways)} for the prompt; got {found}")
    if text is not None:
        return [PromptSpec(prompt=text)]
    if token_ids is not None:
        return [PromptSpec(prompt=parse_token_ids(token_ids, flag="--prompt-ids"))]
    if messages is not None:
        return [_read_messages(messages)]
    if batch is not None:
        return _read_batch(batch)
    return [PromptSpec(prompt=read_standard_input(), origin="standard input")]


def read_standard_input() -> str:
    """Give the text on standard input, without a byte order mark.

    Raises:
        ConfigError: It is closed.
        RequestError: It holds no UTF-8.
    """
    if sys.stdin is None:
        raise ConfigError("standard input is closed, so nothing can be read from it")
    return _decode(sys.stdin.buffer.read(), "standard input")


def _read_messages(path: Path) -> PromptSpec:
    value = _parse(read_text(path), str(path))
    fields = value if isinstance(value, dict) else {"messages": value}
    conversation = _take_conversation(fields, str(path))
    if fields:
        raise RequestError(f"{path}: {next(iter(fields))!r} is not known; it takes {', '.join(_CONVERSATION_KEYS)}")
    return PromptSpec(prompt=conversation, origin=str(path))


def _read_batch(path: Path) -> list[PromptSpec]:
    specs = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            specs.append(_read_line(line, f"{path} line {number}"))
    if not specs:
        raise RequestError(f"{path} holds no prompt: write one JSON object a line")
    return specs


def _read_line(line: str, origin: str) -> PromptSpec:
    value = _parse(line, origin)
    if not isinstance(value, dict):
        raise RequestError(f"{origin}: must be a JSON object, got {line.strip()!r}")
    given = [key for key in _PROMPT_KEYS if key in value]
    if len(given) != 1:
        raise RequestError(f"{origin}: needs one of {', '.join(_PROMPT_KEYS)}; got {' and '.join(given) or 'none'}")
    key = given[0]
    prompt: Any = _take_conversation(value, origin) if key == "messages" else value.pop(key)
    if key == "prompt" and not isinstance(prompt, str):
        raise RequestError(f"{origin}: prompt must be a text, got {prompt!r}")
    if key == "prompt_ids" and not isinstance(prompt, list):
        raise RequestError(f"{origin}: prompt_ids must be a list of token ids, got {prompt!r}")
    if key == "prompt_ids":
        for place, item in enumerate(prompt):
            if isinstance(item, bool) or not isinstance(item, int):
                raise RequestError(f"{origin}: prompt_ids[{place}] must be a token id, got {reprlib.repr(item)}")
    if isinstance(biases := value.get("logit_bias"), dict):
        value["logit_bias"] = {_id_of_key(token_id, origin): bias for token_id, bias in biases.items()}
    _take_grammar(value, origin)
    # As in the OpenAI API, null is what it would be if it were left out.
    sampling = {name: given for name, given in value.items() if given is not None}
    return PromptSpec(prompt=prompt, origin=origin, sampling=sampling)


def _take_grammar(fields: dict[str, Any], origin: str) -> None:
    """Turn what a line says of a grammar, under the names of the flags, into the sampling parameter."""
    given = {key: value for key in _GRAMMAR_KEYS if (value := fields.pop(key, None)) is not None}
    if len(given) > 1:
        raise RequestError(f"{origin}: takes one of {', '.join(_GRAMMAR_KEYS)}; got {' and '.join(given)}")
    with errors_name(origin):
        for key, value in given.items():
            if key == "json_schema":
                fields["grammar"] = Grammar.json_schema(value)
            elif key == "regex":
                fields["grammar"] = Grammar.regex(value)
            elif value is True:
                fields["grammar"] = Grammar.json_object()
            elif value is not False:
                raise RequestError(f"json_object must be true or false, got {value!r}")


def _take_conversation(fields: dict[str, Any], origin: str) -> Conversation:
    """Move a conversation out of the fields of a JSON object."""
    messages, tools, variables = (fields.pop(key, None) for key in _CONVERSATION_KEYS)
    if not _is_list_of_objects(messages) or not messages:
        raise RequestError(f'{origin}: needs a list of messages, as in [{{"role": "user", "content": "hello"}}]')
    if tools is not None and not _is_list_of_objects(tools):
        raise RequestError(f"{origin}: tools must be a list of objects, got {tools!r}")
    if variables is not None and not isinstance(variables, dict):
        raise RequestError(f"{origin}: chat_template_kwargs must be an object, got {variables!r}")
    return Conversation(messages=messages, tools=tools, variables=variables or {})


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _id_of_key(key: str, origin: str) -> int:
    """JSON writes the keys of an object as strings."""
    if not key.isascii() or not key.isdigit() or len(key) > _MAX_DIGITS:
        raise RequestError(f"{origin}: logit_bias must map token ids to numbers, got the id {reprlib.repr(key)}")
    return int(key)


def _parse(text: str, origin: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except ValueError as error:
        raise RequestError(f"{origin}: not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError(f"{origin}: not readable: its lists and objects lie too deep in each other") from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its members; Python would keep the last of two that are named alike."""
    repeated = repeated_key(pairs)
    if repeated is not None:
        raise ValueError(f"an object has {reprlib.repr(repeated)} twice")
    return dict(pairs)


def read_text(path: Path) -> str:
    """Give the text of a file, without a byte order mark.

    Raises:
        ConfigError: It cannot be read.
        RequestError: It holds no UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return _decode(data, str(path))


def _decode(data: bytes, source: str) -> str:
    from specdec.text.tokenizer import text_of_bytes

    return text_of_bytes(data, source=source).removeprefix("\ufeff")  # the byte order mark of some editors
