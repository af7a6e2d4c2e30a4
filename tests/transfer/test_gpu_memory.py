"""GPU memory that peers may have mapped is neither freed nor handed out again too soon."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from specdec.dcp.peer_memory import Slab
from specdec.errors import ConfigError, TransferError
from specdec.transfer import gpu_memory
from specdec.transfer.address import ProcessRecord, decode_address, encode_address
from specdec.transfer.descriptors import Descriptors
from specdec.transfer.gate import GateVisit
from specdec.transfer.gpu_memory import GpuMemory, MappedMemory
from specdec.transfer.transport import RegionCopies, Transport, WriteState, open_transport
from tests.support.gpu import needs_gpu, needs_gpus

PAGE = 2 << 20
CPU = torch.device("cpu")
WAIT_S = 30.0


class FakeGpu:
    """A GPU whose memory is numbers."""

    bus_id = "0000:01:00.0"

    def __init__(self, _: Any) -> None:
        self.taken: list[int] = []
        self.freed: list[int] = []
        self.cleared: list[tuple[int, int]] = []

    def allocate(self, num_bytes: int) -> Slab:
        address = PAGE * (1 + len(self.taken))
        self.taken.append(num_bytes)
        return Slab(address, address.to_bytes(64, "little"))

    def clear(self, slab: Slab, num_bytes: int) -> None:
        self.cleared.append((slab.address, num_bytes))

    def free(self, slab: Slab) -> None:
        self.freed.append(slab.address)

    def reaches(self, bus_id: str) -> bool:
        return bus_id != "0000:99:00.0"

    def access(self, device: torch.device) -> None:
        pass

    def map(self, handle: bytes) -> int:
        if handle[0] == 1:
            raise RuntimeError("CUDA: CUDA_ERROR_INVALID_HANDLE")
        return 77

    def unmap(self, address: int) -> None:
        self.freed.append(-address)


class FakeTensor:
    """Lives as long as whoever has it wants."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def data_ptr(self) -> int:
        return int(self.owner.__cuda_array_interface__["data"][0])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One GPU for all transports of a test."""
    fake = FakeGpu(None)
    monkeypatch.setattr(gpu_memory, "GpuDevice", lambda _: fake)
    monkeypatch.setattr(gpu_memory, "_tensor_of", lambda owner, _: FakeTensor(owner))
    monkeypatch.setattr(gpu_memory, "_kept", {})
    monkeypatch.setattr(gpu_memory, "_address_by_handle", {})
    monkeypatch.setattr(gpu_memory, "_LAST_WRITES_S", 0.05)
    return fake


def visit(memory: GpuMemory) -> GateVisit:
    return GateVisit(ProcessRecord.of_this_process(), memory.gate.record)


def test_whole_pages_are_taken_and_what_is_asked_for_is_cleared(gpu: Any) -> None:
    memory = GpuMemory(CPU)
    small, large = memory.allocate(100), memory.allocate(PAGE + 1)
    assert gpu.taken == [PAGE, 2 * PAGE]
    assert gpu.cleared == [(small.data_ptr(), 100), (large.data_ptr(), PAGE + 1)]
    assert memory.handle_of(small) == small.data_ptr().to_bytes(64, "little")
    assert memory.handle_of(torch.zeros(1)) == b""


def test_memory_of_the_same_size_serves_again_once_nobody_writes_to_it(gpu: Any) -> None:
    old = GpuMemory(CPU)
    tensor = old.allocate(100)
    address = tensor.data_ptr()
    peer = visit(old)
    peer.enter()
    old.gate.shut()
    del tensor
    first = GpuMemory(CPU).allocate(100)
    assert first.data_ptr() != address  # the peer may still write there
    peer.leave()
    assert GpuMemory(CPU).allocate(100).data_ptr() == address  # mapped all the same, but nobody can enter any more
    assert not gpu.freed


def test_memory_of_another_size_is_freed_once_nobody_has_it_mapped(gpu: Any) -> None:
    old = GpuMemory(CPU)
    tensor = old.allocate(100)
    address = tensor.data_ptr()
    peer = visit(old)
    old.gate.shut()
    del tensor
    kept = [GpuMemory(CPU).allocate(3 * PAGE)]
    assert not gpu.freed
    peer.close()
    kept.append(GpuMemory(CPU).allocate(5 * PAGE))
    assert gpu.freed == [address]


def test_memory_that_served_again_is_freed_only_once_nobody_has_it_mapped_from_before(gpu: Any) -> None:
    first = GpuMemory(CPU)
    tensor = first.allocate(100)
    address = tensor.data_ptr()
    peer = visit(first)
    first.gate.shut()
    del tensor
    second = GpuMemory(CPU)
    tensor = second.allocate(100)
    assert tensor.data_ptr() == address
    second.gate.shut()
    del tensor
    kept = [GpuMemory(CPU).allocate(3 * PAGE)]
    assert not gpu.freed
    peer.close()
    kept.append(GpuMemory(CPU).allocate(5 * PAGE))
    assert gpu.freed == [address]


def test_memory_in_use_is_never_handed_out(gpu: Any) -> None:
    memory = GpuMemory(CPU)
    tensors = [memory.allocate(100) for _ in range(4)]
    assert len({tensor.data_ptr() for tensor in tensors}) == 4
    assert not gpu.freed


def test_memory_of_a_peer_is_mapped_and_that_of_this_process_is_used_as_it_is(gpu: Any) -> None:
    memory = GpuMemory(CPU)
    tensor = memory.allocate(100)
    handle = memory.handle_of(tensor)
    of_peer = MappedMemory(gpu, handle, bus_id=gpu.bus_id, here=None)
    own = MappedMemory(gpu, handle, bus_id=gpu.bus_id, here=CPU)
    assert (of_peer.address, own.address) == (77, tensor.data_ptr())
    of_peer.close()
    own.close()
    assert gpu.freed == [-77]


@pytest.mark.parametrize(
    ("handle", "bus_id", "words"),
    [
        (bytes(64), "0000:99:00.0", "no access to memory of GPU 0000:99"),
        (b"\1" * 64, "0", "cannot map .*INVALID_HANDLE"),
    ],
)
def test_memory_that_cannot_be_mapped_is_an_error_of_the_write(
    gpu: Any, handle: bytes, bus_id: str, words: str
) -> None:
    with pytest.raises(TransferError, match=words):
        MappedMemory(gpu, handle, bus_id=bus_id, here=None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["local", "nixl"])
def test_a_gpu_that_is_not_there_is_refused(name: str) -> None:
    with open_transport(name) as transport, pytest.raises(ConfigError, match="cannot take memory of cuda"):
        transport.allocate(8, device="cuda:0")


def test_a_build_of_mooncake_without_cuda_refuses_gpus() -> None:
    engine = pytest.importorskip("mooncake.engine").__file__
    with open(engine, "rb") as file:
        if b"libcudart.so" in file.read():
            pytest.skip("this build knows CUDA")
    with open_transport("mooncake") as transport, pytest.raises(ConfigError, match="memory of the host only"):
        transport.allocate(8, device="cuda:0")


@pytest.mark.parametrize("is_gpu_here", [False, True])
def test_bytes_do_not_go_between_a_host_and_a_gpu(monkeypatch: pytest.MonkeyPatch, is_gpu_here: bool) -> None:
    with open_transport("local") as target, open_transport("local") as writer:
        target.register({"memory": target.allocate(64)})
        writer.register({"memory": torch.zeros(64, dtype=torch.uint8)})
        record = decode_address(target.address(), transport="local")
        fields = {name: getattr(record, name) for name in record.__struct_fields__}
        (region,) = record.regions
        of_region = {name: getattr(region, name) for name in region.__struct_fields__}
        if is_gpu_here:
            monkeypatch.setattr(type(writer._regions["memory"]), "is_cuda", True, raising=False)  # type: ignore[attr-defined]
        else:
            fields["regions"] = (type(region)(**{**of_region, "device": 0}),)
        peer = writer.connect(encode_address(type(record)(**fields)))
        zero = np.zeros(1, np.int64)
        with pytest.raises(TransferError, match="keep both on GPUs, or both on hosts"):
            writer.write(peer, [RegionCopies("memory", "memory", Descriptors(zero, zero, zero + 8))])


# On GPUs.

PAIRS = [
    pytest.param("cuda:0", "cuda:0", id="gpu", marks=needs_gpu),
    pytest.param("cuda:0", "cuda:1", id="gpus", marks=needs_gpus(2)),
]


def whole(num_bytes: int) -> list[RegionCopies]:
    zero = np.zeros(1, np.int64)
    return [RegionCopies("memory", "memory", Descriptors(zero, zero, np.array([num_bytes])))]


@pytest.fixture
def opened() -> Iterator[Callable[[], Transport]]:
    transports: list[Transport] = []

    def open_local() -> Transport:
        transports.append(open_transport("local"))
        return transports[-1]

    yield open_local
    for transport in transports:
        transport.close()


@pytest.mark.parametrize(("own", "peers"), PAIRS)
def test_two_transports_of_one_process_write_to_each_others_gpu(
    opened: Callable[[], Transport], own: str, peers: str
) -> None:
    sides = [(opened(), device) for device in (own, peers)]
    memory = []
    for transport, device in sides:
        memory.append(transport.allocate(1_000_003, device))
        transport.register({"memory": memory[-1]})
        assert memory[-1].device == torch.device(device)
        assert not memory[-1].any()
    before = torch.cuda.current_device()
    memory[0].copy_(torch.randint(0, 256, (1_000_003,), dtype=torch.uint8))
    write = sides[0][0].write(sides[0][0].connect(sides[1][0].address()), whole(1_000_003))
    assert write.wait(WAIT_S) is WriteState.DONE, write.error
    assert torch.equal(memory[0].cpu(), memory[1].cpu())
    memory[1].zero_()
    back = sides[1][0].write(sides[1][0].connect(sides[0][0].address()), whole(1_000_003))
    assert back.wait(WAIT_S) is WriteState.DONE, back.error
    assert not memory[0].any()
    assert torch.cuda.current_device() == before


@pytest.mark.parametrize(("own", "peers"), PAIRS)
def test_bytes_that_a_stream_is_still_to_write_are_waited_for(
    opened: Callable[[], Transport], own: str, peers: str
) -> None:
    target, writer = opened(), opened()
    received, source = target.allocate(4096, peers), writer.allocate(4096, own)
    target.register({"memory": received})
    writer.register({"memory": source})
    peer = writer.connect(target.address())
    assert writer.write(peer, whole(4096)).wait(WAIT_S) is WriteState.DONE
    source.fill_(5)  # loads the kernel, which may wait for all that runs
    with torch.cuda.device(own), torch.cuda.stream(torch.cuda.Stream(own)):
        torch.cuda._sleep(400_000_000)  # a fifth of a second
        source.fill_(7)
        write = writer.write(peer, whole(4096))
        cancelled = writer.write(peer, whole(4096))
        source.fill_(9)  # behind the write; what it reads it may read before or after
    cancelled.cancel()
    assert (cancelled.state, cancelled.may_land) == (WriteState.FAILED, False)
    assert not write.may_land  # nothing is posted before
    assert write.wait(WAIT_S) is WriteState.DONE
    assert set(received.unique().tolist()) <= {7, 9}


@pytest.mark.parametrize(("own", "peers"), PAIRS)
def test_memory_that_is_taken_again_is_not_written_by_who_knew_it_before_on_a_gpu(
    opened: Callable[[], Transport], own: str, peers: str
) -> None:
    writer, target = opened(), opened()
    writer.register({"memory": torch.full((5 << 20,), 7, dtype=torch.uint8, device=own)})
    memory = target.allocate(5 << 20, peers)
    address = memory.data_ptr()
    target.register({"memory": memory})
    peer = writer.connect(target.address())
    assert writer.write(peer, whole(5 << 20)).wait(WAIT_S) is WriteState.DONE
    late = [writer.write(peer, whole(5 << 20)) for _ in range(50)]
    target.close()
    del memory
    gc.collect()
    again = opened().allocate(5 << 20, peers)
    assert again.data_ptr() == address
    assert not again.any()
    assert late[-1].wait(WAIT_S) is WriteState.FAILED
    assert "was closed" in str(late[-1].error)
    assert not late[-1].may_land
    torch.cuda.synchronize(own)
    assert not again.any()


@needs_gpus(2)
def test_a_transport_has_memory_of_one_gpu_only(opened: Callable[[], Transport]) -> None:
    transport = opened()
    transport.allocate(8, "cuda:0")
    with pytest.raises(ConfigError, match="on one GPU, here cuda:0, got cuda:1"):
        transport.allocate(8, "cuda:1")


@needs_gpu
def test_memory_of_torch_on_a_gpu_is_a_source_only(opened: Callable[[], Transport]) -> None:
    transport = opened()
    transport.register({"memory": torch.zeros(8, device="cuda:0")})
    peer = opened().connect(transport.address())
    assert not peer.regions
