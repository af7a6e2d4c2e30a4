"""What a chat template understands, read from the template itself.

All GLM-5.x versions share one architecture and differ in their templates: GLM-5 to 5.2 can be told not to think, 5.3
cannot. So behaviour is chosen by the variables that a template reads, never by the model's name.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import jinja2
import jinja2.meta

from specdec.kernels.errors import ConfigError

_LOOP_CONTROL = re.compile(r"{%-?\s*(break|continue)\s*-?%}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateFacts:
    """Facts about one chat template.

    Attributes:
        file: Where it was found.
        variables: Variables that it takes from the caller, sorted.
        can_switch_thinking: It reads `enable_thinking`.
        has_reasoning_effort: It reads `reasoning_effort`.
        can_clear_thinking: It reads `clear_thinking`: the reasoning of past turns may be dropped.
        uses_tools: It reads `tools`.
        opens_thinking: It writes `<think>`, so that the output may begin inside the reasoning.
        needs_loop_controls: It uses `break` or `continue`.
    """

    file: str
    variables: tuple[str, ...]
    can_switch_thinking: bool
    has_reasoning_effort: bool
    can_clear_thinking: bool
    uses_tools: bool
    opens_thinking: bool
    needs_loop_controls: bool


def read_template_facts(directory: Path) -> TemplateFacts | None:
    """The facts of the template of a checkpoint directory; None where there is no template.

    Looks for chat_template.jinja, then inside tokenizer_config.json, where re-exports keep it.

    Raises:
        ConfigError: The template is not valid Jinja.
    """
    for file, text in (
        ("chat_template.jinja", _template_file(directory / "chat_template.jinja")),
        ("tokenizer_config.json", _template_inside(directory / "tokenizer_config.json")),
    ):
        if text is not None:
            return _facts(directory / file, text)
    return None


def _facts(path: Path, text: str) -> TemplateFacts:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        variables = jinja2.meta.find_undeclared_variables(environment.parse(text))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{path}: the chat template is not valid Jinja (line {error.lineno}: {error.message})"
        ) from error
    return TemplateFacts(
        file=path.name,
        variables=tuple(sorted(variables)),
        can_switch_thinking="enable_thinking" in variables,
        has_reasoning_effort="reasoning_effort" in variables,
        can_clear_thinking="clear_thinking" in variables,
        uses_tools="tools" in variables,
        opens_thinking="<think>" in text,
        needs_loop_controls=_LOOP_CONTROL.search(text) is not None,
    )


def _template_file(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _template_inside(path: Path) -> str | None:
    """The template of a tokenizer_config.json: a string, or the one called "default" of a list."""
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_bytes()).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a JSON object ({error})") from error
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
