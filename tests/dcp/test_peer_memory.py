"""Ranks map each other's memory all together or not at all, and say alike why not; over GPUs that are made up."""

import ctypes
import itertools
import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from specdec.dcp.peer_memory import CudaPeerDevice, PeerMemory, PeerMemoryError, Slab
from specdec.kernels.errors import ConfigError

NUM_BYTES = 1 << 20


_hosts = itertools.count()  # what one leaves behind is not the next one's


class FakeHost:
    """GPUs whose addresses tell whose they are: 1000 for each rank of a slab, and the rank that has mapped it."""

    def __init__(self, *, unreachable: frozenset[tuple[int, int]] = frozenset()) -> None:
        self.number = next(_hosts)
        self.unreachable = {(self.bus_id(rank), self.bus_id(other)) for rank, other in unreachable}
        self.events: list[tuple[str, int, int]] = []  # what, by which rank, where
        self.allocated = 0

    def bus_id(self, rank: int) -> str:
        return f"{self.number:04x}:0{rank}:00.0"


class FakeDevice:
    """One of them."""

    def __init__(self, host: FakeHost, rank: int, *, refuses_to_map: bool = False) -> None:
        self.bus_id = host.bus_id(rank)
        self._host, self._rank, self._refuses = host, rank, refuses_to_map

    def allocate(self, num_bytes: int) -> Slab:
        assert num_bytes == NUM_BYTES
        self._host.allocated += 1
        return Slab(1000 * (self._rank + 1), bytes([self._rank]) * 64)

    def clear(self, slab: Slab, num_bytes: int) -> None:
        assert num_bytes == NUM_BYTES
        self._note("clear", slab.address)

    def reaches(self, bus_id: str) -> bool:
        return (self.bus_id, bus_id) not in self._host.unreachable

    def map(self, handle: bytes) -> int:
        assert len(handle) == 64
        if self._refuses:
            raise RuntimeError("CUDA: CUDA_ERROR_MAP_FAILED")
        self._note("map", 1000 * (handle[0] + 1) + self._rank)
        return 1000 * (handle[0] + 1) + self._rank

    def unmap(self, address: int) -> None:
        self._note("unmap", address)

    def synchronize(self) -> None:
        self._note("synchronize", 0)

    def _note(self, what: str, address: int) -> None:
        self._host.events.append((what, self._rank, address))


def open_all(
    open_device: Callable[[int], FakeDevice], size: int, *, store: HashStore | PrefixStore | None = None
) -> list[PeerMemory | Exception]:
    """What every rank gets, in a thread each."""
    shared = HashStore() if store is None else store
    results: dict[int, PeerMemory | Exception] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = PeerMemory(
                NUM_BYTES, rank=rank, size=size, store=shared,
                timeout=timedelta(seconds=20), open_device=lambda: open_device(rank),
            )  # fmt: skip
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


def refusals(results: list[PeerMemory | Exception]) -> set[str]:
    assert all(isinstance(result, PeerMemoryError) for result in results), results
    return {str(result) for result in results}


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_has_mapped_all_others(size: int) -> None:
    host = FakeHost()
    for rank, memory in enumerate(open_all(lambda rank: FakeDevice(host, rank), size)):
        assert isinstance(memory, PeerMemory)
        expected = [1000 * (peer + 1) + (rank if peer != rank else 0) for peer in range(size)]
        assert memory.addresses == expected
    cleared = [host.events.index(("clear", rank, 1000 * (rank + 1))) for rank in range(size)]
    mapped = [place for place, (what, _, _) in enumerate(host.events) if what == "map"]
    assert max(cleared) < min(mapped)  # a peer may write as soon as it has mapped


def test_memory_is_let_go_of_once_kernels_have_ended_and_serves_the_next_group() -> None:
    host, stores = FakeHost(), HashStore()
    for attempt in range(3):
        store = PrefixStore(str(attempt), stores)
        memories = open_all(lambda rank: FakeDevice(host, rank), 2, store=store)
        host.events.clear()
        for rank, memory in enumerate(memories):
            assert isinstance(memory, PeerMemory)
            memory.close()
            assert host.events == [("synchronize", rank, 0), ("unmap", rank, 1000 * (2 - rank) + rank)]
            memory.close()
            host.events.clear()
    assert host.allocated == 2


