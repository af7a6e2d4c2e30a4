"""FP8 storage of the latent cache: one row of bytes per token and layer.

    plain    L bytes    e4m3(latent / scale)        one scale per layer, kept by the caller
             R bytes    e4m3(rope / scale)
    packed   L bytes    e4m3(latent / scale_g)      value i belongs to group g = i // 128
             4G bytes   scale_g, float32            amax of the group / 448; G = ceil(L / 128), the last may be short
             2R bytes   rope, bfloat16              not quantised

Little endian. T = tokens, L = latent values, R = rotated key values, G = groups, B = bytes of a row. For L = 512 and
R = 64 the packed row has 656 bytes: the FP8 cache layout of FlashMLA's sparse decoding.

Infinities and values too large saturate at +-448 times the scale; NaN stays NaN and does not touch its neighbours. A
group whose largest magnitude is below 448 * 2^-126 is stored with scale 1, so that no scale is zero or subnormal.
"""

import torch

E4M3_MAX = 448.0
PACKED_GROUP_SIZE = 128

_FLOAT32 = torch.finfo(torch.float32)
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e4m3, ties to even, saturating at +-448."""
    # What a cast does with larger values differs: torch 2.13 saturates on CPU, the format's own rule is NaN.
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def from_e4m3(stored: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Values of e4m3 bytes times a scale: u8 [...] -> f32 [...]."""
    if not stored.is_cpu:
        return stored.view(torch.float8_e4m3fn).float().mul_(scale)
    # On CPU the cast takes 11 ns a value, a look-up in a table 2 ns.
    return (_E4M3_VALUES * scale).index_select(0, stored.int().reshape(-1)).view(stored.shape)


def packed_row_bytes(kv_lora_rank: int, rope_head_dim: int) -> int:
    """Bytes of a packed row: L + 4 ceil(L / 128) + 2R."""
    return kv_lora_rank + 4 * -(-kv_lora_rank // PACKED_GROUP_SIZE) + 2 * rope_head_dim


def encode_fp8(latent_TL: torch.Tensor, rope_TR: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows of the plain format: u8 [T, L + R]. Inputs of any float dtype are divided in float32."""
    values = torch.cat((latent_TL.float(), rope_TR.float()), dim=-1)
    return to_e4m3(values.div_(scale)).view(torch.uint8)


def decode_fp8(row_TB: torch.Tensor, scale: float) -> torch.Tensor:
    """Values of rows of the plain format: u8 [..., L + R] -> f32 [..., L + R]."""
    return from_e4m3(row_TB, scale)


def encode_fp8_packed(latent_TL: torch.Tensor, rope_TR: torch.Tensor) -> torch.Tensor:
    """Rows of the packed format: u8 [T, L + 4G + 2R]."""
    num_tokens, num_values = latent_TL.shape
    num_groups = -(-num_values // PACKED_GROUP_SIZE)
    padding = num_groups * PACKED_GROUP_SIZE - num_values
    padded = torch.nn.functional.pad(latent_TL.float(), (0, padding))
    grouped = padded.view(num_tokens, num_groups, PACKED_GROUP_SIZE)
    finite = grouped.nan_to_num(nan=0.0, posinf=_FLOAT32.max, neginf=_FLOAT32.min)
    amax_TG = finite.abs().amax(dim=-1)
    scale_TG = torch.where(amax_TG < E4M3_MAX * _FLOAT32.tiny, 1.0, amax_TG / E4M3_MAX)
    keys = to_e4m3(grouped / scale_TG[..., None]).flatten(1)[:, :num_values]
    rope = rope_TR.to(torch.bfloat16).contiguous()
    return torch.cat((keys.view(torch.uint8), scale_TG.view(torch.uint8), rope.view(torch.uint8)), dim=-1)


def decode_fp8_packed(row_TB: torch.Tensor, kv_lora_rank: int, rope_head_dim: int) -> torch.Tensor:
    """Values of rows of the packed format: u8 [..., L + 4G + 2R] -> f32 [..., L + R]."""
    num_groups = -(-kv_lora_rank // PACKED_GROUP_SIZE)
    scale_end = kv_lora_rank + 4 * num_groups
    unscaled = from_e4m3(row_TB[..., :kv_lora_rank])
    scale_TG = _aligned(row_TB[..., kv_lora_rank:scale_end]).view(torch.float32)
    values = torch.empty(*row_TB.shape[:-1], kv_lora_rank + rope_head_dim, device=row_TB.device)
    for group in range(num_groups):
        span = slice(group * PACKED_GROUP_SIZE, min((group + 1) * PACKED_GROUP_SIZE, kv_lora_rank))
        torch.mul(unscaled[..., span], scale_TG[..., group, None], out=values[..., span])
    values[..., kv_lora_rank:] = _aligned(row_TB[..., scale_end:]).view(torch.bfloat16)
    return values


def _aligned(field: torch.Tensor) -> torch.Tensor:
    """A copy whose bytes can be viewed as wider numbers, wherever in a row they lay."""
    return field.clone(memory_format=torch.contiguous_format)
