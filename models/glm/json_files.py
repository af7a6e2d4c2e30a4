"""JSON files of a checkpoint, read so that whatever is wrong with one names the file."""

import json
from pathlib import Path
from typing import Any

from specdec.kernels.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        CheckpointError: The file cannot be read, or `parse_json_object` refuses it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); download it again") from error
    return parse_json_object(data, source=str(path))


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """The same, and an empty object where there is no such file; a link to a file that is gone is a fault."""
    return read_json_object(path) if path.exists() or path.is_symlink() else {}


def parse_json_object(data: bytes, *, source: str) -> dict[str, Any]:
    """The JSON object that bytes hold.

    Args:
        data: UTF-8.
        source: Where they come from, for the message.

    Raises:
        CheckpointError: They are no JSON, no object, nested too deeply, or have a key twice: readers disagree on which
            of the two values counts.
    """
    try:
        value = json.loads(data, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise CheckpointError(f"{source}: not valid JSON ({error}); download it again") from error
    except RecursionError as error:
        raise CheckpointError(f"{source}: not valid JSON (nested too deeply); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: must hold a JSON object, holds a {type(value).__name__}")
    return value


def repeated_key(pairs: list[tuple[str, Any]]) -> str | None:
    """The first key of a JSON object that stands in it twice, of which Python would keep the last value."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    key = repeated_key(pairs)
    if key is not None:
        raise ValueError(f"the key {key!r} stands in it twice")
    return dict(pairs)
