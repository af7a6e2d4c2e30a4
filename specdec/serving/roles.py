"""What a server does where prompts are computed in other processes than text is drawn."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from specdec.errors import ConfigError


class Role(StrEnum):
    """Part of a server in a deployment of several; one that has none answers requests and computes their prompts.

    PREFILL computes prompts for decode groups, and answers nothing but questions about itself. DECODE answers requests,
    whose prompts prefills compute. BOTH answers requests, computes their prompts, and those of decode groups.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def answers_requests(self) -> bool:
        """Whether clients are answered."""
        return self is not Role.PREFILL

    @property
    def serves_groups(self) -> bool:
        """Whether decode groups may call."""
        return self is not Role.DECODE


def read_role(name: str | None) -> Role | None:
    """Give the role of a name; None for none.

    Raises:
        ConfigError: There is no such role.
    """
    try:
        return None if name is None else Role(name)
    except ValueError:
        raise ConfigError(f"role must be one of {', '.join(Role)}, got {name!r}") from None


def settings_of_role(role: Role | None, given: Mapping[str, Any], *, listens: bool) -> dict[str, Any]:
    """Give the settings of an engine for a role.

    Args:
        role: Of its server.
        given: Settings that were given for it; fields of `EngineConfig`, and `draft_kv`.
        listens: Whether an address for decode groups was given.

    Raises:
        ConfigError: They do not go with the role.
    """
    name = "a server without a role" if role is None else f"role {role}"
    has_prefills = bool(given.get("prefill"))
    if role is Role.DECODE and not has_prefills:
        raise ConfigError(
            "role decode has its prompts computed by others, got no --prefill: name one, or leave the role out"
        )
    if role is not None and role.serves_groups and has_prefills:
        raise ConfigError(f"{name} computes prompts itself, got --prefill {' '.join(given['prefill'])}: leave it out")
    if listens and (role is None or not role.serves_groups):
        raise ConfigError(f"{name} takes no calls of decode groups, got --handoff-listen: use role prefill or both")
    if role is not Role.PREFILL:
        if "draft_kv" in given:
            raise ConfigError(f"{name} computes the draft KV that it drafts with, got --no-draft-kv: leave it out")
        return {"transport": "local", **given} if role is Role.BOTH else dict(given)
    if given.get("num_draft_tokens"):
        raise ConfigError(
            f"role prefill drafts nothing, got num_draft_tokens {given['num_draft_tokens']}: leave it out; the draft "
            "KV is computed, unless --no-draft-kv is given"
        )
    return {"transport": "local", "num_draft_tokens": 0, "draft_kv": True, **given}
