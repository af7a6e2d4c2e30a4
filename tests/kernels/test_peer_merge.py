"""Heads sent to the ranks that keep them and merged there: the bits of the message, the exchange and the merge."""

from typing import Any

import pytest
import torch

from specdec.kernels import peer_merge as module
from specdec.kernels.lse_merge import AttentionState, merge_states_ref
from specdec.kernels.peer_merge import (
    is_few,
    peer_merge,
    peer_merge_macros,
    peer_merge_ref,
    peer_merge_small_macros,
    takes_states,
)
from specdec.kernels.peer_slab import NUM_BLOCKS, THREADS, PeerSlabs, SlabLayout
from specdec.kernels.shard_merge import merge_shards
from specdec.kernels.state_message import pack_states, unpacked_states
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu
from tests.support.peer_ranks import StreamRanks


def make_states(size: int, num_rows: int, num_heads: int, num_values: int, *, seed: int = 0) -> AttentionState:
    """What every rank has, [N, T, G, L]: a third of it, and a head of the first row on all ranks, is without keys."""
    generator = torch.Generator().manual_seed(100 * seed + num_rows)
    out_NTGL = torch.randn(size, num_rows, num_heads, num_values, generator=generator).bfloat16()
    lse_NTG = 5 * torch.randn(size, num_rows, num_heads, generator=generator)
    lse_NTG[torch.rand(lse_NTG.shape, generator=generator) < 1 / 3] = -torch.inf
    lse_NTG[:, 0, 0] = -torch.inf
    return AttentionState(out_NTGL.masked_fill((lse_NTG == -torch.inf)[..., None], torch.nan), lse_NTG)


