"""The errors of specdec, by what the caller can do about them."""

from specdec.kernels.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    GeometryError,
    OutOfPagesError,
    RankError,
    RankLostError,
    RequestError,
    RoundError,
    SpecdecError,
    TransferError,
)

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "ContextLengthError",
    "DeadlineError",
    "GeometryError",
    "OutOfPagesError",
    "RankError",
    "RankLostError",
    "RequestError",
    "RoundError",
    "SpecdecError",
    "TransferError",
]
