"""Who runs in the next round, with how many rows, and which pages they may write.

Continuous batching with chunked prefill: every decoding request takes part in every round, and prompts add at most
`prefill_chunk_tokens` rows to it. So the time between two tokens of a stream is bounded, whatever is being prefilled:
no round has more rows than these and K + 1 for each slot. `specdec.prompt_chunks` says which prompts they are of.

Requests have turns, by arrival and priority (`Request.turn`). The earliest turn gets the next free slot, and nobody
overtakes it where pages are short: what is freed adds up until it fits. When pages run out, cached prefixes go first,
then the running request with the last turn: it waits again and is computed anew in its turn, with the same output.

B = scheduled requests, decoding ones first, each kind by turn.
"""

import time
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from specdec.dcp.allocator import PageAllocator
from specdec.dcp.prefix_tree import PrefixTree
from specdec.drafting.draft_length import DraftLength
from specdec.prompt_chunks import share_chunk
from specdec.request import Request
from specdec.slot_table import BoolArray, Int64Array, SlotTable
from specdec.waiting_queue import WaitingQueue


class ScheduledBatch(NamedTuple):
    """The requests of one round; all arrays [B], i64 unless said otherwise, not to be changed.

    Row i of request b computes position `start_B[b] + i`: first `num_known_B` known tokens, then `num_drafts_B` drafts.

    Attributes:
        slot_B: Slot of each request.
        start_B: First position to compute.
        num_known_B: Known tokens to compute, >= 1.
        num_drafts_B: Drafts to verify behind them; 0 unless the request decodes.
        final_B: Whether the known tokens end with this round, so that the next one is drawn; bool.
        prefill_B: Whether the request had not drawn a token since its admission; bool.
    """

    slot_B: Int64Array
    start_B: Int64Array
    num_known_B: Int64Array
    num_drafts_B: Int64Array
    final_B: BoolArray
    prefill_B: BoolArray

    def of(self, chosen_B: BoolArray) -> "ScheduledBatch":
        """Give some of the requests."""
        return ScheduledBatch(
            slot_B=self.slot_B[chosen_B],
            start_B=self.start_B[chosen_B],
            num_known_B=self.num_known_B[chosen_B],
            num_drafts_B=self.num_drafts_B[chosen_B],
            final_B=self.final_B[chosen_B],
            prefill_B=self.prefill_B[chosen_B],
        )


class PromptSource(Protocol):
    """Where the KV of prompts comes from that are not computed here."""

    def start(self, request: Request, *, token_ids: Int64Array, page_ids: list[int], num_cached: int) -> None:
        """Have the known tokens of a request computed and written to its pages, but for leading cached ones."""

    def abandon(self, request: Request) -> None:
        """Wait no more for a request; whatever may still write to its pages holds them."""


