"""Attention of ranks that share the pages: queries gathered, keys attended to, outputs exchanged and merged.

    dcp2_attention   as the layers run it, over the GPUs' memory; beside it by NCCL, and the other ways to merge
    dcp2_order       from the queries of the rank's heads to its values; beside it the orders that send fewer bytes

A rank has 32 of 64 heads and half of each row's 2,048 keys. Queries may be gathered before absorption, 256 values a
head instead of 576, and outputs sent behind the value up-projection, 256 instead of 512: then every rank has the
projections of all heads and computes with each of them.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.gpu_timing import num_sets, relative_error
from benchmarks.kernel_cases.noise_pool import noise_pool
from benchmarks.kernel_cases.rates import memory_us
from benchmarks.kernel_cases.result import CaseResult
from benchmarks.two_gpu_cases.ranks import Ranks, graph_us, link_us
from specdec.dcp.communicator import Communicator, ProcessCommunicator
from specdec.dcp.exchange import gather_heads
from specdec.dcp.shard_pages import ShardPages
from specdec.kernels.absorbed_query import absorbed_query, value_up
from specdec.kernels.latent_rows import LATENT_DIM, PAGE_ROWS, ROPE_DIM, LatentFormat
from specdec.kernels.lse_merge import merge_states, shard_weights
from specdec.kernels.packed_sparse_mla import ROW_BYTES, PackedSparseMla, packed_sparse_mla_ref
from specdec.kernels.rotary import Rotation
from specdec.models.glm.shard_launches import ShardLaunches, exchange_shards

_POOL_PAGES = 60_000  # 2.5 GB
_SLOTS, _SCALE, _ROWS = 2048, 1 / 16, 6  # ROWS of a request
_ALL_HEADS, _NOPE_DIM, _VALUE_DIM = 64, 192, 256
_ROW_COUNTS = (6, 96, 192)
_CHECKED_ROWS = 3
_MOST_SETS = 6


class _Inputs:
    """One set for a rank: queries, the rows that it holds of each list, and room for results."""

    def __init__(self, num_rows: int, ranks: Ranks) -> None:
        device, bf16 = ranks.device, torch.bfloat16
        num_heads, num_keys = _ALL_HEADS // ranks.size, _SLOTS // ranks.size
        self.q_TAY = torch.randn(num_rows, num_heads, _NOPE_DIM + ROPE_DIM, device=device).to(bf16)
        self.query_TAX = torch.randn(num_rows, num_heads, LATENT_DIM + ROPE_DIM, device=device).to(bf16)
        self.all_row_TK = torch.randint(0, _POOL_PAGES * PAGE_ROWS, (num_rows, _SLOTS), device=device).int()
        self.row_TK = self.all_row_TK.clone()
        self.row_TK[:, num_keys:] = -1
        self.count_T = torch.full((num_rows,), num_keys, dtype=torch.int32, device=device)
        self.all_count_T = torch.full((num_rows,), _SLOTS, dtype=torch.int32, device=device)
        self.out_TAL = torch.empty(num_rows, num_heads, LATENT_DIM, dtype=bf16, device=device)
        self.lse_TA = torch.empty(num_rows, num_heads, device=device)


class _Attention:
    """The ways to attend, for one number of rows."""

    def __init__(self, num_rows: int, ranks: Ranks, pool_PB: torch.Tensor) -> None:
        self.ranks, self.pool_PB = ranks, pool_PB
        device, num_heads = ranks.device, _ALL_HEADS // ranks.size
        page_id_BP = torch.arange(num_rows // _ROWS, device=device).int()[:, None]
        self.pages = ShardPages.of(page_id_BP, size=ranks.size, rank=ranks.rank)
        self._launches = {
            dcp: ShardLaunches(
                num_rows=num_rows,
                num_heads=num_heads,
                latent_dim=LATENT_DIM,
                index_topk=_SLOTS,
                max_positions=1 << 17,
                dcp=dcp,
                device=device,
            )
            for dcp in (ranks.peers, ranks.nccl)
        }
        sizes = {"max_rows": num_rows, "num_slots": _SLOTS, "device": device, "out_dtype": torch.bfloat16}
        self._group, self._alone = (
            PackedSparseMla(num_heads=heads, index_dtype=torch.int32, **sizes) for heads in (_ALL_HEADS, num_heads)
        )
        self._latent_TGL = torch.empty(num_rows, _ALL_HEADS, LATENT_DIM, dtype=torch.bfloat16, device=device)
        self._lse_TG = torch.empty(num_rows, _ALL_HEADS, device=device)
        weights = torch.randn(_ALL_HEADS, _NOPE_DIM + _VALUE_DIM, LATENT_DIM, device=device) * LATENT_DIM**-0.5
        self._key_up_GNL = weights[:, :_NOPE_DIM].bfloat16()
        self._value_up_GLV = weights[:, _NOPE_DIM:].bfloat16().transpose(1, 2)
        angle_TP = torch.rand(num_rows, ROPE_DIM // 2, device=device)
        self._rotation = Rotation(cos_TP=angle_TP.cos(), sin_TP=angle_TP.sin())

    def packed(self, dcp: Communicator, inputs: _Inputs) -> torch.Tensor:
        """As the layers run it."""
        self._launches[dcp].attend(
            inputs.query_TAX, self.pool_PB, self.pages,
            row_TK=inputs.row_TK, count_T=inputs.count_T, scale=_SCALE, out_TAL=inputs.out_TAL, lse_TA=inputs.lse_TA,
        )  # fmt: skip
        return inputs.out_TAL

    def gathered(self, dcp: Communicator, inputs: _Inputs) -> torch.Tensor:
        """LSEs are gathered, and outputs weighed where they were computed: the receiver only adds."""
        latent_TGL = self._attended(gather_heads(inputs.query_TAX, dcp), inputs)
        weight_TG = shard_weights(dcp.all_gather(self._lse_TG)).weight_NTA[dcp.rank]
        by_rank = (len(latent_TGL), dcp.size, -1, LATENT_DIM)
        weighed_NTAL = (latent_TGL * weight_TG[..., None]).bfloat16().view(by_rank).transpose(0, 1).contiguous()
        if isinstance(dcp, ProcessCommunicator):
            dist.reduce_scatter_tensor(inputs.out_TAL, weighed_NTAL, group=dcp.group)
        else:
            torch.add(*dcp.all_to_all(weighed_NTAL), out=inputs.out_TAL)
        return inputs.out_TAL

    def alone(self, inputs: _Inputs) -> None:
        """What a rank does that holds all keys."""
        self._alone(
            inputs.query_TAX, self.pool_PB, inputs.all_row_TK, inputs.all_count_T,
            scale=_SCALE, out_TAL=inputs.out_TAL, lse_TA=inputs.lse_TA,
        )  # fmt: skip

    def ordered(self, inputs: _Inputs, *, absorbs_first: bool, values_first: bool) -> torch.Tensor:
        """From the queries of the rank's heads to their values: absorbed before they are gathered, or behind."""
        dcp, num_rows = self.ranks.peers, len(inputs.q_TAY)
        num_heads = _ALL_HEADS // dcp.size
        own = slice(dcp.rank * num_heads, (dcp.rank + 1) * num_heads)
        if absorbs_first:
            query_TAX = torch.empty_like(inputs.query_TAX)
            absorbed_query(inputs.q_TAY, self._key_up_GNL[own], self._rotation, out_TAX=query_TAX)
            query_TGX = gather_heads(query_TAX, dcp)
        else:
            query_TGX = inputs.query_TAX.new_empty(num_rows, _ALL_HEADS, LATENT_DIM + ROPE_DIM)
            absorbed_query(gather_heads(inputs.q_TAY, dcp), self._key_up_GNL, self._rotation, out_TAX=query_TGX)
        out_TGL = self._attended(query_TGX, inputs)
        if values_first:
            value_TGV = out_TGL.new_empty(num_rows, _ALL_HEADS, _VALUE_DIM)
            out_TGL = value_up(out_TGL, self._value_up_GLV, out_TAV=value_TGV)
        merged_TAL = out_TGL.new_empty(num_rows, num_heads, out_TGL.shape[2])
        exchange_shards(
            out_TGL, self._lse_TG, dcp,
            first_owner_B=self.pages.first_owner_B, out_TAL=merged_TAL, lse_TA=inputs.lse_TA,
        )  # fmt: skip
        if values_first:
            return merged_TAL
        value_TAV = merged_TAL.new_empty(num_rows, num_heads, _VALUE_DIM)
        return value_up(merged_TAL, self._value_up_GLV[own], out_TAV=value_TAV)

    def expected(self, inputs: _Inputs) -> torch.Tensor:
        """Give the first rows of the rank's heads, by the definitions."""
        few, num_heads = slice(_CHECKED_ROWS), _ALL_HEADS // self.ranks.size
        state = packed_sparse_mla_ref(
            gather_heads(inputs.query_TAX[few].contiguous(), self.ranks.nccl), self.pool_PB,
            inputs.row_TK[few], inputs.count_T[few], scale=_SCALE,
        )  # fmt: skip
        own = slice(self.ranks.rank * num_heads, (self.ranks.rank + 1) * num_heads)
        return merge_states(*map(self.ranks.nccl.all_gather, state)).out_TAL[:, own]

    def _attended(self, query_TGX: torch.Tensor, inputs: _Inputs) -> torch.Tensor:
        return self._group(
            query_TGX, self.pool_PB, inputs.row_TK, inputs.count_T,
            scale=_SCALE, out_TAL=self._latent_TGL, lse_TA=self._lse_TG,
        ).out_TAL  # fmt: skip


