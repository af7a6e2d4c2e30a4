"""The checkpoint's own chat template, rendered in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.errors import CheckpointError, RequestError

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
        given = dict(variables or {})
        reserved = {"messages", "tools", "add_generation_prompt", *self._special_tokens} & set(given)
        if reserved:
            raise RequestError(f"chat template variables must not replace {', '.join(sorted(reserved))}")
        context = {
            **self._special_tokens,
            **_plain_json("chat template variables", given),
            "messages": _normalised(messages),
            "tools": None if tools is None else _plain_json("tools", list(tools)),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except Exception as error:  # a template can fail in as many ways as any program
            raise RequestError(f"the chat template cannot render these messages: {error}") from error


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """Find a checkpoint's chat template: chat_template.jinja, else the one inside tokenizer_config.json.

    Returns:
        None if the checkpoint has none.

    Raises:
        CheckpointError: A file is corrupt, or the template is not valid.
    """
    config_path = directory / "tokenizer_config.json"
    config: Any = {}
    if config_path.exists():
        try:
            config = json.loads(_read(config_path))
        except ValueError as error:
            raise CheckpointError(f"{config_path}: cannot be read as JSON: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{config_path}: must hold a JSON object, got {type(config).__name__}")
    path = directory / "chat_template.jinja"
    if path.exists():
        return ChatTemplate(_read(path), origin=str(path), special_tokens=_special_tokens(config))
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates; "default" is the one for chat
        source = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f"{config_path}: chat_template must be a string, got {type(source).__name__}")
    return ChatTemplate(source, origin=str(config_path), special_tokens=_special_tokens(config))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


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
        normalised.append(present)
    return normalised


def _plain_json(name: str, value: Any) -> Any:
    """Copy a value through JSON: a template must not reach the methods of our objects."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} must be plain JSON values: {error}") from error


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