def test_gpus_without_access_to_each_other_are_named() -> None:
    host = FakeHost(unreachable=frozenset({(1, 2)}))
    results = open_all(lambda rank: FakeDevice(host, rank), 3)
    assert refusals(results) == {f"rank 1: its GPU {host.bus_id(1)} has no access to {host.bus_id(2)} of rank 2"}
    mapped = sorted((rank, address) for what, rank, address in host.events if what == "map")
    assert mapped == sorted((rank, address) for what, rank, address in host.events if what == "unmap")


def test_a_refusal_of_the_driver_is_told_to_all() -> None:
    host = FakeHost()
    results = open_all(lambda rank: FakeDevice(host, rank, refuses_to_map=rank == 1), 2)
    assert refusals(results) == {"rank 1: it cannot map the memory of rank 0: CUDA: CUDA_ERROR_MAP_FAILED"}


@pytest.mark.parametrize("error", [RuntimeError("no driver"), ConfigError("no compiler")])
def test_a_rank_without_a_gpu_for_it_is_told_to_all(error: Exception) -> None:
    host = FakeHost()

    def open_device(rank: int) -> FakeDevice:
        if rank == 2:
            raise error
        return FakeDevice(host, rank)

    assert refusals(open_all(open_device, 3)) == {f"rank 2: its GPU takes no part: {error}"}
    assert not any(what == "map" for what, _, _ in host.events)


def test_ranks_on_different_hosts_do_not_map() -> None:
    store, host = HashStore(), FakeHost()
    store.set("offer/1", json.dumps({"host": "elsewhere", "bus_id": "0", "handle": "", "refusal": None}))
    with pytest.raises(PeerMemoryError, match="ranks 0 and 1 are on different hosts"):
        PeerMemory(
            NUM_BYTES, rank=0, size=2, store=store,
            timeout=timedelta(seconds=20), open_device=lambda: FakeDevice(host, 0),
        )  # fmt: skip


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        PeerMemory(
            NUM_BYTES, rank=0, size=2, store=HashStore(),
            timeout=timedelta(seconds=0.1), open_device=lambda: FakeDevice(FakeHost(), 0),
        )  # fmt: skip


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver's bindings, whose records are real; what would reach a device is made up."""
    module = pytest.importorskip("cuda.bindings.driver")
    answers: dict[str, Callable[..., tuple[Any, ...]]] = {
        "cuDeviceGet": lambda number: (0, 10 + number),
        "cuDevicePrimaryCtxRetain": lambda _: (0, 7),
        "cuCtxSetCurrent": lambda context: (0 if context == 7 else 1,),
        "cuDeviceGetPCIBusId": lambda _, number: (0, b"0000:%02d:00.0".ljust(32, b"\0") % number),
        "cuDeviceGetByPCIBusId": lambda name: (101, 0) if name.startswith(b"0000:99") else (0, int(name[5:7])),
        "cuDeviceCanAccessPeer": lambda _, other: (0, int(other != 13)),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(module, name, answer)
    return module


def test_a_gpu_reaches_those_that_the_driver_says_and_those_it_cannot_see(driver: Any) -> None:
    device = CudaPeerDevice(torch.device("cuda:1"))
    assert device.bus_id == "0000:11:00.0"
    reached = {number: device.reaches(f"0000:{number}:00.0") for number in (11, 12, 13, 99)}
    assert reached == {11: True, 12: True, 13: False, 99: True}


def test_a_handle_travels_as_its_bytes(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = bytes(range(100, 164))
    freed: list[int] = []

    def handle_of(address: Any) -> tuple[Any, ...]:
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), name, 64)
        return (0, handle) if int(address) == 4096 else (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, None)

    monkeypatch.setattr(driver, "cuMemAlloc", lambda num_bytes: (0, driver.CUdeviceptr(num_bytes)))
    monkeypatch.setattr(driver, "cuMemFree", lambda address: (freed.append(int(address)), (0,))[1])
    monkeypatch.setattr(driver, "cuIpcGetMemHandle", handle_of)
    monkeypatch.setattr(
        driver, "cuIpcOpenMemHandle", lambda handle, _: (0, ctypes.string_at(handle.getPtr(), 64)[0] * 1000)
    )
    device = CudaPeerDevice(torch.device("cuda:0"))
    assert device.allocate(4096) == Slab(4096, name)
    assert device.map(name) == 100_000
    assert not freed
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NOT_SUPPORTED"):
        device.allocate(8192)
    assert freed == [8192]
