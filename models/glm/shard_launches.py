"""What a rank does beside one alone where pages are spread over a dcp group: choose, attend and merge over the ranks.

    choose    its own best positions of the keys it holds; the best of what all ranks sent; of these, the rows it holds
    attend    with the heads of the whole group to those rows; each head's output and LSE go to the rank that keeps it
    merge     there, by LSE, from the owner of a request's first page on around the ranks

`global_top_positions`, `gather_heads` and `exchange_states` define it. Keys never travel.

B = requests, Q = rows of each, T = B * Q, N = ranks, A = heads of a rank, G = N * A, X = values of a query, L = kv
latent, K = positions chosen.
"""

import copy

import torch

from specdec.dcp.communicator import Communicator
from specdec.dcp.exchange import gather_heads
from specdec.dcp.shard_pages import ShardPages
from specdec.kernels.index_key_pages import PAGE_SIZE, IndexKeyPages
from specdec.kernels.index_select import IndexSelect
from specdec.kernels.owned_rows import owned_rows
from specdec.kernels.owner_top_k import owner_top_k
from specdec.kernels.packed_sparse_mla import PackedSparseMla
from specdec.kernels.paged_index_scores import IndexQueries
from specdec.kernels.pool_rows import pool_rows
from specdec.kernels.shard_merge import merge_shards

_LSE_BYTES = 16  # of which an LSE takes 4, so that outputs begin where whole words are read


class ShardLaunches:
    """Works on passes of one shape, on one stream.

    Args:
        num_rows: T.
        num_heads: A.
        latent_dim: L.
        index_topk: K.
        max_positions: Most positions of a request.
        dcp: The group; more than one rank.
        device: A GPU.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        num_heads: int,
        latent_dim: int,
        index_topk: int,
        max_positions: int,
        dcp: Communicator,
        device: torch.device,
    ) -> None:
        self._dcp, self._max_positions = dcp, max_positions
        group_heads = num_heads * dcp.size
        self._attend = PackedSparseMla(
            max_rows=num_rows,
            num_heads=group_heads,
            num_slots=index_topk,
            device=device,
            out_dtype=torch.bfloat16,
            index_dtype=torch.int32,
        )
        self._latent_TGL = torch.empty((num_rows, group_heads, latent_dim), dtype=torch.bfloat16, device=device)
        self._lse_TG = torch.empty((num_rows, group_heads), device=device)
        self._column_TK = torch.empty((num_rows, index_topk), dtype=torch.int32, device=device)
        self._message_2TK = torch.empty((2, num_rows, index_topk), dtype=torch.int32, device=device)

    def of_rows(self, num_rows: int) -> "ShardLaunches":
        """Give the launches of passes of so many rows, no more than these are for, in the same memory."""
        part = copy.copy(self)
        part._latent_TGL, part._lse_TG = self._latent_TGL[:num_rows], self._lse_TG[:num_rows]
        part._column_TK = self._column_TK[:num_rows]
        words = self._message_2TK.view(-1)[: 2 * num_rows * self._message_2TK.shape[2]]
        part._message_2TK = words.view(2, num_rows, -1)
        return part

    def choose(
        self,
        select: IndexSelect,
        queries: IndexQueries,
        keys: IndexKeyPages,
        pages: ShardPages,
        *,
        out_position_TK: torch.Tensor,
        out_row_TK: torch.Tensor,
        out_count_T: torch.Tensor,
    ) -> None:
        """Choose over all ranks. One collective.

        Args:
            select: Of the rank.
            queries: Over the pages that it holds.
            keys: The layer's pages.
            pages: Of the requests.
            out_position_TK: The chosen positions, ascending, the same on every rank, i32.
            out_row_TK: Physical rows of those that this rank holds, in the same order, i32.
            out_count_T: How many these are, i32.
        """
        score_TK, position_TK = self._message_2TK[0].view(torch.float32), self._message_2TK[1]
        select(queries, keys, out_position_TK=self._column_TK, out_score_TK=score_TK)
        pool_rows(self._column_TK, pages.owned_index_BP, page_size=PAGE_SIZE, out_TK=position_TK)
        gathered_N2TK = self._dcp.all_gather(self._message_2TK)
        owner_top_k(
            gathered_N2TK[:, 0].view(torch.float32),
            gathered_N2TK[:, 1],
            max_positions=self._max_positions,
            out_position_TK=out_position_TK,
        )
        owned_rows(out_position_TK, pages.page_BP, page_size=PAGE_SIZE, out_TK=out_row_TK, out_count_T=out_count_T)

    def attend(
        self,
        query_TAX: torch.Tensor,
        latent_MB: torch.Tensor,
        pages: ShardPages,
        *,
        row_TK: torch.Tensor,
        count_T: torch.Tensor,
        scale: float,
        out_TAL: torch.Tensor,
        lse_TA: torch.Tensor,
    ) -> None:
        """Attend over all ranks. Two collectives.

        Args:
            query_TAX: Absorbed queries of the rank's heads, bfloat16.
            latent_MB: The layer's pages.
            pages: Of the requests.
            row_TK: Physical rows that this rank holds of each row's choice, i32.
            count_T: How many these are, i32.
            scale: Factor on the scores.
            out_TAL: The rank's heads, merged, bfloat16.
            lse_TA: Their LSEs, float32.
        """
        (num_rows, num_heads, latent_dim), num_ranks = out_TAL.shape, self._dcp.size
        self._attend(  # with nothing read early: a collective in front follows rules of its own
            gather_heads(query_TAX, self._dcp), latent_MB, row_TK, count_T,
            scale=scale, out_TAL=self._latent_TGL, lse_TA=self._lse_TG,
        )  # fmt: skip
        message_NTAY = self._latent_TGL.new_empty(
            (num_ranks, num_rows, num_heads, 2 * latent_dim + _LSE_BYTES), dtype=torch.uint8
        )
        by_rank = (num_rows, num_ranks, num_heads)
        message_NTAY.view(torch.bfloat16)[..., :latent_dim] = self._latent_TGL.view(*by_rank, -1).transpose(0, 1)
        message_NTAY.view(torch.float32)[..., latent_dim // 2] = self._lse_TG.view(by_rank).transpose(0, 1)
        received_NTAY = self._dcp.all_to_all(message_NTAY)
        merge_shards(
            received_NTAY.view(torch.bfloat16)[..., :latent_dim],
            received_NTAY.view(torch.float32)[..., latent_dim // 2],
            out_TAL=out_TAL,
            lse_TA=lse_TA,
            first_owner_T=pages.first_owner_B.repeat_interleave(num_rows // len(pages.first_owner_B)),
        )
