"""Pieces arrive byte for byte and nothing else is written; on CPUs, what the kernel is told."""

import ctypes
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from specdec.kernels import copy_pieces
from specdec.kernels.copy_pieces import COPY_PIECES_MACROS, PieceCopies, copy_pieces_ref, num_parts
from specdec.kernels.piece_repeats import ONE_LAYER, Layers, Repeats
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu, needs_gpus

I64 = np.ndarray[Any, np.dtype[np.int64]]
Pieces = tuple[I64, I64, I64]


def random_pieces(seed: int, num_bytes: int, lengths: I64, *, step: int) -> Pieces:
    """Pieces from anywhere to places that do not overlap, in random order, offsets at multiples of `step`."""
    generator = np.random.default_rng(seed)
    gaps = generator.integers(0, 3, len(lengths)) * generator.integers(0, 300, len(lengths))
    order = generator.permutation(len(lengths))
    room = -(-(lengths[order] + gaps) // step) * step
    destination = np.empty_like(lengths)
    destination[order] = np.cumsum(room) - room
    source = generator.integers(0, (num_bytes - lengths) // step + 1) * step
    assert (destination + lengths).max(initial=0) <= num_bytes
    return source, destination, lengths


CASES = [
    ("one byte", np.array([1]), 1),
    ("rows of latents", np.full(700, 656), 16),
    ("rows of index keys", np.full(500, 132), 4),
    ("odd rows", np.full(300, 133), 1),
    ("every length", np.arange(1, 1300), 1),
    ("one long", np.array([300_001]), 1),
    ("short among long", np.array([70_000, 1, 2, 3, 65_536, 15, 16, 17] * 4), 1),
    ("pages", np.full(9, 41_984), 64),
    ("single bytes", np.ones(3000, np.int64), 1),
]
NUM_BYTES = 1 << 21


class RepeatedPieces(NamedTuple):
    """Pieces with rows, as `PieceCopies` takes them."""

    source_offset_X: I64
    destination_offset_X: I64
    length_X: I64
    repeats: Repeats

    def rows(self) -> Pieces:
        """Each row by itself."""
        found = [
            (source + row * source_step, to + row * step, length)
            for source, to, length, count, source_step, step in zip(
                *(array.tolist() for array in (*self[:3], *self.repeats)), strict=True
            )
            for row in range(count)
        ]
        source, destination, length = np.array(found).T
        return source, destination, length


def repeated_pieces(seed: int, lengths: list[int], *, step: int, most_rows: int) -> RepeatedPieces:
    """Rows of these lengths, apart or behind each other on either side, of pieces in random order."""
    generator = np.random.default_rng(seed)
    length_X = generator.choice(lengths, 60)
    count_X = generator.integers(1, most_rows + 1, len(length_X))
    count_X[:3] = 1, most_rows, 2
    gaps = generator.integers(0, 9, (2, len(length_X))) * step * generator.integers(0, 2, (2, len(length_X)))
    source_step_X, step_X = -(-length_X // step) * step + gaps
    behind_each_other = generator.random(len(length_X)) < 0.6
    step_X[behind_each_other] = length_X[behind_each_other]
    room_X = -(-((count_X - 1) * step_X + length_X + generator.integers(0, 200, len(length_X))) // step) * step
    order = generator.permutation(len(length_X))
    destination_X = np.empty_like(length_X)
    destination_X[order] = np.cumsum(room_X[order]) - room_X[order]
    assert (destination_X + room_X).max() <= NUM_BYTES
    last_X = NUM_BYTES - (count_X - 1) * source_step_X - length_X
    source_X = generator.integers(0, last_X // step + 1) * step
    return RepeatedPieces(source_X, destination_X, length_X, Repeats(count_X, source_step_X, step_X))


REPEATED_CASES = [
    ("rows of latents", [656], 16, 32),
    ("rows of index keys", [132], 4, 64),
    ("keys and scales", [128, 4], 4, 64),
    ("single bytes", [1], 1, 50),
    ("any", [1, 3, 16, 127, 128, 640, 1000, 2049], 1, 9),
    ("long rows", [1008, 4096, 5008], 16, 5),
]


def test_the_definition_copies_a_range_for_each_piece() -> None:
    source, destination = torch.arange(10, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    copy_pieces_ref(source, destination, np.array([7, 0]), np.array([1, 5]), np.array([3, 2]))
    assert destination.tolist() == [0, 7, 8, 9, 0, 0, 1, 0]
    source, destination = torch.arange(10, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    repeats = Repeats(np.array([2, 1]), np.array([4, 0]), np.array([2, 0]))
    copy_pieces_ref(source, destination, np.array([1, 3]), np.array([0, 6]), np.array([2, 1]), repeats=repeats)
    assert destination.tolist() == [1, 2, 5, 6, 0, 0, 3, 0]


@pytest.mark.parametrize("destination", [0, 1, 127, 128, 1000])
def test_a_piece_has_as_many_parts_as_runs_of_eight_lines_it_touches(destination: int) -> None:
    for length in (1, 2, 127, 128, 129, 656, 1023, 1024, 1025, 5000):
        first_line, last_line = destination // 128, (destination + length - 1) // 128
        expected = (last_line - first_line) // 8 + 1
        assert num_parts(np.array([destination]), np.array([length])).tolist() == [expected]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What kernels are launched with."""
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(copy_pieces, "load_copy_pieces", lambda _: lambda *arguments: launches.append(arguments))
    return launches


COLUMN_BYTES = (8, 8, 4, 4, 4, 4, 4)


def read_column(address: int, size: int, count: int) -> np.ndarray:
    """What a launch on the CPU was told at an address."""
    return np.frombuffer(ctypes.string_at(address, size * count), np.uint64 if size == 8 else np.uint32)


@pytest.mark.parametrize(("lengths", "step"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_kernel_is_told_addresses_lengths_and_where_the_parts_of_each_piece_end(
    told: list[tuple[Any, ...]], lengths: I64, step: int
) -> None:
    source = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8)
    destination, expected = torch.full((NUM_BYTES,), 0xA5, dtype=torch.uint8), torch.full((NUM_BYTES,), 0xA5).byte()
    pieces = random_pieces(1, NUM_BYTES, lengths, step=step)
    copies = PieceCopies(torch.device("cpu"), max_pieces=len(lengths))
    copies.copy(source.data_ptr(), destination.data_ptr(), *pieces)
    (grid, _, *columns, num_pieces, total) = told[0]
    count = len(lengths)
    assert num_pieces == count
    assert columns[4:] == [0] * 5
    assert grid[1] == 1
    arrays = [read_column(*column, count) for column in zip(columns[:4], COLUMN_BYTES, strict=False)]
    assert np.array_equal(np.diff(arrays[3], prepend=0), num_parts(arrays[1].astype(np.int64), lengths))
    assert total == arrays[3][-1]
    assert 1 <= grid[0] <= 64
    for start, to, length in zip(*(array.tolist() for array in arrays[:3]), strict=True):
        ctypes.memmove(to, start, length)
    for start, to, length in zip(*(array.tolist() for array in pieces), strict=True):
        expected[to : to + length] = source[start : start + length]
    assert torch.equal(destination, expected)


@pytest.mark.parametrize("case", REPEATED_CASES, ids=[case[0] for case in REPEATED_CASES])
def test_the_kernel_is_told_counts_and_steps_and_how_the_rows_of_each_piece_are_cut(
    told: list[tuple[Any, ...]], case: tuple[str, list[int], int, int]
) -> None:
    """Rows behind each other at the destination are cut as one, the others each as if it touched the most lines."""
    _, lengths, step, most_rows = case
    pieces = repeated_pieces(1, lengths, step=step, most_rows=most_rows)
    count = len(pieces.length_X)
    copies = PieceCopies(torch.device("cpu"), max_pieces=count)
    copies.copy(1 << 20, 1 << 30, *pieces[:3], repeats=pieces.repeats)
    (_, _, *columns, _, _, num_pieces, total) = told[0]
    source_X, to_X, length_X, end_X, count_X, source_step_X, step_X = (
        read_column(*column, count).astype(np.int64) for column in zip(columns, COLUMN_BYTES, strict=True)
    )
    assert (num_pieces, total) == (count, end_X[-1])
    found = RepeatedPieces(source_X - (1 << 20), to_X - (1 << 30), length_X, Repeats(count_X, source_step_X, step_X))
    for array, right in zip((*found[:3], *found.repeats), (*pieces[:3], *pieces.repeats), strict=True):
        assert np.array_equal(array, right)
    for x, parts in enumerate(np.diff(end_X, prepend=0).tolist()):
        if count_X[x] == 1 or step_X[x] == length_X[x]:
            assert parts == num_parts(to_X[x : x + 1], length_X[x : x + 1] * count_X[x])[0]
        else:
            assert parts == count_X[x] * num_parts(np.array([127]), length_X[x : x + 1])[0]


@pytest.mark.parametrize(("step", "parts"), [(1 << 20, 1), ((1 << 20) + 16, 2)])
def test_layers_are_rows_of_blocks_and_cut_as_if_they_touched_the_most_lines_unless_they_begin_alike(
    told: list[tuple[Any, ...]], step: int, parts: int
) -> None:
    copies = PieceCopies(torch.device("cpu"), max_pieces=1)
    repeats = Repeats(np.array([2]), np.array([1024]), np.array([512]))
    pieces = (np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([512]))
    copies.copy(1 << 20, 1 << 30, *pieces, repeats=repeats, layers=Layers(10, 4096, step))
    (grid, _, *_, source_step, destination_step, count, total) = told[0]
    assert (grid, source_step, destination_step, count, total) == ((1, 10, 1), 4096, step, 1, parts)


def test_nothing_is_launched_for_nothing_and_too_many_are_refused(told: list[tuple[Any, ...]]) -> None:
    copies = PieceCopies(torch.device("cpu"), max_pieces=2)
    none = np.zeros(0, np.int64)
    copies.copy(0, 0, none, none, none)
    assert not told
    with pytest.raises(ValueError, match="at most 2 pieces are copied in one launch, got 3"):
        copies.copy(0, 0, *([np.ones(3, np.int64)] * 3))


def test_the_kernel_compiles_without_spills() -> None:
    assert most_bytes_spilled("copy_pieces.cu", COPY_PIECES_MACROS) == 0


def check_on_gpu(
    pieces: Pieces | RepeatedPieces,
    *,
    source_skip: int,
    destination_skip: int,
    peer: str,
    layers: Layers = ONE_LAYER,
) -> None:
    """Copy on GPU 0 into memory of GPU `peer`; both memories begin some bytes behind an aligned address."""
    rows = pieces.rows() if isinstance(pieces, RepeatedPieces) else pieces
    repeats = pieces.repeats if isinstance(pieces, RepeatedPieces) else None
    num_bytes = NUM_BYTES + (layers.num_layers - 1) * max(layers.source_step, layers.destination_step)
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    expected = torch.full((num_bytes,), 0xA5, dtype=torch.uint8)
    for layer in range(layers.num_layers):
        for start, to, length in zip(*(array.tolist() for array in rows), strict=True):
            begin, at = start + layer * layers.source_step, to + layer * layers.destination_step
            expected[at : at + length] = source[begin : begin + length]
    on_gpu = torch.empty(num_bytes + 32, dtype=torch.uint8, device="cuda:0")
    memory = torch.full((num_bytes + 256,), 0xA5, dtype=torch.uint8, device=peer)
    on_gpu[source_skip : source_skip + num_bytes].copy_(source)
    memory[:8].copy_(on_gpu[:8]), memory[:8].fill_(0xA5)  # torch enables access between the two
    torch.cuda.synchronize(peer)
    copies = PieceCopies(torch.device("cuda:0"), max_pieces=len(pieces[0]))
    with torch.cuda.device(0):
        addresses = on_gpu.data_ptr() + source_skip, memory.data_ptr() + destination_skip
        copies.copy(*addresses, *pieces[:3], repeats=repeats, layers=layers)
        torch.cuda.synchronize()
    got = memory.cpu()
    assert torch.equal(got[destination_skip : destination_skip + num_bytes], expected)
    assert bool((got[:destination_skip] == 0xA5).all())
    assert bool((got[destination_skip + num_bytes :] == 0xA5).all())


PEERS = [pytest.param("cuda:0", marks=needs_gpu, id="gpu"), pytest.param("cuda:1", marks=needs_gpus(2), id="gpus")]


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize(("lengths", "step"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
@pytest.mark.parametrize(("source_skip", "destination_skip"), [(0, 0), (16, 128), (4, 8), (3, 7), (0, 1), (5, 5)])
def test_pieces_arrive_and_nothing_else_is_written(
    peer: str, lengths: I64, step: int, source_skip: int, destination_skip: int
) -> None:
    pieces = random_pieces(7, NUM_BYTES, lengths, step=step)
    check_on_gpu(pieces, source_skip=source_skip, destination_skip=destination_skip, peer=peer)


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("case", REPEATED_CASES, ids=[case[0] for case in REPEATED_CASES])
@pytest.mark.parametrize(("source_skip", "destination_skip"), [(0, 0), (16, 128), (16, 48), (4, 8), (3, 7), (0, 1)])
def test_rows_arrive_and_nothing_else_is_written(
    peer: str, case: tuple[str, list[int], int, int], source_skip: int, destination_skip: int
) -> None:
    _, lengths, step, most_rows = case
    for seed in range(3):
        pieces = repeated_pieces(seed, lengths, step=step, most_rows=most_rows)
        check_on_gpu(pieces, source_skip=source_skip, destination_skip=destination_skip, peer=peer)


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("case", REPEATED_CASES, ids=[case[0] for case in REPEATED_CASES])
@pytest.mark.parametrize("skew", [0, 16, 48, 1])
def test_layers_arrive_and_nothing_else_is_written(peer: str, case: tuple[str, list[int], int, int], skew: int) -> None:
    _, lengths, step, most_rows = case
    pieces = repeated_pieces(5, lengths, step=step, most_rows=most_rows)
    layers = Layers(3, 4096 + 16, NUM_BYTES + skew)
    check_on_gpu(pieces, source_skip=0, destination_skip=0, peer=peer, layers=layers)


@needs_gpu
def test_every_alignment_of_both_ends_on_a_gpu() -> None:
    lengths = np.tile(np.arange(1, 40), 40)
    generator = np.random.default_rng(3)
    places = np.arange(len(lengths)) * 96 + generator.integers(0, 32, len(lengths))
    pieces = (generator.integers(0, NUM_BYTES - 40, len(lengths)), places, lengths)
    check_on_gpu(pieces, source_skip=0, destination_skip=0, peer="cuda:0")
