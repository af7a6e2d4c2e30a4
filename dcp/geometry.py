"""Which ranks share a request's KV: a value that travels with every batch.

The target runs under decode context parallelism: the pages of a request are spread over `size` ranks. The draft does
not: every rank holds the whole draft KV, so drafting needs no collective over these ranks. What was built for one pool
must never reach the other, therefore metadata carries the `Geometry` it was built for and pools refuse any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from specdec.kernels.errors import ConfigError, GeometryError


class PoolRole(StrEnum):
    """Which model's KV a pool holds."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Who holds the pages of a pool, seen from one rank.

    The role decides, not the type of a layer: a draft pool is replicated, so its size is 1 on every rank.

    Attributes:
        size: Ranks that share a request's pages, >= 1.
        rank: This rank among them, 0..size - 1.
        role: The pool that is meant.
    """

    size: int
    rank: int
    role: PoolRole

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"dcp size must be >= 1, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"dcp rank must lie in 0..{self.size - 1} for dcp size {self.size}, got {self.rank}")
        if self.role is PoolRole.DRAFT and self.size != 1:
            raise GeometryError(
                f"the draft pool is replicated, its dcp size is 1 on every rank, got {self.size}: "
                "build draft metadata inside dcp_disabled()"
            )


_DISABLED: ContextVar[bool] = ContextVar("specdec_dcp_disabled", default=False)


@contextmanager
def dcp_disabled() -> Iterator[None]:
    """Make `active_geometry` answer size 1, rank 0 for everything built inside.

    Covers metadata, graph capture, replay preparation and forward of the draft. It nests, and restores on exceptions.
    It is a context variable: threads started inside do not inherit it, so hand them the geometry itself.
    """
    token = _DISABLED.set(True)
    try:
        yield
    finally:
        _DISABLED.reset(token)


def active_geometry(*, size: int, rank: int, role: PoolRole) -> Geometry:
    """The geometry to build with here: (size, rank) as configured, or (1, 0) inside `dcp_disabled`.

    Raises:
        GeometryError: For the draft at size > 1 outside `dcp_disabled`: its pool is not sharded.
    """
    if _DISABLED.get():
        return Geometry(1, 0, role)
    return Geometry(size, rank, role)
