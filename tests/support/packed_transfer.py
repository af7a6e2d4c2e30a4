"""A rank's transfer that packs what it sends into a small buffer first, where the engine's own sends whole pages.

It stands in for `RankTransfer`: the same orders, plans and reports, and bytes that take another way.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from specdec.dcp.page_ids import NUM_FRONT_PAGES
from specdec.ranks.kv_sides import KvSide
from specdec.ranks.rank_transfer import Order, Piece, RankTransfer
from specdec.transfer.descriptors import RegionMemory
from specdec.transfer.packed_sending import PackedSending, PackedSource
from specdec.transfer.packing import PackBuffer
from specdec.transfer.transport import Write

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
        device = next((pool.device for pool in memory.values()), torch.device("cpu"))
        buffer = self.transport.allocate(NUM_REGIONS * REGION_BYTES, device=device)
        self._device = device
        super()._register({**memory, _BUFFER: buffer})
        self.sending = PackedSending(self.transport, PackBuffer(buffer, num_regions=NUM_REGIONS), buffer_name=_BUFFER)
        self._sources = {
            kind: PackedSource(pool.reshape(-1), region_of(self.side, kind, self.rank)) for kind, pool in memory.items()
        }

    def _write(self, order: Order, piece: Piece, writes: list[tuple[int, Write]]) -> None:
        stored = None
        if self._device.type == "cuda":
            stored = torch.cuda.current_stream(self._device).record_event()
        sent = self.sending.send(
            piece.paths,
            self._sources,
            lambda path: region_of(order.destination, path.kind, path.destination_rank),
            {rank: self._peer(order.addresses[rank]) for rank in piece.copies},
            timeout_s=_FREE_TIMEOUT_S,
            stored=stored,
        )
        self.num_packed += len(sent)
        writes += [(next(iter(piece.copies)), write) for write in sent]  # whose seconds they are matters to nobody


def region_of(side: KvSide, kind: str, rank: int) -> RegionMemory:
    """Memory of one kind of entry on one rank, as a pool lays it out: the pages in front count as an offset."""
    memory = RegionMemory.page_major(side.entries[kind], num_layers=len(side.placements[kind].rank_layers[rank]))
    first = NUM_FRONT_PAGES * memory.page_stride
    return replace(memory, fields=tuple(replace(field, offset=field.offset + first) for field in memory.fields))