class Scheduler:
    """Owns the waiting queue, the slot table and the pages of running requests.

    Args:
        slots: All free.
        allocator: Of the page ids.
        prefix_tree: Keeps pages for prompts that begin alike; None keeps none.
        num_draft_tokens: K, drafts of a request and round.
        prefill_chunk_tokens: Most prompt tokens of a round.
        draft_length: Chooses the drafts of each round, up to K; None always takes K.
        num_lookahead: Rows beyond those of a round for which decoding requests get pages, as far as they may grow.

    Attributes:
        prompt_source: Computes the prompts; None where that is done here.
        num_preemptions: How often a running request's pages were taken away.
    """

    def __init__(
        self,
        slots: SlotTable,
        allocator: PageAllocator,
        prefix_tree: PrefixTree | None,
        *,
        num_draft_tokens: int,
        prefill_chunk_tokens: int,
        draft_length: DraftLength | None = None,
        num_lookahead: int = 0,
    ) -> None:
        self.slots = slots
        self.allocator = allocator
        self.prefix_tree = prefix_tree
        self.num_draft_tokens = num_draft_tokens
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.draft_length = draft_length
        self._num_lookahead = num_lookahead
        self.waiting = WaitingQueue()
        self.prompt_source: PromptSource | None = None
        self.num_preemptions = 0
        self._most_drafts = np.array(num_draft_tokens)  # an array: numpy would make one of an int in every call
        self._decoding: _DecodingRequests | None = None
        self._blocked: _BlockedHead | None = None

    def schedule(self) -> ScheduledBatch | None:
        """Admit what fits, choose the round's rows and give them pages; None when nothing runs."""
        if self.waiting:
            self._admit()
        slots = self.slots
        decoding = self._decoding_requests()
        slot_B = decoding.slot_B
        length_B = slots.length_S[slot_B]
        most_drafts: Int64Array | int = self._most_drafts
        if self.draft_length is not None and len(slot_B):
            most_drafts = self._choose_length(self.draft_length, num_decoding=len(slot_B))
        num_drafts_B = np.minimum(decoding.last_position_B - length_B, most_drafts)
        num_rows_B = length_B + num_drafts_B
        if self._num_lookahead:
            num_rows_B = np.minimum(num_rows_B + self._num_lookahead, decoding.last_position_B + 1)
        num_preempted = self._grow(slot_B, num_rows_B)
        if num_preempted:
            kept_B = slots.active_S[slot_B]
            num_drafts_B = num_drafts_B[kept_B]
            decoding = self._decoding_requests()
            slot_B = decoding.slot_B
        num_known_B, final_B, prefill_B = decoding.num_known_B, decoding.final_B, decoding.prefill_B
        num_decoding = len(slot_B)
        if num_decoding < slots.num_active:
            prefilling_B, num_chunk_B = self._prefill_chunks()
            slot_B = np.concatenate((slot_B, prefilling_B))
            num_known_B = np.concatenate((num_known_B, num_chunk_B))
            num_drafts_B = np.concatenate((num_drafts_B, np.zeros_like(num_chunk_B)))
            final_B = slots.computed_S[slot_B] + num_known_B == slots.length_S[slot_B]
            prefill_B = np.arange(len(slot_B)) >= num_decoding
        if len(slot_B) == 0:
            return None
        return ScheduledBatch(
            slot_B=slot_B,
            start_B=slots.computed_S[slot_B],
            num_known_B=num_known_B,
            num_drafts_B=num_drafts_B,
            final_B=final_B,
            prefill_B=prefill_B,
        )

    def finish(self, slot: int, *, num_refreshed: int) -> None:
        """Take a request out of its slot: keep its refreshed pages for others, return the rest.

        Args:
            slot: The slot.
            num_refreshed: Leading rows whose target and draft KV are both valid.
        """
        if self.slots.receiving_S[slot]:
            num_refreshed = 0  # what was cached before is in the tree already
            assert self.prompt_source is not None
            self.prompt_source.abandon(self.slots.request_at(slot))
        self.cache_prefix(slot, num_refreshed=num_refreshed)
        pages = self.slots.pages(slot)
        self.slots.release(slot)
        self.allocator.release(pages)

    def drop(self, request: Request, *, is_refreshed: bool) -> None:
        """Take a request out of its slot or of the queue; nothing for one that is in neither.

        Args:
            request: The request.
            is_refreshed: Whether the KV it has computed may be shared.
        """
        if request.slot is not None:
            num_refreshed = int(self.slots.computed_S[request.slot]) if is_refreshed else 0
            self.finish(request.slot, num_refreshed=num_refreshed)
        self.waiting.remove(request)

    def candidates(self) -> list[Request]:
        """Requests that the next round may be made of: those that run, and the head of the queue."""
        running = [request for request in self.slots.requests if request is not None]
        return running + list(islice(self.waiting, 1))

    def late_requests(self, now: float) -> list[Request]:
        """Requests whose deadline has come, waiting and running."""
        late = np.flatnonzero(self.slots.deadline_S <= now).tolist()
        return self.waiting.late(now) + [self.slots.request_at(slot) for slot in late]

    def cache_prefix(self, slot: int, *, num_refreshed: int) -> None:
        """Offer the whole refreshed pages of a running request to later prompts."""
        if self.prefix_tree is not None:
            tokens = self.slots.token_SX[slot, : self.slots.length_S[slot]]
            salt = self.slots.request_at(slot).cache_salt
            self.prefix_tree.insert(tokens, self.slots.pages(slot), num_refreshed, salt=salt)

    def preempt(self, slot: int) -> None:
        """Take a running request's pages away; it waits for its turn and starts over."""
        request = self.slots.request_at(slot)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.start_over(slot)

    def start_over(self, slot: int) -> None:
        """Let a running request wait for its turn, in which it begins again."""
        self.waiting.add(self.slots.request_at(slot))  # before it leaves, so that it is never in neither
        self.finish(slot, num_refreshed=int(self.slots.computed_S[slot]))

    def make_room(self, num_pages: int) -> bool:
        """Evict cached prefixes until `num_pages` are free; False where even that is not enough."""
        if self._num_free_or_cached() < num_pages:
            return False  # even an empty tree would not be enough: keep what it holds
        missing = num_pages - self.allocator.num_free
        if missing > 0 and self.prefix_tree is not None:
            self.prefix_tree.evict(missing)
        return self.allocator.num_free >= num_pages

    def reserve(self, slot_B: Int64Array, num_rows_B: Int64Array) -> bool:
        """Give each slot pages for `num_rows_B` rows; False, giving none, where a running request would have to leave.

        Cached prefixes are evicted for them, at most as many pages as are wanted.
        """
        num_missing_B = -(-(num_rows_B - self.slots.capacity_S[slot_B]) // self.slots.page_size)
        if not self.make_room(int(num_missing_B.clip(min=0).sum())):
            return False
        self._grow(slot_B, num_rows_B)  # there is room: nobody is preempted
        return True

    def drop_cached_prefixes(self) -> None:
        """Keep nothing for later prompts; only while nothing runs."""
        if self.prefix_tree is not None:
            self.prefix_tree.evict(self.prefix_tree.num_pages)

    def num_available_pages(self) -> int:
        """Count pages that are free or only kept for later prompts."""
        tree, holders = self.prefix_tree, self.allocator.num_holders
        num_kept = 0 if tree is None else sum(holders(page_id) == 1 for page_id in tree.page_ids())
        return self.allocator.num_free + num_kept

    def _admit(self) -> None:
        """Move waiting requests into free slots while their known tokens find pages.

        One page per running request stays free, so that a preempted request does not return only to be preempted
        again; alone, a request may take everything.
        """
        while self.waiting and (slot := self.slots.free_slot()) is not None:
            request = self.waiting.first
            if self._is_still_blocked(request):
                return
            known_ids = request.known_ids
            hit = self._match_prefix(request)
            num_missing = -(-len(known_ids) // self.slots.page_size) - len(hit)
            is_early = len(hit) < self._num_pages_shared_soon(request)
            if is_early or not self.make_room(num_missing + self.slots.num_active):
                self.allocator.release(hit)
                self._blocked = _BlockedHead(request, self.slots.membership, self._num_free_or_cached())
                return
            pages = hit + self.allocator.allocate(num_missing, after=hit[-1] if hit else None)
            num_cached = len(hit) * self.slots.page_size
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = num_cached
                request.admitted_at = time.monotonic()
            self.slots.admit(slot, request, pages=pages, num_cached=num_cached)
            self.waiting.remove(request)
            # The log-probabilities of a prompt come of computing it.
            if self.prompt_source is not None and request.params.prompt_logprobs is None:
                self.slots.receive(slot)
                self.prompt_source.start(request, token_ids=known_ids, page_ids=pages, num_cached=num_cached)

    def _is_still_blocked(self, request: Request) -> bool:
        """Whether nothing has happened since this request found no room that could have made some.

        Pages come back, and prefixes enter the tree, when a request leaves or ends its prompt. Looking for the prefix
        of a long prompt in every round would cost more than the round's own bookkeeping.
        """
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.request is request
            and blocked.membership == self.slots.membership
            and blocked.num_pages >= self._num_free_or_cached()
            and self.slots.num_active > 0
        )

    def _num_free_or_cached(self) -> int:
        return self.allocator.num_free + (self.prefix_tree.num_pages if self.prefix_tree is not None else 0)

    def _num_pages_shared_soon(self, request: Request) -> int:
        """Count the pages that another choice of the same prompt, which is being computed, will leave in the tree."""
        slots = self.slots
        if self.prefix_tree is None:
            return 0
        is_prefilled = any(
            slots.request_at(slot).prompt_ids is request.prompt_ids
            for slot in np.flatnonzero(slots.active_S & ~slots.decoding_S).tolist()
        )
        return (len(request.prompt_ids) - 1) // slots.page_size if is_prefilled else 0

    def _match_prefix(self, request: Request) -> list[int]:
        if self.prefix_tree is None or request.params.prompt_logprobs is not None:
            return []
        return self.prefix_tree.match(request.known_ids, salt=request.cache_salt)

    def _decoding_requests(self) -> "_DecodingRequests":
        """Requests that decode, by turn; kept until a request joins, leaves or starts to decode."""
        decoding = self._decoding
        if decoding is None or decoding.membership != self.slots.membership:
            slot_B = self._by_turn(self.slots.decoding_S)
            decoding = self._decoding = _DecodingRequests(
                membership=self.slots.membership,
                slot_B=slot_B,
                last_position_B=self.slots.limit_S[slot_B] - 1,
                num_known_B=np.ones_like(slot_B),
                final_B=np.ones(len(slot_B), dtype=np.bool_),
                prefill_B=np.zeros(len(slot_B), dtype=np.bool_),
            )
            for shared in decoding[1:]:
                shared.setflags(write=False)
        return decoding

    def _choose_length(self, draft_length: DraftLength, *, num_decoding: int) -> int:
        """Choose the drafts of the round by what is going to run in it."""
        slots = self.slots
        num_left = int((slots.length_S - slots.computed_S)[slots.prefilling_S].sum())
        return draft_length.choose(num_decoding, num_prompt_tokens=min(num_left, self.prefill_chunk_tokens))

    def _prefill_chunks(self) -> tuple[Int64Array, Int64Array]:
        """Choose the prompts that are computed in the round, by turn, and how many tokens of each."""
        slots = self.slots
        prefill_B = self._by_turn(slots.prefilling_S)
        if len(prefill_B) == 0:
            return prefill_B, prefill_B
        num_left_B = slots.length_S[prefill_B] - slots.computed_S[prefill_B]
        num_chunk_B = share_chunk(num_left_B, slots.priority_S[prefill_B], num_tokens=self.prefill_chunk_tokens)
        taken_B = num_chunk_B > 0
        return prefill_B[taken_B], num_chunk_B[taken_B]

    def _by_turn(self, chosen_S: BoolArray) -> Int64Array:
        slot_B = np.flatnonzero(chosen_S)
        return slot_B[np.argsort(self.slots.turn_S[slot_B], kind="stable")]

    def _grow(self, slot_B: Int64Array, num_rows_B: Int64Array) -> int:
        """Give each slot pages for `num_rows_B` rows, by turn; returns how many requests were preempted for it."""
        slots = self.slots
        num_preempted = 0
        short_G = (num_rows_B > slots.capacity_S[slot_B]).nonzero()[0]
        if len(short_G) == 0:
            return 0
        slot_G, num_rows_G = slot_B[short_G], num_rows_B[short_G]
        if len(short_G) <= self.allocator.num_free and (num_rows_G <= slots.capacity_S[slot_G] + slots.page_size).all():
            # The usual case, all at once: a page each is enough, and there are as many.
            last_G = slots.page_id_SP[slot_G, slots.num_pages_S[slot_G] - 1].tolist()
            slots.append_page_each(slot_G, [self.allocator.allocate(1, after=last)[0] for last in last_G])
            return 0
        for slot, num_rows in zip(slot_G.tolist(), num_rows_G.tolist(), strict=True):
            num_missing = -(-(num_rows - int(slots.capacity_S[slot])) // slots.page_size)
            while slots.active_S[slot] and num_missing > self.allocator.num_free and not self.make_room(num_missing):
                # What another process writes to cannot be given away at once.
                self.preempt(int(self._by_turn(slots.active_S & ~slots.receiving_S)[-1]))
                num_preempted += 1
            if slots.active_S[slot]:
                last = int(slots.page_id_SP[slot, slots.num_pages_S[slot] - 1])
                slots.append_pages(slot, self.allocator.allocate(num_missing, after=last))
        return num_preempted


class _BlockedHead(NamedTuple):
    """The head of the queue when it found no room, and what there was then: free pages and those in the tree."""

    request: Request
    membership: int
    num_pages: int


class _DecodingRequests(NamedTuple):
    """What stays the same of the requests that decode while these are the same; arrays [B], i64 or bool."""

    membership: int
    slot_B: Int64Array
    last_position_B: Int64Array
    num_known_B: Int64Array
    final_B: BoolArray
    prefill_B: BoolArray
