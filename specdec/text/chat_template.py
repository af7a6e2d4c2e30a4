"""The checkpoint's own chat template, rendered in a sandbox."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.errors import CheckpointError, RequestError
from specdec.models.glm.json_files import read_optional_json_object
from specdec.models.glm.template_facts import TOKENIZER_CONFIG_NAME, find_template

# Names under which clients send the reasoning of a past turn; GLM's templates read the first.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A Jinja template with the filters and settings that checkpoints are written for.

    Those are the ones of transformers: `break` and `continue`, block trimming, a `tojson` that keeps non-ASCII
    characters and escapes no HTML, `raise_exception` and `strftime_now`.

    Args:
        source: The template's text.
        origin: The file it comes from, for messages.
        special_tokens: Variables like eos_token.

    Raises:
        CheckpointError: The text is no valid template.
    """

    def __init__(self, source: str, *, origin: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{origin}: not a valid chat template: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.variables = frozenset(names - set(environment.globals))

    def mentions(self, variable: str) -> bool:
        """Say whether the template reads a variable, such as enable_thinking: what it can be told, it reads."""
        return variable in self.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Give the prompt of a conversation, to be encoded without adding special tokens.

        Args:
            messages: Turns as in the OpenAI chat API. A key whose value is None counts as absent.
            tools: Functions that may be called, in the same API's form.
            add_generation_prompt: Whether the prompt ends with the beginning of the assistant's turn.
            variables: More of what the template reads, such as enable_thinking.

        Raises:
            RequestError: The messages are no JSON objects, or the template refuses or cannot render them.
        """
        _check_list("messages", messages)
        if tools is not None:
            _check_list("tools", tools)
        if variables is not None and not isinstance(variables, Mapping):
            raise RequestError(f"variables must be an object, got {reprlib.repr(variables)}", parameter="variables")
        given = dict(variables or {})
        reserved = {"messages", "tools", "add_generation_prompt", *self._special_tokens} & set(given)
        if reserved:
            rule = f"must not replace {', '.join(sorted(reserved))}, which the chat template reads as well"
            raise RequestError(f"variables {rule}", parameter="variables")
        context = {
            **self._special_tokens,
            **_plain_json("variables", given),
            "messages": _normalised(messages),
            "tools": None if tools is None else _plain_json("tools", list(tools)),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except Exception as error:  # a template can fail in as many ways as any program
            reason = str(error) or type(error).__name__
            raise RequestError(f"the chat template cannot render these messages: {reason}") from error


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """Find a checkpoint's chat template: chat_template.jinja, else the one inside tokenizer_config.json.

    Returns:
        None if the checkpoint has none.

    Raises:
        CheckpointError: A file is corrupt, or the template is not valid.
    """
    config = read_optional_json_object(directory / TOKENIZER_CONFIG_NAME)
    found = find_template(directory, config)
    if found is None:
        return None
    path, source = found
    return ChatTemplate(source, origin=str(path), special_tokens=_special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(token, str):
            found[key] = token
    return found


def _normalised(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    plain = _plain_json("messages", list(messages))
    normalised = []
    for index, message in enumerate(plain):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] must be an object with a role, got {message!r}")
        present = {key: value for key, value in message.items() if value is not None}
        reasoning = next((present[key] for key in _REASONING_KEYS if key in present), None)
        if reasoning is not None:
            present["reasoning_content"] = reasoning
        if isinstance(calls := present.get("tool_calls"), list):
            for place, call in enumerate(calls):
                _parse_arguments(call, where=f"messages[{index}].tool_calls[{place}]")
        normalised.append(present)
    return normalised


def _parse_arguments(call: Any, *, where: str) -> None:
    """Replace the arguments of a tool call by an object: the OpenAI API has them as JSON text, templates do not."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}: arguments must be a JSON object: {error}") from error
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}: arguments must be a JSON object, got {reprlib.repr(arguments)}")
    function["arguments"] = arguments


def _check_list(name: str, value: object) -> None:
    """Refuse what is no list of objects; what is in the objects is left to the template."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise RequestError(f"{name} must be a list of objects, got {reprlib.repr(value)}")
    for place, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise RequestError(f"{name}[{place}] must be an object, got {reprlib.repr(item)}")


def _plain_json(name: str, value: Any) -> Any:
    """Copy a value through JSON: a template must not reach the methods of our objects."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} must be plain JSON values: {error}", parameter=name) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
