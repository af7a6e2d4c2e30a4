"""Token ids as people type them."""

import re

from specdec.errors import ConfigError


def parse_token_ids(text: str, *, flag: str) -> list[int]:
    """Read ids separated by commas or white space, as in "1,2,3".

    Args:
        text: What was typed.
        flag: Where, for the message.

    Raises:
        ConfigError: A part is no number.
    """
    parts = [part for part in re.split(r"[\s,]+", text) if part]
    for part in parts:
        if not re.fullmatch(r"[+-]?[0-9]+", part):
            raise ConfigError(f"{flag} takes token ids separated by commas, as in 1,2,3; got {part!r}")
    return [int(part) for part in parts]
