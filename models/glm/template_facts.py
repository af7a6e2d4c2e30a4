"""What a chat template understands, read from the template itself.

All GLM-5.x versions share one architecture and differ in their templates: GLM-5 to 5.2 can be told not to think, 5.3
cannot. So behaviour is chosen by the variables that a template reads, never by the model's name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from specdec.kernels.errors import CheckpointError
from specdec.models.glm.json_files import read_optional_json_object

TOKENIZER_CONFIG_NAME = "tokenizer_config.json"

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

    Raises:
        CheckpointError: A file is corrupt, or the template is not valid Jinja.
    """
    found = find_template(directory, read_optional_json_object(directory / TOKENIZER_CONFIG_NAME))
    return None if found is None else _facts(*found)


def find_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> tuple[Path, str] | None:
    """The chat template of a checkpoint directory and the file it is in; None where there is none.

    Looks for chat_template.jinja, then inside tokenizer_config.json, where re-exports keep it: a string, or of several
    named ones the one called "default".

    Args:
        directory: The checkpoint.
        tokenizer_config: What its tokenizer_config.json holds.

    Raises:
        CheckpointError: A file is corrupt.
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path, path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
    path = directory / TOKENIZER_CONFIG_NAME
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        for place, entry in enumerate(template):
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                raise CheckpointError(
                    f"{path}: chat_template[{place}] must be an object whose name is a string, got {entry!r}"
                )
        template = {entry["name"]: entry.get("template") for entry in template}.get("default")
    if template is None:
        return None
    if not isinstance(template, str):
        raise CheckpointError(f"{path}: chat_template must be a string, got {type(template).__name__}")
    return path, template


def _facts(path: Path, text: str) -> TemplateFacts:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        variables = jinja2.meta.find_undeclared_variables(environment.parse(text))
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
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
