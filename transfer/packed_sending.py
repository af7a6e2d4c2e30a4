"""Send paths through a pack buffer: gather a slice, post it, go on with the next region while that one is sent.

    claim a region  ->  gather into it  ->  post to every rank that reads it  ->  all ended: the region is free again

On a GPU the gathers run on a stream of their own, behind whatever wrote the KV and beside whatever the model does next.
Slices are posted on that stream: a transport comes behind what it was given, and the host waits for no gather. A region
that a failed write may still read stays claimed.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec.kernels.errors import TransferError
from specdec.transfer.descriptors import Descriptors, RegionMemory
from specdec.transfer.packing import PackBuffer, PackedSlice, pack_path, paths_by_pack
from specdec.transfer.reshard_plan import Path
from specdec.transfer.transport import Peer, RegionCopies, Transport, Write, WriteState

_POLL_S = 1e-4  # between looks at the oldest write, where all regions are being read


class PackedSource(NamedTuple):
    """What one kind of entry is gathered from.

    Attributes:
        memory: The region of this rank, u8 [bytes].
        layout: How it is laid out.
    """

    memory: torch.Tensor
    layout: RegionMemory


@dataclass(slots=True)
class _Sent:
    """A region and the writes that read it."""

    region: int
    writes: list[Write]


class PackedSending:
    """Sends through one buffer. One thread at a time; the regions are shared by all it sends.

    Args:
        transport: With the buffer among its regions.
        buffer: In memory that the transport can read.
        buffer_name: Under which that memory is registered.
    """

    def __init__(self, transport: Transport, buffer: PackBuffer, *, buffer_name: str) -> None:
        self._transport = transport
        self._buffer = buffer
        self._buffer_name = buffer_name
        device = buffer.memory.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free = list(range(buffer.num_regions))
        self._sent: list[_Sent] = []

    def send(
        self,
        paths: Sequence[Path],
        sources: Mapping[str, PackedSource],
        destination_of: Callable[[Path], RegionMemory],
        peers: Mapping[int, Peer],
        *,
        timeout_s: float,
        stored: "torch.cuda.Event | None" = None,
    ) -> list[Write]:
        """Gather and post all paths of this rank; returns once the last is posted, with every write.

        Args:
            paths: Of this source rank.
            sources: By kind of entry.
            destination_of: How the region that a path ends in is laid out.
            peers: By destination rank.
            timeout_s: Seconds to wait for a region to come free.
            stored: On a GPU, recorded when the KV was written: the gathers wait for it.

        Raises:
            TransferError: A path does not fit into a region, or none came free in time; what was posted runs on.
        """
        if self._stream is not None and stored is not None:
            self._stream.wait_event(stored)
        writes: list[Write] = []
        for group in paths_by_pack(paths):
            source = sources[group[0].kind]
            destination = destination_of(group[0])
            slices = pack_path(group[0], source.layout, destination, capacity_bytes=self._buffer.region_bytes)
            for region, part in self._gathered(slices, source, timeout_s=timeout_s):
                first = self._buffer.offset(region)
                sent = part.descriptors
                copies = Descriptors(sent.source_offset_X + first, sent.destination_offset_X, sent.length_X)
                posted: list[Write] = []
                self._sent.append(_Sent(region, posted))
                with self._on_stream():
                    for path in group:
                        piece = RegionCopies(self._buffer_name, path.kind, copies)
                        posted.append(self._transport.write(peers[path.destination_rank], [piece]))
                writes += posted
        return writes

    def reclaim(self) -> int:
        """Free the regions that nothing reads any more; gives how many still are."""
        for sent in list(self._sent):
            if any(write.state is WriteState.RUNNING or write.may_land for write in sent.writes):
                continue
            self._free.append(sent.region)
            self._sent.remove(sent)
        return len(self._sent)

    def _gathered(
        self, slices: Iterator[PackedSlice], source: PackedSource, *, timeout_s: float
    ) -> Iterator[tuple[int, PackedSlice]]:
        """Fill a region with each slice, so that it can be posted."""
        for part in slices:
            region = self._claim(timeout_s)
            try:
                with self._on_stream():
                    part.gather(source.memory, self._buffer.view(region))
            except BaseException:
                self._free.append(region)
                raise
            yield region, part

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _claim(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while not self._free and self.reclaim() == self._buffer.num_regions:
            if time.monotonic() >= deadline:
                raise TransferError(
                    f"no region of the pack buffer came free in {timeout_s:g} s: writes that read its "
                    f"{self._buffer.num_regions} regions have neither ended nor let go of them"
                )
            time.sleep(_POLL_S)
        return self._free.pop()
