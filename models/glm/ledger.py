"""The account of one loading: each parameter written exactly once, each stored tensor used or ignored with a reason.

Without it a tensor that a rename or a rule misses leaves its parameter as the memory was, and the model answers
nonsense or drafts nothing, without any error (`vllm#34385` and `vllm#31757` are two such reports).
"""

import threading
from collections.abc import Iterable, Mapping

from specdec.kernels.errors import CheckpointError


class Ledger:
    """Collects what was written and what was used; `settle` raises unless both sides are complete.

    Safe to use from several threads.
    """

    def __init__(self, *, parameter_rows: Mapping[str, int], tensors: Iterable[str]) -> None:
        """Open an account for parameters, given by their number of rows, and for the stored tensors."""
        self._parameter_rows = dict(parameter_rows)
        self._tensors = set(tensors)
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in parameter_rows}
        self._used: set[str] = set()
        self._ignored: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def num_used(self) -> int:
        """Stored tensors that went into a parameter."""
        return len(self._used)

    def write(self, parameter: str, *, first_row: int, num_rows: int) -> None:
        """Note that rows of a parameter were written."""
        with self._lock:
            self._written[parameter].append((first_row, first_row + num_rows))

    def use(self, tensor: str) -> None:
        """Note that a stored tensor was read."""
        with self._lock:
            self._used.add(tensor)

    def ignore(self, tensor: str, reason: str) -> None:
        """Note that a stored tensor is left out, and why."""
        with self._lock:
            self._ignored[tensor] = reason

    def settle(self) -> None:
        """Check both sides.

        Raises:
            CheckpointError: Rows of a parameter were written twice or not at all, or a stored tensor was neither used
                nor ignored, or both.
        """
        for name, num_rows in self._parameter_rows.items():
            end_of_last = 0
            for start, end in [*sorted(self._written[name]), (num_rows, num_rows)]:
                if start != end_of_last:
                    fault = "written twice" if start < end_of_last else "never written"
                    first, last = sorted((start, end_of_last))
                    raise CheckpointError(f"parameter {name}: rows {first}..{last - 1} of {num_rows} were {fault}")
                end_of_last = end
        both = self._used & self._ignored.keys()
        if both:
            raise CheckpointError(f"tensor {min(both)} was used and ignored ({self._ignored[min(both)]})")
        unknown = (self._used | self._ignored.keys()) - self._tensors
        if unknown:
            raise CheckpointError(f"tensor {min(unknown)} was accounted for, but no file holds it")
        forgotten = self._tensors - self._used - self._ignored.keys()
        if forgotten:
            raise CheckpointError(
                f"tensor {min(forgotten)} and {len(forgotten) - 1} more were neither used nor ignored"
            )
