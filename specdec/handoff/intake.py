"""Prompts that a decode group has computed elsewhere: who computes them, and which pages they are written to.

A prompt goes to the prefill that would be done with it first: the one with the fewest tokens left to compute, those of
the prompt included, less the beginning that it is thought to have computed before. So the turns of a conversation stay
at one prefill, unless it has more to do beside them than another would have with all of the prompt. Where that decides
nothing, the one with the fewest prefixes of this group gets it: the prefills' caches fill up alike.

The thread that runs the rounds owns an `Intake`; the threads of the links only hand it events. A transfer holds its
destination pages, beside the request, until nothing can write to them any more: a request that ends early leaves its
pages to the transfer, and nobody gets them before.
"""

import itertools
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import numpy.typing as npt

from specdec.dcp.allocator import PageAllocator
from specdec.errors import ConfigError, TransferError
from specdec.handoff.prefill_link import Arrived, Ended, Freed, LinkEvent, LinkState, PrefillLink
from specdec.handoff.prefix_map import PrefixMap
from specdec.request import Request
from specdec.transfer.messages import Destination, Done, PoolFacts, start_digest

_FIRST_ANSWER_TIMEOUT_S = 10.0
_POLL_S = 0.01
_CLOSED = "the engine was closed: make a new one"


class ReceivedPrompt(NamedTuple):
    """A prompt whose KV is in the pools.

    Attributes:
        request: Whose.
        hidden_H: The hidden state of its last token after the final norm, f32 [H].
        num_reused: Leading tokens that nobody computed: their KV was here, or the prefill had it.
    """

    request: Request
    hidden_H: npt.NDArray[np.float32]
    num_reused: int


class LostPrompt(NamedTuple):
    """A prompt that did not arrive.

    Attributes:
        request: Whose; it still holds its slot.
        error: Why.
        is_retryable: Whether another prefill may be asked: one that was not is left.
    """

    request: Request
    error: TransferError
    is_retryable: bool


@dataclass(slots=True)
class _Attempts:
    """What was tried for a request.

    Attributes:
        deadline: When it is given up, whoever computes it then.
        outcomes: What came of it, by address of the prefill.
    """

    deadline: float
    outcomes: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Transfer:
    """A transfer whose pages are held.

    Attributes:
        request: Who waits for it; None once nobody does.
        link: To the prefill.
        page_ids: The pages it may write to.
        num_tokens: Known tokens of the request when it began.
        num_cached: Leading ones of these whose KV was here.
        start_digest: Of what the prefill was told.
        prefix_digests: Of the prompt, see `PrefixMap`.
        started_at: When.
    """

    request: Request | None
    link: PrefillLink
    page_ids: list[int]
    num_tokens: int
    num_cached: int
    start_digest: bytes
    prefix_digests: list[bytes]
    started_at: float


@dataclass(slots=True)
class IntakeCounts:
    """What became of the prompts.

    Attributes:
        num_started: Transfers begun.
        num_received: Prompts that arrived.
        num_lost: Transfers that failed.
        num_abandoned: Transfers whose request ended first.
        num_held_pages: Pages of transfers that ended and may still be written to, now.
        wait_s: Seconds from start to arrival, of all that arrived.
        num_reopened: Times that the group took other memory, because pages were held for too long.
    """

    num_started: int = 0
    num_received: int = 0
    num_lost: int = 0
    num_abandoned: int = 0
    num_held_pages: int = 0
    wait_s: float = 0.0
    num_reopened: int = 0


