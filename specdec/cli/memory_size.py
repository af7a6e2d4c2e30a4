"""Sizes of memory as one types them: 141GB, 80GiB, 1.5e9."""

import re

from specdec.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)")


def parse_memory_size(text: str) -> int:
    """Give the bytes, rounded down; GB is 10^9 and GiB 2^30.

    Raises:
        ConfigError: It is no size.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    try:
        if match is None:
            raise ValueError
        return int(float(match[1]) * _UNITS[match[2]])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"a size is a number with kB, MB, GB, TB, KiB, MiB, GiB, TiB or B, got {text!r}") from None
