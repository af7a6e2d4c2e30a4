"""The counter-based noise against its formula in Python integers, and against what random numbers must look like."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.gumbel_noise import (
    NoiseStream,
    coins,
    gumbel_argmax,
    gumbel_noise,
    position_keys,
    stream_key,
    uniform_noise,
)
from tests.support.gpu import needs_gpu
from tests.support.splitmix import GOLDEN, mix, unmix

SMALLEST, LARGEST = 2.0**-53, 1 - 2.0**-53


def uniform_by_formula(seed: int, choice: int, stream: int, position: int, token_id: int) -> float:
    key = mix(seed * GOLDEN)
    for number in (choice, stream + 1, position):
        key = mix(key ^ (number * GOLDEN % 2**64))
    return ((mix(mix(GOLDEN * (token_id + 1)) ^ key) >> 12) + 0.5) / 2**52


def keys_of(
    positions: Sequence[int], *, seed: int = 0, choice: int = 0, stream: NoiseStream = NoiseStream.TARGET
) -> torch.Tensor:
    key = stream_key(seed=seed, choice=choice, stream=stream)
    return torch.from_numpy(position_keys(np.full(len(positions), key, np.uint64), np.array(positions)))


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(num_cells: int) -> float:
    """Exceeded by chance once in about 30,000: mean + 4 standard deviations."""
    return num_cells - 1 + 4 * math.sqrt(2 * (num_cells - 1))


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 200),
    stream=st.sampled_from(list(NoiseStream)),
    position=st.integers(0, 2**40),
    num_ids=st.integers(1, 70),
)
def test_uniform_noise_is_the_hash_of_the_five_numbers(
    seed: int, choice: int, stream: NoiseStream, position: int, num_ids: int
) -> None:
    noise_TV = uniform_noise(keys_of([position], seed=seed, choice=choice, stream=stream), num_ids)
    assert noise_TV.tolist() == [[uniform_by_formula(seed, choice, stream, position, i) for i in range(num_ids)]]


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    positions = [5, 0, 7, 5, 123_456, 9, 1, 2, 3]
    noise_TV = gumbel_noise(keys_of(positions), 1001)
    for row, position in enumerate(positions):
        assert torch.equal(noise_TV[row : row + 1], gumbel_noise(keys_of([position]), 1001))


def test_more_ids_only_append_columns() -> None:
    key_T = keys_of([3, 4])
    assert torch.equal(gumbel_noise(key_T, 4099)[:, :517], gumbel_noise(key_T, 517))


def test_coins_are_the_noise_of_the_first_id() -> None:
    key_T = keys_of(range(9), stream=NoiseStream.COIN)
    assert torch.equal(coins(key_T), uniform_noise(key_T, 5)[:, 0])


def test_the_ends_of_the_hash_give_numbers_strictly_between_zero_and_one() -> None:
    edges = {0: SMALLEST, 2**12 - 1: SMALLEST, 2**64 - 1: LARGEST, 2**64 - 2**12: LARGEST, 2**63: 0.5 + SMALLEST}
    keys = [unmix(hashed) ^ mix(GOLDEN) for hashed in edges]
    key_T = torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))
    assert coins(key_T).tolist() == list(edges.values())
    noise_T1 = gumbel_noise(key_T, 1)
    assert noise_T1.isfinite().all()
    assert noise_T1.min().item() == pytest.approx(-math.log(-math.log(SMALLEST)))
    assert noise_T1.max().item() == pytest.approx(-math.log(SMALLEST))


def test_noise_is_uniform_over_ids_and_over_positions() -> None:
    over_ids = uniform_noise(keys_of([17], seed=42), 300_000).numpy().ravel()
    over_positions = coins(keys_of(range(300_000), seed=42)).numpy()
    for numbers in (over_ids, over_positions):
        for num_cells in (2, 64, 1009):
            counts = np.bincount((numbers * num_cells).astype(np.int64), minlength=num_cells)
            assert chi_square(counts) < chi_square_limit(num_cells)


def test_each_of_the_52_bits_is_set_half_of_the_time() -> None:
    bits = (uniform_noise(keys_of([1, 2, 3]), 50_000).numpy().ravel() * 2**52).astype(np.int64)
    share = np.array([((bits >> bit) & 1).mean() for bit in range(52)])
    assert np.abs(share - 0.5).max() < 4.5 / (2 * math.sqrt(bits.size))


@pytest.mark.parametrize(
    "other",
    [
        {"positions": range(1, 65)},
        {"positions": range(64), "choice": 1},
        {"positions": range(64), "seed": 1},
        {"positions": range(64), "seed": 2**63},
        {"positions": range(64), "stream": NoiseStream.DRAFT},
        {"positions": range(64), "stream": NoiseStream.COIN},
        {"positions": range(64), "stream": NoiseStream.RESIDUAL},
    ],
)
def test_rows_that_differ_in_one_number_are_independent(other: dict[str, object]) -> None:
    first = uniform_noise(keys_of(range(64)), 5000).numpy().ravel()
    second = uniform_noise(keys_of(**other), 5000).numpy().ravel()  # type: ignore[arg-type]
    pairs = (first * 16).astype(np.int64) * 16 + (second * 16).astype(np.int64)
    assert chi_square(np.bincount(pairs, minlength=256)) < chi_square_limit(256)


def test_neighbouring_ids_of_a_row_are_independent() -> None:
    numbers = uniform_noise(keys_of([11]), 300_001).numpy().ravel()
    pairs = (numbers[:-1] * 16).astype(np.int64) * 16 + (numbers[1:] * 16).astype(np.int64)
    assert chi_square(np.bincount(pairs, minlength=256)) < chi_square_limit(256)


def test_noise_has_the_moments_of_a_gumbel_variable() -> None:
    noise = gumbel_noise(keys_of(range(100)), 10_000).numpy().ravel()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=4 * 1.29 / 1000)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert np.median(noise) == pytest.approx(-math.log(math.log(2)), abs=0.01)


def test_the_noisy_argmax_draws_from_the_softmax() -> None:
    probs = np.array([0.4, 0.05, 0.25, 0.0, 0.3])
    num_draws = 40_000
    logits_TV = torch.from_numpy(np.log(probs, out=np.full(5, -np.inf), where=probs > 0)).float().expand(num_draws, 5)
    drawn_T, _ = gumbel_argmax(logits_TV, keys_of(range(num_draws), seed=7))
    counts = np.bincount(drawn_T.numpy(), minlength=5)
    assert counts[3] == 0
    expected = probs[probs > 0] * num_draws
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    assert statistic < chi_square_limit(4)


@pytest.mark.parametrize(("num_rows", "num_ids"), [(1, 1), (9, 7), (300, 500), (3, 70_000)])
def test_the_noisy_argmax_is_the_argmax_of_logits_plus_noise(num_rows: int, num_ids: int) -> None:
    logits_TV = torch.randn(num_rows, num_ids, generator=torch.Generator().manual_seed(0))
    key_T = keys_of(range(num_rows))
    drawn_T, value_T = gumbel_argmax(logits_TV, key_T)
    expected_T, expected_id_T = (logits_TV.double() + gumbel_noise(key_T, num_ids)).max(dim=-1)
    assert torch.equal(drawn_T, expected_id_T)
    assert torch.equal(value_T, expected_T)


def test_a_row_without_any_token_has_no_finite_value() -> None:
    inf = math.inf
    logits_TV = torch.tensor([[-inf, -inf], [-inf, 1.0], [0.0, math.nan], [0.0, inf]])
    drawn_T, value_T = gumbel_argmax(logits_TV, keys_of(range(4)))
    assert value_T.isfinite().tolist() == [False, True, False, False]
    assert drawn_T[1] == 1


@needs_gpu
def test_a_gpu_gives_the_same_uniform_bits_and_draws_as_a_cpu() -> None:
    key_T = keys_of(range(16), seed=3)
    assert torch.equal(uniform_noise(key_T.cuda(), 50_000).cpu(), uniform_noise(key_T, 50_000))
    torch.testing.assert_close(
        gumbel_noise(key_T.cuda(), 50_000).cpu(), gumbel_noise(key_T, 50_000), rtol=1e-13, atol=1e-13
    )
    logits_TV = torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_argmax(logits_TV.cuda(), key_T.cuda())[0].cpu(), gumbel_argmax(logits_TV, key_T)[0])
