"""A process whose memory tests write to, and the settings under which the libraries stay on this host's loopback."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from specdec.errors import ConfigError
from specdec.transfer.transport import Transport, open_transport

REQUIRE_ALL = "SPECDEC_REQUIRE_TRANSPORTS"  # set where a missing library is a failure and not a skip
POISON = 0xA5


def use_loopback() -> None:
    """Keep both libraries on TCP sockets of this host, in this process and those it starts."""
    for name, value in (("MC_FORCE_TCP", "1"), ("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo")):
        os.environ.setdefault(name, value)


def open_or_skip(name: str, **options: Any) -> Transport:
    """Open a transport; where its library is missing the test is skipped, or fails where all must be there."""
    use_loopback()
    try:
        return open_transport(name, **options)
    except ConfigError as error:
        if os.environ.get(REQUIRE_ALL):
            raise
        pytest.skip(str(error))


class PeerProcess:
    """A process with a transport whose regions are filled with poison.

    Args:
        name: Which transport.
        regions: Bytes of each region.
        device: Where they are.
    """

    def __init__(self, name: str, regions: Mapping[str, int], *, device: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, name, dict(regions), device), daemon=True)
        self.process.start()
        child.close()
        self._address: bytes | None = None

    @property
    def address(self) -> bytes:
        """Of its transport; waits for the process to start."""
        if self._address is None:
            self._address = self._answer()
        return self._address

    def read(self, region: str) -> np.ndarray:
        """Give the bytes of a region, u8 [bytes]."""
        return np.frombuffer(self.ask("read", region), np.uint8)

    def ask(self, *command: str) -> Any:
        """Have a command carried out."""
        self._pipe.send(command)
        return self._answer()

    def reopen(self) -> bytes:
        """Close its transport and open another with fresh memory; gives the new address."""
        self._address = self.ask("reopen")
        return self.address

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process; it goes on at the end."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it without a last word."""
        self.process.kill()
        self.process.join()

    def end(self) -> int | None:
        """Let it end in order; gives its exit code."""
        if self.process.is_alive():
            self._pipe.send(("end",))
            self.process.join(30)
        self._pipe.close()
        return self.process.exitcode

    def _answer(self) -> Any:
        assert self._pipe.poll(60), "the peer's process does not answer"
        return self._pipe.recv()


def _serve(pipe: Connection, name: str, regions: dict[str, int], device: str) -> None:
    torch.set_num_threads(1)
    transport, memory = _open(name, regions, device)
    pipe.send(transport.address())
    while True:
        match pipe.recv():
            case ["read", region]:
                pipe.send(memory[region].cpu().numpy().tobytes())
            case ["num_fresh", region]:
                pipe.send(int((memory[region] != POISON).sum()))
            case ["poison"]:
                _poison(memory)
                pipe.send(None)
            case ["reopen"]:
                transport.close()
                transport, memory = _open(name, regions, device)
                pipe.send(transport.address())
            case ["end"]:
                transport.close()
                return


def _open(name: str, regions: dict[str, int], device: str) -> tuple[Transport, dict[str, torch.Tensor]]:
    transport = open_transport(name)
    memory = {region: transport.allocate(nbytes, device) for region, nbytes in regions.items()}
    transport.register(memory)
    _poison(memory)
    return transport, memory


def _poison(memory: Mapping[str, torch.Tensor]) -> None:
    for tensor in memory.values():
        tensor.fill_(POISON)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
