"""Merged shards against attention over all keys at once, in float64; empty shards, infinities, bases."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.lse_merge import merge_states, merge_states_ref, natural_lse, shard_weights
from specdec.kernels.sparse_mla import sparse_mla_ref

LATENT_DIM, ROPE_DIM = 8, 4
SCALE = 0.7


def make_attention(
    num_keys: int, *, spread: float = 1.0, seed: int = 0, num_rows: int = 3, num_heads: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query_TAX = spread * torch.randn(num_rows, num_heads, LATENT_DIM + ROPE_DIM, generator=generator)
    return query_TAX, torch.randn(num_rows, num_keys, LATENT_DIM + ROPE_DIM, generator=generator)


def attend(query_TAX: torch.Tensor, kv_TKX: torch.Tensor, valid_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse_mla_ref(query_TAX, kv_TKX, valid_TK, scale=SCALE, latent_dim=LATENT_DIM)


def shards_of(
    query_TAX: torch.Tensor, kv_TKX: torch.Tensor, shard_of_K: torch.Tensor, num_shards: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and LSEs of every shard; where a shard is empty its output is NaN."""
    states = [attend(query_TAX, kv_TKX, (shard_of_K == n).expand(len(kv_TKX), -1)) for n in range(num_shards)]
    out_NTAL, lse_NTA = (torch.stack(parts) for parts in zip(*states, strict=True))
    return out_NTAL.masked_fill((lse_NTA == -torch.inf)[..., None], torch.nan), lse_NTA


@given(
    shard_of=st.lists(st.integers(0, 7), max_size=40),
    num_shards=st.sampled_from([2, 4, 8]),
    spread=st.sampled_from([0.0, 1.0, 30.0]),  # 0: every score is a tie
    seed=st.integers(0, 100),
)
def test_shards_in_any_split_merge_to_attention_over_all_keys(
    shard_of: list[int], num_shards: int, spread: float, seed: int
) -> None:
    query_TAX, kv_TKX = make_attention(len(shard_of), spread=spread, seed=seed)
    shard_of_K = torch.tensor(shard_of, dtype=torch.int64) % num_shards
    out_NTAL, lse_NTA = shards_of(query_TAX.double(), kv_TKX.double(), shard_of_K, num_shards)
    merged = merge_states(out_NTAL.float(), lse_NTA.float())
    out_TAL, lse_TA = attend(query_TAX.double(), kv_TKX.double(), torch.ones(len(kv_TKX), len(shard_of), dtype=bool))
    if not shard_of:
        assert not merged.out_TAL.any()
        assert (merged.lse_TA == -torch.inf).all()
        return
    torch.testing.assert_close(merged.out_TAL.double(), out_TAL, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merged.lse_TA.double(), lse_TA, rtol=1e-5, atol=1e-5)


@given(
    lse=st.lists(
        st.lists(st.sampled_from([-torch.inf, -1e30, -90.0, -0.0, 1.5, 1.5, 80.0, 1e30]), min_size=4, max_size=4),
        min_size=1,
        max_size=8,
    )
)
def test_the_merge_equals_its_definition_in_float64(lse: list[list[float]]) -> None:
    lse_NTA = torch.tensor(lse)[..., None]
    out_NTAL = torch.randn(*lse_NTA.shape, LATENT_DIM, generator=torch.Generator().manual_seed(len(lse)))
    out_NTAL = out_NTAL.masked_fill((lse_NTA == -torch.inf)[..., None], torch.nan)
    merged, expected = merge_states(out_NTAL, lse_NTA), merge_states_ref(out_NTAL.double(), lse_NTA.double())
    torch.testing.assert_close(merged.out_TAL.double(), expected.out_TAL, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged.lse_TA.double(), expected.lse_TA, rtol=1e-6, atol=1e-6)


def test_an_empty_shard_changes_no_bit_wherever_it_stands() -> None:
    query_TAX, kv_TKX = make_attention(20)
    out_NTAL, lse_NTA = shards_of(query_TAX, kv_TKX, torch.arange(20) % 3, 3)
    whole = merge_states(out_NTAL, lse_NTA)
    for place in range(4):
        out_padded = torch.cat((out_NTAL[:place], torch.full_like(out_NTAL[:1], torch.nan), out_NTAL[place:]))
        lse_padded = torch.cat((lse_NTA[:place], torch.full_like(lse_NTA[:1], -torch.inf), lse_NTA[place:]))
        merged = merge_states(out_padded, lse_padded)
        assert torch.equal(merged.out_TAL, whole.out_TAL)
        assert torch.equal(merged.lse_TA, whole.lse_TA)
        assert (shard_weights(lse_padded).weight_NTA[place] == 0).all()


def test_a_damaged_shard_with_keys_shows_even_if_its_weight_is_tiny() -> None:
    lse_NTA = torch.tensor([0.0, -300.0])[:, None, None]
    out_NTAL = torch.stack((torch.ones(1, 1, LATENT_DIM), torch.full((1, 1, LATENT_DIM), torch.nan)))
    assert merge_states(out_NTAL, lse_NTA).out_TAL.isnan().all()
    for damaged in (torch.nan, torch.inf):  # some kernels say +inf for an empty row: not a natural log, so not ignored
        lse_NTA[1] = damaged
        assert merge_states(torch.ones_like(out_NTAL), lse_NTA).out_TAL.isnan().all()


@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it(num_shards: int) -> None:
    generator = torch.Generator().manual_seed(num_shards)
    out_NTAL = torch.randn(num_shards, 37, 3, LATENT_DIM, generator=generator)
    lse_NTA = torch.randn(num_shards, 37, 3, generator=generator)
    lse_NTA[torch.rand(lse_NTA.shape, generator=generator) < 0.2] = -torch.inf
    whole = merge_states(out_NTAL, lse_NTA)
    for row in range(37):
        alone = merge_states(out_NTAL[:, row : row + 1], lse_NTA[:, row : row + 1])
        assert torch.equal(alone.out_TAL[0], whole.out_TAL[row])
        assert torch.equal(alone.lse_TA[0], whole.lse_TA[row])


@pytest.mark.parametrize("base", [math.e, 2.0])
def test_either_base_merges_once_converted_and_the_wrong_base_is_noticed(base: float) -> None:
    query_TAX, kv_TKX = make_attention(30)
    out_NTAL, lse_NTA = shards_of(query_TAX, kv_TKX, torch.arange(30).square() % 4, 4)  # unequal, two empty
    kernel_lse_NTA = lse_NTA / math.log(base)
    out_TAL, lse_TA = attend(query_TAX, kv_TKX, torch.ones(len(kv_TKX), 30, dtype=torch.bool))
    merged = merge_states(out_NTAL, natural_lse(kernel_lse_NTA, base=base))
    torch.testing.assert_close(merged, (out_TAL, lse_TA))
    wrong = merge_states(out_NTAL, natural_lse(kernel_lse_NTA, base={math.e: 2.0, 2.0: math.e}[base]))
    assert (wrong.out_TAL - out_TAL).abs().max() > 1e-2


def test_converting_keeps_empty_rows_empty() -> None:
    assert natural_lse(torch.tensor([-torch.inf, 0.0, 1.0]), base=2.0).tolist() == [
        -torch.inf,
        0.0,
        pytest.approx(math.log(2.0)),
    ]
