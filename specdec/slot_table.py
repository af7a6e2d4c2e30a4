"""The running requests as arrays, one row a slot.

A round touches every running request; as arrays that is a handful of vector operations, as objects it would be a loop.
S = slots, P = pages of the longest request, X = tokens of the longest request and its drafts.

Index algebra of a slot: `length` tokens are known, the last of them without KV. Target rows 0..computed-1 are valid,
and after the refresh so are draft rows 0..computed-1 (row t is made of x[t+1] and the hidden state of row t). A slot
that decodes has computed == length - 1.
"""

import numpy as np
import numpy.typing as npt

from specdec.request import Request

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class SlotTable:
    """State of up to S running requests.

    Attributes:
        requests: The request of each slot, None where it is free.
        active_S: Which slots are taken.
        decoding_S: Which slots have sampled a token since they were admitted, so that drafts can follow it.
        order_S: Admission number; a smaller one is older.
        length_S: Known tokens.
        computed_S: Rows with valid KV.
        limit_S: Tokens at which the request ends.
        num_pages_S: Pages held.
        page_id_SP: Their ids, -1 behind the last.
        token_SX: Known tokens, then the drafts of the current round; memory is touched only as requests grow.
    """

    def __init__(self, *, num_slots: int, max_model_len: int, max_draft_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.requests: list[Request | None] = [None] * num_slots
        self.active_S = np.zeros(num_slots, dtype=np.bool_)
        self.decoding_S = np.zeros(num_slots, dtype=np.bool_)
        self.order_S = np.zeros(num_slots, dtype=np.int64)
        self.length_S = np.zeros(num_slots, dtype=np.int64)
        self.computed_S = np.zeros(num_slots, dtype=np.int64)
        self.limit_S = np.zeros(num_slots, dtype=np.int64)
        self.num_pages_S = np.zeros(num_slots, dtype=np.int64)
        self.page_id_SP = np.full((num_slots, -(-max_model_len // page_size)), -1, dtype=np.int64)
        self.token_SX = np.zeros((num_slots, max_model_len + max_draft_tokens + 1), dtype=np.int32)
        self._num_admitted = 0

    def free_slot(self) -> int | None:
        """Return a slot nobody holds, or None."""
        slot = int(self.active_S.argmin())
        return None if self.active_S[slot] else slot

    def admit(self, slot: int, request: Request, *, limit: int, pages: list[int], num_cached: int) -> None:
        """Put a request into a free slot: its known tokens, the pages it holds, and how many rows of them are valid."""
        known_ids = request.known_ids
        self.requests[slot] = request
        request.slot = slot
        self.active_S[slot] = True
        self.decoding_S[slot] = False
        self.order_S[slot] = self._num_admitted
        self._num_admitted += 1
        self.length_S[slot] = len(known_ids)
        self.computed_S[slot] = num_cached
        self.limit_S[slot] = limit
        self.page_id_SP[slot] = -1
        self.num_pages_S[slot] = 0
        self.append_pages(slot, pages)
        self.token_SX[slot, : len(known_ids)] = known_ids

    def append_pages(self, slot: int, pages: list[int]) -> None:
        """Add pages behind those the slot holds."""
        held = int(self.num_pages_S[slot])
        self.page_id_SP[slot, held : held + len(pages)] = pages
        self.num_pages_S[slot] = held + len(pages)

    def pages(self, slot: int) -> list[int]:
        """Ids of the pages a slot holds, in order."""
        pages: list[int] = self.page_id_SP[slot, : self.num_pages_S[slot]].tolist()
        return pages

    def release(self, slot: int) -> None:
        """Make a slot free; its pages are the caller's to return."""
        request = self.requests[slot]
        if request is not None:
            request.slot = None
        self.requests[slot] = None
        self.active_S[slot] = False
        self.decoding_S[slot] = False
        self.length_S[slot] = self.computed_S[slot] = self.num_pages_S[slot] = 0
        self.page_id_SP[slot] = -1

    def request_at(self, slot: int) -> Request:
        """Return the request of a taken slot."""
        request = self.requests[slot]
        if request is None:
            raise AssertionError(f"slot {slot} is free")
        return request
