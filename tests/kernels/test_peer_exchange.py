"""Exchanges over memory of peers move every byte, whatever their number; on CPUs what is launched, and by whom."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from specdec.kernels import peer_exchange
from specdec.kernels.errors import ConfigError
from specdec.kernels.peer_exchange import (
    UNITS,
    is_small,
    peer_all_gather,
    peer_all_to_all,
    peer_exchange_macros,
    peer_exchange_small_macros,
    unit_of,
)
from specdec.kernels.peer_slab import MAX_RANKS, NUM_BLOCKS, THREADS, PeerSlabs, SlabLayout
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu
from tests.support.peer_ranks import StreamRanks

LARGEST_SMALL = 16 * SlabLayout(3).most_small_units
# 1 byte .. a block's share and one more .. small and no longer .. two chunks of every block
SIZES = [1, 3, 16, 17, 4096, 4100, LARGEST_SMALL, LARGEST_SMALL + 1, LARGEST_SMALL + 16, SlabLayout(3).most_row_bytes]


def make_bytes(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", range(2, MAX_RANKS + 1))
def test_the_parts_of_a_slab_lie_side_by_side(size: int) -> None:
    layout = SlabLayout(size)
    ends = [
        (0, 4 * NUM_BLOCKS * size),
        (layout.chunks_at, size * NUM_BLOCKS * 2 * layout.chunk_bytes),
        (layout.pairs_at, 2 * size * layout.most_small_units * 32),
        (layout.words_at, layout.num_row_blocks * 2 * size * layout.words_bytes),
        (layout.num_bytes, 0),
    ]
    for (begin, num_bytes), (next_begin, _) in pairwise(ends):
        assert begin % 128 == 0
        assert 0 <= next_begin - begin - num_bytes < 4096
    assert layout.chunk_bytes % 16 == 0
    assert layout.num_bytes < 64 << 20
    assert layout.num_small_blocks * THREADS >= size * layout.most_small_units


@pytest.mark.parametrize("size", [1, MAX_RANKS + 1])
def test_other_numbers_of_ranks_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"must be 2..8, got {size}"):
        SlabLayout(size)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    launches: list[tuple[Any, ...]] = []

    def cuda_kernel(file: str, name: str, *, macros: Any, starts_early: bool) -> Any:
        assert starts_early
        return lambda *arguments: launches.append((name, dict(macros), *arguments))

    monkeypatch.setattr(peer_exchange, "cuda_kernel", cuda_kernel)
    return launches


@pytest.mark.parametrize("row_bytes", [*SIZES, 48])
def test_rows_are_cut_by_their_size_alone(launched: list[tuple[Any, ...]], row_bytes: int) -> None:
    slabs = PeerSlabs([0x1000, 0x2000, 0x3000], rank=1, device=torch.device("cpu"))
    memory = torch.zeros(3 * row_bytes + 64, dtype=torch.uint8)
    first = -memory.data_ptr() % 16
    aligned = memory[first : first + 3 * row_bytes].view(3, -1)
    askew = memory[first + 1 : first + 1 + 3 * row_bytes].view(3, -1)
    for rows in (aligned, askew):
        assert peer_all_gather(rows[0], slabs).shape == (3, row_bytes)
        assert peer_all_to_all(rows, slabs).shape == (3, row_bytes)
    unit, cuts = unit_of(row_bytes), set()
    for name, macros, grid, block, tensor, out, addresses, epochs, given_up, seen, rank, count, _, run in launched:
        assert tensor.data_ptr() % unit == out.data_ptr() % unit == 0
        assert len(epochs) >= grid[0]
        assert (addresses is slabs.address_N, given_up is slabs.given_up, seen is slabs.seen) == (True, True, True)
        assert (rank, block, run) == (1, THREADS, count)
        assert macros.get("UNIT", 16) == unit
        cuts.add((name, grid, count))
    assert len(cuts) == 1
    assert [stride for *_, stride, _ in launched] == [0, row_bytes // unit] * 2
    name, grid, count = cuts.pop()
    assert count * unit == row_bytes
    if is_small(row_bytes, slabs.layout, unit=unit):
        assert name == "peer_exchange_small"
        assert 0 <= grid[0] * THREADS - 3 * count < THREADS
    else:
        assert name == "peer_exchange"
        assert grid[0] <= NUM_BLOCKS
        assert -(-row_bytes // grid[0]) <= 2 * slabs.layout.chunk_bytes


@pytest.mark.parametrize(
    ("shape", "axis", "unit", "run"),
    [((6, 4, 24), 1, 16, 12), ((5, 3, 2), 2, 4, 1), ((7, 3), 1, 1, 6), ((7, 3), 2, 1, 2)],
)
def test_ranks_stand_side_by_side_along_any_axis(
    launched: list[tuple[Any, ...]], shape: tuple[int, ...], axis: int, unit: int, run: int
) -> None:
    slabs = PeerSlabs([0, 0], rank=0, device=torch.device("cpu"))
    gathered = peer_all_gather(torch.zeros(shape, dtype=torch.int16), slabs, axis=axis)
    assert gathered.shape == (*shape[:axis], 2, *shape[axis:])
    ((_, macros, *_, count, stride, side),) = launched
    assert (macros.get("UNIT", 16), count * unit, stride, side) == (unit, gathered.nbytes // 2, 0, run)


def test_nothing_is_launched_for_nothing(launched: list[tuple[Any, ...]]) -> None:
    slabs = PeerSlabs([0, 0], rank=0, device=torch.device("cpu"))
    assert peer_all_gather(torch.zeros(0, 5), slabs).shape == (2, 0, 5)
    assert not launched


def test_what_does_not_fit_is_refused() -> None:
    slabs = PeerSlabs([0, 0], rank=0, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="at most 16777216 bytes, got 16777217"):
        peer_all_gather(torch.zeros((16 << 20) + 1, dtype=torch.uint8), slabs)
    with pytest.raises(ValueError, match="must be contiguous"):
        peer_all_gather(torch.zeros(2, 6)[:, :3], slabs)
    with pytest.raises(ValueError, match="over 2 ranks was given 3 rows"):
        peer_all_to_all(torch.zeros(3, 4), slabs)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_kernels_compile_without_spills(size: int) -> None:
    layout = SlabLayout(size)
    assert most_bytes_spilled("peer_exchange_small.cu", peer_exchange_small_macros(layout)) == 0
    for unit in UNITS:
        assert most_bytes_spilled("peer_exchange.cu", peer_exchange_macros(layout, unit=unit)) == 0


@needs_gpu
@pytest.mark.parametrize("row_bytes", SIZES)
def test_a_gpu_takes_in_what_has_come_and_zeros_for_what_has_not(row_bytes: int) -> None:
    sent_NN = make_bytes(3, 3, row_bytes, seed=row_bytes)
    sent_cuda_NN = sent_NN.cuda()
    for last in range(3):
        gathered_N = StreamRanks(3).only(last, lambda slabs: peer_all_gather(sent_cuda_NN[slabs.rank, 0], slabs))
        assert torch.equal(gathered_N.cpu(), sent_NN[:, 0])
        exchanged_N = StreamRanks(3).only(last, lambda slabs: peer_all_to_all(sent_cuda_NN[slabs.rank], slabs))
        assert torch.equal(exchanged_N.cpu(), sent_NN[:, last])
        ranks = StreamRanks(3)
        ranks.slabs[last].give_up()
        left_N = peer_all_to_all(sent_cuda_NN[last], ranks.slabs[last]).cpu()
        assert torch.equal(left_N[last], sent_NN[last, last])
        assert not left_N[torch.arange(3) != last].any()


@needs_gpu
@pytest.mark.parametrize("shape", [(6, 32, 576), (192, 32, 576), (5, 3, 8), (1000, 7), (3001, 1, 100), (300, 12_000)])
def test_a_gpu_puts_ranks_side_by_side_along_any_axis(shape: tuple[int, ...]) -> None:
    sent_N = make_bytes(3, *shape, seed=len(shape)).cuda()
    for dtype in (torch.uint8, torch.bfloat16):
        values_N = sent_N.to(dtype)
        for axis in range(len(shape) + 1):
            for last in (0, 2):
                gathered = StreamRanks(3).only(
                    last,
                    lambda slabs: peer_all_gather(values_N[slabs.rank], slabs, axis=axis),  # noqa: B023
                )
                assert torch.equal(gathered, torch.stack([*values_N], dim=axis))


@needs_gpu
@pytest.mark.parametrize("size", [2, 3])
def test_graphs_that_meet_again_and_again_mix_nothing_up(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    row_bytes = [1 + int(torch.randint(50_000, (), generator=generator)) for _ in range(60)]
    row_bytes += [16 * (1 + count // 16) for count in row_bytes]
    row_bytes += [min(each, 1 << 17) for each in SIZES]  # blocks of all ranks, and of what follows, fit on one GPU
    order = torch.randperm(len(row_bytes), generator=generator).tolist()
    sent = [make_bytes(size, size, row_bytes[place], seed=place) for place in order]
    sent_cuda = [sent_NN.cuda() for sent_NN in sent]

    def exchange(slabs: PeerSlabs) -> list[torch.Tensor]:
        return [
            peer_all_to_all(sent_NN[slabs.rank], slabs)
            if number % 2
            else peer_all_gather(sent_NN[slabs.rank, 0], slabs)
            for number, sent_NN in enumerate(sent_cuda)
        ]

    for rank, received in enumerate(StreamRanks(size).replayed(exchange, times=3)):
        for number, (sent_NN, out_N) in enumerate(zip(sent, received, strict=True)):
            assert torch.equal(out_N.cpu(), sent_NN[:, rank] if number % 2 else sent_NN[:, 0]), (rank, number)
