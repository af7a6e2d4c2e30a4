"""A relay on the control line of a hand-off, which does to messages what a test asks for."""

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

from specdec.transfer.line import dial, frame, read_frame
from specdec.transfer.messages import Message, decode, encode

_END_TIMEOUT_S = 20.0


class Sender(StrEnum):
    """Whose words they are."""

    DECODE = "decode"
    PREFILL = "prefill"


class Action(StrEnum):
    """What happens to a message.

    Attributes:
        DROP: It is lost.
        DOUBLE: It comes twice.
        REPEAT: It comes again later.
        DELAY: It comes later, and so does all that its sender says after it.
        LATE: It comes later, and all that its sender says meanwhile overtakes it.
        SWAP: The next one of its sender overtakes it.
        DAMAGE: Bits of its frame change, or bytes of it are lost or added.
        CUT: Half of its frame comes, and the line breaks.
        CHANGE: Another message comes in its place.
    """

    DROP = "drop"
    DOUBLE = "double"
    REPEAT = "repeat"
    DELAY = "delay"
    LATE = "late"
    SWAP = "swap"
    DAMAGE = "damage"
    CUT = "cut"
    CHANGE = "change"


@dataclass(frozen=True)
class LineFault:
    """One fault, which happens once.

    Attributes:
        action: What happens.
        kind: To a message of this kind,
        occurrence: after so many others of it,
        sender: which this side sends; None where only one does.
        delay_s: Of what comes later.
        change: Gives the message that comes instead.
    """

    action: Action
    kind: type[Message]
    occurrence: int = 0
    sender: Sender | None = None
    delay_s: float = 1.3
    change: Callable[[Any], Message] | None = None


