"""Heads are packed by the rank that keeps them, bit by bit, and found again."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.state_message import pack_states, pack_states_ref, unpacked_states
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

KERNEL_CHECK = """
import torch
from specdec.kernels.state_message import pack_states, pack_states_ref, unpacked_states

for num_ranks, num_rows, num_heads, num_values in ((2, 3, 4, 16), (1, 1, 1, 8), (4, 2, 8, 24), (2, 0, 4, 16)):
    out = torch.randn(num_rows, num_heads, num_values).bfloat16()
    lse = torch.randn(num_rows, num_heads)
    out[:1, 0], lse[:1, 0] = torch.nan, -torch.inf
    ours, expected = (pack(out, lse, num_ranks=num_ranks) for pack in (pack_states, pack_states_ref))
    assert ours.shape == expected.shape
    states = tuple(unpacked_states(ours)), tuple(unpacked_states(expected))
    torch.testing.assert_close(*states, rtol=0, atol=0, equal_nan=True)
"""


def test_each_rank_gets_its_heads_in_order() -> None:
    out_TGL, lse_TG = torch.randn(3, 6, 16).bfloat16(), torch.randn(3, 6)
    out_NTAL, lse_NTA = unpacked_states(pack_states_ref(out_TGL, lse_TG, num_ranks=3))
    for rank in range(3):
        assert torch.equal(out_NTAL[rank], out_TGL[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(lse_NTA[rank], lse_TG[:, 2 * rank : 2 * rank + 2])


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


@needs_gpu
@pytest.mark.parametrize(("num_ranks", "num_rows", "num_heads"), [(2, 192, 64), (8, 5, 64), (2, 1, 16)])
def test_a_gpu_packs_as_the_definition(num_ranks: int, num_rows: int, num_heads: int) -> None:
    out_TGL = torch.randint(-(1 << 15), 1 << 15, (num_rows, num_heads, 512), dtype=torch.int16, device="cuda")
    lse_TG = torch.randn(num_rows, num_heads, device="cuda")
    lse_TG[0] = -torch.inf
    ours, expected = (
        unpacked_states(pack(out_TGL.view(torch.bfloat16), lse_TG, num_ranks=num_ranks))
        for pack in (pack_states, pack_states_ref)
    )
    assert torch.equal(ours.out_TAL.view(torch.int16), expected.out_TAL.view(torch.int16))
    assert torch.equal(ours.lse_TA, expected.lse_TA)


@pytest.mark.parametrize(
    ("out_TGL", "lse_TG", "message"),
    [
        (torch.zeros(2, 3, 16).bfloat16(), torch.zeros(2, 3), "3 heads of 16 values cannot be packed for 2 ranks"),
        (torch.zeros(2, 4, 12).bfloat16(), torch.zeros(2, 4), "4 heads of 12 values cannot be packed"),
        (torch.zeros(2, 4, 16), torch.zeros(2, 4), "out_TGL must be torch.bfloat16"),
        (torch.zeros(2, 4, 16).bfloat16(), torch.zeros(4, 2), "lse_TG must be"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(out_TGL: torch.Tensor, lse_TG: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_states(out_TGL, lse_TG, num_ranks=2)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    ptx = ptx_for_hopper(
        "state_message.pack_states_kernel",
        tmp_path,
        types=("*bf16", "*fp32", "*bf16", "*fp32"),
        constants={"HEADS": 32, "VALUES": 512, "BLOCK": 512, "PAD": 16, "STARTS_EARLY": True},
        aligned=(0, 1, 2, 3),
        options={"num_warps": 2},
    )
    assert ptx.count("st.global.v4.b32") == 1
    assert "griddepcontrol.wait" in ptx
