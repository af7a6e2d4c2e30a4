"""A decoding pass of the target on one GPU: a tensor-parallel rank's slice, in launches of `specdec.kernels` alone.

Nothing waits for the host, so a CUDA graph can hold the pass. Weights stay in block-FP8, the cache in packed FP8. It is
for GLM-5.2's dimensions, of which the kernels are made; `GlmTarget` defines what it computes.

B = requests, Q = rows of each, T = B * Q, H = hidden, A = heads of the rank, L = kv latent, R / N / V = rope, nope and
value dims of a head, J = index heads, D = index head dim, K = positions chosen, P = pages of a request, M = pages in
memory, S = 64 tokens of a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specdec.kernels.absorbed_query import absorbed_query, value_up
from specdec.kernels.add_rms_norm import add_rms_norm
from specdec.kernels.block_fp8_linear import BlockFp8Linear
from specdec.kernels.index_key_pages import PAGE_SIZE, IndexKeyPages
from specdec.kernels.index_query import index_query
from specdec.kernels.index_select import IndexSelect
from specdec.kernels.kv_write import IndexKeyEntries, LatentEntries, write_kv
from specdec.kernels.moe_experts import MixtureLayer, PackedExperts
from specdec.kernels.narrow_linear import narrow_linear
from specdec.kernels.packed_sparse_mla import PackedSparseMla
from specdec.kernels.paged_index_scores import IndexQueries
from specdec.kernels.pool_rows import pool_rows
from specdec.kernels.rotary import Rotation
from specdec.kernels.row_norm import row_norm

_ROPE, _INDEX_HEADS, _INDEX_DIM, _CHOSEN = 64, 32, 128, 2048  # R, J, D and K of GLM-5.2
_KEY_NORM_EPS = 1e-6


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
class LayerPages:
    """Where a layer keeps its KV.

    Attributes:
        latent_MB: u8 [M, S * 656], pages of packed rows; pages may lie apart.
        index_keys: Of a layer with an indexer: u8 [M, S * 132], likewise.
    """

    latent_MB: torch.Tensor
    index_keys: IndexKeyPages | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PassInputs:
    """What a pass reads besides weights and pages; the same memory in every pass that a graph replays.

    Attributes:
        hidden_TH: Embedded tokens, bfloat16; the residual stream afterwards.
        position_T: Position of each row, i32; rows of a request stand together, and -1 marks one that is padding.
        rotation: Of the positions.
        write_row_T: Physical row that takes a row's KV, i64; -1 where this rank keeps nothing.
        page_BP: Physical pages of each request, i32.
    """

    hidden_TH: torch.Tensor
    position_T: torch.Tensor
    rotation: Rotation
    write_row_T: torch.Tensor
    page_BP: torch.Tensor


class RankPass:
    """Runs passes of one shape: B requests of Q rows each.

    Args:
        layers: Weights, first layer first; it has an indexer.
        pages: Where each layer keeps its KV.
        final_norm: bfloat16 [H].
        num_requests: B.
        rows_per_request: Q.
        max_positions: Most positions of a request.
        eps: Of all root-mean-square norms.
        routed_scaling: Factor on the routed experts' weights.

    Attributes:
        selected_TK: Positions that the last indexer chose, i32, -1 where there are fewer.

    Raises:
        ValueError: The first layer has no indexer, so that nothing would tell it which rows to read.
    """

    def __init__(
        self,
        layers: Sequence[LayerSlice],
        pages: Sequence[LayerPages],
        final_norm: torch.Tensor,
        *,
        num_requests: int,
        rows_per_request: int,
        max_positions: int,
        eps: float,
        routed_scaling: float,
    ) -> None:
        if layers[0].attention.indexer is None:
            raise ValueError("the first layer has no indexer, and no layer before it could choose for it")
        self._layers, self._pages, self._final_norm = layers, pages, final_norm
        self._eps, self._routed_scaling = eps, routed_scaling
        num_rows = num_requests * rows_per_request
        attention = layers[0].attention
        self._num_heads, self._nope_dim, self._latent_dim = attention.key_up_ANL.shape
        value_dim = attention.value_up_ALV.shape[2]
        hidden_dim, device = len(final_norm), final_norm.device
        self._q_latent_dim = len(attention.q_a_norm)
        self._scale = (self._nope_dim + _ROPE) ** -0.5

        def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty((num_rows, *shape), dtype=dtype, device=device)

        self._normed_TH, self._delta_TH = rows(hidden_dim), rows(hidden_dim)
        self._q_latent_TQ = rows(self._q_latent_dim)
        self._query_TAX = rows(self._num_heads, self._latent_dim + _ROPE)
        self._value_TAV = rows(self._num_heads, value_dim)
        self._index_query_TJD = rows(_INDEX_HEADS, _INDEX_DIM, dtype=torch.uint8)
        self._index_projected_TJ = rows(_INDEX_HEADS, dtype=torch.float32)
        self._index_weight_TJ = rows(_INDEX_HEADS, dtype=torch.float32)
        self.selected_TK = rows(_CHOSEN, dtype=torch.int32)
        self._row_TK = rows(_CHOSEN, dtype=torch.int32)
        self._latent_TAL = rows(self._num_heads, self._latent_dim)
        self._lse_TA = rows(self._num_heads, dtype=torch.float32)
        self._count_T = torch.full((num_rows,), _CHOSEN, dtype=torch.int32, device=device)
        self._select = IndexSelect(
            num_rows=rows_per_request, max_requests=num_requests, max_positions=max_positions, k=_CHOSEN
        )
        self._attend = PackedSparseMla(
            max_rows=num_rows,
            num_heads=self._num_heads,
            num_slots=_CHOSEN,
            device=device,
            out_dtype=torch.bfloat16,
            index_dtype=torch.int32,
        )
        self._mixture = MixtureLayer(device, max_tokens=num_rows)
        widths = {
            len(linear.weight_OI)
            for layer in layers
            for linear in (layer.attention.qkv_a, layer.attention.q_b, *_dense_linears(layer))
        }
        self._out_TO = {width: rows(width) for width in widths}

    def forward(self, inputs: PassInputs) -> torch.Tensor:
        """Run the pass on the current stream, writing the rows' KV.

        Returns:
            Hidden states after the final norm, bfloat16 [T, H], in memory that the next pass overwrites.
        """
        x_TH, delta_TH = inputs.hidden_TH, self._delta_TH
        delta_TH.zero_()
        for layer, pages in zip(self._layers, self._pages, strict=True):
            add_rms_norm(x_TH, delta_TH, layer.input_norm, eps=self._eps, normed_TH=self._normed_TH)
            self._attention(layer.attention, pages, inputs)
            add_rms_norm(x_TH, delta_TH, layer.post_norm, eps=self._eps, normed_TH=self._normed_TH)
            if isinstance(layer.mlp, DenseSlice):
                gate_up_TX = layer.mlp.gate_up(self._normed_TH, out_TO=self._out(layer.mlp.gate_up))
                gate_TM, up_TM = gate_up_TX.chunk(2, dim=-1)
                layer.mlp.down(F.silu(gate_TM) * up_TM, out_TO=delta_TH)
            else:
                mlp = layer.mlp
                self._mixture(
                    self._normed_TH, mlp.router, mlp.bias, mlp.experts, delta_TH, scaling=self._routed_scaling
                )
        add_rms_norm(x_TH, delta_TH, self._final_norm, eps=self._eps, normed_TH=self._normed_TH)
        return self._normed_TH

    def _out(self, linear: BlockFp8Linear) -> torch.Tensor:
        return self._out_TO[len(linear.weight_OI)]

    def _attention(self, weights: AttentionSlice, pages: LayerPages, inputs: PassInputs) -> None:
        """Attend with the normed rows; what the layer adds to the residual stream is left in `_delta_TH`."""
        indexer, rotation = weights.indexer, inputs.rotation
        kv_dim = self._q_latent_dim + self._latent_dim + _ROPE
        qkv_TO = weights.qkv_a(self._normed_TH, out_TO=self._out(weights.qkv_a))
        write_kv(
            LatentEntries(
                kv_TX=qkv_TO[:, self._q_latent_dim : kv_dim],
                weight_L=weights.kv_a_norm,
                eps=self._eps,
                pages_MB=pages.latent_MB,
            ),
            None
            if indexer is None
            else IndexKeyEntries(
                key_TD=qkv_TO[:, kv_dim:],
                weight_D=indexer.norm_weight,
                bias_D=indexer.norm_bias,
                eps=_KEY_NORM_EPS,
                pages_MB=_index_pages(pages).pages_PX,
            ),
            rotation,
            inputs.write_row_T,
            page_size=PAGE_SIZE,
        )
        row_norm(qkv_TO[:, : self._q_latent_dim], weights.q_a_norm, eps=self._eps, out_TH=self._q_latent_TQ)
        q_TO = weights.q_b(self._q_latent_TQ, out_TO=self._out(weights.q_b))
        head_dim = self._nope_dim + _ROPE
        q_TAY = q_TO[:, : self._num_heads * head_dim].unflatten(1, (self._num_heads, head_dim))
        absorbed_query(q_TAY, weights.key_up_ANL, rotation, out_TAX=self._query_TAX)
        if indexer is not None:
            self._choose(q_TO[:, self._num_heads * head_dim :], indexer, pages, inputs)
        self._attend(
            self._query_TAX, pages.latent_MB, self._row_TK, self._count_T,
            scale=self._scale, out_TAL=self._latent_TAL, lse_TA=self._lse_TA,
        )  # fmt: skip
        value_up(self._latent_TAL, weights.value_up_ALV, out_TAV=self._value_TAV)
        weights.o(self._value_TAV.flatten(1), out_TO=self._delta_TH)

    def _choose(self, index_q_TO: torch.Tensor, indexer: IndexerSlice, pages: LayerPages, inputs: PassInputs) -> None:
        """Choose the positions that this layer and the shared ones behind it attend to."""
        narrow_linear(self._normed_TH, indexer.weights_proj, out_TO=self._index_projected_TJ)
        index_query(
            index_q_TO.unflatten(1, (_INDEX_HEADS, _INDEX_DIM)),
            self._index_projected_TJ,
            inputs.rotation,
            query_TJD=self._index_query_TJD,
            weight_TJ=self._index_weight_TJ,
        )
        self._select(
            IndexQueries(
                query_TJD=self._index_query_TJD,
                weight_TJ=self._index_weight_TJ,
                position_T=inputs.position_T,
                page_table_RP=inputs.page_BP,
            ),
            _index_pages(pages),
            out_position_TK=self.selected_TK,
        )
        pool_rows(self.selected_TK, inputs.page_BP, page_size=PAGE_SIZE, out_TK=self._row_TK)


def _dense_linears(layer: LayerSlice) -> tuple[BlockFp8Linear, ...]:
    return (layer.mlp.gate_up,) if isinstance(layer.mlp, DenseSlice) else ()


def _index_pages(pages: LayerPages) -> IndexKeyPages:
    """Give the pages of a layer that has an indexer.

    Raises:
        ValueError: None were given.
    """
    if pages.index_keys is None:
        raise ValueError("a layer with an indexer was given no pages for index keys")
    return pages.index_keys
