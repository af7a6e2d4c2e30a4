"""The weights of one tensor-parallel rank as the kernels of a GPU take them.

H = hidden, L = kv latent, R / N / V = rope, nope and value dims of a head, A = heads of the rank, J = index heads, D =
index head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.kernels.block_fp8_linear import BlockFp8Linear
from specdec.kernels.moe_experts import PackedExperts


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerSlice:
    """Weights of an indexer that are multiplied apart from others; whole on every rank.

    Attributes:
        norm_weight: Of the keys' norm, float32 [D].
        norm_bias: Likewise.
        weights_proj: bfloat16 [J, H].
    """

    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    weights_proj: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSlice:
    """Weights of a layer's attention on one rank.

    Attributes:
        qkv_a: `q_a_proj`, behind it `kv_a_proj_with_mqa`, and in a layer with an indexer `wk`: [2048 + L + R (+ D), H].
        q_a_norm: bfloat16.
        kv_a_norm: bfloat16 [L].
        q_b: `q_b_proj` of the rank's heads, and behind it the indexer's `wq_b` in a layer that has one.
        key_up_ANL: bfloat16.
        value_up_ALV: bfloat16.
        o: `o_proj`, the columns of the rank's heads: [H, A * V].
        indexer: Where the layer has one.
    """

    qkv_a: BlockFp8Linear
    q_a_norm: torch.Tensor
    kv_a_norm: torch.Tensor
    q_b: BlockFp8Linear
    key_up_ANL: torch.Tensor
    value_up_ALV: torch.Tensor
    o: BlockFp8Linear
    indexer: IndexerSlice | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSlice:
    """Weights of a dense MLP on one rank: gate rows, then up rows, and down columns of its share of the width."""

    gate_up: BlockFp8Linear
    down: BlockFp8Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSlice:
    """Weights of a sparse MLP on one rank: router and bias whole, of each expert a share of its width."""

    router: torch.Tensor
    bias: torch.Tensor
    experts: PackedExperts


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSlice:
    """Weights of one decoder layer on one rank; the two norms are bfloat16 [H]."""

    input_norm: torch.Tensor
    attention: AttentionSlice
    post_norm: torch.Tensor
    mlp: DenseSlice | MixtureSlice


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpSlice:
    """Weights of the MTP layer on one rank; norms are bfloat16 [H].

    Attributes:
        enorm: Of the next token's embedding.
        hnorm: Of the hidden state.
        eh_proj: bfloat16 [H, X]: all 2H columns, or those of the rank's share of the sum, which may lie in a wider
            matrix.
        first_column: Of them, among 2H.
        layer: The decoder layer, with its indexer.
        recycled: The same layer as passes run it that choose nothing: without the indexer's rows.
        head_norm: `shared_head.norm`.
    """

    enorm: torch.Tensor
    hnorm: torch.Tensor
    eh_proj: torch.Tensor
    first_column: int
    layer: LayerSlice
    recycled: LayerSlice
    head_norm: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularySlice:
    """What a rank holds of the vocabulary: consecutive ids.

    Attributes:
        first_id: The first of them.
        embedding_VH: bfloat16.
        head_VH: bfloat16.
    """

    first_id: int
    embedding_VH: torch.Tensor
    head_VH: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSlice:
    """What a rank holds of a checkpoint, and the numbers that no weight tells.

    Attributes:
        layers: First layer first.
        final_norm: bfloat16 [H].
        vocabulary: Embedding and head.
        mtp: None where the checkpoint has none, or nothing drafts.
        inverse_frequency_F: Of the rotation, float32 [R / 2].
        index_topk: Positions that an indexer chooses.
        eps: Of all root-mean-square norms.
        routed_scaling: Factor on the routed experts' weights.
    """

    layers: Sequence[LayerSlice]
    final_norm: torch.Tensor
    vocabulary: VocabularySlice
    mtp: MtpSlice | None
    inverse_frequency_F: torch.Tensor
    index_topk: int
    eps: float
    routed_scaling: float
