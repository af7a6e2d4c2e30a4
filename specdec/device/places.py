"""Which request has which place on the device, as the host knows it: what a round must be told.

B = requests of a round, P = pages.
"""

import numpy as np
import numpy.typing as npt

from specdec.device.decode_task import DecodeTask, Int64Array, Members
from specdec.sampling.sampling_rows import noise_of
from specdec.slot_table import SlotTable

_NO_PAGES = np.zeros((0, 3), dtype=np.int64)


class Places:
    """The places of the rounds so far.

    Args:
        num_places: On the device.
        num_draft_tokens: K, drafts of every round where a request has room for as many.
    """

    def __init__(self, *, num_places: int, num_draft_tokens: int) -> None:
        self.num_places = num_places
        self.num_draft_tokens = num_draft_tokens
        self._admission_B: Int64Array | None = None  # of the requests in their places
        self._num_pages_B: Int64Array = np.zeros(0, dtype=np.int64)

    def tell(self, slot_B: Int64Array, slots: SlotTable) -> tuple[DecodeTask, npt.NDArray[np.bool_]]:
        """Say what the device must know for a round of some requests, and note that it does.

        Args:
            slot_B: Their slots, i64.
            slots: The running requests.

        Returns:
            The task, and which requests have drafts to verify in the round, bool [B].
        """
        num_pages_B = slots.num_pages_S[slot_B]
        admission_B = slots.admission_S[slot_B]
        known_B = self._admission_B
        if known_B is not None and np.array_equal(admission_B, known_B):
            task = DecodeTask(members=None, gained_U3=self._gained(slot_B, num_pages_B, slots))
            self._num_pages_B = num_pages_B
            return task, np.ones(len(slot_B), dtype=np.bool_)
        place_by_admission = {} if known_B is None else {each: place for place, each in enumerate(known_B.tolist())}
        source_place_B = np.array([place_by_admission.get(each, -1) for each in admission_B.tolist()])
        length_B = slots.length_S[slot_B]
        members = Members(
            source_place_B=source_place_B,
            length_B=length_B,
            limit_B=slots.limit_S[slot_B],
            last_token_B=slots.token[slots.first_token_S[slot_B] + length_B - 1].astype(np.int64),
            page_id_BP=slots.page_ids(slot_B),
            noise=noise_of([request.sampling for request in slots.requests_at(slot_B)]),
        )
        self._admission_B, self._num_pages_B = admission_B, num_pages_B
        return DecodeTask(members=members, gained_U3=_NO_PAGES), source_place_B >= 0

    def forget(self) -> None:
        """Know nothing any more: what the device holds is not trusted, or others have computed meanwhile."""
        self._admission_B = None

    def _gained(self, slot_B: Int64Array, num_pages_B: Int64Array, slots: SlotTable) -> Int64Array:
        if (num_pages_B == self._num_pages_B).all():
            return _NO_PAGES
        gained = [
            (place, column, slots.page_id_SP[slot_B[place], column])
            for place in np.flatnonzero(num_pages_B > self._num_pages_B).tolist()
            for column in range(int(self._num_pages_B[place]), int(num_pages_B[place]))
        ]
        return np.array(gained, dtype=np.int64)
