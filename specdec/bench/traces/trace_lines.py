"""Lines of a trace file, checked against what their format says."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from specdec.errors import ConfigError, RequestError

Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e12)]

Row = TypeVar("Row", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One line.

    Attributes:
        data: Its JSON.
        origin: File and line number, for messages.
    """

    data: bytes
    origin: str

    def read(self, row_type: type[Row]) -> Row:
        """Give what the line says.

        Raises:
            RequestError: A field is missing or is of another type.
        """
        try:
            return msgspec.json.decode(self.data, type=row_type)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"{self.origin}: {error}") from error

    def keys(self) -> set[str]:
        """Names of the line's fields.

        Raises:
            RequestError: It is no JSON object.
        """
        try:
            return set(msgspec.json.decode(self.data, type=dict[str, msgspec.Raw]))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"{self.origin}: {error}") from error


def read_lines(path: Path) -> Iterator[TraceLine]:
    """Give the lines of a file that are not empty.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line := line.strip():
                    yield TraceLine(line, f"{path} line {number}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
