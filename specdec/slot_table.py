"""The running requests as arrays, one row a slot.

A round touches every running request; as arrays that is a handful of vector operations, as objects it would be a loop.
S = slots, P = pages of the longest request, X = tokens of the longest request and its drafts, N = stop ids, K = drafts.

Index algebra of a slot: `length` tokens are known, the last of them without KV. Target rows 0..computed-1 are valid,
and after the refresh so are draft rows 0..computed-1 (row t is made of x[t+1] and the hidden state of row t). A slot
that decodes has computed == length - 1.
"""

import numpy as np
import numpy.typing as npt

from specdec.request import Request, SpeculationStats

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_NUM_KEPT_BATCHES = 8  # sets of slots that one round asks about, with room to spare
_NUM_STOP_BUCKETS = 1 << 14  # stop ids are sorted into buckets by their low bits; a byte each, to stay in a cache
_STOP_MASK = np.array(_NUM_STOP_BUCKETS - 1)  # an array: numpy would make one of an int in every call


class SlotTable:
    """State of up to S running requests.

    Attributes:
        requests: The request of each slot, None where it is free.
        active_S: Which slots are taken.
        decoding_S: Which slots have sampled a token since they were admitted, so that drafts can follow it.
        receiving_S: Which slots wait for KV that is computed elsewhere: nothing of them is computed here.
        attended_S: Which slots need a look at their request in every round: for stop strings, penalties, grammars,
            logprobs.
        temperature_only_S: Which slots draw from the logits as they are, but for a temperature, and report no more than
            the token.
        admission_S: Number of the request's admission; no two are the same.
        prefill_only_S: Which slots end with their prompt; says so of the last request of a slot that is free.
        turn_S: Turn of the request, f64: an earlier one goes first; see `Request.turn`.
        priority_S: Its priority.
        deadline_S: When it must have ended, f64, by `time.monotonic`; infinite where the slot is free.
        length_S: Known tokens.
        computed_S: Rows with valid KV.
        limit_S: Tokens at which the request ends.
        stop_id_SN: Ids that end it, -1 padded.
        num_pages_S: Pages held.
        page_id_SP: Their ids, -1 behind the last.
        token_SX: Known tokens; memory is touched only as requests grow.
        token: The same, flat: token x of a slot is at `first_token_S + x`.
        capacity_S: Tokens that the pages held have room for.
        num_rounds_SDA: Rounds since admission with D drafts of which A were kept, [S, K + 1, K + 1].
        num_past_rounds_DA: The same over all requests that have left their slot, [K + 1, K + 1].
        column_K1: 0..K, the places of a run of drafts and the token behind it.
        num_active: Slots taken.
        num_attended: Slots of `attended_S`.
        num_grammars: Slots whose request follows a grammar.
        membership: Grows whenever a slot is taken, freed, or starts to decode.
    """

    def __init__(self, *, num_slots: int, max_model_len: int, max_draft_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.requests: list[Request | None] = [None] * num_slots
        self.active_S = np.zeros(num_slots, dtype=np.bool_)
        self.decoding_S = np.zeros(num_slots, dtype=np.bool_)
        self.receiving_S = np.zeros(num_slots, dtype=np.bool_)
        self.attended_S = np.zeros(num_slots, dtype=np.bool_)
        self.temperature_only_S = np.zeros(num_slots, dtype=np.bool_)
        self.admission_S = np.zeros(num_slots, dtype=np.int64)
        self.prefill_only_S = np.zeros(num_slots, dtype=np.bool_)
        self.turn_S = np.zeros(num_slots)
        self.priority_S = np.zeros(num_slots, dtype=np.int64)
        self.deadline_S = np.full(num_slots, np.inf)
        self.length_S = np.zeros(num_slots, dtype=np.int64)
        self.computed_S = np.zeros(num_slots, dtype=np.int64)
        self.limit_S = np.zeros(num_slots, dtype=np.int64)
        self.stop_id_SN = np.full((num_slots, 0), -1, dtype=np.int64)
        self.num_pages_S = np.zeros(num_slots, dtype=np.int64)
        self.page_id_SP = np.full((num_slots, -(-max_model_len // page_size)), -1, dtype=np.int64)
        self.token_SX = np.zeros((num_slots, max_model_len + max_draft_tokens + 1), dtype=np.int32)
        self.token = self.token_SX.reshape(-1)
        self.first_token_S = np.arange(num_slots) * self.token_SX.shape[1]
        self.capacity_S = np.zeros(num_slots, dtype=np.int64)
        self.num_rounds_SDA = np.zeros((num_slots, max_draft_tokens + 1, max_draft_tokens + 1), dtype=np.int64)
        self.num_past_rounds_DA = np.zeros(self.num_rounds_SDA.shape[1:], dtype=np.int64)
        self.column_K1 = np.arange(max_draft_tokens + 1)
        self._num_rounds = self.num_rounds_SDA.reshape(-1)
        self._first_count_S = np.arange(num_slots) * (max_draft_tokens + 1) ** 2
        self._num_columns = np.array(max_draft_tokens + 1)
        self.num_active = 0
        self.num_attended = 0
        self.num_grammars = 0
        self.membership = 0
        self._requests_of: dict[bytes, tuple[Request, ...]] = {}
        self._page_ids_of: dict[bytes, Int64Array] = {}
        self._stop_filter = -1, np.zeros(0, dtype=np.bool_)

    @property
    def prefilling_S(self) -> BoolArray:
        """Which slots have known tokens that are computed here before they decode."""
        return self.active_S & ~self.decoding_S & ~self.receiving_S

    def free_slot(self) -> int | None:
        """Return a slot nobody holds, or None."""
        slot = int(self.active_S.argmin())
        return None if self.active_S[slot] else slot

    def admit(self, slot: int, request: Request, *, pages: list[int], num_cached: int) -> None:
        """Put a request into a free slot: its known tokens, the pages it holds, and how many rows of them are valid."""
        known_ids = request.known_ids
        params = request.params
        self.requests[slot] = request
        request.slot = slot
        self.active_S[slot] = True
        self.attended_S[slot] = (
            request.is_judged_by_text
            or params.logprobs is not None
            or params.prompt_logprobs is not None
            or request.sampling.history is not None
            or request.grammar is not None
        )
        self.temperature_only_S[slot] = (
            request.sampling.needs_only_temperature and params.logprobs is None and request.grammar is None
        )
        self.prefill_only_S[slot] = request.is_prefill_only
        self.num_active += 1
        self.num_attended += int(self.attended_S[slot])
        self.num_grammars += request.grammar is not None
        self.membership += 1
        self.admission_S[slot] = self.membership
        self.turn_S[slot] = request.turn
        self.priority_S[slot] = request.priority
        self.deadline_S[slot] = request.deadline
        self.length_S[slot] = len(known_ids)
        self.computed_S[slot] = num_cached
        self.limit_S[slot] = request.limit
        missing = len(request.stop_ids) - self.stop_id_SN.shape[1]
        if missing > 0:
            self.stop_id_SN = np.pad(self.stop_id_SN, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_id_SN[slot, : len(request.stop_ids)] = sorted(request.stop_ids)
        self.append_pages(slot, pages)
        self.token_SX[slot, : len(known_ids)] = known_ids

    def receive(self, slot: int) -> None:
        """Let a slot wait for its KV."""
        self.receiving_S[slot] = True

    def take_in(self, slot: int, hidden_H: npt.NDArray[np.float32]) -> None:
        """Note that all KV of a slot that waited is there, and the hidden state of its last known token."""
        self.receiving_S[slot] = False
        self.computed_S[slot] = self.length_S[slot] - 1
        self.request_at(slot).received_hidden_H = hidden_H

    def rewind(self, slot: int, num_rows: int) -> None:
        """Note that of the rows with valid KV only the first `num_rows` are left; the others are computed again."""
        if num_rows < self.computed_S[slot]:
            self.computed_S[slot] = num_rows
            self.decoding_S[slot] = False
            self.membership += 1

    def append_pages(self, slot: int, pages: list[int]) -> None:
        """Add pages behind those the slot holds."""
        self._page_ids_of.clear()
        held = int(self.num_pages_S[slot])
        self.page_id_SP[slot, held : held + len(pages)] = pages
        self.num_pages_S[slot] = held + len(pages)
        self.capacity_S[slot] = (held + len(pages)) * self.page_size

    def append_page_each(self, slot_G: Int64Array, pages: list[int]) -> None:
        """Add one page behind those that each of several slots holds; `slot_G` names none twice."""
        self._page_ids_of.clear()
        held_G = self.num_pages_S[slot_G]
        self.page_id_SP[slot_G, held_G] = pages
        self.num_pages_S[slot_G] = held_G + 1
        self.capacity_S[slot_G] += self.page_size

    def start_decoding(self, slot_B: Int64Array) -> None:
        """Note that slots have drawn a token; costs a look where all had before."""
        if np.count_nonzero(self.decoding_S[slot_B]) < len(slot_B):
            self.decoding_S[slot_B] = True
            self.membership += 1

    def count_drafts(self, slot_F: Int64Array, *, num_drafts_F: Int64Array, num_accepted_F: Int64Array) -> None:
        """Count a round of each slot by how many drafts it had and how many were kept."""
        self._num_rounds[self._first_count_S[slot_F] + num_drafts_F * self._num_columns + num_accepted_F] += 1

    def pages(self, slot: int) -> list[int]:
        """Ids of the pages a slot holds, in order."""
        pages: list[int] = self.page_id_SP[slot, : self.num_pages_S[slot]].tolist()
        return pages

    def page_ids(self, slot_B: Int64Array) -> Int64Array:
        """Pages of several slots, -1 padded to the longest: i64 [B, P].

        The very same array, which cannot be written to, as long as no pages come or go.
        """
        key = slot_B.tobytes()
        page_id_BP = self._page_ids_of.get(key)
        if page_id_BP is None:
            if len(self._page_ids_of) == _NUM_KEPT_BATCHES:
                self._page_ids_of.clear()
            num_pages_B = self.num_pages_S[slot_B]
            page_id_BP = self.page_id_SP[slot_B, : int(num_pages_B[num_pages_B.argmax()])]
            page_id_BP.setflags(write=False)
            self._page_ids_of[key] = page_id_BP
        return page_id_BP

    def requests_at(self, slot_B: Int64Array) -> tuple[Request, ...]:
        """Return the requests of several taken slots; kept until one of the running requests leaves its slot."""
        key = slot_B.tobytes()
        requests = self._requests_of.get(key)
        if requests is None:
            if len(self._requests_of) == _NUM_KEPT_BATCHES:
                self._requests_of.clear()
            requests = tuple(self.request_at(slot) for slot in slot_B.tolist())
            self._requests_of[key] = requests
        return requests

    def may_stop(self, token_id_FK1: Int64Array) -> bool:
        """Whether some of these ids may be a stop id of a running request. False is certain, and cheap to find."""
        membership, has_stop_H = self._stop_filter
        if membership != self.membership:
            has_stop_H = np.zeros(_NUM_STOP_BUCKETS, dtype=np.bool_)
            has_stop_H[self.stop_id_SN[self.stop_id_SN >= 0] & _STOP_MASK] = True
            self._stop_filter = self.membership, has_stop_H
        return bool(np.count_nonzero(has_stop_H[token_id_FK1.reshape(-1) & _STOP_MASK]))

    def release(self, slot: int) -> None:
        """Make a slot free and hand its output and counts to its request; its pages are the caller's to return."""
        request = self.request_at(slot)
        self._requests_of.clear()
        self._page_ids_of.clear()
        request.output_ids = tuple(self.token_SX[slot, len(request.prompt_ids) : self.length_S[slot]].tolist())
        request.speculation += _speculation(self.num_rounds_SDA[slot])
        self.num_past_rounds_DA += self.num_rounds_SDA[slot]
        request.slot = request.received_hidden_H = None
        self.requests[slot] = None
        self.num_active -= 1
        self.num_attended -= int(self.attended_S[slot])
        self.num_grammars -= request.grammar is not None
        self.membership += 1
        for flags in (self.active_S, self.decoding_S, self.receiving_S, self.attended_S):
            flags[slot] = False
        for counts in (self.length_S, self.computed_S, self.num_pages_S, self.capacity_S, self.num_rounds_SDA):
            counts[slot] = 0
        self.deadline_S[slot] = np.inf
        self.page_id_SP[slot] = -1
        self.stop_id_SN[slot] = -1

    def speculation(self) -> SpeculationStats:
        """Say how drafting went so far, over all requests that ever held a slot."""
        return _speculation(self.num_past_rounds_DA + self.num_rounds_SDA.sum(axis=0))

    def request_at(self, slot: int) -> Request:
        """Return the request of a taken slot."""
        request = self.requests[slot]
        if request is None:
            raise AssertionError(f"slot {slot} is free")
        return request


def _speculation(num_rounds_DA: Int64Array) -> SpeculationStats:
    """Read off how drafting went; rounds without drafts say nothing."""
    num_rounds_D = num_rounds_DA[1:].sum(axis=1)
    num_rounds_A = num_rounds_DA[1:].sum(axis=0)
    at_least_A = np.cumsum(num_rounds_A[::-1])[::-1]
    longest = int(np.flatnonzero(num_rounds_D).max(initial=-1)) + 1
    return SpeculationStats(
        num_drafts=int(num_rounds_D.sum()),
        num_draft_tokens=int(num_rounds_D @ np.arange(1, len(num_rounds_D) + 1)),
        accepted_per_position=tuple(at_least_A[1 : longest + 1].tolist()),
    )
