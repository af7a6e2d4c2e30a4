"""What one rank does in a transfer: its pools are registered, it posts its share of the writes, and looks after them.

The leading rank decides what is sent; every rank makes the plan from the same order, finds its digest equal to the
leader's, and posts what it is the source of. Posting returns at once: writes run beside the passes, and each later
`move` reports what became of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import nvtx
import torch

from specdec.dcp.page_ids import NUM_FRONT_PAGES
from specdec.dcp.pool import KvPool
from specdec.errors import SpecdecError, TransferError
from specdec.memory.pools import Pools
from specdec.ranks.kv_sides import KvSide
from specdec.slot_table import Int64Array
from specdec.transfer.descriptors import Descriptors, RegionMemory, expand_path
from specdec.transfer.reshard_plan import Path, ReshardPlan, Span, plan_reshard
from specdec.transfer.transport import Peer, RegionCopies, Transport, Write, WriteState, open_transport


class Order(NamedTuple):
    """One piece of a prompt that every rank sends its share of.

    Attributes:
        order_id: Drawn by the leading rank, never again.
        destination: The ranks it goes to.
        addresses: Of these ranks, for the transport.
        source_page_ids: Pages of the prompt here, i64 [P].
        destination_page_ids: Pages of the prompt there, i64 [P].
        target: Tokens whose target KV is sent, begin and end; None where none is.
        draft: Tokens whose draft KV is sent, begin and end; None where none is.
        digest: Of the plan.
    """

    order_id: int
    destination: KvSide
    addresses: tuple[bytes, ...]
    source_page_ids: Int64Array
    destination_page_ids: Int64Array
    target: tuple[int, int] | None
    draft: tuple[int, int] | None
    digest: str


class Moves(NamedTuple):
    """What the ranks are told about transfers in one pass.

    Attributes:
        orders: To post.
        cancelled: Orders of which nothing more may be posted.
        forgotten: Addresses that are written to no more.
    """

    orders: tuple[Order, ...] = ()
    cancelled: tuple[int, ...] = ()
    forgotten: tuple[bytes, ...] = ()


@dataclass(slots=True)
class PathCounts:
    """What was written on one path: one source rank, one destination rank, one kind of entry.

    A write carries all kinds of an order that go from one rank to another; its seconds count for each of them.

    Attributes:
        num_bytes: Bytes.
        num_descriptors: Contiguous pieces.
        queued_s: Seconds that writes waited for those before them.
        sending_s: Seconds from a write's turn to its end.
    """

    num_bytes: int = 0
    num_descriptors: int = 0
    queued_s: float = 0.0
    sending_s: float = 0.0


class OrderReport(NamedTuple):
    """What became of an order on one rank.

    Attributes:
        order_id: Which.
        error: Why it failed; None where all was written.
        may_land: Whether bytes of it may still arrive; another report, without counts, follows once none can.
        was_dropped: Whether nothing was sent: the pass that it was prepared for did not run, or no order of that number
            came here before it was cancelled.
        num_bytes: Bytes by destination rank and kind of entry.
        num_descriptors: Descriptors likewise.
        times: By destination rank, the seconds that its write waited and took.
    """

    order_id: int
    error: str | None
    may_land: bool
    was_dropped: bool
    num_bytes: dict[tuple[int, str], int]
    num_descriptors: dict[tuple[int, str], int]
    times: dict[int, tuple[float, float]]

    @classmethod
    def of_unknown(cls, order_id: int) -> "OrderReport":
        """Tell of an order that never came here."""
        return cls(order_id, None, False, True, {}, {}, {})


def plan_order(order: Order, source: KvSide) -> ReshardPlan:
    """Plan what an order moves.

    Raises:
        TransferError: The two sides do not fit.
    """
    spans = {}
    destinations = order.destination.placements
    for kind, placement in source.placements.items():
        span = order.target if kind.startswith("target.") else order.draft
        if span is None or kind not in destinations:
            continue
        spans[kind] = Span(
            source=placement,
            source_pages=order.source_page_ids,
            destination=destinations[kind],
            destination_pages=order.destination_page_ids,
            begin=span[0],
            end=span[1],
        )
    return plan_reshard(spans)


@dataclass(slots=True)
class _Prepared:
    """An order that may not have ended.

    Attributes:
        order: What it is.
        copies: What this rank sends, by destination rank; empty once it is posted.
        writes: What it has posted, by destination rank.
        num_bytes: Bytes by destination rank and kind of entry.
        num_descriptors: Descriptors likewise.
        error: Why it could not be prepared or posted.
        is_posted: Whether it was.
        is_reported: Whether the leading rank was told that it failed.
    """

    order: Order
    copies: dict[int, list[RegionCopies]] = field(default_factory=dict)
    writes: dict[int, Write] = field(default_factory=dict)
    num_bytes: dict[tuple[int, str], int] = field(default_factory=dict)
    num_descriptors: dict[tuple[int, str], int] = field(default_factory=dict)
    error: str | None = None
    is_posted: bool = False
    is_reported: bool = False

    @property
    def has_ended(self) -> bool:
        return all(write.state is not WriteState.RUNNING for write in self.writes.values())

    @property
    def may_land(self) -> bool:
        return any(write.may_land for write in self.writes.values() if write.state is WriteState.FAILED)


class RankTransfer:
    """Transfers of one rank.

    Args:
        transport: Owned from now on.
        side: The ranks of this engine.
        rank: This one.
        memory: Its pools by kind of entry, as `KvPool.memory` gives them.

    Attributes:
        unposted: Orders that are prepared and not posted.
    """

    def __init__(self, transport: Transport, *, side: KvSide, rank: int, memory: Mapping[str, torch.Tensor]) -> None:
        self.transport = transport
        self.side = side
        self.rank = rank
        self._register(memory)
        self._peers: dict[bytes, Peer] = {}
        self._open: dict[int, _Prepared] = {}
        self.unposted: list[_Prepared] = []
        self._forgotten: set[bytes] = set()

    def address(self) -> bytes:
        """Where others write to."""
        return self.transport.address()

    def reopen(self, pools: Pools) -> None:
        """Let nobody write any more who was told the address: new memory, a new transport, a new address.

        Args:
            pools: Of this rank, of `KvPool`; what they hold is lost.
        """
        name = self.transport.name
        self.transport.close()
        self.transport = open_transport(name)
        for pool in (pools.target, pools.draft):
            if pool is not None:
                assert isinstance(pool, KvPool)
                pool.take_memory(partial(self.transport.allocate, device=pool.device))
        self._register(pools.memory_by_kind)

    def _register(self, memory: Mapping[str, torch.Tensor]) -> None:
        regions = {name: buffer.reshape(-1) for name, buffer in memory.items() if buffer.numel()}
        if regions:  # a rank of a layer split may hold no layer
            self.transport.register(regions)

    def move(self, moves: Moves) -> list[OrderReport]:
        """Post, cancel and forget; gives what has ended since the last call. Never raises for one order."""
        unknown = [order_id for order_id in moves.cancelled if order_id not in self._open]
        for order_id in moves.cancelled:
            for write in self._open[order_id].writes.values() if order_id in self._open else ():
                write.cancel()
        self.unposted.clear()  # the pass that would have posted it did not run
        self.prepare(moves.orders)
        self.post_prepared()
        reports = [
            self._report(posted)
            for posted in list(self._open.values())
            if posted.has_ended and not (posted.is_reported and posted.may_land)
        ]
        self._forgotten.update(moves.forgotten)
        if self._forgotten:
            self._forget()
        return reports + [OrderReport.of_unknown(order_id) for order_id in unknown]

    def prepare(self, orders: Sequence[Order]) -> None:
        """Plan this rank's share of orders, so that it can be posted at once. Never raises for one order."""
        for order in orders:
            prepared = self._open[order.order_id] = _Prepared(order)
            self.unposted.append(prepared)
            self._forgotten.difference_update(order.addresses)
            try:
                plan = plan_order(order, self.side)
                if plan.digest != order.digest:
                    raise TransferError(
                        f"the plan made here has digest {plan.digest[:16]}, the leading rank's {order.digest[:16]}"
                    )
                prepared.copies = self._copies(plan, prepared)
            except Exception as error:  # whatever its destination said of itself, only this order has failed
                prepared.error = _in_words(error)

    def post_prepared(self) -> None:
        """Post what was prepared; returns before it is sent."""
        with nvtx.annotate("send"):
            for prepared in self.unposted:
                self._post(prepared)
        self.unposted.clear()

    def close(self) -> None:
        """Stop writing and give the transport back."""
        self.transport.close()

    def _post(self, posted: _Prepared) -> None:
        posted.is_posted = True
        try:
            for destination_rank, copies in posted.copies.items():
                address = posted.order.addresses[destination_rank]
                self._peers.pop(address, None)  # where connecting fails, the transport has forgotten it too
                self._peers[address] = peer = self.transport.connect(address)  # anew where it was cut
                posted.writes[destination_rank] = self.transport.write(peer, copies)
        except Exception as error:  # as in `prepare`
            posted.error = _in_words(error)
            for write in posted.writes.values():
                write.cancel()
        posted.copies = {}

    def _copies(self, plan: ReshardPlan, posted: _Prepared) -> dict[int, list[RegionCopies]]:
        """Expand this rank's paths, by destination rank."""
        copies: dict[int, list[RegionCopies]] = {}
        for path in plan.paths_from(self.rank):
            rank, kind = path.destination_rank, path.kind
            descriptors = _expand(path, self.side, posted.order.destination)
            if len(descriptors):
                copies.setdefault(rank, []).append(RegionCopies(kind, kind, descriptors))
            posted.num_bytes[rank, kind] = descriptors.num_bytes
            posted.num_descriptors[rank, kind] = len(descriptors)
        return copies

    def _report(self, posted: _Prepared) -> OrderReport:
        failed = [write for write in posted.writes.values() if write.state is WriteState.FAILED]
        report = OrderReport(
            order_id=posted.order.order_id,
            error=posted.error or next((write.error or "a write failed" for write in failed), None),
            may_land=posted.may_land,
            was_dropped=not posted.is_posted,
            num_bytes={} if posted.is_reported else posted.num_bytes,
            num_descriptors={} if posted.is_reported else posted.num_descriptors,
            times={}
            if posted.is_reported
            else {rank: (write.queued_s, write.sending_s) for rank, write in posted.writes.items()},
        )
        posted.is_reported = True
        if not report.may_land:
            del self._open[posted.order.order_id]
        return report

    def _forget(self) -> None:
        """Disconnect the forgotten addresses that no write is on its way to: others still have to be watched."""
        busy = {address for posted in self._open.values() for address in posted.order.addresses}
        for address in self._forgotten - busy:
            self._forgotten.remove(address)
            if address in self._peers:
                self.transport.disconnect(self._peers.pop(address))


def _expand(path: Path, source: KvSide, destination: KvSide) -> Descriptors:
    """Bytes of a path: an engine lays out all layers that a rank holds of a page side by side."""
    memories, fronts = [], []
    for side, rank in ((source, path.source_rank), (destination, path.destination_rank)):
        memory = RegionMemory.page_major(
            side.entries[path.kind], num_layers=len(side.placements[path.kind].rank_layers[rank])
        )
        memories.append(memory)
        fronts.append(NUM_FRONT_PAGES * memory.page_stride)
    found = expand_path(path, *memories)
    return Descriptors(found.source_offset_X + fronts[0], found.destination_offset_X + fronts[1], found.length_X)


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, SpecdecError) else f"{type(error).__name__}: {error}"
