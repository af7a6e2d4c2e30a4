"""The gate in front of a transport's GPU memory: peers of this host pass it to write, its owner shuts it.

A peer that has mapped memory of a GPU can write to it whatever its owner does, and memory that is given back while it
is mapped must not be used anew. So every peer tells, by locks on the gate's file, that it has the memory mapped and
that a write of it is in flight. A lock goes with the process that holds it. Who wants to write takes the lock before it
looks whether the gate is open, and the owner shuts the gate before it looks for locks: so nobody slips through.
"""

import contextlib
import fcntl
import os
import struct
import weakref

from specdec.kernels.errors import TransferError
from specdec.transfer.address import GateRecord, ProcessRecord
from specdec.transfer.shared_memory import SharedBlock

_FLOCK = struct.Struct("hhqqi")  # of Linux on 64 bits: type, whence, start, length, and no process: of the open file
_MAPPED, _WRITING = 0, 1  # bytes of the file that stand for what a lock says


class Gate:
    """The gate of a transport of this process."""

    def __init__(self) -> None:
        self._block = SharedBlock.create(1)
        self._file = _open_file(os.getpid(), self._block.fd)
        weakref.finalize(self, os.close, self._file)

    @property
    def record(self) -> GateRecord:
        """What peers need to come to it."""
        return GateRecord(fd=self._block.fd, token=self._block.token)

    @property
    def is_written(self) -> bool:
        """Whether a write of a peer is in flight."""
        return not _try_lock(self._file, _WRITING)

    @property
    def is_mapped(self) -> bool:
        """Whether a peer has the memory mapped."""
        return not _try_lock(self._file, _MAPPED)

    def shut(self) -> None:
        """Let no write begin any more."""
        self._block.close()


class GateVisit:
    """The gate of a peer; it counts as having mapped the memory from now on. For one thread.

    Raises:
        TransferError: It was shut, or is not there.
    """

    def __init__(self, process: ProcessRecord, record: GateRecord) -> None:
        self._closed_words = f"the peer's transport in process {process.pid} was closed"
        try:
            file = _open_file(process.pid, record.fd)
        except OSError as error:
            raise TransferError(
                f"the GPU memory of process {process.pid} cannot be reached ({error}): it must run as the same user, "
                "and its transport must be open"
            ) from error
        self._close = weakref.finalize(self, os.close, file)
        self._file = file
        _lock_shared(file, _MAPPED)
        self._block = SharedBlock.open(pid=process.pid, fd=record.fd, token=record.token, nbytes=1)

    @property
    def is_shut(self) -> bool:
        """Whether no write may begin any more."""
        return self._block.is_closed

    def enter(self) -> None:
        """Say that writes are in flight from now on.

        Raises:
            TransferError: The gate was shut; nothing may be written.
        """
        _lock_shared(self._file, _WRITING)
        if self.is_shut:
            self.leave()
            raise TransferError(self._closed_words)

    def leave(self) -> None:
        """Say that none is in flight."""
        _lock(self._file, fcntl.F_UNLCK, _WRITING)

    def close(self) -> None:
        """Say that the memory is mapped no more."""
        self._close()


def _open_file(pid: int, fd: int) -> int:
    """Open a file of a process anew: locks of this kind belong to each opening."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _lock(file: int, kind: int, place: int) -> None:
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))


def _lock_shared(file: int, place: int) -> None:
    """Take a lock that many may have. Its owner may be looking for locks, which takes an instant."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return _lock(file, fcntl.F_RDLCK, place)


def _try_lock(file: int, place: int) -> bool:
    """Whether nobody has a lock there."""
    try:
        _lock(file, fcntl.F_WRLCK, place)
    except BlockingIOError:
        return False
    _lock(file, fcntl.F_UNLCK, place)
    return True
