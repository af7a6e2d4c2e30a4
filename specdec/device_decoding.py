"""Decoding in rounds that stay on the device, the next of which runs while the host looks at what one emitted.

A round needs nothing of the host but pages. So after a step in which nothing else ran, and as long as its requests go
on, the next round is started before the one in front is read. A request that ends meanwhile takes part once for
nothing. Its pages may be given away at once: other passes of this device come behind that round, and another process is
told of pages only when the device has ended all that it was given (`Intake.start`).

A round ahead can always be dropped. What it wrote are rows that the host does not count yet, and whoever computes these
computes the same.

B = requests, n = requests of a round.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdec.device.decode_task import Decoded, Int64Array
from specdec.device.device_rounds import DeviceRounds
from specdec.device.places import Places
from specdec.device.started_round import StartedRound
from specdec.ranks.passes import Ranks
from specdec.scheduler import ScheduledBatch, Scheduler

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flight:
    """A round that was started.

    Attributes:
        admission_n: Numbers of its requests' admissions, by place, i64.
        has_drafts_n: Whether they had drafts to verify, bool.
        started: The round.
    """

    admission_n: Int64Array
    has_drafts_n: BoolArray
    started: StartedRound


class DeviceDecoding:
    """Decides which requests decode on the device, and keeps one round ahead of what is read.

    Args:
        ranks: Run the rounds.
        scheduler: Owns the requests and their pages.
        rounds: Of this rank.
    """

    def __init__(self, ranks: Ranks, scheduler: Scheduler, rounds: DeviceRounds) -> None:
        self._ranks = ranks
        self._scheduler = scheduler
        self._slots = scheduler.slots
        self._places = Places(num_places=rounds.num_places, num_draft_tokens=rounds.num_draft_tokens)
        self._ahead: _Flight | None = None

    def choose(self, batch: ScheduledBatch) -> BoolArray:
        """Which requests of a round decode on the device, bool [B]: those that draw by a temperature alone, by turn.

        While a round is ahead these are its own, but for those that left: others have to run in passes before.
        """
        can_B: BoolArray = ~batch.prefill_B & self._slots.temperature_only_S[batch.slot_B]
        return can_B & (np.cumsum(can_B) <= self._places.num_places)

    def run(self, batch: ScheduledBatch, *, is_whole: bool) -> tuple[Decoded, Int64Array]:
        """Give what a round of these requests emits, by place in the batch, and how many drafts each verified in it.

        Args:
            batch: Chosen by `choose`, one at least.
            is_whole: Whether nothing else runs in this step, so that the same round may follow.
        """
        admission_B, flight = self._slots.admission_S[batch.slot_B], self._ahead
        if flight is None or not np.isin(admission_B, flight.admission_n).any():  # all of the round ahead have left
            flight = self._start(batch.slot_B)
        self._ahead = self._start_ahead(batch, flight) if is_whole else None
        decoded = self._ranks.await_decoded(flight.started)
        place_by_admission = {each: place for place, each in enumerate(flight.admission_n.tolist())}
        place_B = np.array([place_by_admission[each] for each in admission_B.tolist()])
        room_B = self._slots.limit_S[batch.slot_B] - self._slots.length_S[batch.slot_B] - 1
        num_drafts_B = np.minimum(room_B, self._places.num_draft_tokens) * flight.has_drafts_n[place_B]
        return Decoded(token_id_BQ=decoded.token_id_BQ[place_B], drawable_B=decoded.drawable_B[place_B]), num_drafts_B

    def forget(self) -> None:
        """Drop the round ahead and know nothing of the device any more: a round failed, or others compute meanwhile."""
        self._ahead = None
        self._places.forget()

    def _start(self, slot_B: Int64Array) -> _Flight:
        task, has_drafts_B = self._places.tell(slot_B, self._slots)
        return _Flight(
            admission_n=self._slots.admission_S[slot_B],
            has_drafts_n=has_drafts_B,
            started=self._ranks.decode(task),
        )

    def _start_ahead(self, batch: ScheduledBatch, flight: _Flight) -> _Flight | None:
        """Start the round behind `flight` if its requests all go on and pages for it are free or only cached."""
        slots, most_drafts = self._slots, self._places.num_draft_tokens
        if not np.array_equal(slots.admission_S[batch.slot_B], flight.admission_n):
            return None
        limit_B, length_B = slots.limit_S[batch.slot_B], slots.length_S[batch.slot_B]
        if (limit_B - length_B <= 1).all():
            return None  # their next token is their last
        # A round has pages for 2 K rows behind the known tokens, which may be K + 1 more by then.
        if not self._scheduler.reserve(batch.slot_B, np.minimum(length_B + 3 * most_drafts + 1, limit_B)):
            return None
        return self._start(batch.slot_B)
