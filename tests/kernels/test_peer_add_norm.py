"""Rows added up over ranks and normed: the bits of the sum in rank order and the norm of one rank, on every rank."""

from typing import Any

import pytest
import torch

from specdec.kernels import peer_add_norm as module
from specdec.kernels.add_rms_norm import add_rms_norm
from specdec.kernels.peer_add_norm import peer_add_norm, peer_add_norm_macros, peer_add_norm_ref, takes_rows
from specdec.kernels.peer_slab import NUM_PARTS, PeerSlabs, SlabLayout
from specdec.kernels.sum_in_order import sum_in_order
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu
from tests.support.peer_ranks import StreamRanks

EPS = 1e-5


def make_rows(size: int, num_rows: int, num_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    shapes = ((num_rows, num_features), (size, num_rows, num_features), (num_features,))
    x_TH, delta_NTH, weight_H = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    return x_TH, delta_NTH * 10, weight_H


def test_the_definition_is_the_norm_of_the_residual_and_the_sum_in_order() -> None:
    x_TH, delta_NTH, weight_H = make_rows(3, 2, 256)
    sum_TH, normed_TH = peer_add_norm_ref(x_TH, delta_NTH, weight_H, eps=EPS)
    assert torch.equal(sum_TH, x_TH + ((delta_NTH[0] + delta_NTH[1]) + delta_NTH[2]))
    exact_TH = sum_TH.double() * (sum_TH.double().square().mean(dim=1, keepdim=True) + EPS).rsqrt() * weight_H.double()
    torch.testing.assert_close(normed_TH.double(), exact_TH, rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("num_features", [2048, 6144])
def test_the_kernel_compiles_without_spills(size: int, num_features: int) -> None:
    macros = peer_add_norm_macros(SlabLayout(size), num_features=num_features)
    assert most_bytes_spilled("peer_add_norm.cu", macros) == 0


@pytest.mark.parametrize(("size", "most"), [(2, 128), (3, 64), (8, 18)])
def test_so_many_rows_of_so_many_features_are_taken(size: int, most: int) -> None:
    layout = SlabLayout(size)
    assert takes_rows(layout, most, 6144)
    assert takes_rows(layout, 0, 2048)
    assert not takes_rows(layout, most + 1, 6144)
    assert not takes_rows(layout, 1, 6144 + 2048)
    assert not takes_rows(layout, 1, 3072)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_TH": torch.zeros(129, 2048).bfloat16()}, "2 ranks add up to 128 rows.*got 129 of 2048"),
        ({"delta_TH": torch.zeros(3, 2048).bfloat16()}, "delta_TH must be torch.bfloat16"),
        ({"normed_TH": torch.zeros(2, 2048)}, "normed_TH must be torch.bfloat16"),
        ({"weight_H": torch.zeros(128).bfloat16()}, "weight_H must be"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(changes: dict[str, Any], message: str) -> None:
    x_TH, delta_NTH, weight_H = make_rows(2, 2, 2048)
    arguments: dict[str, Any] = {
        "x_TH": x_TH, "delta_TH": delta_NTH[0], "weight_H": weight_H, "eps": EPS, "normed_TH": torch.empty_like(x_TH),
        "slabs": PeerSlabs([0, 0], rank=0, device=torch.device("cpu")),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        peer_add_norm(**(arguments | changes))


def test_eight_blocks_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "cuda_kernel", lambda *_, **__: lambda *arguments: launches.append(arguments))
    slabs = PeerSlabs([0, 0, 0], rank=2, device=torch.device("cpu"))
    x_TH, delta_NTH, weight_H = make_rows(3, 64, 2048)
    for num_rows in (0, 1, 64):
        rows = slice(num_rows)
        peer_add_norm(x_TH[rows], delta_NTH[0, rows], weight_H, slabs, eps=EPS, normed_TH=torch.empty_like(x_TH[rows]))
    assert [(grid, block) for grid, block, *_ in launches] == [((NUM_PARTS, 1, 1), 96), ((64 * NUM_PARTS, 1, 1), 96)]
    assert len(slabs.row_epochs) >= 64 * NUM_PARTS


@needs_gpu
@pytest.mark.parametrize(
    ("size", "num_rows", "num_features"), [(2, 1, 6144), (3, 6, 2048), (2, 128, 6144), (8, 18, 6144)]
)
@pytest.mark.parametrize("hostile", [False, True])
def test_a_gpu_gives_the_bits_of_the_sum_and_the_norm(
    size: int, num_rows: int, num_features: int, hostile: bool
) -> None:
    x_TH, delta_NTH, weight_H = (part.cuda() for part in make_rows(size, num_rows, num_features))
    if hostile:
        x_TH[0], delta_NTH[:, 0] = 0, 0
        delta_NTH[-1, -1, 5] = torch.inf
        delta_NTH[0, -1, 5] = -torch.inf
        delta_NTH[0, num_rows // 2].view(torch.int16)[7] = 0x7FC1
        weight_H[[20, 70]] = torch.tensor([torch.inf, torch.nan]).bfloat16().cuda()
    expected_x, expected = x_TH.clone(), torch.empty_like(x_TH)
    add_rms_norm(expected_x, sum_in_order(delta_NTH), weight_H, eps=EPS, normed_TH=expected)
    for last in (0, size - 1):
        ranks = StreamRanks(size)
        for rows in (slice(None), slice(num_rows // 2, num_rows // 2 + 1)):  # a row alone has the bits it has here
            x_RH, normed_RH = x_TH[rows].clone(), torch.full_like(x_TH[rows], 9)

            def launch(slabs: PeerSlabs) -> None:
                is_last = slabs.rank == last  # noqa: B023
                peer_add_norm(
                    x_RH if is_last else x_RH.clone(),  # noqa: B023
                    delta_NTH[slabs.rank, rows],  # noqa: B023
                    weight_H,
                    slabs,
                    eps=EPS,
                    normed_TH=normed_RH if is_last else torch.empty_like(normed_RH),  # noqa: B023
                )

            ranks.only(last, launch)
            assert torch.equal(x_RH.view(torch.int16), expected_x[rows].view(torch.int16))
            assert torch.equal(normed_RH.view(torch.int16), expected[rows].view(torch.int16))


@needs_gpu
def test_graphs_that_meet_again_and_again_agree() -> None:
    size, times = 3, 3
    delta_NTH, weight_H = (part.cuda() for part in make_rows(size, 20, 6144)[1:])  # the blocks of all fit on one GPU
    row_counts = [1 + 7 * number % 20 for number in range(50)]
    stream_NTH = torch.zeros_like(delta_NTH)
    normed_NTH = torch.zeros_like(delta_NTH)

    def launch(slabs: PeerSlabs) -> None:
        rank = slabs.rank
        stream_NTH[rank].zero_()
        for count in row_counts:
            x_TH, delta_TH, normed_TH = (each[rank, :count] for each in (stream_NTH, delta_NTH, normed_NTH))
            peer_add_norm(x_TH, delta_TH, weight_H, slabs, eps=EPS, normed_TH=normed_TH)

    StreamRanks(size).replayed(launch, times=times)
    expected_x, expected = torch.zeros_like(delta_NTH[0]), torch.zeros_like(delta_NTH[0])
    for count in row_counts:
        summed_TH = sum_in_order(delta_NTH[:, :count])
        add_rms_norm(expected_x[:count], summed_TH, weight_H, eps=EPS, normed_TH=expected[:count])
    for rank in range(size):
        assert torch.equal(stream_NTH[rank], expected_x)
        assert torch.equal(normed_NTH[rank], expected)
