"""A rank gives the embeddings of its own tokens, and zeros for the others."""

from pathlib import Path

import pytest
import torch

from specdec.kernels.embed_rows import embed_rows, embed_rows_ref
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

KERNEL_CHECK = """
import torch
from specdec.kernels.embed_rows import embed_rows, embed_rows_ref

for rows, ids, features, first in ((1, 1, 1, 0), (7, 10, 1030, 20)):
    table = torch.randn(ids, features).bfloat16()
    token = torch.randint(first - 3, first + ids + 3, (rows,))
    position = torch.randint(-1, 2, (rows,), dtype=torch.int32)
    token[0] = -1
    out = torch.full((rows, features), torch.nan, dtype=torch.bfloat16)
    embed_rows(token, position, table, first_id=first, out_TH=out)
    assert torch.equal(out, embed_rows_ref(token, position, table, first_id=first))
"""


def test_the_definition_gives_the_whole_embedding_as_a_sum_over_ranks() -> None:
    table_VH = torch.randn(12, 5)
    token_T, position_T = torch.tensor([0, 11, 5, 6, 6, 3]), torch.tensor([4, 5, 6, 0, 1, -1])
    parts = [embed_rows_ref(token_T, position_T, table_VH[first : first + 4], first_id=first) for first in (0, 4, 8)]
    assert torch.equal(torch.stack(parts).sum(dim=0), torch.cat((table_VH[token_T[:-1]], torch.zeros(1, 5))))


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    types = ("*i64", "*i32", "*bf16", "*bf16", "i32", "i32", "i32")
    sizes = {"BLOCK": 1024, "STARTS_EARLY": True}
    assert ptx_for_hopper("embed_rows.embed_rows_kernel", tmp_path, types=types, constants=sizes)


def test_a_table_or_positions_of_another_dtype_are_refused() -> None:
    token_T = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"table_VH must be torch.bfloat16 \(3, 8\).* got torch.float32"):
        embed_rows(token_T, token_T.int(), torch.zeros(3, 8), first_id=0, out_TH=torch.zeros(1, 8))
    with pytest.raises(ValueError, match=r"position_T must be torch.int32 \(1,\).* got torch.int64"):
        embed_rows(token_T, token_T, torch.zeros(3, 8).bfloat16(), first_id=0, out_TH=torch.zeros(1, 8).bfloat16())


@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 6, 192])
def test_a_gpu_gives_what_the_definition_gives(num_rows: int) -> None:
    table_VH = torch.randn(19360, 6144, device="cuda").bfloat16()
    token_T = torch.randint(-1, 4 * 19360, (num_rows,), device="cuda")
    position_T = torch.randint(-1, 4, (num_rows,), dtype=torch.int32, device="cuda")
    out_TH = table_VH.new_full((num_rows, 6144), torch.nan)
    embed_rows(token_T, position_T, table_VH, first_id=19360, out_TH=out_TH)
    assert torch.equal(out_TH, embed_rows_ref(token_T, position_T, table_VH, first_id=19360))
