"""What a server counted during a window that ends with the newest reading."""

from collections import deque
from dataclasses import dataclass

from specdec.top.reading import Counts, Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """What was counted between two readings."""

    begin_s: float
    end_s: float
    counts: Counts


class History:
    """The readings of one server.

    A server that was started again counts from 0: what it counts then is what it counted since, and what it had
    counted behind the last reading before is lost. The time in between belongs to the window, whatever happened in it.

    Args:
        window_s: Length of the window. It begins with a reading, so it may last up to one step longer.

    Attributes:
        newest: The last reading.
        num_restarts: How often the server was started again.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._steps: deque[_Step] = deque()
        self.newest: Reading | None = None
        self.num_restarts = 0

    def add(self, reading: Reading) -> None:
        """Take the next reading; times must not go back."""
        earlier, self.newest = self.newest, reading
        if earlier is None:
            return
        is_restarted = reading.follows_restart(earlier)
        self.num_restarts += is_restarted
        counts = reading.counts if is_restarted else reading.counts.since(earlier.counts)
        self._steps.append(_Step(begin_s=earlier.read_at_s, end_s=reading.read_at_s, counts=counts))
        while self._steps[0].end_s <= reading.read_at_s - self._window_s:
            self._steps.popleft()

    @property
    def duration_s(self) -> float:
        """Seconds from the beginning of the window to the newest reading; 0 with less than two readings."""
        return self._steps[-1].end_s - self._steps[0].begin_s if self._steps else 0.0

    @property
    def counts(self) -> Counts:
        """What was counted in the window."""
        return sum((step.counts for step in self._steps), Counts())
