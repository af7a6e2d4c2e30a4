"""A request's arrival: what is known of it before anything of it is read."""

from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """When a request came, and how it is called.

    Attributes:
        request_id: Its id.
        at: By `time.monotonic`.
        log: Fields of its line in the log: numbers and names, nothing that a user wrote.
    """

    request_id: str
    at: float
    log: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> "Arrival":
        """Read what the outermost layer noted."""
        state = request.state
        return cls(request_id=state.request_id, at=state.arrived_at, log=state.log)
