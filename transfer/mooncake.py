"""Mooncake's TransferEngine behind the protocol of `specdec.transfer.transport`.

What its TCP path does, found by measurement with 0.3.13.post1, and how it is met:

- A batch call waits in a busy loop, and a failed one says nothing about what is still in flight. So every descriptor is
  submitted alone and asked for alone, which costs less, blocks nobody, and shows when the last byte has stopped moving.
- More than about 2,050 descriptors in flight to one peer break its session for good: at most 512 are.
- A descriptor that failed may land all the same, since the peer's kernel or process may still hold its bytes.
- Whoever listens at a peer's port takes the writes, and with them a process that got the port of a dead one. So each
  transport registers a few random bytes that its address tells, and a writer reads them before it writes.
- A build without CUDA registers an address on a GPU without complaint and would read it like memory of the host. So it
  is asked whether it knows CUDA's library.
- The first contact waits up to a minute for a peer that is stopped. It is made by the sending thread.
"""

import errno
import functools
import mmap
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from specdec.kernels.errors import ConfigError, TransferError
from specdec.transfer.address import AddressRecord
from specdec.transfer.gate import GateVisit
from specdec.transfer.gpu_memory import GpuMemory
from specdec.transfer.queued_transport import QueuedTransport
from specdec.transfer.sending_thread import Batch, EndCause, Link
from specdec.transfer.transport import DEFAULT_TIMEOUT_S

_IDENTITY_BYTES = 16
_RUNNING, _DONE = 0, 1  # what `transfer_check_status` returns; less than 0 is a failure
_PROBE_TIMEOUT_S = 1.0
_MOST_GREETINGS = 3


class MooncakeTransport(QueuedTransport):
    """One TransferEngine without a metadata server.

    Args:
        host: Name or address under which peers reach this process. Both of its ports listen on every interface all the
            same, and let everybody write who reaches them.
        timeout_s: Seconds that a write may take, from the call on.
    """

    name = "mooncake"

    def __init__(self, *, host: str = "127.0.0.1", timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(timeout_s=timeout_s)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.engine import TransferEngine  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                f"transport mooncake cannot be loaded ({error}): pip install 'specdec[transfer]' and, on Debian and "
                "Ubuntu, apt-get install libibverbs1 libnuma1 libcurl4"
            ) from error
        self._engine = TransferEngine()
        if (code := self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "")) != 0:
            raise TransferError(f"Mooncake cannot listen at {host}: initialize returned {code}")
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._bases: dict[str, int] = {}
        self._identity = torch.frombuffer(bytearray(secrets.token_bytes(_IDENTITY_BYTES)), dtype=torch.uint8)
        self._registered: list[int] = []
        self._add_memory([self._identity])

    def _register(self, regions: Mapping[str, torch.Tensor]) -> Mapping[str, int]:
        self._add_memory(list(regions.values()))
        self._bases.update((name, region.data_ptr()) for name, region in regions.items())
        return self._bases

    def _add_memory(self, tensors: list[torch.Tensor]) -> None:
        for place, tensor in enumerate(tensors):
            if (code := self._engine.register_memory(tensor.data_ptr(), tensor.nbytes)) != 0:
                for added in tensors[:place]:
                    self._engine.unregister_memory(added.data_ptr())
                raise TransferError(f"Mooncake cannot register {tensor.nbytes} bytes: it returned {code}")
        self._registered += [tensor.data_ptr() for tensor in tensors]

    def _endpoint(self) -> bytes:
        return msgspec.msgpack.encode(
            _Endpoint(
                session=self._session,
                identity_address=self._identity.data_ptr(),
                identity=self._identity.numpy().tobytes(),
            )
        )

    def _on_gpu(self, device: torch.device) -> GpuMemory:
        if not _knows_gpus():
            raise ConfigError(
                f"this build of Mooncake moves memory of the host only, got {device}: pip uninstall "
                "mooncake-transfer-engine-non-cuda, then pip install 'specdec[cuda13]'"
            )
        return super()._on_gpu(device)

    def _link(self, record: AddressRecord, gate: GateVisit | None) -> "_MooncakeLink":
        return _MooncakeLink(self._engine, self._bases, record)

    def _close(self) -> None:
        for address in self._registered:
            self._engine.unregister_memory(address)
        del self._engine  # closes its ports, unless a thread is stuck in it: then when that returns


class _Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a peer's engine listens, and how to know that it is that engine."""

    session: str
    identity_address: int
    identity: bytes


