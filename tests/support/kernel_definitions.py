"""Definitions in the place of the GPU's kernels, so that what is made of their launches runs on a CPU.

Each stand-in has the launcher's signature, computes what the file of the kernel defines, and rounds what the kernel
rounds. Sizes that a kernel is compiled for are not asked for here.
"""

import functools
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F

from specdec.device import decode_round
from specdec.kernels.absorbed_query import absorbed_query_ref
from specdec.kernels.add_rms_norm import add_rms_norm_ref
from specdec.kernels.bf16_linear import bf16_linear_ref
from specdec.kernels.block_fp8_linear import BlockFp8Linear, block_fp8_linear_ref
from specdec.kernels.chain_accept import chain_accept_ref
from specdec.kernels.commit_runs import commit_runs_ref
from specdec.kernels.decode_rows import decode_rows_ref
from specdec.kernels.embed_rows import embed_rows_ref
from specdec.kernels.gated_product import gated_product_ref
from specdec.kernels.index_key_pages import PAGE_SIZE, IndexKeyPages
from specdec.kernels.index_query import index_query_ref
from specdec.kernels.index_select import index_select_ref
from specdec.kernels.joined_norms import joined_norms_ref
from specdec.kernels.kv_write import write_kv_ref
from specdec.kernels.lm_head_pick import lm_head_pick_ref
from specdec.kernels.moe_experts import PackedExperts, moe_ref
from specdec.kernels.noise_keys import noise_keys_ref
from specdec.kernels.owned_rows import owned_rows_ref
from specdec.kernels.owner_top_k import owner_top_k_ref
from specdec.kernels.packed_sparse_mla import WrittenLast, packed_sparse_mla_ref
from specdec.kernels.paged_index_scores import paged_index_scores_ref
from specdec.kernels.pool_rows import pool_rows_ref
from specdec.kernels.rotary import Rotation
from specdec.kernels.shard_merge import merge_shards_ref
from specdec.kernels.state_message import pack_states_ref
from specdec.kernels.take_rows import take_rows_ref
from specdec.models.glm import (
    draft_chain,
    kernel_target,
    layer_launches,
    rank_head,
    rank_pass,
    rank_slices,
    shard_launches,
    token_draw,
)
from specdec.models.glm.config import GlmConfig


def use_definitions(patch: pytest.MonkeyPatch, config: GlmConfig) -> None:
    """Let launches compute their definitions, of a model with this config.

    Slices must be made behind this, too: experts stay unpacked.
    """

    class Mixture(_Mixture):
        num_chosen = config.num_experts_per_token

    patch.setattr(BlockFp8Linear, "__call__", _block_fp8_linear)
    for name in ("pack_gate_up", "pack_down"):
        patch.setattr(rank_slices, name, lambda values, scales: (values, scales))
    for name, stand_in in {
        "absorbed_query": _absorbed_query,
        "add_rms_norm": _add_rms_norm,
        "gated_product": _gated_product,
        "index_query": _index_query,
        "narrow_linear": _narrow_linear,
        "value_up": _value_up,
        "write_kv": write_kv_ref,
        "IndexSelect": _IndexSelect,
        "MixtureLayer": Mixture,
        "PackedSparseMla": _PackedSparseMla,
    }.items():
        patch.setattr(layer_launches, name, stand_in)
    for name, stand_in in {
        "merge_shards": _merge_shards,
        "owned_rows": _owned_rows,
        "pack_states": _pack_states,
        "owner_top_k": _owner_top_k,
        "PackedSparseMla": _PackedSparseMla,
    }.items():
        patch.setattr(shard_launches, name, stand_in)
    patch.setattr(rank_pass, "embed_rows", _embed_rows)
    for name, stand_in in {
        "bf16_linear": _bf16_linear,
        "decode_rows": _decode_rows,
        "embed_rows": _embed_rows,
        "joined_norms": _joined_norms,
        "noise_keys": _noise_keys,
        "take_rows": _take_rows,
    }.items():
        patch.setattr(draft_chain, name, stand_in)
    patch.setattr(rank_head, "LmHeadPick", _LmHeadPick)
    patch.setattr(token_draw, "ChainAcceptor", _ChainAcceptor)
    patch.setattr(decode_round, "decode_rows", _decode_rows)
    patch.setattr(kernel_target, "decode_rows", _decode_rows)
    for module in (decode_round, kernel_target):
        patch.setattr(module, "CandidateMemory", _CandidateMemory)
    patch.setattr(decode_round, "commit_runs", _commit_runs)
    patch.setattr(IndexKeyPages, "of", lambda pages_PX: IndexKeyPages(pages_PX, torch.empty(0, dtype=torch.uint8)))


