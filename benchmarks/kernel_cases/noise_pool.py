"""A pool of cached rows to attend to: larger than any cache, of values that no kernel can profit from."""

import torch

from specdec.kernels.latent_formats import encode_fp8, encode_fp8_packed
from specdec.kernels.latent_rows import LATENT_DIM, PAGE_ROWS, ROPE_DIM, LatentFormat

ROW_SCALE = 0.02  # of plain FP8 rows

_FRESH_PAGES = 1000


def noise_pool(row_format: LatentFormat, num_pages: int) -> torch.Tensor:
    """Make pages of noise, u8 [P, 64 * row bytes]; the same 1,000 over and over, which no cache can tell."""
    latent = torch.randn(_FRESH_PAGES * PAGE_ROWS, LATENT_DIM, device="cuda")
    rope = torch.randn(_FRESH_PAGES * PAGE_ROWS, ROPE_DIM, device="cuda")
    if row_format is LatentFormat.BFLOAT16:
        rows = torch.cat((latent, rope), dim=-1).bfloat16().view(torch.uint8)
    elif row_format is LatentFormat.FP8:
        rows = encode_fp8(latent, rope, ROW_SCALE)
    else:
        rows = encode_fp8_packed(latent, rope)
    return rows.view(_FRESH_PAGES, -1).repeat(-(-num_pages // _FRESH_PAGES), 1)[:num_pages]
