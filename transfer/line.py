"""A line between a decode group and a prefill: framed messages over TCP, with signs of life.

A peer that stopped is only silent: whoever owns the line decides what that means. A frame is one message behind three
numbers of four bytes: its length, its CRC-32, and the CRC-32 of these two. So a message that was damaged on the way is
never read as another one, which might name other pages or hold another hidden state, and a length that was damaged is
not waited for.
"""

import contextlib
import queue
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable

from specdec.kernels.errors import ConfigError, TransferError
from specdec.transfer.messages import MAX_MESSAGE_BYTES, Heartbeat, Message, Refused, clip, decode, encode

HEARTBEAT_S = 0.5  # between signs of life of either end

_LENGTH_AND_CRC = struct.Struct("!II")
_CRC = struct.Struct("!I")
_CONNECT_TIMEOUT_S = 5.0
_CLOSE_GRACE_S = 0.5
_MAX_WAITING = 1 << 14  # messages to a peer that does not read
_HEARTBEAT = encode(Heartbeat())
_DAMAGED = (
    "a control message came damaged: its checksum is wrong; where that goes on, see that both sides run one version of "
    "specdec"
)


def parse_address(text: object) -> tuple[str, int]:
    """Split "host:port", with brackets around an IPv6 host.

    Raises:
        ConfigError: It is none.
    """
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise ConfigError(f'an address of a prefill is "host:port", as in 127.0.0.1:7100, got {text!r}')
    return host, int(port)


def dial(address: str) -> socket.socket:
    """Connect to a prefill.

    Raises:
        OSError: It cannot be reached; `ConnectionRefusedError` where nobody listens at any address of the host.
    """
    try:
        connection = socket.create_connection(parse_address(address), timeout=_CONNECT_TIMEOUT_S, all_errors=True)
    except ExceptionGroup as group:  # one error for each address of the host
        others = [error for error in group.exceptions if not isinstance(error, ConnectionRefusedError)]
        raise [*others, *group.exceptions][0] from None
    except UnicodeError as error:
        raise OSError(f"no host can have this name: {error}") from None
    if connection.getsockname() == connection.getpeername():  # Linux may connect a socket with itself
        connection.close()
        raise ConnectionRefusedError(f"nobody listens at {address}")
    return connection


def frame(data: bytes) -> bytes:
    """Put a message into a frame."""
    head = _LENGTH_AND_CRC.pack(len(data), zlib.crc32(data))
    return head + _CRC.pack(zlib.crc32(head)) + data


def read_frame(read: Callable[[int], bytes]) -> bytes:
    """Read the message of the next frame.

    Args:
        read: Gives the next so many bytes.

    Raises:
        TransferError: It was damaged, or no message has that length.
    """
    head = read(_LENGTH_AND_CRC.size)
    if read(_CRC.size) != _CRC.pack(zlib.crc32(head)):
        raise TransferError(_DAMAGED)
    length, crc = _LENGTH_AND_CRC.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise TransferError(f"a control message of {length} bytes was announced, at most {MAX_MESSAGE_BYTES} are read")
    data = read(length)
    if zlib.crc32(data) != crc:
        raise TransferError(_DAMAGED)
    return data


class Line:
    """One end of a line. A thread reads and a thread writes, so that `send` never waits.

    Args:
        connection: A connected socket, owned by the line from now on.
        heartbeat_s: Seconds between signs of life of this end.
        on_message: Called by the reading thread for every message but heartbeats; must not block.
        on_end: Called once by the reading thread when the line is over, with why; not after `close`.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        heartbeat_s: float,
        on_message: Callable[[Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._heartbeat_s = heartbeat_s
        self._on_message = on_message
        self._on_end = on_end
        self._to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_closed = False
        self._why = "the peer hung up"
        self._heard_at = time.monotonic()
        self._threads = [
            threading.Thread(target=target, name=f"specdec-line-{target.__name__.strip('_')}", daemon=True)
            for target in (self._write, self._read)  # what is read may lead to `close`, which waits for both
        ]

    def start(self) -> None:
        """Begin to read and to write."""
        for thread in self._threads:
            thread.start()

    @property
    def heard_at(self) -> float:
        """When the peer was last heard, by `time.monotonic`."""
        return self._heard_at

    def send(self, message: Message) -> None:
        """Send a message, in order; it is lost where the line is over, which `on_end` tells.

        Raises:
            TransferError: The message is too large.
        """
        self._to_send.put(encode(message))
        if self._to_send.qsize() > _MAX_WAITING:
            self._why = f"the peer does not read: more than {_MAX_WAITING} messages wait for it"
            self._hang_up()

    def close(self) -> None:
        """Send what is waiting, as far as the peer takes it at once, and hang up; not called by the line's threads."""
        self._is_closed = True
        self._to_send.put(None)
        self._threads[0].join(_CLOSE_GRACE_S)
        self._hang_up()
        for thread in self._threads:
            thread.join()
        self._connection.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while True:
                message = self._decode(read_frame(self._bytes))
                if not isinstance(message, Heartbeat):
                    self._on_message(message)
        except (EOFError, ConnectionError):
            pass
        except TransferError as error:
            self._why = str(error)
        except Exception as error:  # whatever a message leads to, the owner must hear that the line is over
            self._why = f"{type(error).__name__}: {error}"
        self._hang_up()
        self._to_send.put(None)
        if not self._is_closed:
            self._on_end(self._why)

    def _decode(self, data: bytes) -> Message:
        """Read a message; the peer is told that it cannot be, since it may run another version and not know."""
        try:
            return decode(data)
        except TransferError as error:
            self._to_send.put(encode(Refused(reason=clip(str(error)))))
            self._to_send.put(None)
            self._threads[0].join(_CLOSE_GRACE_S)
            raise

    def _write(self) -> None:
        while True:
            try:
                data = self._to_send.get(timeout=self._heartbeat_s)
            except queue.Empty:
                data = _HEARTBEAT
            if data is None:
                return
            try:
                self._connection.sendall(frame(data))
            except OSError:
                self._hang_up()  # half a message may be on its way; the reading thread tells why
                return

    def _bytes(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            piece = self._connection.recv(min(num_bytes - len(data), 1 << 20))
            if not piece:
                raise EOFError
            self._heard_at = time.monotonic()
            data += piece
        return bytes(data)