def _block_fp8_linear(linear, x_TI, *, out_TO):
    return out_TO.copy_(x_TI.double() @ _values(linear))


@functools.cache
def _values(linear):
    identity_II = torch.eye(linear.weight_OI.shape[1], dtype=torch.float64)
    return block_fp8_linear_ref(identity_II, linear.weight_OI, linear.scale_JB)


def _bf16_linear(x_TI, weight_OI, *, out_TO):
    out_TO.copy_(bf16_linear_ref(x_TI, weight_OI))


def _absorbed_query(x_TAY, key_up_ANL, rotation, *, out_TAX):
    num_rows = len(x_TAY)
    padding = (0, 0, 0, -num_rows % 8)
    padded = Rotation(cos_TP=F.pad(rotation.cos_TP, padding), sin_TP=F.pad(rotation.sin_TP, padding))
    return out_TAX.copy_(absorbed_query_ref(F.pad(x_TAY, (0, 0, *padding)), key_up_ANL, padded)[:num_rows])


def _value_up(latent_TAL, value_up_ALV, *, out_TAV, ahead):
    return out_TAV.copy_(torch.einsum("tal,alv->tav", latent_TAL.double(), value_up_ALV.double()))


def _add_rms_norm(x_TH, delta_TH, weight_H, *, eps, normed_TH):
    sum_TH, normed, _ = add_rms_norm_ref(x_TH, delta_TH, weight_H, eps=eps)
    x_TH.copy_(sum_TH)
    normed_TH.copy_(normed)


def _gated_product(gate_up_TX, *, out_TM):
    out_TM.copy_(gated_product_ref(gate_up_TX))


def _joined_norms(*rows, eps, out_TX):
    out_TX.copy_(joined_norms_ref(*rows, eps=eps))


def _narrow_linear(x_TI, weight_OI, *, out_TO):
    out_TO.copy_(x_TI.double() @ weight_OI.double().T)


def _index_query(x_TJD, projected_TJ, rotation, *, query_TJD, weight_TJ):
    query, weight = index_query_ref(x_TJD, projected_TJ, rotation)
    query_TJD.copy_(query)
    weight_TJ.copy_(weight)


def _owned_rows(position_TK, page_RP, *, page_size, out_TK, out_count_T):
    row_TK, count_T = owned_rows_ref(position_TK, page_RP, page_size=page_size)
    out_TK.copy_(row_TK)
    out_count_T.copy_(count_T)


def _owner_top_k(score_NTW, position_NTW, *, max_positions, out_position_TK):
    out_position_TK.copy_(owner_top_k_ref(score_NTW, position_NTW, out_position_TK.shape[1]))


def _pack_states(out_TGL, lse_TG, *, num_ranks):
    return pack_states_ref(out_TGL, lse_TG, num_ranks=num_ranks)


def _merge_shards(out_NTAL, lse_NTA, *, out_TAL, lse_TA, first_owner_B):
    state = merge_shards_ref(out_NTAL, lse_NTA, first_owner_B=first_owner_B)
    out_TAL.copy_(state.out_TAL)
    lse_TA.copy_(state.lse_TA)


def _take_rows(row_B, sources, outs):
    for out, taken in zip(outs, take_rows_ref(row_B, sources), strict=True):
        out.copy_(taken)


def _embed_rows(*rows, first_id, out_TH):
    out_TH.copy_(embed_rows_ref(*rows, first_id=first_id))


