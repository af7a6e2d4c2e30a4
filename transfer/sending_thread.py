"""Sends the writes to one peer, in order, on a thread of its own.

One thread per peer: a peer that stopped holds up nobody else, and what is in flight to a peer stays bounded, which one
of the libraries needs (more than 2,050 descriptors in flight break Mooncake's session for good). A write whose time is
over keeps its place until the library has done with it, because only then it is known that its bytes no longer move.

X = descriptors.
"""

import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specdec.kernels.cuda_program import as_current
from specdec.kernels.errors import TransferError
from specdec.kernels.piece_repeats import ONE_LAYER, Layers, Repeats
from specdec.transfer.descriptors import Descriptors
from specdec.transfer.gate import GateVisit
from specdec.transfer.placement import I64
from specdec.transfer.queued_write import CANCELLED, GpuSource, QueuedWrite
from specdec.transfer.transport import RegionCopies

CLOSED = "the transport was closed, or the peer disconnected, while the write ran"
_LANDING_GRACE_S = 1.0  # at the end, for what is in flight
_CLOSE_GRACE_S = 3.0  # for the thread
_NO_PAUSE_S = 1e-3  # how long looks at what is in flight follow each other at once: a batch on a GPU is a part of that
_LONGEST_PAUSE_S = 1e-2
_PAUSE_SHARE = 0.02  # of the time waited so far: what lands is seen that much late


@dataclass(frozen=True, slots=True)
class Batch:
    """Copies between one pair of regions that are posted together; all else as in `Descriptors`."""

    source_region: str
    destination_region: str
    source_offset_X: I64
    destination_offset_X: I64
    length_X: I64
    repeats: Repeats | None = None
    layers: Layers = ONE_LAYER


class EndCause(NamedTuple):
    """Why a peer is of no use any more.

    Attributes:
        words: For the error of every write.
        takes_nothing: Whether no byte can reach its memory any more, whatever is still on its way.
    """

    words: str
    takes_nothing: bool


class Link(ABC):
    """What a transport does for one peer; all but `cause_of_end` is called by the sending thread alone.

    Attributes:
        descriptor_bytes: Most bytes of a descriptor; longer ones are cut.
        batch_descriptors: Most descriptors of a batch.
        batch_bytes: Most bytes of a batch of several descriptors.
        batches_in_flight: Most batches that have been posted and not ended.
    """

    descriptor_bytes: int
    batch_descriptors: int
    batch_bytes: int
    batches_in_flight: int

    def takes_repeats(self, destination_region: str) -> bool:
        """Tell whether batches for a region may have repeats and layers; where not, each has its own descriptor."""
        return False

    @abstractmethod
    def post(self, batch: Batch) -> Any:
        """Begin a batch; gives a ticket to ask for its end.

        Raises:
            TransferError: Nothing of the batch is in flight.
        """

    @abstractmethod
    def has_landed(self, ticket: Any) -> bool:
        """Tell whether a batch has landed; False while the library still works on any part of it.

        Raises:
            TransferError: The library is done with it and it failed; parts may land all the same.
        """

    @abstractmethod
    def abandon(self, ticket: Any) -> None:
        """Ask no more for a batch that is in flight."""

    @abstractmethod
    def cause_of_end(self) -> "EndCause | None":
        """Say why no write to the peer can succeed any more, as far as is known; None where one may. Never waits."""

    def find_cause_of_end(self) -> "EndCause | None":
        """The same, after a look at what is only known by asking, which may take a moment."""
        return self.cause_of_end()

    @abstractmethod
    def close(self) -> None:
        """Give back what the library holds for the peer. Called last, by the sending thread."""


_left_open: list[GateVisit] = []  # of writes whose end nobody will know


