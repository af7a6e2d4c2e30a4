"""What one rank does in a transfer: its pools are registered, it posts its share of the writes, and looks after them.

The leading rank decides what is sent; every rank makes the plan from the same order, finds its digest equal to the
leader's, and posts what it is the source of. Posting returns at once: writes run beside the passes, and each later
`move` reports what became of them. What a pass computes goes layer by layer, a few layers a piece, as they are stored.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import nvtx
import torch

from specdec.dcp.page_ids import NUM_FRONT_PAGES
from specdec.dcp.pool import KvPool
from specdec.errors import SpecdecError, TransferError
from specdec.memory.pools import Pools
from specdec.ranks.kv_sides import KvSide
from specdec.ranks.layer_parts import parts_by_layer
from specdec.slot_table import Int64Array
from specdec.transfer.descriptors import Descriptors, RegionMemory, repeat_path
from specdec.transfer.reshard_plan import Path, ReshardPlan, Span, plan_reshard
from specdec.transfer.transport import Peer, RegionCopies, Transport, Write, WriteState, open_transport

_LAST_LAYER = sys.maxsize  # no layer is behind it


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

    A write carries all kinds of an order that go from one rank to another at one time; its seconds count for each.

    Attributes:
        num_bytes: Bytes.
        num_descriptors: Contiguous pieces, and evenly spaced ones that are named together.
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
        times: By destination rank, the seconds that its writes waited and took, added up.
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


class Piece(NamedTuple):
    """What this rank sends of an order as soon as a layer is stored.

    Attributes:
        layer: None of its layers is behind it.
        paths: Of this rank, cut to its layers; those with anything to send.
        copies: The same as bytes, by destination rank.
    """

    layer: int
    paths: list[Path]
    copies: dict[int, list[RegionCopies]]


@dataclass(slots=True)
class _Prepared:
    """An order that may not have ended.

    Attributes:
        order: What it is.
        pieces: What this rank has still to post, by layer.
        writes: What was posted, with the destination rank of each.
        num_bytes: Bytes by destination rank and kind of entry.
        num_descriptors: Descriptors likewise.
        error: Why it could not be prepared or posted; nothing more of it is.
        was_posted: Whether any of it was, or there was nothing for this rank to send.
        is_reported: Whether the leading rank was told that it failed.
    """

    order: Order
    pieces: list[Piece] = field(default_factory=list)
    writes: list[tuple[int, Write]] = field(default_factory=list)
    num_bytes: dict[tuple[int, str], int] = field(default_factory=dict)
    num_descriptors: dict[tuple[int, str], int] = field(default_factory=dict)
    error: str | None = None
    was_posted: bool = False
    is_reported: bool = False

    @property
    def has_ended(self) -> bool:
        return all(write.state is not WriteState.RUNNING for _, write in self.writes)

    @property
    def may_land(self) -> bool:
        return any(write.may_land for write in self.failed)

    @property
    def failed(self) -> list[Write]:
        return [write for _, write in self.writes if write.state is WriteState.FAILED]

    def stop(self, error: str) -> None:
        """Post nothing more of it."""
        self.error = self.error or error
        for _, write in self.writes:
            write.cancel()


class RankTransfer:
    """Transfers of one rank.

    On a GPU nobody waits for a pass: a write that is posted comes behind what its stream was given before.

    Args:
        transport: Owned from now on.
        side: The ranks of this engine.
        rank: This one.
        memory: Its pools by kind of entry, as `KvPool.memory` gives them.

    Attributes:
        unposted: Orders that are prepared and not posted, or not with all pieces.
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
            if order_id in self._open:
                self._open[order_id].stop("cancelled")
        for prepared in self.unposted:  # the pass that would have posted it did not run, or not to its end
            prepared.pieces.clear()
            if prepared.was_posted:
                prepared.stop("the pass that computes it broke off")
        self.unposted.clear()
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
                prepared.pieces = self._pieces(plan, prepared)
            except Exception as error:  # whatever its destination said of itself, only this order has failed
                prepared.error = _in_words(error)

    def post_stored(self, layer: int) -> None:
        """Post what was prepared of layers up to this one; returns before it is sent.

        Args:
            layer: Of the pass that stores it; on a GPU what does was launched on the current stream.
        """
        for prepared in self.unposted:
            self._post(prepared, layer)
        self.unposted = [prepared for prepared in self.unposted if prepared.pieces]

    def post_prepared(self) -> None:
        """Post all that was prepared; returns before it is sent."""
        self.post_stored(_LAST_LAYER)

    def close(self) -> None:
        """Stop writing and give the transport back."""
        self.transport.close()

    def _post(self, posted: _Prepared, layer: int) -> None:
        try:
            while posted.pieces and posted.pieces[0].layer <= layer:
                posted.was_posted = True
                with nvtx.annotate("send"):
                    self._write(posted.order, posted.pieces.pop(0), posted.writes)
        except Exception as error:  # as in `prepare`
            posted.pieces.clear()
            posted.stop(_in_words(error))
        posted.was_posted |= not posted.pieces

    def _write(self, order: Order, piece: Piece, writes: list[tuple[int, Write]]) -> None:
        """Post one piece; each write is added to `writes` with the rank that it goes to."""
        for destination_rank, copies in piece.copies.items():
            peer = self._peer(order.addresses[destination_rank])
            writes.append((destination_rank, self.transport.write(peer, copies)))

    def _peer(self, address: bytes) -> Peer:
        self._peers.pop(address, None)  # where connecting fails, the transport has forgotten it too
        self._peers[address] = peer = self.transport.connect(address)  # anew where it was cut
        return peer

    def _pieces(self, plan: ReshardPlan, posted: _Prepared) -> list[Piece]:
        """Cut and expand this rank's paths, by the layer that each part waits for."""
        pieces: dict[int, Piece] = {}
        for layer, part in parts_by_layer(plan.paths_from(self.rank), self.side.entries):
            rank, kind = part.destination_rank, part.kind
            descriptors = _expand(part, self.side, posted.order.destination)
            for counts, count in (
                (posted.num_bytes, descriptors.num_bytes),
                (posted.num_descriptors, len(descriptors)),
            ):
                counts[rank, kind] = counts.get((rank, kind), 0) + count
            if len(descriptors):
                piece = pieces.setdefault(layer, Piece(layer, [], {}))
                piece.paths.append(part)
                piece.copies.setdefault(rank, []).append(RegionCopies(kind, kind, descriptors))
        return [pieces[layer] for layer in sorted(pieces)]

    def _report(self, posted: _Prepared) -> OrderReport:
        times: dict[int, tuple[float, float]] = {}
        for rank, write in posted.writes:
            queued_s, sending_s = times.get(rank, (0.0, 0.0))
            times[rank] = queued_s + write.queued_s, sending_s + write.sending_s
        report = OrderReport(
            order_id=posted.order.order_id,
            error=posted.error or next((write.error or "a write failed" for write in posted.failed), None),
            may_land=posted.may_land,
            was_dropped=not posted.was_posted,
            num_bytes={} if posted.is_reported else posted.num_bytes,
            num_descriptors={} if posted.is_reported else posted.num_descriptors,
            times={} if posted.is_reported else times,
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
    found = repeat_path(path, *memories)
    return replace(
        found,
        source_offset_X=found.source_offset_X + fronts[0],
        destination_offset_X=found.destination_offset_X + fronts[1],
    )


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, SpecdecError) else f"{type(error).__name__}: {error}"
