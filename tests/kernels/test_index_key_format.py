"""The FP8 index-key format against exact arithmetic on Python numbers."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from specdec.kernels.index_key_format import decode_index_keys, encode_index_keys
from specdec.kernels.latent_formats import to_e4m3

MAX_FLOAT32 = float(np.finfo(np.float32).max)


def smallest_power_of_two(amax: float) -> Fraction:
    """The smallest power of two in 2^-126 .. 2^119 whose 448-fold reaches `amax`; 1 where a smaller one would do."""
    scale = Fraction(2) ** -126
    if Fraction(amax) < 448 * scale:
        return Fraction(1)
    while 448 * scale < Fraction(amax) and scale < 2**119:
        scale *= 2
    return scale


def keys(num_tokens: int, index_head_dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index_head_dim)
    magnitude_T1 = torch.rand(num_tokens, 1, generator=generator).mul(40).sub(20).exp()
    return torch.randn(num_tokens, index_head_dim, generator=generator) * magnitude_T1


@pytest.mark.parametrize("index_head_dim", [1, 4, 128])
def test_scales_are_the_smallest_power_of_two_that_fits(index_head_dim: int) -> None:
    key_TD = keys(50, index_head_dim)
    stored_TD, scale_T = encode_index_keys(key_TD)
    assert [Fraction(scale) for scale in scale_T.tolist()] == [
        smallest_power_of_two(amax) for amax in key_TD.abs().amax(-1).tolist()
    ]
    assert torch.equal(stored_TD, to_e4m3(key_TD / scale_T[:, None]).view(torch.uint8))


@pytest.mark.parametrize("exponent", [-126, -30, 0, 1, 100])
def test_the_border_of_a_power_of_two_is_exact(exponent: int) -> None:
    border = np.float32(448 * 2.0**exponent)
    for amax in (np.nextafter(border, np.float32(0)), border, np.nextafter(border, np.float32(np.inf))):
        _, scale_T = encode_index_keys(torch.tensor([[0.0, -amax]]))
        assert Fraction(scale_T.item()) == smallest_power_of_two(float(amax))


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 5e-36, MAX_FLOAT32])
def test_extreme_keys_have_a_normal_scale(amax: float) -> None:
    stored_TD, scale_T = encode_index_keys(torch.tensor([[amax, -amax]]))
    assert Fraction(scale_T.item()) == smallest_power_of_two(float(np.float32(amax)))
    decoded = decode_index_keys(stored_TD, scale_T)
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, torch.tensor([[amax, -amax]]), rtol=2**-3, atol=1e-35)


def test_values_on_the_grid_survive_unchanged() -> None:
    values_TD = torch.tensor([[448.0, -1.0, 0.5, 0.0], [7.0, 1.75, -0.4375, 3.5]])
    torch.testing.assert_close(decode_index_keys(*encode_index_keys(values_TD)), values_TD, rtol=0, atol=0)


def test_decoding_multiplies_every_key_by_its_tokens_scale() -> None:
    key_TD = keys(6, 4)
    stored_TD, scale_T = encode_index_keys(key_TD)
    expected = torch.stack([stored_TD[t].view(torch.float8_e4m3fn).float() * scale_T[t] for t in range(6)])
    assert torch.equal(decode_index_keys(stored_TD, scale_T), expected)
    shaped = decode_index_keys(stored_TD.view(2, 3, 4), scale_T.view(2, 3))
    assert torch.equal(shaped, expected.view(2, 3, 4))


def test_nan_and_infinity_stay_in_their_place() -> None:
    key_TD = keys(3, 4)
    clean = decode_index_keys(*encode_index_keys(key_TD))
    key_TD[0, 0] = float("nan")
    key_TD[1, 2] = float("inf")
    stored_TD, scale_T = encode_index_keys(key_TD)
    decoded = decode_index_keys(stored_TD, scale_T)
    assert decoded[0, 0].isnan()
    assert scale_T[0].item() == float(smallest_power_of_two(key_TD[0, 1:].abs().max().item()))
    assert decoded[1, 2].item() == 448 * 2.0**119
    assert decoded[1].isfinite().all()
    assert torch.equal(decoded[2], clean[2])


def test_a_key_does_not_depend_on_its_neighbours() -> None:
    key_TD = keys(9, 128)
    stored_TD, scale_T = encode_index_keys(key_TD)
    alone = [encode_index_keys(key_TD[t : t + 1]) for t in range(9)]
    assert torch.equal(stored_TD, torch.cat([stored for stored, _ in alone]))
    assert torch.equal(scale_T, torch.cat([scale for _, scale in alone]))


def test_no_keys_are_no_bytes() -> None:
    stored_TD, scale_T = encode_index_keys(torch.empty(0, 4))
    assert stored_TD.shape == (0, 4)
    assert scale_T.shape == (0,)