class _MooncakeLink(Link):
    descriptor_bytes = 4 << 20  # a block of its own travels on one of four connections; in parts it takes all
    batch_descriptors = 16
    batch_bytes = 64 << 20
    batches_in_flight = 32

    def __init__(self, engine: Any, own_bases: Mapping[str, int], record: AddressRecord) -> None:
        self._engine = engine
        self._own_bases = own_bases
        self._process = record.process
        self._peer_bases = {region.name: region.base for region in record.regions}
        try:
            self._endpoint = msgspec.msgpack.decode(record.endpoint, type=_Endpoint)
        except msgspec.DecodeError as error:
            raise TransferError(
                f"the endpoint in the address of process {self._process.pid} is none: {error}"
            ) from None
        self._is_known = False  # whether the identity was read, since the last failure
        self._cause: EndCause | None = None

    def post(self, batch: Batch) -> "_Ticket":
        if not self._is_known:
            self._greet()
        submit, session = self._engine.transfer_submit_write, self._endpoint.session
        source_X = (batch.source_offset_X + self._own_bases[batch.source_region]).tolist()
        destination_X = (batch.destination_offset_X + self._peer_bases[batch.destination_region]).tolist()
        ticket = _Ticket()
        for source, destination, length in zip(source_X, destination_X, batch.length_X.tolist(), strict=True):
            if (number := submit(session, source, destination, length)) <= 0:
                ticket.has_failed = True
                break
            ticket.in_flight.append(number)
        return ticket

    def has_landed(self, ticket: "_Ticket") -> bool:
        check = self._engine.transfer_check_status
        while ticket.in_flight:
            if (status := check(ticket.in_flight[-1])) == _RUNNING:
                return False
            ticket.in_flight.pop()
            ticket.has_failed |= status != _DONE
        if ticket.has_failed:
            self._is_known = False
            raise TransferError(f"Mooncake could not write to {self._endpoint.session}; its log may say why")
        return True

    def abandon(self, ticket: "_Ticket") -> None:
        pass  # the engine forgets it when it ends

    def cause_of_end(self) -> EndCause | None:
        if self._cause is None and self._process.is_gone:
            self._cause = EndCause(f"the peer's process {self._process.pid} has ended", takes_nothing=True)
        return self._cause

    def find_cause_of_end(self) -> EndCause | None:
        if self.cause_of_end() is not None or self._is_known or not _is_refused(self._endpoint.session):
            return self._cause
        if self.cause_of_end() is None:  # asked again: a process that is killed may have refused by its end
            words = f"nobody listens at {self._endpoint.session}: the peer's transport was closed"
            self._cause = EndCause(words, takes_nothing=True)
        return self._cause

    def close(self) -> None:
        del self._engine

    def _greet(self) -> None:
        """Read the identity behind the port; waits for the peer.

        The engine keeps connections and regions of the last process that had this port, and finds out by failing.
        """
        engine, endpoint = self._engine, self._endpoint
        read = torch.zeros(_IDENTITY_BYTES, dtype=torch.uint8)
        engine.register_memory(read.data_ptr(), read.nbytes)
        try:
            arguments = (endpoint.session, read.data_ptr(), endpoint.identity_address, read.nbytes)
            is_read = any(engine.transfer_sync_read(*arguments) == 0 for _ in range(_MOST_GREETINGS))
        finally:
            engine.unregister_memory(read.data_ptr())
        if not is_read:
            raise TransferError(
                f"the peer at {endpoint.session} cannot be read from, or is not the one of this address"
            )
        if read.numpy().tobytes() != endpoint.identity:
            words = f"another transport listens at {endpoint.session} than the one of this address"
            self._cause = EndCause(words, takes_nothing=True)
            raise TransferError(words)
        self._is_known = True


class _Ticket:
    """Numbers of the descriptors of one batch that are in flight."""

    __slots__ = ("has_failed", "in_flight")

    def __init__(self) -> None:
        self.in_flight: list[int] = []
        self.has_failed = False


@functools.cache
def _knows_gpus() -> bool:
    """Whether the build that is installed was linked with CUDA's library."""
    engine = sys.modules["mooncake.engine"].__file__
    assert engine is not None
    with Path(engine).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"libcudart.so") >= 0


def _is_refused(session: str) -> bool:
    """Whether the peer's host says that nobody listens there; False also where it says nothing."""
    host, _, port = session.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _PROBE_TIMEOUT_S).close()
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False
