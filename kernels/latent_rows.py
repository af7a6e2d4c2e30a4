"""Rows of the latent cache in its three formats, where they lie in the pages of a pool.

    bfloat16   1152 bytes   512 latent and 64 rope values, bfloat16
    FP8         576 bytes   512 latent and 64 rope values, e4m3; times one scale of the layer
    packed      656 bytes   512 latent values, e4m3; 4 float32 scales, of 128 values each; 64 rope values, bfloat16

A page has 64 rows; row i of the pool is row i % 64 of page i // 64. `latent_formats` writes the two FP8 formats.
P = pages, S = rows of a page, B = bytes of a page or of a row, N = rows that are read, X = 576 values of a row.
"""

from enum import Enum

import torch

from specdec.kernels.latent_formats import decode_fp8, decode_fp8_packed

LATENT_DIM, ROPE_DIM, PAGE_ROWS = 512, 64, 64


class LatentFormat(Enum):
    """How a row is stored.

    Attributes:
        row_bytes: Bytes of a row, a multiple of 16.
    """

    BFLOAT16 = 1152
    FP8 = 576
    FP8_PACKED = 656

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: what tells the formats apart."""
        return self.value


def latent_rows_ref(
    pool_PB: torch.Tensor, row_N: torch.Tensor, row_format: LatentFormat, *, row_scale: float = 1.0
) -> torch.Tensor:
    """Read rows of a pool: float32 [N, X].

    Args:
        pool_PB: Pages, u8 [P, 64 * row bytes].
        row_N: Rows that are read, an integer dtype.
        row_format: Their format.
        row_scale: Factor on the values, which FP8 rows do not carry themselves.
    """
    row_N = row_N.long()
    row_PSB = pool_PB.unflatten(1, (PAGE_ROWS, row_format.row_bytes))
    row_NB: torch.Tensor = row_PSB[row_N // PAGE_ROWS, row_N % PAGE_ROWS]
    if row_format is LatentFormat.BFLOAT16:
        return row_NB.view(torch.bfloat16).float() * row_scale
    if row_format is LatentFormat.FP8:
        return decode_fp8(row_NB, row_scale)
    return decode_fp8_packed(row_NB, LATENT_DIM, ROPE_DIM) * row_scale


def check_latent_pool(pool_PB: torch.Tensor, row_format: LatentFormat, device: torch.device) -> None:
    """Raise a ValueError unless a kernel can read the pages, which may lie apart."""
    page_bytes = PAGE_ROWS * row_format.row_bytes
    if pool_PB.dtype != torch.uint8 or pool_PB.shape[1:] != (page_bytes,) or pool_PB.stride(1) != 1:
        raise ValueError(f"pool must be uint8 [P, {page_bytes}], got {pool_PB.dtype} {tuple(pool_PB.shape)}")
    if pool_PB.stride(0) % 16 or pool_PB.data_ptr() % 16:
        raise ValueError(f"rows must begin at multiples of 16 bytes, got pages {pool_PB.stride(0)} bytes apart")
    if pool_PB.device != device:
        raise ValueError(f"pool must be on {device}, got {pool_PB.device}")
