"""The FP8 latent formats against a byte-by-byte reading that shares nothing with them."""

import struct

import numpy as np
import pytest
import torch

from specdec.kernels.latent_formats import (
    decode_fp8,
    decode_fp8_packed,
    encode_fp8,
    encode_fp8_packed,
    from_e4m3,
    packed_row_bytes,
    to_e4m3,
)


def e4m3_value(byte: int) -> float:
    """Read one e4m3 byte: sign, 4 exponent bits with bias 7, 3 mantissa bits; only 0x7f and 0xff are NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 0xF, byte & 7
    if exponent == 0xF and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


FINITE = np.array([e4m3_value(byte) for byte in range(0x7F)])  # 0 .. 448, by byte
ODD = np.arange(0x7F) & 1


def nearest_e4m3(value: float) -> int:
    """The byte of the nearest value, ties to the even mantissa, saturating; NaN for NaN."""
    if np.isnan(value):
        return 0x7F
    magnitude = min(abs(value), 448.0)
    byte = int(np.lexsort((ODD, np.abs(FINITE - magnitude)))[0])
    return byte | (0x80 if np.signbit(value) else 0)


def read_bf16(row: bytes, offset: int) -> float:
    (low,) = struct.unpack_from("<H", row, offset)
    return float(struct.unpack("<f", struct.pack("<I", low << 16))[0])


def latents(num_tokens: int, kv_lora_rank: int, rope_head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(kv_lora_rank)
    magnitude = torch.rand(num_tokens, kv_lora_rank, generator=generator).mul(12).sub(8).exp()
    return (
        torch.randn(num_tokens, kv_lora_rank, generator=generator) * magnitude,
        torch.randn(num_tokens, rope_head_dim, generator=generator),
    )


def test_every_e4m3_byte_is_read_as_its_value_times_the_scale() -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([np.float32(e4m3_value(byte)) * np.float32(0.3) for byte in range(256)])
    torch.testing.assert_close(from_e4m3(stored, 0.3), expected, rtol=0, atol=0, equal_nan=True)


def test_rounding_is_to_the_nearest_value_with_ties_to_even() -> None:
    values = FINITE.astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    below, above = np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(500))
    probes = np.concatenate([values, middles, below, above])
    probes = np.concatenate([probes, -probes])
    expected = torch.tensor([nearest_e4m3(float(probe)) for probe in probes], dtype=torch.uint8)
    assert torch.equal(to_e4m3(torch.from_numpy(probes)).view(torch.uint8), expected)


@pytest.mark.parametrize("value", [448.0, 449.0, 463.9, 464.0, 464.1, 1e30, float("inf")])
def test_values_too_large_saturate_and_never_become_nan(value: float) -> None:
    assert to_e4m3(torch.tensor([value, -value])).float().tolist() == [448.0, -448.0]


def test_nan_stays_nan() -> None:
    assert to_e4m3(torch.tensor([float("nan")])).float().isnan().all()


@pytest.mark.parametrize("scale", [1.0, 0.037, 300.0])
def test_plain_rows_hold_latent_then_rope_divided_by_the_layer_scale(scale: float) -> None:
    latent_TL, rope_TR = latents(3, 5, 2)
    row_TB = encode_fp8(latent_TL, rope_TR, scale)
    values = np.concatenate([latent_TL.numpy(), rope_TR.numpy()], axis=1)
    for row, expected in zip(row_TB.tolist(), values / np.float32(scale), strict=True):
        assert row == [nearest_e4m3(float(value)) for value in expected]
    read = torch.tensor([[np.float32(e4m3_value(byte)) * np.float32(scale) for byte in row] for row in row_TB.tolist()])
    assert torch.equal(decode_fp8(row_TB, scale), read)


def test_packed_rows_of_the_released_models_have_656_bytes() -> None:
    assert packed_row_bytes(512, 64) == 656
    assert encode_fp8_packed(*latents(2, 512, 64)).shape == (2, 656)


@pytest.mark.parametrize(("kv_lora_rank", "rope_head_dim"), [(1, 1), (5, 2), (128, 16), (129, 3), (300, 8), (512, 64)])
def test_packed_rows_are_written_and_read_byte_by_byte(kv_lora_rank: int, rope_head_dim: int) -> None:
    latent_TL, rope_TR = latents(3, kv_lora_rank, rope_head_dim)
    row_TB = encode_fp8_packed(latent_TL, rope_TR)
    num_groups = -(-kv_lora_rank // 128)
    decoded = decode_fp8_packed(row_TB, kv_lora_rank, rope_head_dim)
    for t, row in enumerate(bytes(row.tolist()) for row in row_TB):
        assert len(row) == kv_lora_rank + 4 * num_groups + 2 * rope_head_dim
        for group in range(num_groups):
            members = range(group * 128, min((group + 1) * 128, kv_lora_rank))
            (scale,) = struct.unpack_from("<f", row, kv_lora_rank + 4 * group)
            values = latent_TL[t, members.start : members.stop].numpy()
            assert scale == np.abs(values).max() / np.float32(448)
            for i in members:
                assert row[i] == nearest_e4m3(float(latent_TL[t, i].numpy() / np.float32(scale)))
                assert decoded[t, i].item() == np.float32(e4m3_value(row[i])) * np.float32(scale)
        for i in range(rope_head_dim):
            rope = read_bf16(row, kv_lora_rank + 4 * num_groups + 2 * i)
            assert rope == rope_TR[t, i].bfloat16().item()
            assert decoded[t, kv_lora_rank + i].item() == rope


def test_packed_error_is_half_a_step_of_e4m3() -> None:
    latent_TL, rope_TR = latents(64, 512, 64)
    decoded_TL = decode_fp8_packed(encode_fp8_packed(latent_TL, rope_TR), 512, 64)[:, :512]
    scale_TL = (latent_TL.abs().view(64, 4, 128).amax(-1) / 448).repeat_interleave(128, dim=1)
    half_step_TL = torch.maximum(latent_TL.abs() * 2**-4, scale_TL * 2**-10)
    assert ((decoded_TL - latent_TL).abs() <= half_step_TL * (1 + 1e-5)).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-38, -5e-36])
def test_groups_of_zeros_and_of_vanishing_values_get_scale_one(value: float) -> None:
    row = bytes(encode_fp8_packed(torch.full((1, 130), value), torch.zeros(1, 1))[0].tolist())
    assert struct.unpack_from("<ff", row, 130) == (1.0, 1.0)
    assert not any(byte & 0x7F for byte in row[:130])


def test_nan_and_infinity_stay_in_their_place() -> None:
    latent_TL = torch.linspace(-1, 1, 256).repeat(3, 1)
    clean = decode_fp8_packed(encode_fp8_packed(latent_TL, torch.zeros(3, 2)), 256, 2)
    latent_TL[1, 7] = float("nan")
    latent_TL[2, 200] = float("-inf")
    decoded = decode_fp8_packed(encode_fp8_packed(latent_TL, torch.zeros(3, 2)), 256, 2)
    assert decoded[1, 7].isnan()
    decoded[1, 7] = clean[1, 7]
    assert torch.equal(decoded[:2], clean[:2])
    assert torch.equal(decoded[2, :128], clean[2, :128])
    assert decoded.isfinite().all()
    assert decoded[2, 200] < -3e38


def test_packed_groups_of_nan_alone_read_as_nan() -> None:
    decoded = decode_fp8_packed(encode_fp8_packed(torch.full((1, 3), float("nan")), torch.zeros(1, 1)), 3, 1)
    assert decoded[:, :3].isnan().all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    latent_TL, rope_TR = latents(9, 300, 8)
    rows = torch.cat([encode_fp8_packed(latent_TL[t : t + 1], rope_TR[t : t + 1]) for t in range(9)])
    assert torch.equal(encode_fp8_packed(latent_TL, rope_TR), rows)


def test_bfloat16_inputs_are_stored_as_their_float32_values() -> None:
    latent_TL, rope_TR = (x.bfloat16() for x in latents(4, 130, 6))
    assert torch.equal(encode_fp8_packed(latent_TL, rope_TR), encode_fp8_packed(latent_TL.float(), rope_TR.float()))
    assert torch.equal(encode_fp8(latent_TL, rope_TR, 0.5), encode_fp8(latent_TL.float(), rope_TR.float(), 0.5))


def test_no_rows_are_no_bytes() -> None:
    assert encode_fp8_packed(torch.empty(0, 130), torch.empty(0, 4)).shape == (0, 146)
    assert decode_fp8_packed(torch.empty(0, 7, 146, dtype=torch.uint8), 130, 4).shape == (0, 7, 134)
    assert encode_fp8(torch.empty(0, 5), torch.empty(0, 4), 1.0).shape == (0, 9)


def test_decoding_keeps_leading_dims_and_accepts_slices() -> None:
    latent_TL, rope_TR = latents(6, 130, 6)
    row_TB = encode_fp8_packed(latent_TL, rope_TR)
    decoded = decode_fp8_packed(row_TB, 130, 6)
    assert torch.equal(decode_fp8_packed(row_TB.view(2, 3, -1), 130, 6), decoded.view(2, 3, -1))
    assert torch.equal(decode_fp8_packed(row_TB[::2], 130, 6), decoded[::2])
