"""A block-FP8 product is the product of the values; its kernels give a row the same bits in every batch."""

import pytest
import torch

from specdec.kernels.block_fp8 import dequantise_block_fp8
from specdec.kernels.block_fp8_linear import (
    BlockFp8Linear,
    Workspace,
    block_fp8_linear_ref,
    concatenated_scales,
    concatenated_weights,
    gemm_macros,
    gemv_macros,
    gemv_rows,
    gemv_shared_bytes,
    group_blocks,
)
from tests.support.cuda_spills import most_bytes_spilled
from tests.support.gpu import needs_gpu
from tests.support.misaligned import misaligned

GLM_SHAPES = [(2624, 6144), (2048, 2048), (6144, 2048), (4096, 2048)]


def make_weight(parts: tuple[int, ...], num_in: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Matrices of every finite e4m3 value, and their scales."""
    generator = torch.Generator().manual_seed(num_in + sum(parts))
    weights, scales = [], []
    for rows in parts:
        q = torch.randint(0, 256, (rows, num_in), dtype=torch.uint8, generator=generator)
        weights.append(q.masked_fill(q & 0x7F == 0x7F, 0).view(torch.float8_e4m3fn))
        scales.append(torch.rand(-(-rows // 128), num_in // 128, generator=generator) + 0.01)
    return weights, scales


def joined(parts: tuple[int, ...], num_in: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, scales = make_weight(parts, num_in)
    return concatenated_weights(weights), concatenated_scales(scales, parts)


def hostile_rows(num_rows: int, num_in: int) -> torch.Tensor:
    """Ordinary rows, and among them large, tiny, wide, zero and non-finite ones."""
    generator = torch.Generator().manual_seed(num_rows)
    x_TI = torch.randn(num_rows, num_in, generator=generator)
    wide = 2.0 ** torch.randint(-60, 30, (num_in,), generator=generator)
    for row, change in enumerate((1e6, 1e-30, 0.0, wide, torch.nan)):
        x_TI[3 + 2 * row :: 16] *= change
    x_TI[13::16, 5] = torch.inf
    return x_TI.bfloat16()


@pytest.mark.parametrize("parts", [(576,), (128, 576), (64, 192, 1), (2,)])
def test_the_definition_is_the_product_of_each_matrix_with_its_own_blocks(parts: tuple[int, ...]) -> None:
    weights, scales = make_weight(parts, 512)
    x_TI = torch.randn(3, 512).bfloat16()
    expected = []
    for weight, scale in zip(weights, scales, strict=True):
        values = torch.empty(weight.shape)
        dequantise_block_fp8(weight, scale, first_row=0, first_col=0, out_RC=values)
        expected.append(x_TI.double() @ values.double().T)
    expected_TO = torch.cat(expected, dim=1)
    error_TO = block_fp8_linear_ref(x_TI, *joined(parts, 512)) - expected_TO
    assert float(error_TO.norm() / expected_TO.norm()) < 1e-7  # `dequantise_block_fp8` rounds to float32


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="576 rows need 5 rows"):
        concatenated_scales([torch.ones(4, 4)], [576])
    with pytest.raises(ValueError, match="multiple of 64 rows, got 100"):
        concatenated_scales([torch.ones(1, 4), torch.ones(1, 4)], [100, 128])


def test_other_operands_are_refused() -> None:
    weight_OI, scale_JB = joined((128,), 512)
    with pytest.raises(ValueError, match=r"weight must be torch\.float8_e4m3fn"):
        BlockFp8Linear(weight_OI.float(), scale_JB)
    with pytest.raises(ValueError, match=r"weight must be .* multiple of 512"):
        BlockFp8Linear(weight_OI[:, :384].contiguous(), scale_JB)
    with pytest.raises(ValueError, match=r"weight must be .*O >= 1, .*got .* \(0, 512\)"):
        BlockFp8Linear(weight_OI[:0], scale_JB[:0])
    with pytest.raises(ValueError, match="weight must begin at a multiple of 16 bytes"):
        BlockFp8Linear(misaligned(weight_OI), scale_JB)
    with pytest.raises(ValueError, match=r"scale must be torch.float32 \(2, 4\)"):
        BlockFp8Linear(weight_OI, scale_JB[:1])
    with pytest.raises(ValueError, match="out_dtype"):
        BlockFp8Linear(weight_OI, scale_JB, out_dtype=torch.float16)
    linear = BlockFp8Linear(weight_OI, scale_JB, max_rows=20)
    with pytest.raises(ValueError, match="x has 21 rows, max_rows is 20"):
        linear(torch.zeros(21, 512, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"x must be torch.bfloat16 \(2, 512\)"):
        linear(torch.zeros(2, 512))
    with pytest.raises(ValueError, match="x must begin at a multiple of 16 bytes"):
        linear(misaligned(torch.zeros(2, 512, dtype=torch.bfloat16)))
    with pytest.raises(ValueError, match="x must be on cpu, got meta"):
        linear(torch.zeros(2, 512, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(ValueError, match="out must be"):
        linear(torch.zeros(2, 512, dtype=torch.bfloat16), out_TO=torch.zeros(2, 128))
    assert linear(torch.zeros(0, 512, dtype=torch.bfloat16)).shape == (0, 128)


def test_weights_that_share_a_workspace_share_the_largest() -> None:
    shared, alone = Workspace(torch.device("cpu")), Workspace(torch.device("cpu"))
    for rows in (128, 640, 256):
        BlockFp8Linear(*joined((rows,), 512), max_rows=192, workspace=shared)
    BlockFp8Linear(*joined((640,), 512), max_rows=192, workspace=alone)
    assert shared.memory.numel() == alone.memory.numel() > 0
    assert BlockFp8Linear(*joined((640,), 512), max_rows=8)._workspace.memory.numel() == 0


@pytest.mark.parametrize(("num_out", "num_in"), [*GLM_SHAPES, (1, 512), (3072, 6144), (6144, 16384), (24576, 6144)])
def test_a_block_of_threads_fits_a_multiprocessor(num_out: int, num_in: int) -> None:
    assert num_in // 128 % group_blocks(num_out, num_in) == 0
    for tokens in (8, 16):
        rows = gemv_rows(num_out, num_in, tokens)
        assert 1 <= rows <= 64  # it then has two rows of scales at most
        assert gemv_shared_bytes(rows, num_in, tokens) <= 227 << 10


@pytest.mark.parametrize(("num_out", "num_in"), [*GLM_SHAPES, (100, 512)])
@pytest.mark.parametrize("out_f32", [False, True])
def test_the_kernels_compile_and_spill_nothing(num_out: int, num_in: int, *, out_f32: bool) -> None:
    files = [("block_fp8_gemv.cu", gemv_macros(num_out, num_in, tokens, out_f32=out_f32)) for tokens in (8, 16)]
    files += [("block_fp8_gemm.cu", gemm_macros(num_out, num_in, tokens, out_f32=out_f32)) for tokens in (32, 96, 192)]
    for file, macros in files:
        assert most_bytes_spilled(file, macros) == 0, (file, macros)


@needs_gpu
@pytest.mark.parametrize(
    ("parts", "num_in"),
    [((2048, 576), 6144), ((2048,), 2048), ((6144,), 2048), ((4096,), 2048), ((1,), 512), ((128, 64, 33), 1536)],
)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_equal_the_definition_and_a_row_is_the_same_in_every_batch(
    parts: tuple[int, ...], num_in: int, out_dtype: torch.dtype
) -> None:
    weight_OI, scale_JB = (tensor.cuda() for tensor in joined(parts, num_in))
    linear = BlockFp8Linear(weight_OI, scale_JB, out_dtype=out_dtype)
    x_TI = hostile_rows(192, num_in).cuda()
    alone_TO = torch.cat([linear(row[None]) for row in x_TI])
    expected_TO = block_fp8_linear_ref(x_TI, weight_OI, scale_JB)
    assert torch.equal(alone_TO.isfinite().all(1), expected_TO.isfinite().all(1))
    is_finite_T = expected_TO.isfinite().all(1)
    error_TO = (alone_TO.double() - expected_TO)[is_finite_T]
    size_T = expected_TO[is_finite_T].norm(dim=1)
    terms_TO = block_fp8_linear_ref(x_TI.abs(), weight_OI.float().abs().to(weight_OI.dtype), scale_JB.abs())
    rounding = 4e-3 if out_dtype == torch.bfloat16 else 2e-6
    assert bool((error_TO.norm(dim=1) <= rounding * size_T + 1e-6 * terms_TO[is_finite_T].norm(dim=1)).all())
    for num_rows in (1, 2, 6, 8, 9, 16, 17, 32, 33, 96, 97, 192):
        out_TO = torch.full((num_rows + 1, sum(parts)), 7.0, dtype=out_dtype, device="cuda")
        linear(x_TI[:num_rows], out_TO=out_TO[:num_rows])
        assert torch.equal(out_TO[:num_rows].nan_to_num(), alone_TO[:num_rows].nan_to_num()), num_rows
        assert bool((out_TO[num_rows] == 7).all())


@needs_gpu
def test_a_graph_replays_the_product() -> None:
    weight_OI, scale_JB = (tensor.cuda() for tensor in joined((300,), 1024))
    linear = BlockFp8Linear(weight_OI, scale_JB)
    x_TI, out_TO = hostile_rows(2, 1024).cuda().repeat(20, 1), torch.empty(40, 300, dtype=torch.bfloat16, device="cuda")
    expected_TO = linear(x_TI)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(x_TI, out_TO=out_TO)
    graph.replay()
    assert torch.equal(out_TO, expected_TO)
