"""NIXL's agent with the UCX backend behind the protocol of `specdec.transfer.transport`.

What it does, found by measurement with 1.5.1, and how it is met:

- It has no time-out: a transfer to a stopped peer stays in progress for ever. The deadline is ours, and the transfer is
  watched on, because its bytes land when the peer goes on, also after its handle was released.
- Posting many small descriptors takes as long as sending them, and between processes of one host all of a transfer
  happens while it is posted. Sending threads post; the agent must lock strictly, or they get in each other's way.
- A region that overlaps another hides the rest of it; a name that was used for a damaged record never works again:
  regions are disjoint, every agent has a fresh name, and addresses carry a digest.
- Memory of a GPU is reached by CUDA IPC within a host. Nothing tells whether a peer that mapped it still writes, so
  writes pass the owner's gate.
- With the system's libibverbs loaded beside the one in the wheel the process crashes at its end: `UCX_MODULES=^ib` is
  set where there is no InfiniBand device, unless the variable is set already.
- UCX takes SIGHUP as a wish for debug output, so that a process outlives its terminal: `UCX_DEBUG_SIGNO=0` is set.
- UCX writes what it has to say to standard output, into what a command prints there: `UCX_LOG_FILE=stderr` is set.
"""

import contextlib
import os
import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from specdec.kernels.errors import ConfigError, TransferError
from specdec.transfer.address import HOST_DEVICE, AddressRecord
from specdec.transfer.gate import GateVisit
from specdec.transfer.placement import I64
from specdec.transfer.queued_transport import QueuedTransport
from specdec.transfer.sending_thread import Batch, EndCause, Link
from specdec.transfer.transport import DEFAULT_TIMEOUT_S

_NAME_BYTES = 32  # of an agent; what follows in the endpoint is its metadata


