"""The picked token is the argmax of the logits, the lowest id on a tie, and NaN above all."""

import math

import pytest
import torch

from specdec.kernels.block_fp8_linear import concatenated_scales
from specdec.kernels.lm_head_pick import LmHeadPick, block_rows, lm_head_pick_ref, pick_macros, pick_shared_bytes
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu
from tests.support.misaligned import misaligned

GLM_SLICE = (19360, 6144)


def make_weight(num_ids: int, num_in: int, *, is_fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(num_ids)
    if not is_fp8:
        return torch.randn(num_ids, num_in, generator=generator).bfloat16(), None
    q = torch.randint(0, 256, (num_ids, num_in), dtype=torch.uint8, generator=generator)
    scale_IJ = torch.rand(-(-num_ids // 128), num_in // 128, generator=generator) + 0.01
    return q.masked_fill(q & 0x7F == 0x7F, 0).view(torch.float8_e4m3fn), concatenated_scales([scale_IJ], [num_ids])


def test_the_definition_takes_the_lowest_id_of_equal_logits_and_the_first_nan() -> None:
    x_TI = torch.zeros(2, 512)
    x_TI[0, 0], x_TI[1, 1] = 1, 1
    weight_VI = torch.zeros(5, 512)
    weight_VI[:, 0] = torch.tensor([-1.0, 3, 2, 3, 0])
    weight_VI[2:4, 1] = torch.nan
    value_T, id_T, is_finite_T = lm_head_pick_ref(x_TI[:1], weight_VI.nan_to_num(), first_id=100)
    assert (value_T.tolist(), id_T.tolist(), is_finite_T.tolist()) == ([3.0], [101], [True])
    value_T, id_T, is_finite_T = lm_head_pick_ref(x_TI[1:], weight_VI)
    assert bool(value_T.isnan().all())
    assert (id_T.tolist(), is_finite_T.tolist()) == ([2], [False])


def test_other_operands_are_refused() -> None:
    weight_VI, scale_JB = make_weight(200, 512, is_fp8=True)
    with pytest.raises(ValueError, match=r"weight without scales must be torch\.bfloat16"):
        LmHeadPick(weight_VI)
    with pytest.raises(ValueError, match=r"weight must be .*multiple of 512\], got \(200, 500\)"):
        LmHeadPick(torch.zeros(200, 500, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="weight without scales must begin at a multiple of 16 bytes"):
        LmHeadPick(misaligned(torch.zeros(200, 512, dtype=torch.bfloat16)))
    assert scale_JB is not None
    with pytest.raises(ValueError, match=r"scale must be torch.float32 \(4, 4\)"):
        LmHeadPick(weight_VI, scale_JB[:3])
    pick = LmHeadPick(weight_VI, scale_JB)
    with pytest.raises(ValueError, match=r"x must be torch.bfloat16 \(1, 512\)"):
        pick(torch.zeros(1, 512))
    with pytest.raises(ValueError, match="x must begin at a multiple of 16 bytes"):
        pick(misaligned(torch.zeros(1, 512, dtype=torch.bfloat16)))
    with pytest.raises(ValueError, match="at most 32 rows, got 33"):
        pick(torch.zeros(33, 512, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"logits must be torch.float32 \(1, 200\)"):
        pick(torch.zeros(1, 512, dtype=torch.bfloat16), logits_TV=torch.zeros(1, 100))
    assert pick(torch.zeros(0, 512, dtype=torch.bfloat16)).id_T.tolist() == []


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_the_kernels_compile_spill_nothing_and_fit(tokens: int, *, is_fp8: bool) -> None:
    for num_ids, num_in in (GLM_SLICE, (154880, 6144), (100, 512)):
        macros = pick_macros(num_ids, num_in, tokens, is_fp8=is_fp8, logits=True)
        assert most_bytes_spilled("lm_head_pick.cu", macros) == 0, num_ids
        assert block_rows(num_ids) <= 160
        assert pick_shared_bytes(block_rows(num_ids), tokens, is_fp8=is_fp8) <= 222 << 10  # and static memory beside it


@needs_gpu
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(("num_ids", "num_in"), [GLM_SLICE, (1, 512), (1000, 1024), (30000, 512)])
def test_the_kernel_picks_the_best_of_its_logits_and_a_row_is_the_same_in_every_batch(
    num_ids: int, num_in: int, *, is_fp8: bool
) -> None:
    weight_VI, scale_JB = make_weight(num_ids, num_in, is_fp8=is_fp8)
    weight_VI, scale_JB = weight_VI.cuda(), None if scale_JB is None else scale_JB.cuda()
    pick = LmHeadPick(weight_VI, scale_JB, first_id=50)
    x_TI = torch.randn(32, num_in).bfloat16().cuda()
    x_TI[3] = 0  # all equal
    logits_TV = torch.full((33, num_ids), 7.0, device="cuda")
    for num_rows in (32, 1, 8, 9, 16, 17):
        value_T, id_T, is_finite_T = pick(x_TI[:num_rows], logits_TV=logits_TV[:num_rows])
        if num_rows == 32:
            expected_TV, best_TV = logits_TV.clone(), logits_TV[:32].max(dim=1).values[:, None]
            expected_ids = (logits_TV[:32] == best_TV).int().argmax(dim=1) + 50
            exact_TV = x_TI.double() @ weight_VI.double().T
            if scale_JB is not None:
                scale_VI = scale_JB.repeat_interleave(64, 0)[:num_ids].repeat_interleave(128, 1)
                exact_TV = x_TI.double() @ (weight_VI.double() * scale_VI).T
            assert float((logits_TV[:32] - exact_TV).norm() / exact_TV.norm()) < 2e-6
        assert torch.equal(logits_TV, expected_TV)
        assert torch.equal(value_T, best_TV[:num_rows, 0])
        assert torch.equal(id_T, expected_ids[:num_rows])
        assert bool(is_finite_T.all())
        without = pick(x_TI[:num_rows])
        assert torch.equal(without.value_T, value_T)
        assert torch.equal(without.id_T, id_T)


@needs_gpu
def test_ties_go_to_the_lowest_id_and_nan_stands_above_infinity() -> None:
    weight_VI = torch.zeros(1000, 512, dtype=torch.bfloat16, device="cuda")
    weight_VI[[7, 700], 0] = 2.0
    weight_VI[[300, 900], 1] = torch.inf
    weight_VI[[400, 450], 2] = torch.nan
    weight_VI[:, 3] = -1.0
    weight_VI[[20, 30], 3] = -0.0
    for column, id_, value in ((0, 7, 2.0), (1, 300, torch.inf), (2, 400, torch.nan), (3, 20, 0.0)):
        x_TI = torch.zeros(2, 512, dtype=torch.bfloat16, device="cuda")
        x_TI[1, column] = 1
        chosen = weight_VI.clone()
        chosen[:, [c for c in range(4) if c != column]] = 0  # 0 * inf would be NaN
        value_T, id_T, is_finite_T = LmHeadPick(chosen)(x_TI)
        assert is_finite_T.tolist() == [math.isfinite(0 * value), math.isfinite(value)]
        assert id_T[1] == id_
        torch.testing.assert_close(value_T[1].cpu(), torch.tensor(value), equal_nan=True)
