"""When sessions start: at the times of the trace, by chance, evenly, or when another one has ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from specdec.bench.workload import Workload
from specdec.errors import ConfigError


class ArrivalKind(StrEnum):
    """The ways; all but the last are open loops: they do not wait for the server."""

    TRACE = "trace"
    POISSON = "poisson"
    FIXED = "fixed"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """When sessions start.

    Inside of a session a request waits for the replies it needs and for its think time, whatever the way.

    Attributes:
        kind: The way.
        rate_per_s: Sessions started each second, on average (POISSON) or exactly (FIXED).
        concurrency: Sessions that run at the same time (CLOSED).
        speed: Times of the trace, think times too, pass this many times as fast.
        max_think_time_s: Longest think time, before `speed` shortens it; None for no limit.
    """

    kind: ArrivalKind
    rate_per_s: float | None = None
    concurrency: int | None = None
    speed: float = 1.0
    max_think_time_s: float | None = None

    def __post_init__(self) -> None:
        has_rate = self.kind in (ArrivalKind.POISSON, ArrivalKind.FIXED)
        if has_rate != (self.rate_per_s is not None):
            verb = "needs" if has_rate else "takes no"
            raise ConfigError(f"--arrivals {self.kind} {verb} --rate; got {self.rate_per_s}")
        is_closed = self.kind is ArrivalKind.CLOSED
        if is_closed != (self.concurrency is not None):
            verb = "needs" if is_closed else "takes no"
            raise ConfigError(f"--arrivals {self.kind} {verb} --concurrency; got {self.concurrency}")
        for flag, value in (("rate", self.rate_per_s), ("concurrency", self.concurrency), ("speed", self.speed)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{flag} must be above 0, got {value}")
        if self.max_think_time_s is not None and not self.max_think_time_s >= 0:
            raise ConfigError(f"--max-think-time must be at least 0, got {self.max_think_time_s}")

    def start_times_s(self, workload: Workload, *, seed: int) -> Sequence[float] | None:
        """When each session starts, in seconds from the start of the run; None for a closed loop.

        Raises:
            ConfigError: The times of the trace are asked for, and it has none.
        """
        num_sessions = len(workload.sessions)
        if self.kind is ArrivalKind.CLOSED:
            return None
        if self.rate_per_s is not None:
            if self.kind is ArrivalKind.FIXED:
                return [place / self.rate_per_s for place in range(num_sessions)]
            gaps_s = np.random.default_rng(seed).exponential(1 / self.rate_per_s, num_sessions)
            starts_s: list[float] = np.cumsum(gaps_s).tolist()
            return starts_s
        if not workload.has_times:
            raise ConfigError(
                f"--arrivals trace needs a trace with times, a {workload.kind} workload has none: "
                "give --arrivals closed, poisson or fixed"
            )
        return [(session.start_s or 0.0) / self.speed for session in workload.sessions]

    def think_time_s(self, planned_s: float) -> float:
        """The think time that a planned one becomes."""
        if self.max_think_time_s is not None:
            planned_s = min(planned_s, self.max_think_time_s)
        return planned_s / self.speed
