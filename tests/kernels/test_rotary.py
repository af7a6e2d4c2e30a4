"""Rotation of interleaved pairs, against complex numbers in float64."""

import torch

from specdec.kernels.rotary import inverse_frequency, rotate, rotation_at


def test_pairs_rotate_like_complex_numbers() -> None:
    position_T = torch.tensor([0, 1, 5, 1000])
    inverse_frequency_P = inverse_frequency(theta=10000.0, dim=16, device=torch.device("cpu"))
    x_THR = torch.randn(4, 3, 16)
    pair = torch.view_as_complex(x_THR.double().unflatten(-1, (8, 2)))
    angle_TP = position_T.double()[:, None] * 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    expected = torch.view_as_real(pair * torch.polar(torch.ones_like(angle_TP), angle_TP)[:, None]).flatten(-2)
    rotated = rotate(x_THR, rotation_at(position_T, inverse_frequency_P))
    torch.testing.assert_close(rotated.double(), expected, rtol=1e-4, atol=2e-4)


def test_dot_products_depend_on_the_distance_alone() -> None:
    inverse_frequency_P = inverse_frequency(theta=8e6, dim=64, device=torch.device("cpu"))
    q_1R, k_1R = torch.randn(1, 64), torch.randn(1, 64)

    def dot(q_position: int, k_position: int) -> float:
        q = rotate(q_1R, rotation_at(torch.tensor([q_position]), inverse_frequency_P))
        return float((q * rotate(k_1R, rotation_at(torch.tensor([k_position]), inverse_frequency_P))).sum())

    assert abs(dot(17, 5) - dot(112, 100)) < 1e-3
