"""How much a model thinks: what clients ask for, in the words of the checkpoint's own template.

All GLM-5.x versions share one architecture, and their templates differ: some can be told not to think, some know levels
of effort, some neither. So a wish is passed on where the template reads it, and has no effect where it does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import RequestError
from specdec.serving.api_errors import refused
from specdec.text.chat_template import ChatTemplate

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
_NO_EFFORT = "none"
_UNKNOWN_EFFORT = "unknown"
_PROBE = ({"role": "user", "content": "Hello"},)


@dataclass(frozen=True, slots=True)
class ThinkingWish:
    """What a request says about thinking.

    Attributes:
        is_enabled: Whether to think; None leaves it to the template.
        effort: One of `EFFORTS`, or "none"; None leaves it to the template.
        variables: More variables for the template, as they are; they may say the same.
    """

    is_enabled: bool | None = None
    effort: str | None = None
    variables: Mapping[str, Any] | None = None


class ThinkingRules:
    """What one template makes of wishes.

    Attributes:
        can_switch: Whether it can be told not to think.
        efforts: Levels of effort that it knows, beside the one that is its default.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.can_switch = template.mentions("enable_thinking")
        self._reads_effort = template.mentions("reasoning_effort")
        self.efforts = _known_efforts(template) if self._reads_effort else ()

    def variables(self, wish: ThinkingWish) -> tuple[dict[str, Any], list[str]]:
        """Give the variables for the template, and the names of fields that have no effect on it.

        A level that the template does not know becomes the next higher one that it knows; above all of these it is left
        to the template, whose default is its highest.

        Raises:
            ApiError: 400 for a level that nobody knows, and for wishes that contradict each other.
        """
        given = dict(wish.variables or {})
        without_effect = []
        if wish.effort is not None:
            if wish.effort not in (_NO_EFFORT, *EFFORTS):
                names = ", ".join((_NO_EFFORT, *EFFORTS))
                raise refused("reasoning_effort", f"reasoning_effort must be one of {names}, got {wish.effort[:64]!r}")
            if wish.effort == _NO_EFFORT:
                if wish.is_enabled:
                    raise refused("reasoning_effort", "reasoning_effort is none, but thinking is asked for")
                if self.can_switch:
                    _set(given, "enable_thinking", False, field="reasoning_effort")
            elif self._reads_effort:
                _set(given, "reasoning_effort", self._nearest(wish.effort), field="reasoning_effort")
            if not (self.can_switch if wish.effort == _NO_EFFORT else self._reads_effort):
                without_effect.append("reasoning_effort")
        if wish.is_enabled is not None:
            if self.can_switch:
                _set(given, "enable_thinking", wish.is_enabled, field="enable_thinking")
            else:
                without_effect.append("enable_thinking")
        return given, without_effect

    def _nearest(self, effort: str) -> str:
        higher = EFFORTS[EFFORTS.index(effort) :]
        return next((level for level in higher if level in self.efforts), effort)


def _set(given: dict[str, Any], name: str, value: Any, *, field: str) -> None:
    if given.setdefault(name, value) != value:
        raise refused(field, f"{field} and chat_template_kwargs.{name} contradict each other")


def _known_efforts(template: ChatTemplate) -> tuple[str, ...]:
    """Find the levels that make a difference to a prompt."""

    def render(effort: str) -> str | None:
        try:
            return template.render(_PROBE, variables={"reasoning_effort": effort})
        except RequestError:
            return None

    default = render(_UNKNOWN_EFFORT)
    return tuple(effort for effort in EFFORTS if render(effort) not in (default, None))