def empty_state(size: int, state: AttentionState) -> AttentionState:
    """Room for what a rank keeps."""
    _, num_rows, num_heads, num_values = state.out_TAL.shape
    shape, device = (num_rows, num_heads // size, num_values), state.lse_TA.device
    out_TAL = torch.full(shape, 9.0, dtype=torch.bfloat16, device=device)
    return AttentionState(out_TAL, torch.full(shape[:2], 9.0, device=device))


def merge(state: AttentionState, slabs: PeerSlabs, first_owner_B: torch.Tensor, kept: AttentionState) -> None:
    """Launch for one rank, given what every rank has."""
    out_TGL, lse_TG = (part[slabs.rank] for part in state)
    peer_merge(out_TGL, lse_TG, slabs, first_owner_B=first_owner_B, out_TAL=kept.out_TAL, lse_TA=kept.lse_TA)


def in_steps(state: AttentionState, first_owner_B: torch.Tensor, *, rank: int) -> AttentionState:
    """What a rank keeps by way of a message of every rank."""
    size = len(state.lse_TA)
    messages = [pack_states(*of_rank, num_ranks=size)[rank] for of_rank in zip(*state, strict=True)]
    merged = empty_state(size, state)
    out_NTAL, lse_NTA = unpacked_states(torch.stack(messages))
    out_TAL, lse_TA = merged
    return merge_shards(out_NTAL, lse_NTA, out_TAL=out_TAL, lse_TA=lse_TA, first_owner_B=first_owner_B)


def assert_same_bits(merged: AttentionState, expected: AttentionState) -> None:
    assert torch.equal(merged.out_TAL.view(torch.int16), expected.out_TAL.view(torch.int16))
    assert torch.equal(merged.lse_TA.view(torch.int32), expected.lse_TA.view(torch.int32))


def test_the_definition_merges_the_heads_that_a_rank_keeps() -> None:
    state = make_states(3, 4, 6, 16)
    expected = merge_states_ref(state.out_TAL.double(), state.lse_TA.double())
    for rank in range(3):
        out_TAL, lse_TA = peer_merge_ref(*state, first_owner_B=torch.tensor([2, 0]), rank=rank)
        own = slice(2 * rank, 2 * rank + 2)
        torch.testing.assert_close(out_TAL.double(), expected.out_TAL[:, own].nan_to_num(nan=0.0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse_TA.double(), expected.lse_TA[:, own], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("num_values", [512, 256, 64])
def test_the_kernels_compile_without_spills(size: int, num_values: int) -> None:
    layout, sizes = SlabLayout(size), {"num_heads": 64 // size, "num_values": num_values}
    assert most_bytes_spilled("peer_merge.cu", peer_merge_macros(layout, **sizes)) == 0
    assert most_bytes_spilled("peer_merge_small.cu", peer_merge_small_macros(layout, **sizes)) == 0


def test_so_many_rows_of_so_many_heads_are_taken() -> None:
    layout = SlabLayout(2)
    most = layout.most_row_bytes // (32 * 1028)
    assert takes_states(layout, most, 64, 512)
    assert takes_states(layout, 0, 64, 256)
    assert not takes_states(layout, most + 1, 64, 512)
    assert not takes_states(layout, 1, 63, 512)
    assert not takes_states(layout, 1, 64, 516)
    assert not takes_states(layout, 1, 64, 24)
    assert is_few(layout, 15, 64, 512)
    assert not is_few(layout, 16, 64, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_TGL": torch.zeros(3, 5, 16).bfloat16()}, r"2 ranks merge heads that they divide.*got \(3, 5, 16\)"),
        ({"out_TGL": torch.zeros(3, 4, 16)}, "out_TGL must be torch.bfloat16"),
        ({"lse_TG": torch.zeros(4, 3)}, "lse_TG must be"),
        ({"out_TAL": torch.zeros(3, 4, 16).bfloat16()}, "out_TAL must be"),
        ({"lse_TA": torch.zeros(3, 4)}, "lse_TA must be"),
        ({"first_owner_B": torch.zeros(3, dtype=torch.int32)}, "first_owner_B must be"),
        ({"first_owner_B": torch.zeros(2, dtype=torch.int64)}, "3 rows are not those of 2 requests"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "out_TGL": torch.zeros(3, 4, 16).bfloat16(), "lse_TG": torch.zeros(3, 4),
        "slabs": PeerSlabs([0, 0], rank=0, device=torch.device("cpu")), "first_owner_B": torch.zeros(3).long(),
        "out_TAL": torch.zeros(3, 2, 16).bfloat16(), "lse_TA": torch.zeros(3, 2),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        peer_merge(**(arguments | changes))


@pytest.mark.parametrize("size", [2, 8])
def test_every_head_has_its_threads_or_its_turn(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    launches: list[tuple[Any, ...]] = []

    def cuda_kernel(file: str, name: str, *, macros: Any, starts_early: bool) -> Any:
        assert starts_early
        assert file == f"{name}.cu"
        return lambda *arguments: launches.append((name, dict(macros), *arguments))

    monkeypatch.setattr(module, "cuda_kernel", cuda_kernel)
    slabs = PeerSlabs([0] * size, rank=1, device=torch.device("cpu"))
    for num_rows in (0, 1, 6, 15, 16, 192):
        state = AttentionState(torch.zeros(1, num_rows, 64, 512).bfloat16(), torch.zeros(1, num_rows, 64))
        merged = empty_state(size, state)
        first_owner_B = torch.zeros(num_rows // 3 if num_rows % 3 == 0 and num_rows else 1, dtype=torch.int64)
        merge(AttentionState(*(part.expand(2, *part.shape[1:]) for part in state)), slabs, first_owner_B, merged)
    assert [arguments[-2] for arguments in launches] == [1, 6, 15, 16, 192]
    for name, macros, grid, block, *_, epochs, given_up, seen, rank, num_rows, rows_per_request in launches:
        assert (given_up is slabs.given_up, seen is slabs.seen, rank) == (True, True, 1)
        assert rows_per_request == (3 if num_rows % 3 == 0 else num_rows)
        assert (block, macros["HEADS"]) == (macros["THREADS"], 64 // size)
        assert grid[0] <= len(epochs) == macros["BLOCKS"]
        num_threads = num_rows * (64 // size) * 64
        if is_few(slabs.layout, num_rows, 64, 512):
            assert (name, epochs is slabs.pair_epochs) == ("peer_merge_small", True)
            assert 0 <= grid[0] * THREADS - num_threads < THREADS
        else:
            assert (name, epochs is slabs.chunk_epochs) == ("peer_merge", True)
            assert grid[0] == min(NUM_BLOCKS, -(-num_threads // block))


GPU_SIZES = [(2, 1, 64, 512), (2, 6, 64, 512), (2, 15, 64, 512), (2, 16, 64, 512), (2, 300, 64, 512), (3, 5, 6, 256)]
GPU_SIZES += [(3, 300, 33, 64), (8, 8, 64, 512), (8, 25, 64, 512), (4, 40, 64, 256)]


@needs_gpu
@pytest.mark.parametrize(("size", "num_rows", "num_heads", "num_values"), GPU_SIZES)
def test_a_gpu_gives_the_bits_of_the_message_and_the_merge(
    size: int, num_rows: int, num_heads: int, num_values: int
) -> None:
    state = AttentionState(*(part.cuda() for part in make_states(size, num_rows, num_heads, num_values)))
    state.lse_TA[-1, -1, -1] = torch.nan
    owners = [torch.randint(size, (count,), device="cuda") for count in {1, num_rows}]
    for last in (0, size - 1):
        for first_owner_B in owners:
            merged = empty_state(size, state)

            def launch(slabs: PeerSlabs) -> None:
                own = merged if slabs.rank == last else empty_state(size, state)  # noqa: B023
                merge(state, slabs, first_owner_B, own)  # noqa: B023

            StreamRanks(size).only(last, launch)
            assert_same_bits(merged, in_steps(state, first_owner_B, rank=last))
            expected = peer_merge_ref(*state, first_owner_B=first_owner_B, rank=last)
            torch.testing.assert_close(merged.out_TAL.float(), expected.out_TAL, rtol=2**-7, atol=1e-6, equal_nan=True)
            torch.testing.assert_close(merged.lse_TA, expected.lse_TA, rtol=1e-5, atol=1e-5, equal_nan=True)


@needs_gpu
@pytest.mark.parametrize("num_rows", [3, 40])
def test_a_rank_that_was_led_out_merges_its_own_alone(num_rows: int) -> None:
    state = AttentionState(*(part.cuda() for part in make_states(2, num_rows, 64, 512)))
    first_owner_B = torch.zeros(1, dtype=torch.int64, device="cuda")
    slabs, merged = StreamRanks(2).slabs[1], empty_state(2, state)
    slabs.give_up()
    merge(state, slabs, first_owner_B, merged)
    state.lse_TA[0] = -torch.inf
    assert_same_bits(merged, in_steps(state, first_owner_B, rank=1))


@needs_gpu
@pytest.mark.parametrize(("size", "most_rows"), [(2, 200), (3, 60)])  # the blocks of all, and of what follows, fit
def test_graphs_that_meet_again_and_again_agree(size: int, most_rows: int) -> None:
    num_heads, row_counts = 4 * size, [1 + 37 * number % most_rows for number in range(40)]
    states = [make_states(size, count, num_heads, 512, seed=number) for number, count in enumerate(row_counts)]
    on_gpu = [AttentionState(*(part.cuda() for part in state)) for state in states]
    first_owner_B = torch.tensor([size - 1], device="cuda")

    def launch(slabs: PeerSlabs) -> list[AttentionState]:
        kept = []
        for state in on_gpu:
            kept.append(empty_state(size, state))
            merge(state, slabs, first_owner_B, kept[-1])
        return kept

    for rank, kept in enumerate(StreamRanks(size).replayed(launch, times=3)):
        for merged, state in zip(kept, on_gpu, strict=True):
            assert_same_bits(merged, in_steps(state, first_owner_B, rank=rank))
