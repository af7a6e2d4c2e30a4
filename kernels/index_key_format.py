"""FP8 storage of index keys: e4m3 values with one power-of-two scale per token.

    scale = 2 ^ ceil(log2(amax / 448)),   key = e4m3(value / scale)

A page of `page_size` tokens holds the keys of all its tokens, page_size * D bytes, and behind them their float32
scales, page_size * 4 bytes: 132 bytes per token at D = 128, but never 132 contiguous ones. Little endian.

T = tokens, D = index head dim. NaN stays NaN and does not enter its token's scale. Values saturate at +-448 * 2^119,
the largest that can be read back without overflow. A key whose largest magnitude is below 448 * 2^-126 has scale 1, so
that no scale is zero or subnormal.
Source: the index-key cache of DeepSeek-V3.2's sparse attention, with `scale_fmt` ue8m0.
"""

import torch

from specdec.kernels.latent_formats import E4M3_MAX, from_e4m3, to_e4m3

LARGEST_KEY = E4M3_MAX * 2.0**119
SMALLEST_KEY = E4M3_MAX * 2.0**-126


def encode_index_keys(key_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise index keys of any float dtype.

    Returns:
        Keys, u8 [T, D], and scales, f32 [T].
    """
    values = key_TD.float()
    amax_T = values.nan_to_num(nan=0.0).abs().amax(dim=-1).clamp_(max=LARGEST_KEY)
    # Rounding the bits of a float up to the next whole exponent is an exact 2 ^ ceil(log2(x)); a float log2 is not.
    bits_T = (amax_T / E4M3_MAX).view(torch.int32)
    power_T = ((bits_T + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    scale_T = torch.where(amax_T < SMALLEST_KEY, 1.0, power_T)
    return to_e4m3(values / scale_T[..., None]).view(torch.uint8), scale_T


def decode_index_keys(key_TD: torch.Tensor, scale_T: torch.Tensor) -> torch.Tensor:
    """Values of quantised keys: u8 [..., D] and f32 [...] -> f32 [..., D]."""
    return from_e4m3(key_TD).mul_(scale_T[..., None])
