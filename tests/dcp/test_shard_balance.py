"""How evenly KV lies on ranks, against a count token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.dcp.page_ids import owner
from specdec.dcp.shard_balance import Int64Array, ShardBalance, shard_balance

DCP_SIZES = [1, 2, 3, 4, 8]


def count_tokens(page_id_RP: Int64Array, num_tokens_R: Int64Array, *, page_size: int, dcp_size: int) -> list[list[int]]:
    """Tokens that each rank owns of each request: the definition."""
    counts = [[0] * dcp_size for _ in num_tokens_R]
    for r, num_tokens in enumerate(num_tokens_R.tolist()):
        for position in range(num_tokens):
            counts[r][owner(int(page_id_RP[r, position // page_size]), dcp_size)] += 1
    return counts


@given(
    dcp_size=st.sampled_from(DCP_SIZES),
    page_size=st.sampled_from([1, 4, 64]),
    num_requests=st.integers(0, 6),
    is_at_border=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_tokens_are_those_of_a_count_one_by_one(
    dcp_size: int, page_size: int, num_requests: int, is_at_border: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    num_tokens_R = generator.integers(0, 4 * dcp_size * page_size, size=num_requests)
    if is_at_border:
        num_tokens_R -= num_tokens_R % page_size
    num_pages_R = -(-num_tokens_R // page_size) + generator.integers(0, 3, size=num_requests)  # some not written yet
    page_id_RP = np.full((num_requests, int(num_pages_R.max(initial=0))), -1)
    for r, num_pages in enumerate(num_pages_R.tolist()):
        page_id_RP[r, :num_pages] = generator.integers(0, 1000, size=num_pages)
    shards = shard_balance(page_id_RP, num_tokens_R, page_size=page_size, dcp_size=dcp_size)
    counts = count_tokens(page_id_RP, num_tokens_R, page_size=page_size, dcp_size=dcp_size)
    num_tokens_N = [sum(count[rank] for count in counts) for rank in range(dcp_size)]
    assert shards.num_tokens_N.tolist() == num_tokens_N
    assert shards.num_tokens_N.dtype == np.int64
    assert shards.num_empty_shards == sum(count.count(0) for count in counts if any(count))
    most = max(num_tokens_N)
    assert shards.balance == pytest.approx(sum(num_tokens_N) / dcp_size / most if most else 1.0)


@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_balance_goes_from_one_rank_to_all(dcp_size: int) -> None:
    def balance(num_tokens: int) -> ShardBalance:
        page_id_RP = np.arange(2 * dcp_size)[None]
        return shard_balance(page_id_RP, np.array([num_tokens]), page_size=4, dcp_size=dcp_size)

    assert (balance(0).balance, balance(0).num_empty_shards) == (1.0, 0)
    assert (balance(4).balance, balance(4).num_empty_shards) == (1 / dcp_size, dcp_size - 1)
    assert balance(4 * dcp_size).num_empty_shards == 0
    assert balance(8 * dcp_size).balance == 1.0


def test_pages_that_requests_share_count_for_each() -> None:
    shards = shard_balance(np.array([[0, 1], [0, 3]]), np.array([8, 5]), page_size=4, dcp_size=2)
    assert shards.num_tokens_N.tolist() == [8, 5]