def run(ranks: Ranks) -> list[CaseResult]:
    """Check and time every number of rows."""
    torch.manual_seed(ranks.rank)
    pool_PB = noise_pool(LatentFormat.FP8_PACKED, _POOL_PAGES)
    results = []
    for num_rows in _ROW_COUNTS:
        torch.manual_seed(100 + num_rows)  # the projections of all heads are the same on both ranks
        attention = _Attention(num_rows, ranks, pool_PB)
        torch.manual_seed(ranks.rank)
        count = num_sets(num_rows * _SLOTS // ranks.size * ROW_BYTES, most=_MOST_SETS)
        sets = [_Inputs(num_rows, ranks) for _ in range(count)]
        results += [_ways(attention, sets, num_rows), _orders(attention, sets, num_rows)]
    return results


def _ways(attention: _Attention, sets: list[_Inputs], num_rows: int) -> CaseResult:
    ranks = attention.ranks
    packed_TAL = attention.packed(ranks.peers, sets[0]).clone()
    assert torch.equal(packed_TAL, attention.packed(ranks.nccl, sets[0]))
    alone_us = _timed(attention.alone, sets)
    sent = _query_bytes(num_rows, LATENT_DIM + ROPE_DIM) + _output_bytes(num_rows, LATENT_DIM)
    return CaseResult(
        case="dcp2_attention",
        shape=_shape(ranks, num_rows),
        ours_us=_timed(partial(attention.packed, ranks.peers), sets),
        floor_us=_floor_us(num_rows, ranks, sent),
        error=relative_error(packed_TAL[:_CHECKED_ROWS], attention.expected(sets[0])),
        peers_us={
            "NCCL packed all-to-all": _timed(partial(attention.packed, ranks.nccl), sets),
            "NCCL gather + reduce-scatter": _timed(partial(attention.gathered, ranks.nccl), sets),
            "LSEs gathered, over peer memory": _timed(partial(attention.gathered, ranks.peers), sets),
        },
        note=f"a rank that holds all keys {alone_us:.1f} us",
    )


def _orders(attention: _Attention, sets: list[_Inputs], num_rows: int) -> CaseResult:
    names = {
        (True, False): "queries absorbed, latents sent",
        (False, False): "queries gathered first",
        (True, True): "values sent",
        (False, True): "queries gathered first, values sent",
    }
    orders = {
        name: partial(attention.ordered, absorbs_first=absorbs_first, values_first=values_first)
        for (absorbs_first, values_first), name in names.items()
    }
    (first, ours), *others = orders.items()
    value_TAV = ours(sets[0]).clone()
    error = max(relative_error(other(sets[0]), value_TAV) for _, other in others)
    sent = _query_bytes(num_rows, _NOPE_DIM + ROPE_DIM) + _output_bytes(num_rows, _VALUE_DIM)
    return CaseResult(
        case="dcp2_order",
        shape=_shape(attention.ranks, num_rows),
        ours_us=_timed(ours, sets),
        floor_us=_floor_us(num_rows, attention.ranks, sent),
        error=error,
        peers_us={name: _timed(other, sets) for name, other in others},
        note=f"ours: {first}; error: between the orders; floor: of the fewest bytes",
    )


def _timed(call: Callable[[_Inputs], object], sets: list[_Inputs]) -> float:
    return graph_us([partial(call, inputs) for inputs in sets])


def _query_bytes(num_rows: int, num_values: int) -> int:
    """That one rank sends to another, for its heads."""
    return num_rows * _ALL_HEADS // 2 * num_values * 2


def _output_bytes(num_rows: int, num_values: int) -> int:
    return num_rows * _ALL_HEADS // 2 * (num_values * 2 + 4)


def _floor_us(num_rows: int, ranks: Ranks, sent: int) -> float:
    """The rows of the keys that a rank holds at the copy rate, and what it sends at that of a copy to a peer."""
    return memory_us(num_rows * _SLOTS // ranks.size * (ROW_BYTES + 4)) + link_us(sent * (ranks.size - 1))


def _shape(ranks: Ranks, num_rows: int) -> str:
    return f"T={num_rows}, {ranks.size} x {_ALL_HEADS // ranks.size} heads, {_SLOTS // ranks.size} of {_SLOTS} slots"
