"""Shared memory of one host: the default transport, and what the others are compared with.

A write is a copy into a mapping of the peer's memory, in this process as between processes, by threads into memory of
the host and by a kernel into that of a GPU. A peer that is stopped takes writes all the same. What threads have copied
has landed, and a kernel that was launched soon has: `may_land` is False after every failure that is looked at in the
end.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from specdec.kernels.copy_pieces import load_copy_pieces
from specdec.kernels.errors import ConfigError, TransferError
from specdec.transfer.address import AddressRecord, ProcessRecord
from specdec.transfer.copy_threads import CopyThreads
from specdec.transfer.gate import GateVisit
from specdec.transfer.gpu_copies import MAX_PIECES, GpuCopies, GpuTarget, Launch
from specdec.transfer.queued_transport import NO_TARGET, QueuedTransport
from specdec.transfer.sending_thread import Batch, EndCause, Link
from specdec.transfer.shared_memory import TOKEN_BYTES, SharedBlock
from specdec.transfer.transport import DEFAULT_TIMEOUT_S

_KEY_BYTES = 64  # of a handle
_U8 = npt.NDArray[np.uint8]


class LocalTransport(QueuedTransport):
    """Memory of `allocate` can be written to by processes of the same user on this host; other memory is a source only.

    The address holds the number of the file of each region in memory of the host, and in `endpoint` what else it takes
    to map them: for each region 64 bytes, which are the handle of its memory on a GPU or begin with the token of its
    file, and behind these the name of the GPU on this host.
    """

    name = "local"

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(timeout_s=timeout_s)
        self._blocks: dict[int, SharedBlock] = {}
        self._keys = b""
        self._threads = CopyThreads()
        self._sources: dict[str, _U8] = {}
        self._gpu_sources: dict[str, int] = {}

    def _allocate(self, nbytes: int) -> torch.Tensor:
        block = SharedBlock.create(nbytes)
        self._blocks[block.data.data_ptr()] = block
        return block.data

    def _register(self, regions: Mapping[str, torch.Tensor]) -> Mapping[str, int]:
        bases, keys = {}, []
        for name, region in regions.items():
            if region.is_cuda:
                key = self._on_gpu(region.device).handle_of(region)
                bases[name] = 0 if key else NO_TARGET
            else:
                block = self._blocks.get(region.data_ptr())
                bases[name], key = (block.fd, block.token) if block else (NO_TARGET, b"")
            keys.append(key.ljust(_KEY_BYTES, b"\0"))
        self._sources.update(
            (name, region.reshape(-1).view(torch.uint8).numpy())
            for name, region in regions.items()
            if not region.is_cuda
        )
        self._gpu_sources.update((name, region.data_ptr()) for name, region in regions.items() if region.is_cuda)
        if (memory := self._gpu_memory) is not None:
            keys.append(memory.gpu.bus_id.encode())
            try:
                load_copy_pieces(memory.device)
            except RuntimeError as error:
                raise ConfigError(f"transport local cannot copy with {memory.device}: {error}") from error
        self._keys = b"".join(keys)
        return bases

    def _endpoint(self) -> bytes:
        return self._keys

    def _link(self, record: AddressRecord, gate: GateVisit | None) -> "_LocalLink":
        process = record.process
        if not process.is_on_this_host:
            raise TransferError(
                f"process {process.pid} runs on another host or in another container: take mooncake or nixl to reach it"
            )
        bus_id = record.endpoint[len(record.regions) * _KEY_BYTES :].decode(errors="replace")
        is_here = process == ProcessRecord.of_this_process()
        blocks, targets = {}, {}
        for place, region in enumerate(record.regions):
            key = record.endpoint[place * _KEY_BYTES : (place + 1) * _KEY_BYTES]
            if region.base == NO_TARGET:
                continue
            if region.is_on_gpu:
                here = torch.device("cuda", region.device) if is_here else None
                targets[region.name] = GpuTarget(key, bus_id, here)
            else:
                blocks[region.name] = SharedBlock.open(
                    pid=process.pid, fd=region.base, token=key[:TOKEN_BYTES], nbytes=region.nbytes
                )
        link = _LocalLink(process, self._threads, self._sources, blocks, gate)
        if targets and self._gpu_memory is not None:
            link.copy_on_gpu(GpuCopies(self._gpu_memory, self._gpu_sources, targets))
        return link

    def _close(self) -> None:
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()
        self._sources.clear()
        self._gpu_sources.clear()
        self._threads.close()


class _LocalLink(Link):
    descriptor_bytes = 1 << 30  # the C library copies hundreds of MB at once faster than in parts
    batch_descriptors = 1 << 20
    batch_bytes = 64 << 20  # about 10 ms: how soon a write is cancelled
    batches_in_flight = 1

    def __init__(
        self,
        process: ProcessRecord,
        threads: CopyThreads,
        sources: Mapping[str, _U8],
        blocks: Mapping[str, SharedBlock],
        gate: GateVisit | None,
    ) -> None:
        self._process = process
        self._threads = threads
        self._sources = sources
        self._blocks = dict(blocks)
        self._destinations = {name: block.data.numpy() for name, block in blocks.items()}
        self._gate = gate
        self._gpu: GpuCopies | None = None

    def copy_on_gpu(self, copies: GpuCopies) -> None:
        """Copy into the peer's GPU memory, too."""
        self._gpu = copies
        self.descriptor_bytes = self.batch_bytes = 64 << 20  # 0.2 ms
        self.batch_descriptors = MAX_PIECES
        self.batches_in_flight = 2  # side by side, so that the link is busy from one to the next

    def takes_repeats(self, destination_region: str) -> bool:
        return self._gpu is not None and destination_region in self._gpu

    def post(self, batch: Batch) -> Launch | None:
        if self._is_closed():
            raise TransferError(self._closed_words)
        if self._gpu is not None and batch.destination_region in self._gpu:
            return self._gpu.post(batch)
        self._threads.copy(
            self._destinations[batch.destination_region],
            self._sources[batch.source_region],
            batch.destination_offset_X,
            batch.source_offset_X,
            batch.length_X,
        )
        return None

    def has_landed(self, ticket: Launch | None) -> bool:
        return ticket is None or self._of_gpu.has_landed(ticket)

    def abandon(self, ticket: Launch | None) -> None:
        assert ticket is not None  # what threads copy is never in flight
        self._of_gpu.abandon()

    def cause_of_end(self) -> EndCause | None:
        if self._process.is_gone:
            return EndCause(f"the peer's process {self._process.pid} has ended", takes_nothing=True)
        if self._is_closed():
            return EndCause(self._closed_words, takes_nothing=True)
        return None

    @property
    def _of_gpu(self) -> GpuCopies:
        assert self._gpu is not None
        return self._gpu

    def _is_closed(self) -> bool:
        is_shut = self._gate is not None and self._gate.is_shut
        return is_shut or any(block.is_closed for block in self._blocks.values())

    @property
    def _closed_words(self) -> str:
        return f"the peer's transport in process {self._process.pid} was closed"

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
        self._destinations.clear()
        self._blocks.clear()
