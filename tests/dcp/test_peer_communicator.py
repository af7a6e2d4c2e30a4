"""Exchanges of GPUs through each other's memory equal those of a process group; on CPUs, what goes which way."""

import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from specdec.dcp import peer_communicator
from specdec.dcp.communicator import Collective, CollectiveRecord, Communicator, ordered_sum
from specdec.dcp.exchange import gather_heads
from specdec.dcp.peer_communicator import PeerCommunicator, over_peer_memory
from specdec.kernels.add_rms_norm import add_rms_norm
from specdec.kernels.errors import CollectiveError
from specdec.kernels.lse_merge import AttentionState
from specdec.kernels.peer_slab import SlabLayout
from specdec.kernels.shard_merge import merge_shards
from specdec.kernels.state_message import pack_states, unpacked_states
from specdec.kernels.sum_in_order import sum_in_order
from specdec.models.glm.shard_launches import exchange_shards
from tests.support.gpu import needs_gpu, needs_two_gpus
from tests.support.peer_ranks import GpuRank, run_gpu_ranks

CPU = torch.device("cpu")


class FakeGroup:
    """A process group that notes what it is asked for."""

    def __init__(self, *, size: int = 2, rank: int = 0) -> None:
        self.name, self.size, self.rank, self.record = "tp", size, rank, CollectiveRecord(is_recording=True)
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *_, **__: self.asked.append(name) or f"{name} of the group"

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.asked.append("all_gather")
        return torch.stack([tensor] * self.size)

    def note(self, kind: str, num_bytes: int) -> None:
        self.record.collectives.append(Collective(self.name, kind, num_bytes))


class FakeMemory:
    """Slabs that nobody has."""

    def __init__(self, size: int) -> None:
        self.addresses = [0] * size
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> tuple[PeerCommunicator, Any, FakeMemory]:
    for name in ("all_gather", "all_to_all", "add_norm", "merge"):
        monkeypatch.setattr(peer_communicator, f"peer_{name}", lambda *_, name=name, **__: f"{name} of peers")
    group: Any = FakeGroup(size=3)
    memory: Any = FakeMemory(3)
    return PeerCommunicator(group, memory, device=CPU), group, memory


def test_what_fits_goes_through_the_peers_memory_and_all_else_by_the_group(
    fakes: tuple[PeerCommunicator, Any, FakeMemory],
) -> None:
    communicator, group, _ = fakes
    most = SlabLayout(3).most_row_bytes
    fits, too_large = (torch.empty(count, dtype=torch.uint8) for count in (most, most + 1))
    fits_N, too_large_N = (torch.empty(3, count, dtype=torch.uint8) for count in (most, most + 1))
    assert communicator.all_gather(fits) == "all_gather of peers"
    assert communicator.all_gather(too_large).shape == (3, most + 1)
    assert communicator.all_to_all(fits_N) == "all_to_all of peers"
    assert communicator.all_to_all(too_large_N) == "all_to_all of the group"
    assert communicator.takes(most)
    assert not communicator.takes(most + 1)
    assert communicator.broadcast(fits, source=1) == "broadcast of the group"
    assert group.asked == ["all_gather", "all_to_all", "broadcast"]
    assert communicator.record.take() == [("tp", "all_gather", 2 * most), ("tp", "all_to_all", 2 * most)]


def test_rows_that_are_added_up_count_as_gathered_and_few_enough_fit(
    fakes: tuple[PeerCommunicator, Any, FakeMemory],
) -> None:
    communicator, _, _ = fakes
    max_rows = SlabLayout(3).max_rows
    row_TH = torch.zeros(max_rows, 6144, dtype=torch.bfloat16)
    communicator.add_norm(row_TH, row_TH, row_TH[0], eps=1e-5, normed_TH=row_TH)
    assert communicator.record.take() == [("tp", "all_gather", 2 * max_rows * 6144 * 2)]
    assert communicator.adds_rows(row_TH)
    assert not communicator.adds_rows(torch.zeros(max_rows + 1, 6144))
    assert not communicator.adds_rows(torch.zeros(1, 512))


