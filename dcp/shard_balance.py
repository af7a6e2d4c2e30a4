"""How evenly the KV of the running requests lies on the ranks of a dcp group.

In every step the ranks wait for the one that attends to the most.

R = requests, P = pages of the longest request, N = ranks of the group.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.dcp.page_ids import owner

Int64Array = npt.NDArray[np.int64]


class ShardBalance(NamedTuple):
    """What each rank owns of some requests. A page that requests share counts for each of them.

    Attributes:
        num_tokens_N: KV tokens that each rank owns, i64 [N].
        num_empty_shards: Pairs of a request with KV and a rank that owns no token of it.
    """

    num_tokens_N: Int64Array
    num_empty_shards: int

    @property
    def balance(self) -> float:
        """Mean over the ranks by the largest, 1/N..1: 1 where all own as much, also where they own nothing."""
        most = self.num_tokens_N.max()
        return float(self.num_tokens_N.mean() / most) if most else 1.0


def shard_balance(page_id_RP: Int64Array, num_tokens_R: Int64Array, *, page_size: int, dcp_size: int) -> ShardBalance:
    """Count the tokens that each rank owns.

    Args:
        page_id_RP: Page ids of each request, -1 behind its last; there may be pages behind its last token.
        num_tokens_R: Tokens with KV of each request, i64 [R].
        page_size: Tokens of a page.
        dcp_size: N.
    """
    num_requests, max_pages = page_id_RP.shape
    num_in_page_RP = (num_tokens_R[:, None] - page_size * np.arange(max_pages)).clip(0, page_size)
    shard_RP = np.arange(num_requests)[:, None] * dcp_size + owner(page_id_RP, dcp_size)
    is_held_RP = page_id_RP >= 0
    num_tokens_RN = np.bincount(
        shard_RP[is_held_RP], weights=num_in_page_RP[is_held_RP], minlength=num_requests * dcp_size
    ).reshape(num_requests, dcp_size)
    return ShardBalance(
        num_tokens_N=num_tokens_RN.sum(axis=0).astype(np.int64),
        num_empty_shards=int(np.count_nonzero(num_tokens_RN[num_tokens_R > 0] == 0)),
    )