class NixlTransport(QueuedTransport):
    """One agent.

    Args:
        timeout_s: Seconds that a write may take, from the call on.
    """

    name = "nixl"

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(timeout_s=timeout_s)
        api = _load()
        self._agent_name = secrets.token_hex(_NAME_BYTES // 2)
        try:
            self._agent = api.nixl_agent(
                self._agent_name,
                api.nixl_agent_config(
                    enable_prog_thread=True,
                    backends=["UCX"],
                    sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
                ),
            )
        except Exception as error:  # whatever the bindings raise
            raise TransferError(f"NIXL cannot start an agent: {error}") from error
        self._own: dict[str, _Place] = {}
        self._registered: list[Any] = []

    def _register(self, regions: Mapping[str, torch.Tensor]) -> Mapping[str, int]:
        for name, region in regions.items():
            self._own[name] = _Place(region.data_ptr(), region.device.index if region.is_cuda else HOST_DEVICE)
        rows: dict[str, list[tuple[int, int, int, str]]] = {}
        for name, region in regions.items():
            place = self._own[name]
            rows.setdefault(place.kind, []).append((place.base, region.nbytes, place.number, ""))
        try:
            for kind, rows_of_kind in rows.items():
                self._registered.append(self._agent.register_memory(rows_of_kind, kind))
        except Exception as error:
            self._deregister()
            raise TransferError(f"NIXL cannot register {sorted(regions)}: {error}") from error
        return {name: place.base for name, place in self._own.items()}

    def _deregister(self) -> None:
        while self._registered:
            with contextlib.suppress(Exception):  # a peer that ended does not keep this one from ending
                self._agent.deregister_memory(self._registered.pop())

    def _endpoint(self) -> bytes:
        metadata: bytes = self._agent.get_agent_metadata()
        return self._agent_name.encode() + metadata

    def _link(self, record: AddressRecord, gate: GateVisit | None) -> "_NixlLink":
        name, metadata = record.endpoint[:_NAME_BYTES].decode(errors="replace"), record.endpoint[_NAME_BYTES:]
        if name == self._agent_name:
            raise TransferError("a NIXL agent cannot be its own peer: open another transport")
        try:
            self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(f"NIXL does not take the address of process {record.process.pid}: {error}") from error
        return _NixlLink(self._agent, self._own, name, record)

    def _close(self) -> None:
        self._deregister()
        del self._agent


class _Place(NamedTuple):
    """Where a region is, for NIXL: an address, and the number of its GPU in its process."""

    base: int
    device: int

    @property
    def kind(self) -> str:
        """NIXL's word for memory of a host or of a GPU."""
        return "DRAM" if self.device == HOST_DEVICE else "VRAM"

    @property
    def number(self) -> int:
        """NIXL's number of the device; hosts have 0."""
        return max(self.device, 0)


class _NixlLink(Link):
    descriptor_bytes = 64 << 20
    batch_descriptors = 4096
    batch_bytes = 64 << 20
    batches_in_flight = 2

    def __init__(self, agent: Any, own: Mapping[str, _Place], name: str, record: AddressRecord) -> None:
        self._agent = agent
        self._own = own
        self._name = name
        self._process = record.process
        self._peers = {region.name: _Place(region.base, region.device) for region in record.regions}
        self._is_cut = False

    def post(self, batch: Batch) -> "_Ticket":
        agent = self._agent
        own, peer = self._own[batch.source_region], self._peers[batch.destination_region]
        source = _rows(own, batch.source_offset_X, batch.length_X)
        destination = _rows(peer, batch.destination_offset_X, batch.length_X)
        try:
            handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(source, own.kind),
                agent.get_xfer_descs(destination, peer.kind),
                self._name,
            )
        except Exception as error:  # it checks all ranges before it sends any
            raise TransferError(f"NIXL refused a write: {type(error).__name__} {error}".rstrip()) from error
        ticket = _Ticket(handle)
        try:
            ticket.state = agent.transfer(handle)
        except Exception as error:  # part of it may have been posted
            ticket.failure = error
        return ticket

    def has_landed(self, ticket: "_Ticket") -> bool:
        try:
            if ticket.failure is not None:
                raise ticket.failure
            if ticket.state == "PROC":
                ticket.state = self._agent.check_xfer_state(ticket.handle)
            if ticket.state == "PROC":
                return False
        except Exception as error:
            self._is_cut |= type(error).__name__ == "nixlRemoteDisconnectError"
            self.abandon(ticket)
            raise TransferError(f"NIXL could not write: {type(error).__name__} {error}".rstrip()) from error
        self.abandon(ticket)
        if ticket.state != "DONE":
            raise TransferError(f"NIXL could not write: the transfer ended as {ticket.state}")
        return True

    def abandon(self, ticket: "_Ticket") -> None:
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(ticket.handle)

    def cause_of_end(self) -> EndCause | None:
        if self._process.is_gone:
            return EndCause(f"the peer's process {self._process.pid} has ended", takes_nothing=True)
        if self._is_cut:
            words = f"the connection to process {self._process.pid} was cut: connect to it again"
            return EndCause(words, takes_nothing=False)
        return None

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(self._name)
        del self._agent


class _Ticket:
    """A transfer, the state it was last seen in, and what posting it raised."""

    __slots__ = ("failure", "handle", "state")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.state = "PROC"
        self.failure: Exception | None = None


def _rows(place: _Place, offset_X: I64, length_X: I64) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Descriptors as NIXL takes them: u64 [X, 3] of address, length, device."""
    rows_X3 = np.empty((len(offset_X), 3), np.uint64)
    rows_X3[:, 0] = offset_X + place.base
    rows_X3[:, 1] = length_X
    rows_X3[:, 2] = place.number
    return rows_X3


def _load() -> ModuleType:
    """Import NIXL: the package of one CUDA version, or the one that chooses among them."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    if not Path("/sys/class/infiniband").is_dir():
        os.environ.setdefault("UCX_MODULES", "^ib")
    missing = None
    for package in ("nixl_cu13", "nixl"):
        try:
            return import_module(f"{package}._api")
        except ImportError as error:
            missing = missing or error
    raise ConfigError(f"transport nixl cannot be loaded ({missing}): pip install 'specdec[transfer]'") from missing
