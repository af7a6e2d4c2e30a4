"""Writes into the GPU memory of one peer of this host: a kernel of the own GPU copies, over the link between the two.

A launch copies any number of pieces. It has landed once the event behind it is done, for a kernel has ended only when
what it wrote can be seen everywhere. Memory of the peer is mapped by the first write to it, which takes a while.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from specdec.kernels.copy_pieces import PieceCopies
from specdec.kernels.errors import TransferError
from specdec.transfer.gpu_memory import GpuMemory, MappedMemory
from specdec.transfer.sending_thread import Batch

MAX_PIECES = 1 << 16  # of a launch


class GpuTarget(NamedTuple):
    """A region of a peer on a GPU.

    Attributes:
        handle: Of its memory.
        bus_id: Name of its GPU, on this host.
        here: That GPU, where the peer is in this process; None where it is in another.
    """

    handle: bytes
    bus_id: str
    here: torch.device | None


class Launch:
    """A launch on its way, and the room it needs; for one after the other.

    On a stream of its own: the next launch is told its pieces and begins while this one still ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream):  # torch's memory is ready on the stream that it was taken on
            self.pieces = PieceCopies(device, max_pieces=MAX_PIECES)
        self.is_done = torch.cuda.Event()


_abandoned: list["GpuCopies"] = []  # whose launches may still run


class GpuCopies:
    """Copies from GPU regions of one transport into those of one peer, on streams of their own. For one thread.

    Args:
        memory: Of the transport.
        sources: Address of each own region on the GPU.
        targets: The peer's regions there.
    """

    def __init__(self, memory: GpuMemory, sources: Mapping[str, int], targets: Mapping[str, GpuTarget]) -> None:
        self._memory = memory
        self._sources = sources
        self._targets = targets
        self._mapped: dict[str, MappedMemory] = {}
        self._launches: list[Launch] = []  # all that there are
        self._free: list[Launch] = []

    def __contains__(self, region: str) -> bool:
        return region in self._targets

    def post(self, batch: Batch) -> Launch:
        """Launch a batch.

        Raises:
            TransferError: The peer's memory cannot be mapped, or there is no room for the launch; nothing is in flight.
        """
        destination = self._map(batch.destination_region)
        if not self._free:
            try:
                launch = Launch(self._memory.device)
            except RuntimeError as error:
                raise TransferError(f"{self._memory.device} has no room for a launch: {error}") from error
            self._launches.append(launch)
            self._free.append(launch)
        launch = self._free.pop()
        with torch.cuda.stream(launch.stream):
            launch.pieces.copy(
                self._sources[batch.source_region],
                destination.address,
                batch.source_offset_X,
                batch.destination_offset_X,
                batch.length_X,
                repeats=batch.repeats,
                layers=batch.layers,
            )
            launch.is_done.record()
        return launch

    def has_landed(self, launch: Launch) -> bool:
        """Tell whether all of a launch lies in the peer's memory."""
        if not launch.is_done.query():
            return False
        self._free.append(launch)
        return True

    def abandon(self) -> None:
        """Look after launches no more: what they use stays as it is."""
        _abandoned.append(self)

    def close(self) -> None:
        """Let go of the peer's memory, unless something may still be written there."""
        if self in _abandoned:
            return
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped.clear()

    def _map(self, region: str) -> MappedMemory:
        if region not in self._mapped:
            handle, bus_id, here = self._targets[region]
            self._mapped[region] = MappedMemory(self._memory.gpu, handle, bus_id=bus_id, here=here)
        return self._mapped[region]
