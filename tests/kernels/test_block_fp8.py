import numpy as np
import pytest
import torch

from specdec.kernels.block_fp8 import dequantise_block_fp8


def e4m3_values() -> np.ndarray:
    """The value of each byte: sign, 4 exponent bits with bias 7, 3 mantissa bits; 0x7f and 0xff are NaN."""
    values = np.empty(256, dtype=np.float32)
    for byte in range(256):
        sign = -1.0 if byte & 0x80 else 1.0
        exponent, mantissa = byte >> 3 & 0xF, byte & 0x7
        if exponent == 0:
            values[byte] = sign * mantissa * 2.0**-9
        else:
            values[byte] = sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values[0x7F] = values[0xFF] = np.nan
    return values


def make_matrix(num_rows: int, num_cols: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """FP8 bytes without NaN, scales, and the values computed one by one in numpy."""
    generator = np.random.default_rng(num_rows * 1000 + num_cols)
    bytes_RC = generator.integers(0, 255, (num_rows, num_cols), dtype=np.uint8)
    bytes_RC[(bytes_RC & 0x7F) == 0x7F] = 0
    scale_IJ = generator.uniform(0.001, 2.0, (-(-num_rows // 128), -(-num_cols // 128))).astype(np.float32)
    row_block = np.arange(num_rows)[:, None] // 128
    col_block = np.arange(num_cols)[None, :] // 128
    expected_RC = e4m3_values()[bytes_RC] * scale_IJ[row_block, col_block]
    return torch.from_numpy(bytes_RC).view(torch.float8_e4m3fn), torch.from_numpy(scale_IJ), expected_RC


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 128), (192, 40), (576, 300)])
def test_every_value_is_multiplied_by_the_scale_of_its_block(shape: tuple[int, int]) -> None:
    q_RC, scale_IJ, expected_RC = make_matrix(*shape)
    out_RC = torch.full(shape, float("nan"))
    dequantise_block_fp8(q_RC, scale_IJ, first_row=0, first_col=0, out_RC=out_RC)
    assert np.array_equal(out_RC.numpy(), expected_RC)


@pytest.mark.parametrize("rows", [(0, 576), (100, 300), (127, 128), (130, 140), (512, 576), (5, 5)])
@pytest.mark.parametrize("cols", [(0, 300), (60, 290), (128, 256), (299, 300)])
def test_a_slice_takes_the_scales_of_its_place_in_the_whole_matrix(
    rows: tuple[int, int], cols: tuple[int, int]
) -> None:
    q_RC, scale_IJ, expected_RC = make_matrix(576, 300)
    place = slice(*rows), slice(*cols)
    out_RC = torch.full((rows[1] - rows[0], cols[1] - cols[0]), float("nan"))
    dequantise_block_fp8(q_RC[place], scale_IJ, first_row=rows[0], first_col=cols[0], out_RC=out_RC)
    assert np.array_equal(out_RC.numpy(), expected_RC[place])


def test_the_product_is_rounded_once_to_the_output_dtype() -> None:
    q_RC, scale_IJ, expected_RC = make_matrix(192, 40)
    out_RC = torch.empty(192, 40, dtype=torch.bfloat16)
    dequantise_block_fp8(q_RC, scale_IJ, first_row=0, first_col=0, out_RC=out_RC)
    assert torch.equal(out_RC, torch.from_numpy(expected_RC).bfloat16())
