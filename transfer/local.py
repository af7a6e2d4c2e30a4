"""Shared memory of one host: the default transport, and what the others are compared with.

A write is a copy into a mapping of the peer's memory, in this process as between processes. What is copied has landed:
`may_land` is False after every failure, also with a peer that is stopped, whose memory takes writes all the same.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from specdec.kernels.errors import TransferError
from specdec.transfer.address import AddressRecord, ProcessRecord
from specdec.transfer.copy_threads import CopyThreads
from specdec.transfer.queued_transport import NO_TARGET, QueuedTransport
from specdec.transfer.sending_thread import Batch, EndCause, Link
from specdec.transfer.shared_memory import TOKEN_BYTES, SharedBlock
from specdec.transfer.transport import DEFAULT_TIMEOUT_S

_U8 = npt.NDArray[np.uint8]


class LocalTransport(QueuedTransport):
    """Memory of `allocate` can be written to by processes of the same user on this host; other memory is a source only.

    The address holds, for each region, the number of its file, and in `endpoint` the tokens of these files.
    """

    name = "local"

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(timeout_s=timeout_s)
        self._blocks: dict[int, SharedBlock] = {}
        self._tokens = b""
        self._threads = CopyThreads()
        self._sources: dict[str, _U8] = {}

    def _allocate(self, nbytes: int) -> torch.Tensor:
        block = SharedBlock.create(nbytes)
        self._blocks[block.data.data_ptr()] = block
        return block.data

    def _register(self, regions: Mapping[str, torch.Tensor]) -> Mapping[str, int]:
        blocks = [self._blocks.get(region.data_ptr()) for region in regions.values()]
        self._sources.update((name, region.reshape(-1).view(torch.uint8).numpy()) for name, region in regions.items())
        self._tokens = b"".join(block.token if block else bytes(TOKEN_BYTES) for block in blocks)
        return {name: block.fd if block else NO_TARGET for name, block in zip(regions, blocks, strict=True)}

    def _endpoint(self) -> bytes:
        return self._tokens

    def _link(self, record: AddressRecord) -> "_LocalLink":
        process = record.process
        if not process.is_on_this_host:
            raise TransferError(
                f"process {process.pid} runs on another host or in another container: take mooncake or nixl to reach it"
            )
        blocks = {}
        for place, region in enumerate(record.regions):
            if region.base != NO_TARGET:
                token = record.endpoint[place * TOKEN_BYTES : (place + 1) * TOKEN_BYTES]
                blocks[region.name] = SharedBlock.open(
                    pid=process.pid, fd=region.base, token=token, nbytes=region.nbytes
                )
        return _LocalLink(process, self._threads, self._sources, blocks)

    def _close(self) -> None:
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()
        self._sources.clear()
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
    ) -> None:
        self._process = process
        self._threads = threads
        self._sources = sources
        self._blocks = dict(blocks)
        self._destinations = {name: block.data.numpy() for name, block in blocks.items()}

    def post(self, batch: Batch) -> None:
        if self._is_closed():
            raise TransferError(self._closed_words)
        self._threads.copy(
            self._destinations[batch.destination_region],
            self._sources[batch.source_region],
            batch.destination_offset_X,
            batch.source_offset_X,
            batch.length_X,
        )

    def has_landed(self, ticket: None) -> bool:
        return True

    def abandon(self, ticket: None) -> None:
        raise AssertionError("a local copy is never in flight")

    def cause_of_end(self) -> EndCause | None:
        if self._process.is_gone:
            return EndCause(f"the peer's process {self._process.pid} has ended", takes_nothing=True)
        if self._is_closed():
            return EndCause(self._closed_words, takes_nothing=True)
        return None

    def _is_closed(self) -> bool:
        return any(block.is_closed for block in self._blocks.values())

    @property
    def _closed_words(self) -> str:
        return f"the peer's transport in process {self._process.pid} was closed"

    def close(self) -> None:
        self._destinations.clear()
        self._blocks.clear()
