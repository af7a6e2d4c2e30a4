"""Memory that another process of this host can map, without a name that could be left behind.

A block is a memfd: a header, then the data. Who knows the process and the number of the file in it opens the block
through `/proc/<pid>/fd/<number>`, which the kernel allows to processes of the same user, and checks the token in the
header, since numbers of files are used again. The memory goes when the last process that maps it ends or lets go.
"""

import contextlib
import mmap
import os
import secrets

import torch

from specdec.kernels.errors import TransferError

TOKEN_BYTES = 16
_HEADER_BYTES = mmap.PAGESIZE  # the data begins at a page
_OPEN, _CLOSED = b"open", b"shut"


class SharedBlock:
    """A block of this process, or the view of one of another process.

    Attributes:
        data: u8 [nbytes]; keeps the mapping alive.
    """

    def __init__(self, mapping: mmap.mmap, fd: int | None) -> None:
        self._mapping = mapping
        self._fd = fd
        self.data = torch.frombuffer(mapping, dtype=torch.uint8, offset=_HEADER_BYTES)

    @classmethod
    def create(cls, nbytes: int) -> "SharedBlock":
        """Make a zeroed block.

        Raises:
            OSError: There is no memory for it.
        """
        fd = os.memfd_create("specdec-transfer", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _HEADER_BYTES + nbytes)
            mapping = mmap.mmap(fd, _HEADER_BYTES + nbytes)
        except BaseException:
            os.close(fd)
            raise
        mapping[: TOKEN_BYTES + len(_OPEN)] = secrets.token_bytes(TOKEN_BYTES) + _OPEN
        return cls(mapping, fd)

    @classmethod
    def open(cls, *, pid: int, fd: int, token: bytes, nbytes: int) -> "SharedBlock":
        """Map a block of another process, or of this one.

        Raises:
            TransferError: It is not there, or another file has its number.
        """
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                mapping = mmap.mmap(opened, _HEADER_BYTES + nbytes)
            finally:
                os.close(opened)
        except (OSError, ValueError) as error:
            raise TransferError(
                f"the memory of process {pid} cannot be mapped ({error}): it must run on this host, as the same user"
            ) from error
        block = cls(mapping, None)
        if block.token != token or block.is_closed:
            raise TransferError(f"process {pid} has closed the memory that this address names: get a new address")
        return block

    @property
    def fd(self) -> int:
        """Number of the file in the process that made the block."""
        assert self._fd is not None
        return self._fd

    @property
    def token(self) -> bytes:
        """Random bytes that no other block has."""
        return self._mapping[:TOKEN_BYTES]

    @property
    def is_closed(self) -> bool:
        """Whether the process that made the block takes no more writes."""
        return self._mapping[TOKEN_BYTES : TOKEN_BYTES + len(_CLOSED)] == _CLOSED

    def close(self) -> None:
        """Take no more writes: those who mapped the block see it, and nobody can map it any more."""
        self._mapping[TOKEN_BYTES : TOKEN_BYTES + len(_CLOSED)] = _CLOSED
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None
