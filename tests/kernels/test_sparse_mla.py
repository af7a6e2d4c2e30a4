"""Sparse latent attention against softmax in float64, on odd sizes and empty rows."""

import pytest
import torch

from specdec.kernels.sparse_mla import sparse_mla, sparse_mla_ref, tiled_sparse_mla


def make_inputs(num_rows: int, num_heads: int, num_slots: int, latent_dim: int, rope_dim: int):
    valid_TK = torch.rand(num_rows, num_slots) < 0.6
    valid_TK[0] = False
    kv_TKX = torch.randn(num_rows, num_slots, latent_dim + rope_dim) * valid_TK[..., None]
    return torch.randn(num_rows, num_heads, latent_dim + rope_dim), kv_TKX, valid_TK


@pytest.mark.parametrize(("num_heads", "num_slots", "latent_dim"), [(1, 1, 8), (8, 8, 16), (3, 13, 64), (8, 256, 512)])
def test_output_and_lse_equal_softmax_over_the_valid_slots(num_heads: int, num_slots: int, latent_dim: int) -> None:
    query_TAX, kv_TKX, valid_TK = make_inputs(5, num_heads, num_slots, latent_dim, 8)
    state = sparse_mla(query_TAX, kv_TKX, valid_TK, scale=0.25, latent_dim=latent_dim)
    expected = sparse_mla_ref(query_TAX.double(), kv_TKX.double(), valid_TK, scale=0.25, latent_dim=latent_dim)
    torch.testing.assert_close(state.out_TAL.double(), expected.out_TAL, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.lse_TA.double(), expected.lse_TA, rtol=1e-5, atol=1e-5)


def test_a_row_without_keys_gives_zeros_and_minus_infinity() -> None:
    query_TAX, kv_TKX, valid_TK = make_inputs(2, 4, 8, 16, 8)
    state = sparse_mla(query_TAX, kv_TKX, valid_TK, scale=1.0, latent_dim=16)
    assert state.out_TAL[0].abs().sum() == 0
    assert (state.lse_TA[0] == -torch.inf).all()


def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it() -> None:
    query_TAX, kv_TKX, valid_TK = make_inputs(37, 8, 256, 64, 16)
    whole = sparse_mla(query_TAX, kv_TKX, valid_TK, scale=0.3, latent_dim=64)
    for row in range(37):
        alone = sparse_mla(
            query_TAX[row : row + 1], kv_TKX[row : row + 1], valid_TK[row : row + 1], scale=0.3, latent_dim=64
        )
        assert torch.equal(alone.out_TAL[0], whole.out_TAL[row])
        assert torch.equal(alone.lse_TA[0], whole.lse_TA[row])


@pytest.mark.parametrize("num_tiles", [1, 2, 5])
def test_tiles_give_what_one_product_gives(num_tiles: int) -> None:
    query_TAX, kv_TKX, valid_TK = make_inputs(5, 8, num_tiles * 16, 64, 8)
    valid_TK[1, :16] = valid_TK[2, -16:] = False  # empty tiles
    kv_TKX *= valid_TK[..., None]
    state = tiled_sparse_mla(query_TAX, kv_TKX, valid_TK, slots_per_tile=16, scale=0.25, latent_dim=64)
    expected = sparse_mla_ref(query_TAX.double(), kv_TKX.double(), valid_TK, scale=0.25, latent_dim=64)
    torch.testing.assert_close(state.out_TAL.double(), expected.out_TAL.nan_to_num(nan=0.0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.lse_TA.double(), expected.lse_TA, rtol=1e-5, atol=1e-5)
    assert not state.out_TAL[0].any()


@pytest.mark.parametrize("num_heads", [1, 3, 8])
def test_a_row_has_the_same_bits_whatever_rows_and_empty_tiles_stand_beside_it(num_heads: int) -> None:
    query_TAX, kv_TKX, valid_TK = make_inputs(21, num_heads, 5 * 64, 64, 16)
    num_slots_T = torch.randint(0, 5 * 64, (21,))
    valid_TK = torch.arange(5 * 64) < num_slots_T[:, None]
    kv_TKX = torch.randn_like(kv_TKX) * valid_TK[..., None]
    whole = tiled_sparse_mla(query_TAX, kv_TKX, valid_TK, slots_per_tile=64, scale=0.3, latent_dim=64)
    for row in range(21):
        own = slice(row, row + 1), slice(max(1, -(-int(num_slots_T[row]) // 64)) * 64)
        alone = tiled_sparse_mla(
            query_TAX[own[0]], kv_TKX[own], valid_TK[own], slots_per_tile=64, scale=0.3, latent_dim=64
        )
        assert torch.equal(alone.out_TAL[0], whole.out_TAL[row])
        assert torch.equal(alone.lse_TA[0], whole.lse_TA[row])