class SendingThread:
    """The queue of one peer and the thread that empties it.

    Args:
        link: To the peer.
        name: Of the thread.
        gate: Passed before the peer's GPU memory is written; None where that cannot be reached from this host.
    """

    def __init__(self, link: Link, *, name: str, gate: GateVisit | None = None) -> None:
        self._link = link
        self._gate = gate
        self._lock = threading.Condition()
        self._queue: deque[QueuedWrite] = deque()
        self._current: QueuedWrite | None = None
        self._closed_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"specdec-send-{name}", daemon=True)
        self._thread.start()

    def put(self, write: QueuedWrite) -> None:
        """Send a write after those before it."""
        with self._lock:
            if self._closed_at is None:
                self._queue.append(write)
                self._lock.notify()
                return
        write.finish(CLOSED)

    def close(self) -> None:
        """End the thread; every write that has not ended fails. What is in flight has a second to land.

        A thread that is stuck inside of a library, as with a stopped peer whose connection is just being opened, is
        waited for a few seconds only; it ends when the library returns.
        """
        with self._lock:
            self._closed_at = time.monotonic()
            left = [*self._queue]
            self._queue.clear()
            self._lock.notify()
        for write in left:
            write.finish(CLOSED)
        self._thread.join(_CLOSE_GRACE_S)
        if (current := self._current) is not None:
            current.give_up(CLOSED)

    def _run(self) -> None:
        while (write := self._next()) is not None:
            self._current = write
            if write.begin():
                if write.gpu_source is None:
                    self._send(write)
                else:
                    self._send_from_gpu(write, write.gpu_source)
            self._current = None
            del write  # its arrays and the tensors behind them must not wait for the next one
        self._link.close()
        if self._gate is not None and self._gate not in _left_open:
            self._gate.close()

    def _next(self) -> QueuedWrite | None:
        with self._lock:
            self._lock.wait_for(lambda: self._queue or self._closed_at is not None)
            return self._queue.popleft() if self._closed_at is None else None

    def _send_from_gpu(self, write: QueuedWrite, source: GpuSource) -> None:
        """Send once the bytes are there, and within the gate. Libraries want the GPU to be the thread's current one."""
        with as_current(source.device):
            try:
                pauses = _Pauses()
                while not source.stored.query() and write.is_wanted() and self._closed_at is None:
                    pauses.sleep()
                if self._gate is not None:
                    self._gate.enter()
            except Exception as failure:  # of the GPU, or the gate was shut
                write.finish(_in_words(failure))
                return
            self._send(write)
            if self._gate is not None and self._gate not in _left_open:
                self._gate.leave()

    def _send(self, write: QueuedWrite) -> None:
        """Post and watch one write until nothing of it is in flight."""
        link = self._link
        cause = link.find_cause_of_end()
        error = cause.words if cause else None
        end_is_unknown = False
        waiting = _batches(write.copies, link)
        upcoming = next(waiting, None)  # known one ahead, so that a write whose last batch has landed is DONE
        in_flight: deque[Any] = deque()
        pauses = _Pauses()
        while not self._is_out_of_time():
            while upcoming and not error and len(in_flight) < link.batches_in_flight and self._may_post(write):
                try:
                    in_flight.append(link.post(upcoming))
                    upcoming = next(waiting, None)
                except TransferError as failure:
                    error = str(failure)
                except Exception as failure:  # of a library: this thread lives on, for the writes behind
                    error, end_is_unknown = _in_words(failure), True
            if not in_flight:
                break
            try:
                has_landed = link.has_landed(in_flight[0])
            except Exception as failure:
                error = error or _in_words(failure)
                end_is_unknown = has_landed = True
            if has_landed:
                in_flight.popleft()
                pauses = _Pauses()
            else:
                pauses.sleep()
        if in_flight or upcoming:
            error = error or (CLOSED if self._closed_at is not None else CANCELLED)
        end_is_unknown |= bool(in_flight)
        for ticket in in_flight:
            link.abandon(ticket)
        if error and (cause := link.find_cause_of_end()) is not None:
            error = cause.words
            end_is_unknown &= bool(in_flight) or not cause.takes_nothing
        if end_is_unknown and self._gate is not None and self._gate not in _left_open:
            _left_open.append(self._gate)
        write.finish(error, end_is_unknown=end_is_unknown)

    def _may_post(self, write: QueuedWrite) -> bool:
        return self._closed_at is None and write.may_post()

    def _is_out_of_time(self) -> bool:
        return self._closed_at is not None and time.monotonic() > self._closed_at + _LANDING_GRACE_S


class _Pauses:
    """Pauses between looks at what is waited for, the longer the longer it takes; at first only others get a turn."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def sleep(self) -> None:
        waited_s = time.monotonic() - self._since
        if waited_s < _NO_PAUSE_S:
            select.select((), (), (), 0.0)  # lets go of the interpreter; even no sleep at all sleeps for 50 us
        else:
            time.sleep(min(_PAUSE_SHARE * waited_s, _LONGEST_PAUSE_S))


def _batches(copies: tuple[RegionCopies, ...], link: Link) -> Iterator[Batch]:
    """Cut copies into batches of the link's size."""
    for copy in copies:
        descriptors = copy.descriptors
        if not link.takes_repeats(copy.destination_region):
            descriptors = descriptors.once()
        descriptors = _cut_long(descriptors, link.descriptor_bytes)
        end_X = np.cumsum(descriptors.bytes_X)
        first, sent_bytes = 0, 0
        while first < len(end_X):
            within = int(np.searchsorted(end_X, sent_bytes + link.batch_bytes, side="right"))
            last = min(max(within, first + 1), first + link.batch_descriptors)
            part = descriptors[first:last]
            yield Batch(
                copy.source_region,
                copy.destination_region,
                part.source_offset_X,
                part.destination_offset_X,
                part.length_X,
                part.repeats,
                part.layers,
            )
            first, sent_bytes = last, int(end_X[last - 1])


def _cut_long(descriptors: Descriptors, most_bytes: int) -> Descriptors:
    """Cut descriptors into parts of at most `most_bytes`; empty ones are left out."""
    bytes_X = descriptors.bytes_X
    if len(bytes_X) and bytes_X.min() > 0 and bytes_X.max() <= most_bytes:
        return descriptors
    descriptors = descriptors.once()
    length_X = descriptors.length_X
    num_parts_X = -(-length_X // most_bytes)
    part = np.arange(num_parts_X.sum()) - np.repeat(np.cumsum(num_parts_X) - num_parts_X, num_parts_X)
    begin = part * most_bytes
    arrays = (descriptors.source_offset_X, descriptors.destination_offset_X, length_X)
    source, destination, length = (np.repeat(array, num_parts_X) for array in arrays)
    return Descriptors(source + begin, destination + begin, np.minimum(length - begin, most_bytes))


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
