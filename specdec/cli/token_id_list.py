"""Token ids as people type them."""

import re
import reprlib

from specdec.errors import ConfigError


def parse_token_ids(text: str, *, flag: str) -> list[int]:
    """Read ids separated by commas or white space, as in "1,2,3".

    Args:
        text: What was typed.
        flag: Where, for the message.

    Raises:
        ConfigError: A part is no number, or has more digits than any id.
    """
    parts = [part for part in re.split(r"[\s,]+", text) if part]
    for part in parts:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", part):
            raise ConfigError(f"{flag} takes token ids separated by commas, as in 1,2,3; got {reprlib.repr(part)}")
    return [int(part) for part in parts]
