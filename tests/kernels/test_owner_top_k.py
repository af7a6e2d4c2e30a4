"""Merged lists are what one list of all would give."""

from typing import Any

import pytest
import torch

from specdec.kernels.owner_top_k import merge_macros, owner_top_k, owner_top_k_ref
from specdec.kernels.top_positions import top_positions
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu


def make_lists(num_owners: int, *, num_rows: int = 3, width: int = 40, kind: str = "ties") -> tuple[torch.Tensor, ...]:
    """Make scores and positions of owners who hold every N-th position; "short" lists end in padding."""
    generator = torch.Generator().manual_seed(num_owners)
    shape = (num_owners, num_rows, width)
    place_NTW = torch.rand((num_owners, num_rows, 2 * width), generator=generator).argsort(dim=2)[..., :width]
    position_NTW = place_NTW.sort(dim=2).values * num_owners + torch.arange(num_owners)[:, None, None]
    score_NTW = torch.randn(shape, generator=generator)
    if kind != "plain":
        score_NTW = (score_NTW * 2).round()
    if kind == "equal":
        score_NTW.zero_()
    if kind == "short":
        count_NT1 = torch.randint(0, width + 1, (num_owners, num_rows, 1), generator=generator)
        is_padding_NTW = torch.arange(width) >= count_NT1
        score_NTW = score_NTW.masked_fill(is_padding_NTW, -torch.inf)
        position_NTW = position_NTW.masked_fill(is_padding_NTW, -1)
    return score_NTW, position_NTW.int()


def by_position(score_NTW: torch.Tensor, position_NTW: torch.Tensor) -> torch.Tensor:
    """Put the scores of a row where one list of all positions has them, -inf where it has none."""
    num_owners, num_rows, width = score_NTW.shape
    scores_TS = torch.full((num_rows, 2 * width * num_owners), -torch.inf)
    for owner in range(num_owners):
        for row in range(num_rows):
            seen_W = position_NTW[owner, row] >= 0
            scores_TS[row, position_NTW[owner, row][seen_W].long()] = score_NTW[owner, row][seen_W]
    return scores_TS


@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "short"])
@pytest.mark.parametrize("num_owners", [1, 2, 8])
def test_the_definition_chooses_what_one_owner_would(num_owners: int, kind: str) -> None:
    score_NTW, position_NTW = make_lists(num_owners, kind=kind)
    expected_TK = top_positions(by_position(score_NTW, position_NTW), 25)
    assert torch.equal(owner_top_k_ref(score_NTW, position_NTW, 25), expected_TK)


@pytest.mark.parametrize("num_owners", range(1, 9))
def test_the_kernel_compiles_for_hopper_and_spills_nothing(num_owners: int) -> None:
    assert most_bytes_spilled("top_candidates.cu", merge_macros(1 << 17, num_owners=num_owners)) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_NTW": torch.zeros(2, 3, 4, dtype=torch.float64)}, "must be float32 and int32"),
        ({"position_NTW": torch.zeros(2, 3, 5, dtype=torch.int32)}, "must lie alike"),
        ({"position_NTW": torch.zeros(3, 2, 4, dtype=torch.int32).transpose(0, 1)}, "must lie alike"),
        (
            {
                name: torch.empty(1, dtype=dtype, device="meta").as_strided((2, 3, 4), (1 << 31, 4, 1))
                for name, dtype in (("score_NTW", torch.float32), ("position_NTW", torch.int32))
            },
            "within 2147483648 values, got owners 2147483648 apart",
        ),
        ({"out_position_TK": torch.zeros(3, 7, dtype=torch.int64)}, "out_position must be torch.int32"),
        ({"out_position_TK": torch.zeros(3, 2049, dtype=torch.int32)}, r"k must be 1..2048, got 2049"),
    ],
)
def test_lists_of_another_kind_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "score_NTW": torch.zeros(2, 3, 4),
        "position_NTW": torch.zeros(2, 3, 4, dtype=torch.int32),
        "max_positions": 100,
        "out_position_TK": torch.zeros(3, 7, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        owner_top_k(**(arguments | changes))


@needs_gpu
@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "short"])
@pytest.mark.parametrize(
    ("num_owners", "width", "k"), [(1, 2048, 2048), (2, 2048, 2048), (5, 999, 100), (8, 2048, 2048)]
)
def test_a_gpu_merges_the_same(num_owners: int, width: int, k: int, kind: str) -> None:
    score_NTW, position_NTW = make_lists(num_owners, width=width, kind=kind)
    score_NTW[0, 1, :1][position_NTW[0, 1, :1] >= 0] = torch.nan  # of a damaged key
    expected_TK = owner_top_k_ref(score_NTW, position_NTW, k)
    scores_TS = by_position(score_NTW, position_NTW).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    expected_score_TK = scores_TS.gather(1, expected_TK.clamp(min=0)).masked_fill(expected_TK < 0, -torch.inf)
    out_TK = torch.full(expected_TK.shape, -7, dtype=torch.int32, device="cuda")
    out_score_TK = torch.full(expected_TK.shape, torch.nan, device="cuda")
    lists = (score_NTW.cuda(), position_NTW.cuda())
    owner_top_k(*lists, max_positions=1 << 17, out_position_TK=out_TK, out_score_TK=out_score_TK)
    assert torch.equal(out_TK.long().cpu(), expected_TK)
    assert torch.equal(out_score_TK.cpu(), expected_score_TK)
    owner_top_k(*lists, max_positions=1 << 17, out_position_TK=out_TK.fill_(-7))
    assert torch.equal(out_TK.long().cpu(), expected_TK)
