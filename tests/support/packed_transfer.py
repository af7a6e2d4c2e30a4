"""A rank's transfer that packs what it sends into a small buffer first, where the engine's own sends whole pages.

It stands in for `RankTransfer`: the same orders, plans and reports, and bytes that take another way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from specdec.dcp.page_ids import NUM_FRONT_PAGES
from specdec.ranks.kv_sides import KvSide
from specdec.ranks.rank_transfer import RankTransfer, _Prepared
from specdec.transfer.descriptors import RegionMemory
from specdec.transfer.packed_sending import PackedSending, PackedSource
from specdec.transfer.packing import PackBuffer
from specdec.transfer.reshard_plan import Path, ReshardPlan
from specdec.transfer.transport import RegionCopies, Write, WriteState

NUM_REGIONS = 2
REGION_BYTES = 2048  # a few rows: most paths take several slices
_FREE_TIMEOUT_S = 60.0
_BUFFER = "pack"


class PackedTransfer(RankTransfer):
    """Gathers and posts every path of this rank through one `PackedSending`.

    Attributes:
        num_packed: Writes that it posted; each reads one region of the buffer.
    """

    num_packed: int = 0

    def _register(self, memory: Mapping[str, torch.Tensor]) -> None:
        buffer = self.transport.allocate(NUM_REGIONS * REGION_BYTES)
        super()._register({**memory, _BUFFER: buffer})
        self.sending = PackedSending(self.transport, PackBuffer(buffer, num_regions=NUM_REGIONS), buffer_name=_BUFFER)
        self._sources = {
            kind: PackedSource(pool.reshape(-1), region_of(self.side, kind, self.rank)) for kind, pool in memory.items()
        }
        self._paths: dict[int, tuple[Path, ...]] = {}

    def _copies(self, plan: ReshardPlan, posted: _Prepared) -> dict[int, list[RegionCopies]]:
        self._paths[posted.order.order_id] = plan.paths_from(self.rank)
        return super()._copies(plan, posted)

    def _post(self, posted: _Prepared) -> None:
        posted.is_posted = True
        order, ranks = posted.order, tuple(posted.copies)
        posted.copies = {}
        try:
            peers = {rank: self.transport.connect(order.addresses[rank]) for rank in ranks}
            self._peers.update({order.addresses[rank]: peer for rank, peer in peers.items()})
            writes = self.sending.send(
                self._paths.pop(order.order_id, ()),
                self._sources,
                lambda path: region_of(order.destination, path.kind, path.destination_rank),
                peers,
                timeout_s=_FREE_TIMEOUT_S,
            )
        except Exception as error:
            posted.error = str(error)
            return
        self.num_packed += len(writes)
        posted.writes = dict.fromkeys(ranks, AllOf(writes))


class AllOf:
    """Writes that count as one, with what is asked of a `Write`."""

    def __init__(self, writes: Sequence[Write]) -> None:
        self._writes = writes

    @property
    def state(self) -> WriteState:
        states = {write.state for write in self._writes}
        return next((each for each in (WriteState.RUNNING, WriteState.FAILED) if each in states), WriteState.DONE)

    @property
    def error(self) -> str | None:
        return next((write.error for write in self._writes if write.state is WriteState.FAILED), None)

    @property
    def may_land(self) -> bool:
        return any(write.may_land for write in self._writes)

    @property
    def queued_s(self) -> float:
        return min(write.queued_s for write in self._writes)

    @property
    def sending_s(self) -> float:
        return sum(write.sending_s for write in self._writes)

    def wait(self, timeout_s: float) -> WriteState:
        for write in self._writes:
            write.wait(timeout_s)
        return self.state

    def cancel(self) -> None:
        for write in self._writes:
            write.cancel()


def region_of(side: KvSide, kind: str, rank: int) -> RegionMemory:
    """Memory of one kind of entry on one rank, as a pool lays it out: the pages in front count as an offset."""
    memory = RegionMemory.page_major(side.entries[kind], num_layers=len(side.placements[kind].rank_layers[rank]))
    first = NUM_FRONT_PAGES * memory.page_stride
    return replace(memory, fields=tuple(replace(field, offset=field.offset + first) for field in memory.fields))
