"""The address of a transport: what a peer is told so that it can write, and how it tells that its owner is gone.

An address is a digest followed by a msgspec record. Libraries do not check what they are given (NIXL drops the good
record of a peer, for good, when it reads a truncated one), so nothing is passed on to them before the digest was right.
"""

import os
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec

from specdec.kernels.errors import TransferError

VERSION = 2
HOST_DEVICE = -1  # of a region in memory of the host
_DIGEST_BYTES = 16
_PF_EXITING = 0x4  # Linux, include/linux/sched.h: set before a process that ends gives back its files


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process of some host.

    Attributes:
        host: Differs between hosts, their restarts, and containers that do not see each other's processes.
        pid: Its number on that host.
        start_time: When it started, in ticks since the host did: a number may be used again.
    """

    host: Annotated[str, msgspec.Meta(max_length=256)]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    start_time: Annotated[int, msgspec.Meta(ge=0)]

    @classmethod
    def of_this_process(cls) -> "ProcessRecord":
        """Describe the calling process."""
        pid = os.getpid()
        start_time = _start_time(pid)
        assert start_time is not None
        return cls(host=_this_host(), pid=pid, start_time=start_time)

    @property
    def is_on_this_host(self) -> bool:
        """Whether the calling process could see it."""
        return self.host == _this_host()

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended: False for a process of another host."""
        return self.is_on_this_host and _start_time(self.pid) != self.start_time


class RegionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One region of a transport.

    Attributes:
        name: Its name.
        nbytes: Its bytes.
        base: Where it is, as the transport has it: an address in its process, or the number of a file.
        device: Number of its GPU in that process, or `HOST_DEVICE`.
    """

    name: str
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 60)]
    base: Annotated[int, msgspec.Meta(ge=-1)]
    device: Annotated[int, msgspec.Meta(ge=HOST_DEVICE, lt=1 << 16)] = HOST_DEVICE

    @property
    def is_on_gpu(self) -> bool:
        """Whether it is memory of a GPU."""
        return self.device != HOST_DEVICE


class GateRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gate of a transport with regions on a GPU is (`specdec.transfer.gate`).

    Attributes:
        fd: Number of its file in its process.
        token: Random bytes in it.
    """

    fd: Annotated[int, msgspec.Meta(ge=0)]
    token: bytes


class AddressRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an address says.

    Attributes:
        version: Of this record.
        transport: Which transport wrote it.
        process: Whose memory it is.
        endpoint: What else the transport needs.
        regions: What can be written to.
        gate: What peers of the same host pass to write to a GPU; None where all regions are memory of the host.
    """

    version: int
    transport: str
    process: ProcessRecord
    endpoint: bytes
    regions: tuple[RegionRecord, ...]
    gate: GateRecord | None = None


def encode_address(record: AddressRecord) -> bytes:
    """Write an address."""
    body = msgspec.msgpack.encode(record)
    return _digest(body) + body


def decode_address(address: bytes, *, transport: str) -> AddressRecord:
    """Read an address that must be of the transport `transport`.

    Raises:
        TransferError: It is damaged, or of another transport or version.
    """
    digest, body = address[:_DIGEST_BYTES], address[_DIGEST_BYTES:]
    if digest != _digest(body):
        raise TransferError(f"the address of a peer is damaged: its digest does not fit its {len(body)} bytes")
    try:
        record = msgspec.msgpack.decode(body, type=AddressRecord)
    except msgspec.DecodeError as error:
        raise TransferError(f"the address of a peer cannot be read ({error}): run one version on both sides") from None
    if (record.version, record.transport) != (VERSION, transport):
        raise TransferError(
            f"a {transport} transport (address version {VERSION}) cannot reach a peer of transport {record.transport} "
            f"(address version {record.version}): open the same one on both sides"
        )
    return record


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()


@cache
def _this_host() -> str:
    """Name the boot of this host and the processes that are visible here."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int) -> int | None:
    """When a process started; None where it ends or has ended, waited for or not. Asked for before every write."""
    try:
        stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(stat, 4096).rpartition(b")")[2].split()
        finally:
            os.close(stat)
    except OSError:
        return None
    # One that is killed closes its sockets a moment before it counts as dead: a refused port must find it ending.
    is_ending = fields[0] in b"ZX" or int(fields[6]) & _PF_EXITING
    return None if is_ending else int(fields[19])