def test_ranks_stand_side_by_side_along_any_axis_whichever_way_they_are_gathered(
    fakes: tuple[PeerCommunicator, Any, FakeMemory],
) -> None:
    communicator, group, _ = fakes
    most = SlabLayout(3).most_row_bytes
    assert communicator.all_gather(torch.zeros(2, most // 2, dtype=torch.uint8), axis=1) == "all_gather of peers"
    assert communicator.all_gather(torch.zeros(2, most, dtype=torch.uint8), axis=1).shape == (2, 3, most)
    assert group.asked == ["all_gather"]


def test_heads_that_are_merged_count_as_sent_to_those_that_keep_them(
    fakes: tuple[PeerCommunicator, Any, FakeMemory],
) -> None:
    communicator, _, _ = fakes
    out_TGL, lse_TG = torch.zeros(5, 6, 16, dtype=torch.bfloat16), torch.zeros(5, 6)
    out_TAL, lse_TA = torch.zeros(5, 2, 16, dtype=torch.bfloat16), torch.zeros(5, 2)
    assert communicator.takes_states(out_TGL)
    assert not communicator.takes_states(out_TGL[:, :5])
    first_owner_B = torch.zeros(1, dtype=torch.int64)
    communicator.merge_states(out_TGL, lse_TG, first_owner_B=first_owner_B, out_TAL=out_TAL, lse_TA=lse_TA)
    assert communicator.record.take() == [("tp", "all_to_all", 2 * 5 * 2 * (2 * 16 + 4))]


def test_a_group_that_was_left_exchanges_nothing(fakes: tuple[PeerCommunicator, Any, FakeMemory]) -> None:
    communicator, group, memory = fakes
    communicator.abort()
    assert group.asked == ["abort"]
    for collective in (communicator.all_gather, communicator.all_to_all):
        with pytest.raises(CollectiveError, match="over the tp ranks broke off: the group was left"):
            collective(torch.zeros(3, 1))
    row_TH = torch.zeros(1, 6144)
    with pytest.raises(CollectiveError, match="over the tp ranks broke off: the group was left"):
        communicator.add_norm(row_TH, row_TH, row_TH[0], eps=1e-5, normed_TH=row_TH)
    with pytest.raises(CollectiveError, match="over the tp ranks broke off: the group was left"):
        communicator.merge_states(row_TH, row_TH, first_owner_B=row_TH, out_TAL=row_TH, lse_TA=row_TH)
    communicator.close()
    assert group.asked == ["abort", "close"]
    assert not memory.closed  # a rank that was lost may still write there


def test_memory_is_closed_once_and_with_the_group(fakes: tuple[PeerCommunicator, Any, FakeMemory]) -> None:
    communicator, group, memory = fakes
    communicator.close()
    assert (group.asked, memory.closed) == (["close"], 1)
    with pytest.raises(CollectiveError):
        communicator.all_gather(torch.zeros(1))


@pytest.mark.parametrize(
    ("size", "why"),
    [(9, "at most 8 ranks do, and there are 9"), (2, "rank {rank}: its GPU takes no part: no such device")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_says_why_a_group_stays_with_nccl(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: int, size: int, why: str
) -> None:
    monkeypatch.setattr(peer_communicator, "load_peer_exchange", lambda _: None)
    monkeypatch.setattr(peer_communicator, "CudaPeerDevice", lambda _: _raise(RuntimeError("no such device")))
    store = HashStore()
    store.set(f"offer/{1 - rank}", '{"host": "", "bus_id": "", "handle": "", "refusal": null}')
    group: Any = FakeGroup(size=size, rank=rank)
    assert over_peer_memory(group, store=store, timeout=timedelta(seconds=20), device=CPU) is group
    said = f"specdec: the tp ranks exchange all by NCCL, not through their GPUs' memory: {why.format(rank=rank)}\n"
    assert capsys.readouterr().err == (said if rank == 0 else "")


def _raise(error: Exception) -> Any:
    raise error


# Ranks on one GPU take turns on it; where there are as many GPUs as ranks, each has its own.
on_gpus = pytest.mark.parametrize(
    ("size", "num_gpus"),
    [
        (2, 1),
        (3, 1),
        pytest.param(2, 2, marks=needs_two_gpus),
    ],
)


def random_rows(size: int, row_bytes: int, *, seed: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(0, 256, (size, row_bytes), dtype=torch.uint8, generator=generator)


def exchange_sizes(rank: GpuRank) -> None:
    communicator = rank.connect()
    layout = communicator.slabs.layout
    small = 16 * layout.most_small_units
    sizes = [1, 3, 16, 4100, 65521, small, small + 16, small + 1, layout.most_row_bytes]
    for number, row_bytes in enumerate(sizes):
        sent_N = random_rows(communicator.size, row_bytes, seed=number, rank=communicator.rank)
        own_N = torch.empty(sent_N.numel() + 16, dtype=torch.uint8, device=rank.device)
        own_N = own_N[communicator.rank : communicator.rank + sent_N.numel()].view_as(sent_N)  # some are askew
        own_N.copy_(sent_N)
        assert torch.equal(communicator.all_to_all(own_N).cpu(), rank.alone.all_to_all(sent_N)), row_bytes
        assert torch.equal(communicator.all_gather(own_N[0]).cpu(), rank.alone.all_gather(sent_N[0])), row_bytes
    for shape in ((6, 32, 576), (96, 32, 576), (5, 3)):  # queries of few rows and of many
        rows = random_rows(1, math.prod(shape), seed=len(shape), rank=communicator.rank).view(shape)
        expected = torch.cat([*rank.alone.all_gather(rows)], dim=1)
        assert torch.equal(gather_heads(rows.to(rank.device), communicator).cpu(), expected)
    nan_T = torch.arange(0x7F80, 0x8000, dtype=torch.int16).view(torch.bfloat16)
    gathered_NT = communicator.all_gather(nan_T.to(rank.device)).cpu().view(torch.int16)
    assert torch.equal(gathered_NT, nan_T.view(torch.int16).expand_as(gathered_NT))
    apart_NT = communicator.all_gather(nan_T.to(rank.device)[::2])
    assert apart_NT.shape == (communicator.size, len(nan_T) // 2)
    communicator.close()


@needs_gpu
@on_gpus
def test_exchanges_of_every_size_equal_those_of_a_process_group(size: int, num_gpus: int, tmp_path: Path) -> None:
    run_gpu_ranks(exchange_sizes, tmp_path, size=size, num_gpus=num_gpus)


def chain(communicator: Communicator, value_X: torch.Tensor) -> list[torch.Tensor]:
    """Exchanges of many sizes, each made of what the one before gave."""
    values = []
    for number in range(24):
        count = (4 << number % 13) + number % 3
        row_X = value_X.repeat(-(-count // len(value_X)))[:count] * (communicator.rank + 2) + number
        gathered_NX = communicator.all_gather(row_X)
        exchanged_NX = communicator.all_to_all(gathered_NX * (communicator.rank + 1))
        value_X = ordered_sum(exchanged_NX, communicator)[number % communicator.size] % 1_000_003
        values.append(value_X)
    return values


def replay_chain(rank: GpuRank) -> None:
    communicator = rank.connect()
    value_X = torch.zeros(3, dtype=torch.int32, device=rank.device)
    chain(communicator, value_X)
    rank.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = chain(communicator, value_X)
    for replay in range(3):
        value_X.copy_(torch.tensor([1, 2, 3]) + replay)
        graph.replay()
        expected = chain(rank.alone, torch.tensor([1, 2, 3], dtype=torch.int32) + replay)
        for got_X, expected_X in zip(values, expected, strict=True):
            assert torch.equal(got_X.cpu(), expected_X)
    rank.meet()
    graph.reset()
    communicator.close()


@needs_gpu
@on_gpus
def test_a_graph_of_many_exchanges_can_be_replayed(size: int, num_gpus: int, tmp_path: Path) -> None:
    run_gpu_ranks(replay_chain, tmp_path, size=size, num_gpus=num_gpus)


def add_rows(rank: GpuRank) -> None:
    communicator = rank.connect()
    generator = torch.Generator().manual_seed(communicator.rank)
    common = torch.Generator().manual_seed(100)
    weight_H = torch.randn(6144, generator=common).bfloat16().to(rank.device)
    for num_rows in (1, 6, communicator.slabs.layout.max_rows, 2):
        delta_TH = torch.randn(num_rows, 6144, generator=generator).bfloat16()
        x_TH = torch.randn(num_rows, 6144, generator=common).bfloat16().to(rank.device)
        delta_NTH = rank.alone.all_gather(delta_TH.view(torch.uint8)).view(torch.bfloat16).to(rank.device)
        expected_x, expected, normed_TH = x_TH.clone(), torch.empty_like(x_TH), torch.empty_like(x_TH)
        add_rms_norm(expected_x, sum_in_order(delta_NTH), weight_H, eps=1e-5, normed_TH=expected)
        assert communicator.adds_rows(x_TH)
        communicator.add_norm(x_TH, delta_TH.to(rank.device), weight_H, eps=1e-5, normed_TH=normed_TH)
        assert torch.equal(x_TH, expected_x)
        assert torch.equal(normed_TH, expected)
    communicator.close()


@needs_gpu
@on_gpus
def test_rows_added_up_and_normed_have_the_bits_of_two_steps(size: int, num_gpus: int, tmp_path: Path) -> None:
    run_gpu_ranks(add_rows, tmp_path, size=size, num_gpus=num_gpus)


def merge_heads(rank: GpuRank) -> None:
    communicator = rank.connect()
    size, device = communicator.size, rank.device
    generator = torch.Generator().manual_seed(communicator.rank)
    most_rows = communicator.slabs.layout.most_row_bytes // (8 * 1028)
    for number, num_rows in enumerate((6, most_rows, 1, 100, 2)):
        out_TGL = torch.randn(num_rows, 8 * size, 512, generator=generator).bfloat16()
        lse_TG = torch.randn(num_rows, 8 * size, generator=generator)
        lse_TG[torch.rand(lse_TG.shape, generator=generator) < 1 / 3] = -torch.inf
        first_owner_B = torch.full((1,), number % size)
        expected = AttentionState(
            torch.empty(num_rows, 8, 512).bfloat16().to(device), torch.zeros(num_rows, 8).to(device)
        )
        message_NTAY = pack_states(out_TGL.to(device), lse_TG.to(device), num_ranks=size)
        state = unpacked_states(rank.alone.all_to_all(message_NTAY.cpu()).to(device))
        merge_shards(*state, first_owner_B=first_owner_B.to(device), out_TAL=expected.out_TAL, lse_TA=expected.lse_TA)
        merged = AttentionState(*(torch.zeros_like(part) for part in expected))
        exchange_shards(
            out_TGL.to(device), lse_TG.to(device), communicator,
            first_owner_B=first_owner_B.to(device), **merged._asdict(),
        )  # fmt: skip
        assert torch.equal(merged.out_TAL, expected.out_TAL)
        assert torch.equal(merged.lse_TA, expected.lse_TA)
    communicator.close()


@needs_gpu
@on_gpus
def test_heads_sent_and_merged_have_the_bits_of_three_steps(size: int, num_gpus: int, tmp_path: Path) -> None:
    run_gpu_ranks(merge_heads, tmp_path, size=size, num_gpus=num_gpus)


def leave_a_missing_rank(rank: GpuRank) -> None:
    communicator = rank.connect()
    row_X = torch.full((100_001,), 7, dtype=torch.uint8, device=rank.device)
    communicator.all_gather(row_X)
    torch.cuda.synchronize()
    rank.meet()
    if communicator.rank == 0:
        gathered_NX = communicator.all_gather(row_X)
        done = torch.cuda.Event()
        done.record()
        time.sleep(0.5)
        assert not done.query()
        threading.Thread(target=communicator.slabs.give_up).start()
        done.synchronize()
        assert not gathered_NX[1:].any()
        assert bool((gathered_NX[0] == 7).all())
        with pytest.raises(CollectiveError, match="the group was left"):
            communicator.all_gather(row_X)
    rank.meet()
    communicator.close()


@needs_gpu
@on_gpus
def test_a_rank_that_waits_for_a_missing_one_can_be_led_out(size: int, num_gpus: int, tmp_path: Path) -> None:
    run_gpu_ranks(leave_a_missing_rank, tmp_path, size=size, num_gpus=num_gpus)


def open_again(rank: GpuRank) -> None:
    addresses = set()
    for attempt in range(4):
        communicator = rank.connect(f"peers {attempt}")
        addresses.add(int(communicator.slabs.address_N[communicator.rank]))
        sent_N = random_rows(communicator.size, 30_000, seed=attempt, rank=communicator.rank)
        for _ in range(3):
            received_N = communicator.all_to_all(sent_N.to(rank.device))
        assert torch.equal(received_N.cpu(), rank.alone.all_to_all(sent_N))
        group = rank.alone.group
        communicator.close()
        rank.alone.group = group
    assert len(addresses) == 1  # kept, not taken anew


@needs_gpu
@on_gpus
def test_memory_can_be_opened_again_after_it_was_closed(size: int, num_gpus: int, tmp_path: Path) -> None:
    run_gpu_ranks(open_again, tmp_path, size=size, num_gpus=num_gpus)
