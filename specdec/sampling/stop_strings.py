"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StopMatch:
    """What one piece of text brought.

    Attributes:
        visible: Text that is now certain to be part of the output.
        stop: The stop string that was completed, or None. Nothing follows it.
    """

    visible: str
    stop: str | None


class StopMatcher:
    """Finds the first of several strings to be completed, whatever the pieces.

    The text is read character by character, so where it was cut cannot matter. If one character completes several stop
    strings, the longest counts. Text that may be the beginning of a stop string is held back until it is known.

    Args:
        stops: Non-empty strings.
        include_stop: Whether the stop string itself is part of the output.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include_stop = include_stop
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._matched = [0] * len(stops)  # length of the longest beginning of each stop that the text ends with
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> StopMatch:
        """Take more text.

        Args:
            piece: Any text; what follows a completed stop string is dropped.
            may_stop: Whether a stop string that is completed in this piece takes effect.
        """
        if not self._stops:
            return StopMatch(visible=piece, stop=None)
        for index, character in enumerate(piece):
            completed = self._advance(character)
            if completed is not None and may_stop:
                text = self._held + piece[: index + 1]
                visible = text if self._include_stop else text[: len(text) - len(completed)]
                self._held = ""
                return StopMatch(visible=visible, stop=completed)
        text = self._held + piece
        num_visible = len(text) - max(self._matched)
        self._held = text[num_visible:]
        return StopMatch(visible=text[:num_visible], stop=None)

    def finish(self) -> str:
        """Give the text that was held back, once none follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        completed = None
        for i, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            length = self._matched[i]
            while length and stop[length] != character:
                length = failure[length]
            length += stop[length] == character
            if length == len(stop):
                completed = completed or stop
                length = failure[length]  # it may have been passed over; go on as if it were ordinary text
            self._matched[i] = length
        return completed


def _failure_function(stop: str) -> list[int]:
    """Give for each n the longest proper beginning of stop[:n] that also ends it (Knuth, Morris, Pratt)."""
    failure = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = failure[length]
        length += stop[length] == character
        failure.append(length)
    return failure
