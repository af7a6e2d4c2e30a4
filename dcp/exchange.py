"""What the ranks of a dcp group exchange around attention: queries before it, partial outputs and LSEs after it.

Every rank attends with the heads of the whole group to the keys it owns, and keeps the merged output of its own heads.
Keys never travel.

T = query rows, N = ranks of the group, A = heads of a rank, G = N * A heads of the group in rank order, X = values of a
query, L = values of a head's output.
Sources: the all-gather and reduce-scatter of Megatron-LM's context parallelism; "Helix Parallelism" (arXiv:2507.07120)
for the exchange as one all-to-all over heads.
"""

from enum import StrEnum

import torch

from specdec.dcp.communicator import Communicator
from specdec.dcp.peer_communicator import PeerCommunicator
from specdec.kernels.lse_merge import AttentionState, merge_states, shard_weights, weighted
from specdec.kernels.sum_in_order import sum_in_order

_FLOAT32_BYTES = 4


class ExchangeStrategy(StrEnum):
    """How partial attention is merged over the ranks: the same sums in the same order, reached in two ways.

    GATHER_SCATTER: Gather all LSEs, let each rank weigh its own partial output, reduce-scatter over heads. Two
        collectives; the receiver only adds.
    PACKED: Send each head's output with its LSE behind it to the rank that keeps the head, which merges. One collective
        and fewer bytes.
    """

    GATHER_SCATTER = "gather-scatter"
    PACKED = "packed"


def gather_heads(query_TAX: torch.Tensor, dcp: Communicator) -> torch.Tensor:
    """Give every rank the queries of all heads of the group, in rank order: [T, G, X]. One collective."""
    if isinstance(dcp, PeerCommunicator):
        return dcp.all_gather(query_TAX, axis=1).flatten(1, 2)
    query_NTAX = dcp.all_gather(query_TAX)
    return query_NTAX.transpose(0, 1).flatten(1, 2)


def exchange_states(
    state: AttentionState, dcp: Communicator, strategy: ExchangeStrategy, *, first_owner_T: torch.Tensor
) -> torch.Tensor:
    """Merge partial attention over the ranks. Collectives of the dcp group, the same on every rank.

    Shards are added in the order in which a request's pages go round the ranks, from the owner of its first page on.
    Which rank that is depends on what else is running; as long as the pages do go round, the bits of a row do not.

    Args:
        state: Attention of all G heads over the keys of this rank.
        dcp: The group; it divides G.
        strategy: How.
        first_owner_T: Owner of the first page of each row's request, i64 [T].

    Returns:
        Attention over the keys of all ranks for the heads of this rank, float32 [T, A, L]; zeros in a row without keys.
    """
    row_T = torch.arange(len(first_owner_T), device=first_owner_T.device)
    rank_NT = (first_owner_T + torch.arange(dcp.size, device=first_owner_T.device)[:, None]) % dcp.size
    if strategy is ExchangeStrategy.GATHER_SCATTER:
        weight_NTG = shard_weights(dcp.all_gather(state.lse_TA)[rank_NT, row_T]).weight_NTA
        own_weight_TG = weight_NTG[(dcp.rank - first_owner_T) % dcp.size, row_T]
        weighted_NTAL = dcp.all_to_all(_by_owner(weighted(*state, own_weight_TG), dcp))
        return sum_in_order(weighted_NTAL[rank_NT, row_T])
    packed_TGY = torch.cat((state.out_TAL, state.lse_TA[..., None]), dim=-1)
    packed_NTAY = dcp.all_to_all(_by_owner(packed_TGY, dcp))[rank_NT, row_T]
    return merge_states(packed_NTAY[..., :-1], packed_NTAY[..., -1]).out_TAL


def query_bytes(*, dcp_size: int, num_heads: int, query_dim: int, value_bytes: int) -> int:
    """Bytes that a rank sends for the queries of one token in one layer.

    Args:
        dcp_size: N.
        num_heads: A.
        query_dim: X.
        value_bytes: Of one query value.
    """
    return (dcp_size - 1) * num_heads * query_dim * value_bytes


def exchange_bytes(strategy: ExchangeStrategy, *, dcp_size: int, num_heads: int, latent_dim: int) -> int:
    """Bytes that a rank sends to merge one token's attention in one layer.

    Both strategies send A outputs to every other rank. With them go the LSEs: of all G heads when they are gathered, of
    the receiver's A heads when they are packed.

    Args:
        strategy: How.
        dcp_size: N.
        num_heads: A.
        latent_dim: L.
    """
    num_lses = dcp_size * num_heads if strategy is ExchangeStrategy.GATHER_SCATTER else num_heads
    return (dcp_size - 1) * (num_heads * latent_dim + num_lses) * _FLOAT32_BYTES


def _by_owner(x_TGY: torch.Tensor, dcp: Communicator) -> torch.Tensor:
    """Cut the heads of the group by the rank that keeps them: [N, T, A, Y]."""
    num_rows, num_heads, width = x_TGY.shape
    return x_TGY.view(num_rows, dcp.size, num_heads // dcp.size, width).transpose(0, 1).contiguous()
