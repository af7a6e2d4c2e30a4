"""An event loop whose clock jumps to the next timer instead of waiting: hours pass at once, and exactly."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_START_S = 1000.0  # not 0, so that a time is not taken for a duration
_PATIENCE_S = 5.0  # real seconds that something outside of the loop may take


class _JumpingSelector(selectors.DefaultSelector):
    """Moves the loop's clock ahead where it should wait."""

    now_s = _START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:  # no timer is left: only a thread could wake the loop
            events = super().select(_PATIENCE_S)
            if not events:
                raise AssertionError("everything waits for something that never comes")
            return events
        self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop. What it runs must not wait for sockets."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on such a loop."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