class Intake:
    """Gives prompts to prefills and takes in what arrives. Not thread-safe.

    Args:
        addresses: Of the prefills, "host:port" each.
        allocator: Of the page ids.
        facts: Of the group's pools.
        destination: The group, without pages.
        transport: What it receives through.
        hidden_size: H.
        timeout_s: Seconds in which a prompt must arrive, however many prefills try it.
        peer_timeout_s: Silence after which a prefill counts as stopped.
        await_device: Waits until no rank writes to the pools any more: what requests left behind may still run there
            when their pages are given to a prefill.

    Raises:
        ConfigError: An address is none, or a prefill refuses the group.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        allocator: PageAllocator,
        facts: PoolFacts,
        destination: Destination,
        transport: str,
        hidden_size: int,
        timeout_s: float,
        peer_timeout_s: float,
        await_device: Callable[[], None],
    ) -> None:
        self.counts = IntakeCounts()
        self._await_device = await_device
        self._allocator = allocator
        self._destination = destination
        self._page_size = facts.page_size
        self._prefixes = PrefixMap(facts.page_size)
        self._hidden_size = hidden_size
        self._timeout_s = timeout_s
        self._events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self._transfers: dict[int, _Transfer] = {}
        self._transfer_of: dict[int, int] = {}  # by request id
        self._attempts: WeakKeyDictionary[Request, _Attempts] = WeakKeyDictionary()
        self._kept_waiting: tuple[Request, float] | None = None  # by held pages, and since when
        self._lost_at_once: list[LostPrompt] = []
        self._is_closed = False
        self._ids = itertools.count()
        self._link_to = partial(PrefillLink, transport=transport, facts=facts, peer_timeout_s=peer_timeout_s)
        self.links: list[PrefillLink] = []
        try:
            self._call(addresses)
            for link in self.links:
                link.await_first_answer(_FIRST_ANSWER_TIMEOUT_S)
                if link.state is LinkState.REFUSED:
                    raise ConfigError(f"prefill {link.address} refuses this decode group: {link.why}")
        except BaseException:
            self.close()
            raise

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for a prompt."""
        return bool(self._transfer_of) or bool(self._lost_at_once)

    @property
    def holds_pages(self) -> bool:
        """Whether pages will come back that nobody waits for any more."""
        return self.counts.num_held_pages > 0

    def start(
        self, request: Request, *, token_ids: npt.NDArray[np.int64], page_ids: list[int], num_cached: int
    ) -> None:
        """Have a prompt computed and written; `take` tells how it went.

        Args:
            request: Whose prompt; it waits until then.
            token_ids: Known tokens, i64 [n].
            page_ids: Pages for all of them, in order.
            num_cached: Leading tokens whose KV is in these pages already, a multiple of the page size.
        """
        if self._is_closed:
            self._lost_at_once.append(LostPrompt(request, TransferError(_CLOSED), False))
            return
        now = time.monotonic()
        attempts = self._attempts.setdefault(request, _Attempts(now + self._timeout_s))
        tried = attempts.outcomes
        ready = [link for link in self.links if link.state is LinkState.READY and link.address not in tried]
        if not ready or now >= attempts.deadline:
            states = [
                tried.get(link.address) or f"prefill {link.address} is {link.state}: {link.why}" for link in self.links
            ]
            what = "no prefill is left for" if not ready else f"no prefill delivered in {self._timeout_s:g} s to"
            error = TransferError(f"{what} request {request.request_id}; {'; '.join(states)}")
            self._lost_at_once.append(LostPrompt(request, error, False))
            return
        prefix_digests = self._prefixes.digests(token_ids, salt=request.cache_salt)
        link, num_computed = self._choose(ready, prefix_digests)
        tried[link.address] = f"prefill {link.address} did not deliver"
        transfer_id = next(self._ids)
        written = page_ids[num_cached // self._page_size :]
        self._allocator.retain(written)
        tokens = token_ids.astype(np.int32).tobytes()
        destination = msgspec.structs.replace(self._destination, page_ids=np.array(page_ids, dtype=np.int64).tobytes())
        self._transfers[transfer_id] = _Transfer(
            request=request,
            link=link,
            page_ids=written,
            num_tokens=len(token_ids),
            num_cached=num_cached,
            start_digest=start_digest(
                tokens, num_cached=num_cached, cache_salt=request.cache_salt, destination=destination
            ),
            prefix_digests=prefix_digests,
            started_at=now,
        )
        self._transfer_of[request.request_id] = transfer_id
        self.counts.num_started += 1
        self._await_device()
        link.start(
            transfer_id,
            token_ids=tokens,
            num_cached=num_cached,
            num_computed=num_computed,
            cache_salt=request.cache_salt,
            priority=request.priority,
            destination=destination,
            deadline_s=attempts.deadline - now,
        )

    def abandon(self, request: Request) -> None:
        """Wait no more for a request's prompt; its pages stay held until nothing writes to them."""
        self._lost_at_once = [lost for lost in self._lost_at_once if lost.request is not request]
        transfer_id = self._transfer_of.pop(request.request_id, None)
        if transfer_id is None:
            return
        transfer = self._transfers[transfer_id]
        transfer.request = None
        self.counts.num_abandoned += 1
        self.counts.num_held_pages += len(transfer.page_ids)
        transfer.link.abort(transfer_id)

    def take(self, *, wait_s: float = 0.0) -> list[ReceivedPrompt | LostPrompt]:
        """Give what has become of prompts since the last call; waits up to `wait_s` for the first news."""
        taken: list[ReceivedPrompt | LostPrompt] = list(self._lost_at_once)
        self._lost_at_once.clear()
        wait_s = 0.0 if taken else wait_s
        while (event := self._next_event(wait_s)) is not None:
            wait_s = 0.0
            transfer = self._transfers.get(event.transfer_id)
            if transfer is None:
                continue
            match event:
                case Arrived():
                    taken += self._arrived(event.transfer_id, transfer, event.done)
                case Ended():
                    self.counts.num_lost += 1
                    request = self._part(transfer)
                    if request is not None:
                        outcomes = self._attempts[request].outcomes
                        outcomes[transfer.link.address] = event.reason
                        left = any(link.address not in outcomes for link in self.links)
                        taken.append(LostPrompt(request, TransferError(event.reason), event.is_retryable and left))
                case Freed():
                    self._release(event.transfer_id, transfer)
        return taken

    def has_kept_waiting(self, request: Request) -> bool:
        """Tell whether a request has waited too long for pages that only a prefill can give back.

        Args:
            request: The head of the queue, while nothing runs and no prompt is on its way.
        """
        now = time.monotonic()
        if self._kept_waiting is None or self._kept_waiting[0] is not request:
            self._kept_waiting = request, now
        return now - self._kept_waiting[1] >= self._timeout_s

    def forget_held_pages(self) -> None:
        """Hang up on all prefills and give held pages back: the memory behind them is about to be other memory.

        No prompt may be on its way. `reopen` follows.
        """
        assert not self.is_waiting
        for link in self.links:
            link.close()
        while self._next_event(0.0) is not None:
            pass
        for transfer_id, transfer in list(self._transfers.items()):
            self._release(transfer_id, transfer)
        self._kept_waiting = None

    def reopen(self, addresses: list[bytes]) -> None:
        """Meet the prefills again, as a group that none of them has heard of.

        Args:
            addresses: Of the ranks, for the transport.
        """
        self.counts.num_reopened += 1
        self._destination = msgspec.structs.replace(self._destination, addresses=addresses)
        prefills = [link.address for link in self.links]
        self.links = []
        self._call(prefills)
        deadline = time.monotonic() + _FIRST_ANSWER_TIMEOUT_S
        while time.monotonic() < deadline and not any(link.state is LinkState.READY for link in self.links):
            if not any(link.state is LinkState.CONNECTING for link in self.links):
                return
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Hang up on all prefills; requests that wait are lost, now and from now on."""
        self._is_closed = True
        for transfer in self._transfers.values():
            request = self._part(transfer)
            if request is not None:
                self._lost_at_once.append(LostPrompt(request, TransferError(_CLOSED), False))
        for link in self.links:
            link.close()

    def _choose(self, links: Sequence[PrefillLink], prefix_digests: list[bytes]) -> tuple[PrefillLink, int]:
        """Give the prefill that would be done first with a prompt, and how many of its tokens it is thought to have."""
        num_known = [self._prefixes.num_tokens(link.address, link.prefill_epoch, prefix_digests) for link in links]
        costs = [
            (link.num_tokens - known, self._prefixes.num_pages(link.address))
            for link, known in zip(links, num_known, strict=True)
        ]
        chosen = costs.index(min(costs))
        return links[chosen], num_known[chosen]

    def _call(self, addresses: Sequence[str]) -> None:
        epoch = secrets.token_hex(16)
        for address in addresses:
            self.links.append(self._link_to(address, epoch=epoch, on_event=self._events.put))

    def _arrived(self, transfer_id: int, transfer: _Transfer, done: Done) -> list[ReceivedPrompt | LostPrompt]:
        request = transfer.request
        self._release(transfer_id, transfer)
        if request is None:
            return []
        del self._transfer_of[request.request_id]
        try:
            hidden_H = self._check(done, transfer)
        except TransferError as error:
            self.counts.num_lost += 1
            return [LostPrompt(request, error, False)]
        self._prefixes.note(
            transfer.link.address, done.prefill_epoch, transfer.prefix_digests, num_found=done.num_cached
        )
        self._attempts.pop(request, None)
        self.counts.num_received += 1
        self.counts.wait_s += time.monotonic() - transfer.started_at
        return [ReceivedPrompt(request, hidden_H, max(transfer.num_cached, done.num_cached))]

    def _check(self, done: Done, transfer: _Transfer) -> npt.NDArray[np.float32]:
        """Read the hidden state of a prompt, once everything that was to come is said to be there."""
        where = f"prefill {transfer.link.address}"
        if done.start_digest != transfer.start_digest:
            raise TransferError(f"{where} delivered another prompt, or to other pages, than it was told")
        wanted = {"target.latent": transfer.num_tokens, "target.index_keys": transfer.num_tokens}
        if self._destination.facts.draft is not None:
            wanted |= {"draft.latent": transfer.num_tokens - 1, "draft.index_keys": transfer.num_tokens - 1}
        if done.num_tokens != wanted:
            raise TransferError(f"{where} delivered {done.num_tokens} tokens, wanted were {wanted}")
        if len(done.hidden) != 4 * self._hidden_size:
            raise TransferError(
                f"{where} sent a hidden state of {len(done.hidden)} bytes, one of {4 * self._hidden_size} was wanted"
            )
        hidden_H = np.frombuffer(done.hidden, dtype=np.float32)
        if not np.isfinite(hidden_H).all():
            raise TransferError(f"{where} sent a hidden state that is not finite")
        return hidden_H

    def _part(self, transfer: _Transfer) -> Request | None:
        """Take the request from a transfer that has failed; the pages stay held."""
        request, transfer.request = transfer.request, None
        if request is not None:
            del self._transfer_of[request.request_id]
            self.counts.num_held_pages += len(transfer.page_ids)
        return request

    def _release(self, transfer_id: int, transfer: _Transfer) -> None:
        if transfer.request is None:
            self.counts.num_held_pages -= len(transfer.page_ids)
        del self._transfers[transfer_id]
        self._allocator.release(transfer.page_ids)

    def _next_event(self, wait_s: float) -> LinkEvent | None:
        try:
            return self._events.get(timeout=wait_s) if wait_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None
