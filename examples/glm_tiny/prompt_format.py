"""Render messages with glm-tiny's chat template, as an engine would."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")


class PromptFormat:
    """Turns messages and tools into the text that the model reads."""

    def __init__(self) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = lambda value, ensure_ascii=True: json.dumps(value, ensure_ascii=ensure_ascii)
        self._template = environment.from_string(TEMPLATE_PATH.read_text())

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = False,
        enable_thinking: bool = True,
    ) -> str:
        """Give the prompt; special tokens appear by name and are encoded as such."""
        return self._template.render(
            messages=messages,
            tools=list(tools),
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
        )
