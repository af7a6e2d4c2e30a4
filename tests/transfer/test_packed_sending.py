"""What is packed and sent through a transport is what one token at a time would have moved.

Tags such as A43 are explained in `tests/INVARIANTS.md`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from specdec.dcp.layout import FieldLayout
from specdec.errors import TransferError
from specdec.transfer.descriptors import RegionMemory
from specdec.transfer.packed_sending import PackedSending, PackedSource
from specdec.transfer.packing import PackBuffer
from specdec.transfer.placement import layer_split, sharded
from specdec.transfer.reshard_plan import Path, ReshardPlan, Span, plan_reshard
from specdec.transfer.transport import Peer, Transport, WriteState, open_transport
from tests.support.faulty_transport import Fault, FaultyTransport
from tests.support.reshard_cases import ReshardCase, moved_by_definition, random_case, write_cells
from tests.support.transfer_peer import open_or_skip

WAIT_S = 60.0
KIND = "entry"


class Rig:
    """Both sides of a case in this process: a transport for each destination rank, one for all source ranks."""

    def __init__(self, stack: contextlib.ExitStack, name: str, case: ReshardCase, *, buffer_bytes: int, regions: int):
        self.case = case
        self.plan: ReshardPlan = plan_reshard({KIND: case.span})
        self.destinations = [self._target(stack, name, memory) for memory in case.destination_memory]
        self.transport = FaultyTransport(open_transport(name))
        stack.callback(self.transport.close)
        memory = self.transport.allocate(buffer_bytes)
        self.transport.register({"pack": memory})
        self.sending = PackedSending(self.transport, PackBuffer(memory, num_regions=regions), buffer_name="pack")
        self.peers: dict[int, Peer] = {
            rank: self.transport.connect(transport.address()) for rank, (transport, _) in enumerate(self.destinations)
        }

    def _target(
        self, stack: contextlib.ExitStack, name: str, noise: "np.ndarray[Any, Any]"
    ) -> tuple[Transport, torch.Tensor]:
        transport = open_transport(name)
        stack.callback(transport.close)
        memory = transport.allocate(len(noise))
        memory.copy_(torch.from_numpy(noise))
        transport.register({KIND: memory})
        return transport, memory

    def send(self, rank: int, *, timeout_s: float = WAIT_S) -> list[Any]:
        source = PackedSource(torch.from_numpy(self.case.source_memory[rank]), self.case.source_regions[rank])

        def destination_of(path: Path) -> RegionMemory:
            return self.case.destination_regions[path.destination_rank]

        paths = self.plan.paths_from(rank)
        return self.sending.send(paths, {KIND: source}, destination_of, self.peers, timeout_s=timeout_s)

    def assert_moved(self) -> None:
        for (_, memory), right in zip(self.destinations, moved_by_definition(self.case), strict=True):
            assert np.array_equal(memory.numpy(), right)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("seed", range(40))
def test_any_geometry_arrives_as_the_definition_says(stack: contextlib.ExitStack, seed: int) -> None:
    """A43: with regions that are filled again and again, and with room for everything."""
    rng = np.random.default_rng(seed)
    rig = Rig(
        stack,
        "local",
        random_case(seed),
        buffer_bytes=int(rng.choice([96, 320, 1 << 14])),
        regions=int(rng.choice([1, 3])),
    )
    for rank in range(len(rig.case.source_memory)):
        for write in rig.send(rank):
            assert write.wait(WAIT_S) is WriteState.DONE
    rig.assert_moved()
    assert rig.sending.reclaim() == 0


def interleaved_case() -> ReshardCase:
    """Layers split over two ranks, to a foreign engine whose two shards take tokens in turns, in two groups."""
    layers, num_pages, page_size, num_tokens = [0, 1, 2], 12, 4, 37
    source = layer_split(layers, num_ranks=2, model_layers=3, page_size=page_size, num_pages=num_pages)
    destination = sharded([layers], dcp_size=2, tp_size=4, block_width=1, page_size=page_size, num_pages=num_pages)
    fields = (FieldLayout("keys", 0, 3, 3), FieldLayout("scales", 12, 2, 2))
    regions = [
        RegionMemory(page_size=page_size, page_stride=20 * len(held), layer_stride=20, fields=fields)
        for held in (*source.rank_layers, *destination.rank_layers)
    ]
    rng = np.random.default_rng(5)
    span = Span(
        source=source,
        source_pages=rng.permutation(num_pages)[:10].astype(np.int64),
        destination=destination,
        destination_pages=np.stack([rng.permutation(num_pages)[:5] for _ in range(2)]).astype(np.int64),
        begin=3,
        end=num_tokens,
    )
    case = ReshardCase(
        span=span,
        source_regions=regions[:2],
        destination_regions=regions[2:],
        source_memory=[rng.integers(0, 256, num_pages * each.page_stride, dtype=np.uint8) for each in regions[:2]],
        destination_memory=[rng.integers(0, 256, num_pages * each.page_stride, dtype=np.uint8) for each in regions[2:]],
    )
    write_cells(span, source, span.source_pages, case.source_regions, case.source_memory)
    return case


@pytest.mark.parametrize("name", ["local", "mooncake", "nixl"])
def test_interleaved_tokens_travel_packed_over_every_transport(stack: contextlib.ExitStack, name: str) -> None:
    open_or_skip(name).close()
    case = interleaved_case()
    rig = Rig(stack, name, case, buffer_bytes=4 * 96, regions=4)
    for rank in range(2):
        for write in rig.send(rank):
            assert write.wait(WAIT_S) is WriteState.DONE, write.error
    rig.assert_moved()
    num_writes = len(rig.transport.writes)
    num_packed = sum(len(copy.descriptors) for write in rig.transport.writes for copy in write._copies)
    num_rows = 34 * 3 * 2 * 2  # tokens, layers, fields, groups of ranks
    assert num_packed < num_rows / 2
    assert num_writes % 2 == 0  # each pack is sent to both peers that hold the same shard


def test_a_region_is_filled_again_only_once_nothing_reads_it(stack: contextlib.ExitStack) -> None:
    """A43: neither while a write runs nor while a failed one may still be read."""
    rig = Rig(stack, "local", interleaved_case(), buffer_bytes=96, regions=1)
    rig.transport.faults.extend([Fault.HOLD, None])
    with pytest.raises(TransferError, match=r"no region of the pack buffer came free in 0\.05 s"):
        rig.send(0, timeout_s=0.05)
    assert rig.sending.reclaim() == 1
    before = rig.sending._buffer.memory.clone()
    with pytest.raises(TransferError, match="no region"):
        rig.send(1, timeout_s=0.05)
    assert torch.equal(rig.sending._buffer.memory, before)
    rig.transport.release()
    rig.transport.faults.append(Fault.LAND_LATE)
    with pytest.raises(TransferError, match="no region"):
        rig.send(0, timeout_s=0.05)
    rig.transport.release()
    for rank in range(2):
        for write in rig.send(rank):
            assert write.wait(WAIT_S) is WriteState.DONE
    rig.assert_moved()


def test_a_gather_that_fails_gives_its_region_back(stack: contextlib.ExitStack) -> None:
    case = interleaved_case()
    rig = Rig(stack, "local", case, buffer_bytes=96, regions=1)
    short = PackedSource(torch.zeros(4, dtype=torch.uint8), case.source_regions[0])
    with pytest.raises(ValueError, match="leave source"):
        rig.sending.send(
            rig.plan.paths_from(0), {KIND: short}, lambda _: case.destination_regions[0], rig.peers, timeout_s=WAIT_S
        )
    for rank in range(2):
        rig.send(rank)
    rig.sending.reclaim()
    for write in rig.transport.writes:
        assert write.wait(WAIT_S) is WriteState.DONE
    rig.assert_moved()


class Landed:
    """A write that is over."""

    state, may_land = WriteState.DONE, False


class DirectTransport:
    """Writes at once, from the buffer as it is now: what is not gathered yet is missed."""

    def __init__(self, buffer: torch.Tensor, targets: dict[int, torch.Tensor]) -> None:
        self._buffer, self._targets = buffer, targets

    def write(self, peer: Any, copies: Any) -> Any:
        memory = self._buffer.cpu()
        for copy in copies:
            arrays = (
                copy.descriptors.source_offset_X,
                copy.descriptors.destination_offset_X,
                copy.descriptors.length_X,
            )
            for start, to, size in zip(*(array.tolist() for array in arrays), strict=True):
                self._targets[peer][to : to + size] = memory[start : start + size]
        return Landed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="gathers on a GPU")
def test_gathers_on_a_gpu_wait_for_the_kv_and_are_complete_when_posted() -> None:
    case = interleaved_case()
    got = {rank: torch.from_numpy(memory.copy()) for rank, memory in enumerate(case.destination_memory)}
    plan = plan_reshard({KIND: case.span})
    for rank, memory in enumerate(case.source_memory):
        buffer = torch.zeros(4 * 96, dtype=torch.uint8, device="cuda")
        transport: Any = DirectTransport(buffer, got)
        sending = PackedSending(transport, PackBuffer(buffer, num_regions=4), buffer_name="pack")
        pool = torch.zeros(len(memory), dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(100_000_000)  # the KV is written late
        pool.copy_(torch.from_numpy(memory).pin_memory(), non_blocking=True)
        stored = torch.cuda.Event()
        stored.record()
        peers: Any = {each: each for each in got}
        sending.send(
            plan.paths_from(rank),
            {KIND: PackedSource(pool, case.source_regions[rank])},
            lambda path: case.destination_regions[path.destination_rank],
            peers,
            timeout_s=WAIT_S,
            stored=stored,
        )
        assert sending.reclaim() == 0
    for rank, right in enumerate(moved_by_definition(case)):
        assert np.array_equal(got[rank].numpy(), right)
