"""The errors of specdec, by what the caller can do about them."""

from specdec.kernels.errors import (
    CheckpointError,
    ConfigError,
    GeometryError,
    OutOfPagesError,
    RequestError,
    SpecdecError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "GeometryError",
    "OutOfPagesError",
    "RequestError",
    "SpecdecError",
]