class FaultyLine:
    """Stands between decode groups and a prefill.

    Args:
        prefill: Address of the prefill.

    Attributes:
        address: Where decode groups call.
        prefill: Address of the prefill that the next call is passed on to.
        random: Draws what damage is done.
    """

    def __init__(self, prefill: str) -> None:
        self.prefill = prefill
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self.random = Random(0)
        self._lock = threading.Lock()
        self._faults: list[LineFault] = []
        self._num_seen: Counter[tuple[type[Message], Sender]] = Counter()
        self._num_late = 0
        self._last: dict[type[Message], Message] = {}
        self._ends: set[_End] = set()
        self._failures: list[BaseException] = []
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def script(self, *faults: LineFault) -> None:
        """Let these happen from now on, and no others; messages are counted anew."""
        with self._lock:
            self._faults = list(faults)
            self._num_seen.clear()

    @property
    def is_done(self) -> bool:
        """Whether every fault of the script has happened, and nothing is late any more."""
        with self._lock:
            return not self._faults and self._num_late == 0

    def num_seen(self, kind: type[Message]) -> int:
        """Count messages of a kind that came since the script began."""
        with self._lock:
            return sum(self._num_seen[kind, sender] for sender in Sender)

    def last(self, kind: type[Message]) -> Any:
        """Give the last message of a kind that came."""
        with self._lock:
            return self._last[kind]

    def say(self, message: Message, *, sender: Sender) -> None:
        """Say something on every line that is up, as if one side had said it."""
        with self._lock:
            ends = [end for end in self._ends if end.sender is sender]
        for end in ends:
            with contextlib.suppress(OSError):  # its line has broken, and it does not know
                end.pass_on(frame(encode(message)))

    def cut(self) -> None:
        """Break all lines."""
        with self._lock:
            ends = list(self._ends)
        for end in ends:
            end.hang_up()

    def close(self) -> None:
        """Break all lines and take no more calls; fails where a message could not be read."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in list(self._threads):
            thread.join(_END_TIMEOUT_S)
            assert not thread.is_alive()
        self._door.close()
        if self._failures:
            raise self._failures[0]

    def _run(self, work: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=args, name="faulty line", daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            try:
                far = dial(self.prefill)
            except OSError:
                near.close()
                continue
            for connection in (near, far):
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for end in (_End(Sender.DECODE, near, far), _End(Sender.PREFILL, far, near)):
                with self._lock:
                    self._ends.add(end)
                self._run(self._relay, end)

    def _relay(self, end: "_End") -> None:
        overtaken = b""
        try:
            while True:
                message = decode(read_frame(end.read))
                fault = self._fault_of(message, end.sender)
                overtaken = self._pass_on(end, message, fault, overtaken)
        except (EOFError, OSError):
            pass
        except BaseException as error:
            self._failures.append(error)
        end.hang_up()
        with self._lock:
            self._ends.remove(end)
        end.close()

    def _pass_on(self, end: "_End", message: Message, fault: LineFault | None, overtaken: bytes) -> bytes:
        """Pass a message on, behind it what it has overtaken; gives what the next one overtakes."""
        whole = frame(encode(message))
        if fault is None:
            end.pass_on(whole + overtaken)
            return b""
        match fault.action:
            case Action.DROP:
                whole = b""
            case Action.DOUBLE:
                whole += whole
            case Action.REPEAT | Action.LATE:
                self._run(self._pass_on_later, end, whole, fault.delay_s)
                whole = b"" if fault.action is Action.LATE else whole
            case Action.DELAY:
                self._is_closed.wait(fault.delay_s)
            case Action.SWAP:
                return overtaken + whole
            case Action.DAMAGE:
                whole = damaged(whole, self.random)
            case Action.CUT:
                end.pass_on(whole[: len(whole) // 2])
                raise EOFError
            case Action.CHANGE:
                assert fault.change is not None
                whole = frame(encode(fault.change(message)))
        end.pass_on(whole + overtaken)
        return b""

    def _pass_on_later(self, end: "_End", whole: bytes, delay_s: float) -> None:
        self._is_closed.wait(delay_s)
        with contextlib.suppress(OSError):
            end.pass_on(whole)
        with self._lock:
            self._num_late -= 1

    def _fault_of(self, message: Message, sender: Sender) -> LineFault | None:
        """Note a message, and take the fault that happens to it from the script."""
        kind = type(message)
        with self._lock:
            num_before = self._num_seen[kind, sender]
            due = [
                fault
                for fault in self._faults
                if fault.kind is kind and fault.sender in (None, sender) and fault.occurrence == num_before
            ]
            for fault in due:
                self._faults.remove(fault)
            self._num_seen[kind, sender] += 1
            self._num_late += sum(fault.action in (Action.REPEAT, Action.LATE) for fault in due)
            self._last[kind] = message
        return due[0] if due else None


class _End:
    """What one side says on one line.

    Args:
        sender: Which side.
        source: Where it is heard.
        target: Where it is passed on to.
    """

    def __init__(self, sender: Sender, source: socket.socket, target: socket.socket) -> None:
        self.sender = sender
        self._source = source
        self._target = target
        self._lock = threading.Lock()

    def read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            piece = self._source.recv(num_bytes - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def pass_on(self, data: bytes) -> None:
        with self._lock:
            self._target.sendall(data)

    def hang_up(self) -> None:
        for connection in (self._source, self._target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Be heard no more; the other end of the line closes the target."""
        self._source.close()


def damaged(whole: bytes, random: Random) -> bytes:
    """Give bytes that are not these: some of them flipped, replaced, lost or added to."""
    place, num_bytes = random.randrange(len(whole)), random.randrange(1, 9)
    match random.randrange(4):
        case 0:
            flipped = bytes([whole[place] ^ 1 << random.randrange(8)])
            return whole[:place] + flipped + whole[place + 1 :]
        case 1:
            noise = bytes(byte ^ random.randrange(1, 256) for byte in whole[place : place + num_bytes])
            return whole[:place] + noise + whole[place + num_bytes :]
        case 2:
            return whole[:place] + whole[place + num_bytes :]
        case _:
            return whole[:place] + random.randbytes(num_bytes) + whole[place:]