def _noise_keys(stream_key_B, start_B, *, first=0, out_T):
    rows_per_request = len(out_T) // len(start_B)
    out_T.copy_(noise_keys_ref(stream_key_B, start_B, rows_per_request=rows_per_request, first=first))


def _decode_rows(start_B, num_rows_B, page_BP, inverse_frequency_F, *, first=0, out, **sizes):
    rows_per_request = len(out.position_T) // len(start_B)
    rows = decode_rows_ref(
        start_B, num_rows_B, page_BP, inverse_frequency_F, rows_per_request=rows_per_request, first=first, **sizes
    )
    for name in ("position_T", "write_row_T", "count_T", "owned_T"):
        getattr(out, name).copy_(getattr(rows, name))
    out.rotation.cos_TP.copy_(rows.rotation.cos_TP)
    out.rotation.sin_TP.copy_(rows.rotation.sin_TP)


def _commit_runs(drawn_T, is_drawn_T, state, *, out):
    for kept, given in zip((state, out), commit_runs_ref(drawn_T, is_drawn_T, state), strict=True):
        for field in fields(kept):
            getattr(kept, field.name).copy_(getattr(given, field.name))


class _IndexSelect:
    def __init__(self, *, num_rows, max_requests, max_positions, k, memory):
        self._k = k

    def __call__(self, queries, keys, *, out_position_TK, out_score_TK=None, out_row_TK=None, page_RP=None):
        position_TK = index_select_ref(queries, keys.pages_PX, k=self._k, dtype=torch.float32)
        out_position_TK.copy_(position_TK)
        if out_score_TK is not None:
            scores_TS = paged_index_scores_ref(queries, keys.pages_PX, dtype=torch.float32)
            chosen_TK = scores_TS.gather(1, position_TK.clamp(min=0))
            out_score_TK.copy_(chosen_TK.masked_fill(position_TK < 0, -torch.inf))
        if out_row_TK is not None:
            page_RP = queries.page_table_RP if page_RP is None else page_RP
            out_row_TK.copy_(pool_rows_ref(position_TK, page_RP, page_size=PAGE_SIZE))


class _CandidateMemory:
    nbytes = 0

    def __init__(self, **_sizes):
        pass


class _PackedSparseMla:
    def __init__(self, **_sizes):
        pass

    def __call__(
        self, query_TAX, pool_PB, index_TK, count_T, *, scale, out_TAL, lse_TA, written_last=WrittenLast.ANYTHING
    ):
        state = packed_sparse_mla_ref(query_TAX, pool_PB, index_TK, count_T, scale=scale)
        out_TAL.copy_(state.out_TAL.masked_fill(count_T[:, None, None] == 0, 0))  # softmax over nothing
        lse_TA.copy_(state.lse_TA)


class _Mixture:
    num_chosen = 0

    def __init__(self, device, *, max_tokens, width):
        pass

    def __call__(self, x_TH, router_EH, bias_E, experts: PackedExperts, out_TH, *, scaling):
        out, _ = moe_ref(
            x_TH, router_EH, bias_E, list(zip(*experts, strict=True)), num_chosen=self.num_chosen, scaling=scaling
        )
        out_TH.copy_(out)


class _LmHeadPick:
    def __init__(self, weight_VI, *, first_id):
        self._weight_VI, self._first_id = weight_VI, first_id

    def __call__(self, x_TI, *, logits_TV=None):
        if logits_TV is not None:
            logits_TV.copy_(x_TI.double() @ self._weight_VI.double().T)
        return lm_head_pick_ref(x_TI, self._weight_VI, first_id=self._first_id)


class _ChainAcceptor:
    def __init__(self, **_sizes):
        pass

    def __call__(self, logits_TV, row_BK1, draft_ids_BK, *, key_T, greedy_T, out):
        for kept, given in zip(
            out, chain_accept_ref(logits_TV, row_BK1, draft_ids_BK, key_T=key_T, greedy_T=greedy_T), strict=True
        ):
            kept.copy_(given)
        return out
