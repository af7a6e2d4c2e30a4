"""Connections that do not wait for ever: for a request that does not come, or for a client that takes nothing."""

import asyncio
import socket
import struct

from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.errors import ConfigError

_BACKLOG = 2048
_NO_LINGER = struct.pack("ii", 1, 0)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that connections are accepted from; port 0 takes a free one.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        door = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error
    # Connections inherit it. Without it a head and the first piece behind it wait for each other's acknowledgement.
    door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return door


class TimedConnection(H11Protocol):
    """One connection; it breaks off what makes no progress.

    Attributes:
        client_timeout_s: Seconds in which the head of a request must have arrived, and in which a client must take
            more of what it is sent; set by a subclass, since the HTTP library makes the connections.
    """

    client_timeout_s: float

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; the time that its head may take runs from its first byte."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_head_timer()
        elif self._head_timer is None:
            self._await_head()

    def pause_writing(self) -> None:
        """Note that the client does not take what it is sent."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.client_timeout_s, self._break_off)

    def resume_writing(self) -> None:
        """Note that it does again."""
        super().resume_writing()
        self._end_stall_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        super().connection_lost(exc)
        self._end_head_timer()
        self._end_stall_timer()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.client_timeout_s, self._break_off)

    def _break_off(self) -> None:
        """Close at once, and have the system forget what the client has not taken."""
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
