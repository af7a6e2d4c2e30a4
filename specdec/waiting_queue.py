"""The requests that wait for a slot, in the order in which they get one.

Any thread may add requests; everything else is done by the thread that runs the rounds. Nothing is locked: a request
enters or leaves a list in one step, and both lists are always sorted.
"""

import math
from bisect import insort
from collections.abc import Iterator
from itertools import takewhile

from specdec.request import Request

_Entry = tuple[float, int, Request]  # request ids are unique: no two requests are ever compared


class WaitingQueue:
    """Requests by their turn, the earliest first; see `Request.turn`."""

    def __init__(self) -> None:
        self._by_turn: list[_Entry] = []
        self._by_deadline: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._by_turn)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._by_turn)

    def __contains__(self, request: Request) -> bool:
        return _turn_of(request) in self._by_turn

    @property
    def first(self) -> Request:
        """Who is next; there must be one."""
        return self._by_turn[0][2]

    def add(self, *requests: Request) -> None:
        """Let requests wait, each in its turn."""
        for request in requests:
            insort(self._by_turn, _turn_of(request))
            if request.deadline < math.inf:
                insort(self._by_deadline, _deadline_of(request))

    def remove(self, request: Request) -> None:
        """Let a request wait no more; nothing for one that does not."""
        for entries, entry in (self._by_turn, _turn_of(request)), (self._by_deadline, _deadline_of(request)):
            if entry in entries:
                entries.remove(entry)

    def late(self, now: float) -> list[Request]:
        """Give those whose deadline has come; they stay until they are removed."""
        return [request for _, _, request in takewhile(lambda entry: entry[0] <= now, self._by_deadline.copy())]


def _turn_of(request: Request) -> _Entry:
    return request.turn, request.request_id, request


def _deadline_of(request: Request) -> _Entry:
    return request.deadline, request.request_id, request
