"""Moving bytes into the memory of another process: one protocol, three implementations.

    local      shared memory of one host and of its GPUs; the default, and the definition that the others are tested
               against
    mooncake   Mooncake's TransferEngine: RDMA where it finds an adapter, else TCP
    nixl       NIXL with its UCX backend: whatever UCX finds

The side that is written to allocates and registers its memory and gives out its address; the side that writes registers
too, connects to that address and writes. Nothing is announced to the side that was written to: that, and what a page
holds, is the business of messages.

Memory is that of the host, or of one GPU, as each region is. Bytes go from a GPU to a GPU, or from a host to a host.

A failed write is not a finished write. What was posted before a peer stopped answering may arrive much later, when its
process goes on; `Write.may_land` says so, and while it does neither side may use those bytes for anything else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

from specdec.kernels.errors import ConfigError
from specdec.transfer.descriptors import Descriptors

DEFAULT_TIMEOUT_S = 30.0


class WriteState(StrEnum):
    """How far a write is; the last two are final."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RegionCopies:
    """Copies from one region of the writing side into one region of the peer.

    Attributes:
        source_region: Name under which the writing side registered it.
        destination_region: Name under which the peer registered it.
        descriptors: What to copy; its arrays must not be changed while a write of them runs. No byte is written
            twice in a write: its parts go side by side.
    """

    source_region: str
    destination_region: str
    descriptors: Descriptors


class Write(Protocol):
    """A batch of copies on its way. Any thread may ask."""

    @property
    def state(self) -> WriteState:
        """How far it is. Does not wait. DONE: every byte lies in the peer's memory."""

    @property
    def error(self) -> str | None:
        """Why it FAILED."""

    @property
    def may_land(self) -> bool:
        """Whether bytes of it may still be read here and arrive there.

        True while something of it is in flight, also after it FAILED, and for good where nobody can tell. False after
        a failure: nothing of it will arrive any more; what arrived before is still there.
        """

    @property
    def queued_s(self) -> float:
        """Seconds from the call until its turn came, or so far."""

    @property
    def sending_s(self) -> float:
        """Seconds from its turn until it ended, or so far."""

    def wait(self, timeout_s: float) -> WriteState:
        """Wait until it is DONE or FAILED, at most `timeout_s`; gives its state, which may be RUNNING."""

    def cancel(self) -> None:
        """Post nothing more. It stays RUNNING until nothing of it is in flight, then is FAILED with "cancelled"."""


class Peer(Protocol):
    """A transport in another process (or in this one) that can be written to."""

    @property
    def name(self) -> str:
        """Who it is, for messages."""

    @property
    def regions(self) -> Mapping[str, int]:
        """Bytes of each of its regions."""


class Transport(Protocol):
    """Memory that peers may write into, and writes into theirs.

    Attributes:
        name: "local", "mooncake" or "nixl".
    """

    name: str

    def allocate(self, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Give zeroed memory that peers can be let into, u8 [nbytes]. The tensor owns it.

        Memory of a GPU is taken from the driver, not from torch, and goes back to it once the tensor is gone and no
        peer of this host has it mapped; until then it serves for an allocation of the same size.

        Raises:
            ConfigError: This transport cannot reach that device, or has memory of another GPU.
            RuntimeError: The GPU has no room.
        """

    def register(self, regions: Mapping[str, torch.Tensor]) -> None:
        """Let regions take part in writes: once, all pools at a time, before the address is given out.

        A region is a contiguous tensor; offsets count its bytes. Memory of `allocate` can be written to by peers; other
        memory can be read from, and whether peers may write into it depends on the transport. The transport keeps the
        tensors until it is closed.

        Raises:
            ConfigError: A tensor that this transport cannot serve, or two that overlap.
            TransferError: The library refused one; none is registered.
        """

    def address(self) -> bytes:
        """Give what a peer needs to connect: checksummed, and good as long as this transport is open."""

    def connect(self, address: bytes) -> Peer:
        """Get to know a peer; the same address gives the same peer. Does not wait for it to answer.

        Raises:
            TransferError: The address is damaged, of another transport or version, out of reach, or its owner is gone.
        """

    def write(self, peer: Peer, copies: Sequence[RegionCopies]) -> Write:
        """Copy into a peer's memory. Checks everything, then returns at once: a thread of the peer sends.

        Writes to one peer are sent in order. A peer that is known to be gone gives a write that FAILED at once.

        Bytes in memory of the host are there when this is called. Bytes on a GPU may still be on their way: they are
        read after all that the calling thread's current stream of that GPU has been told so far. At the peer, whatever
        is launched once the write is DONE sees them.

        Raises:
            TransferError: A region is unknown, an offset or length lies outside of it, or one side is on a GPU and the
                other is not; nothing was posted.
        """

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer; writes to it that still run become FAILED."""

    def close(self) -> None:
        """End. Writes that still run become FAILED, and `may_land` keeps telling the truth about them."""


def open_transport(name: str, **options: Any) -> Transport:
    """Open a transport; its library is imported now and not before.

    Args:
        name: "local", "mooncake" or "nixl".
        **options: `timeout_s` for each: seconds that a write may take from the call on (30). For mooncake `host`: the
            name or address under which peers reach this process ("127.0.0.1"). Which network the libraries take is set
            by their own environment variables (docs/transports.md).

    Raises:
        ConfigError: There is no such transport or option, or its library is missing; says how to install it.
    """
    # Each library is imported by the module that speaks to it, and only where it is wanted.
    match name:
        case "local":
            from specdec.transfer.local import LocalTransport as Opened  # noqa: PLC0415
        case "mooncake":
            from specdec.transfer.mooncake import MooncakeTransport as Opened  # type: ignore[assignment]  # noqa: PLC0415
        case "nixl":
            from specdec.transfer.nixl import NixlTransport as Opened  # type: ignore[assignment]  # noqa: PLC0415
        case _:
            raise ConfigError(f"transport must be local, mooncake or nixl, got {name!r}")
    try:
        return Opened(**options)
    except TypeError as error:
        raise ConfigError(f"transport {name}: {error}") from error
