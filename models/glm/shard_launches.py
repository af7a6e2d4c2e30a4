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
from specdec.dcp.peer_communicator import PeerCommunicator
from specdec.dcp.shard_pages import ShardPages
from specdec.kernels.index_key_pages import PAGE_SIZE, IndexKeyPages
from specdec.kernels.index_select import IndexSelect
from specdec.kernels.owned_rows import owned_rows
from specdec.kernels.owner_top_k import owner_top_k
from specdec.kernels.packed_sparse_mla import PackedSparseMla, WrittenLast
from specdec.kernels.paged_index_scores import IndexQueries
from specdec.kernels.shard_merge import merge_shards
from specdec.kernels.state_message import pack_states, unpacked_states


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
        select(  # among the keys that are here; a page's place in its request tells which positions these are
            queries, keys, out_position_TK=self._column_TK, out_score_TK=score_TK,
            out_row_TK=position_TK, page_RP=pages.owned_index_BP,
        )  # fmt: skip
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
        self._attend(
            gather_heads(query_TAX, self._dcp), latent_MB, row_TK, count_T, scale=scale,
            written_last=self._written_by_gather(query_TAX), out_TAL=self._latent_TGL, lse_TA=self._lse_TG,
        )  # fmt: skip
        exchange_shards(
            self._latent_TGL, self._lse_TG, self._dcp,
            first_owner_B=pages.first_owner_B, out_TAL=out_TAL, lse_TA=lse_TA,
        )  # fmt: skip

    def _written_by_gather(self, query_TAX: torch.Tensor) -> WrittenLast:
        """Say what may be written when attention starts: a library's collective follows rules of its own."""
        dcp = self._dcp
        if isinstance(dcp, PeerCommunicator) and dcp.takes(query_TAX.nbytes):
            return WrittenLast.QUERIES
        return WrittenLast.ANYTHING


def exchange_shards(
    out_TGL: torch.Tensor,
    lse_TG: torch.Tensor,
    dcp: Communicator,
    *,
    first_owner_B: torch.Tensor,
    out_TAL: torch.Tensor,
    lse_TA: torch.Tensor,
) -> None:
    """Send each head's output and LSE to the rank that keeps the head, which merges. One collective.

    Args:
        out_TGL: Over the keys of this rank, bfloat16.
        lse_TG: Natural LSEs, float32.
        dcp: The group.
        first_owner_B: Rank that each request's sums begin with, i64.
        out_TAL: The rank's heads, merged, bfloat16.
        lse_TA: Their LSEs, float32.
    """
    if isinstance(dcp, PeerCommunicator) and dcp.takes_states(out_TGL):
        dcp.merge_states(out_TGL, lse_TG, first_owner_B=first_owner_B, out_TAL=out_TAL, lse_TA=lse_TA)
        return
    received_NTAY = dcp.all_to_all(pack_states(out_TGL, lse_TG, num_ranks=dcp.size))
    out_NTAL, lse_NTA = unpacked_states(received_NTAY)
    merge_shards(out_NTAL, lse_NTA, out_TAL=out_TAL, lse_TA=lse_TA, first_owner_B=first_owner_B)
