"""Decoder layers of one tensor-parallel rank on a GPU, in launches of `specdec.kernels` alone.

Nothing waits for the host, so a CUDA graph can hold what runs here. Weights stay in block-FP8, the cache in packed FP8.
It is for GLM-5.2's dimensions, of which the kernels are made; `DecoderLayer` defines what a layer computes.

B = requests, Q = rows of each, T = B * Q, H = hidden, A = heads of the rank, L = kv latent, R / N / V = rope, nope and
value dims of a head, J = index heads, D = index head dim, K = positions chosen, P = pages of a request, M = pages in
memory, S = 64 tokens of a page.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdec.dcp.communicator import Communicator, ordered_sum
from specdec.dcp.layout import EntryKind, KvFormat
from specdec.dcp.peer_communicator import PeerCommunicator
from specdec.dcp.pool import KvPool
from specdec.dcp.shard_pages import ShardPages
from specdec.kernels.absorbed_query import absorbed_query, value_up
from specdec.kernels.add_rms_norm import add_rms_norm
from specdec.kernels.block_fp8_linear import BlockFp8Linear
from specdec.kernels.decode_rows import DecodeRows
from specdec.kernels.errors import ConfigError
from specdec.kernels.gated_product import gated_product
from specdec.kernels.index_key_pages import PAGE_SIZE, IndexKeyPages
from specdec.kernels.index_query import index_query
from specdec.kernels.index_select import CandidateMemory, IndexSelect
from specdec.kernels.kv_write import IndexKeyEntries, LatentEntries, QueryLatents, write_kv
from specdec.kernels.moe_experts import WIDTH, MixtureLayer
from specdec.kernels.narrow_linear import narrow_linear
from specdec.kernels.packed_sparse_mla import PackedSparseMla, WrittenLast
from specdec.kernels.paged_index_scores import IndexQueries
from specdec.models.glm.layer_slice import AttentionSlice, DenseSlice, IndexerSlice, LayerSlice, MixtureSlice
from specdec.models.glm.shard_launches import ShardLaunches

_KEY_NORM_EPS = 1e-6


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
class PassSizes:
    """The shape of a pass, and the numbers of the model that no weight tells.

    Attributes:
        num_requests: B.
        rows_per_request: Q.
        max_positions: Most positions of a request.
        index_topk: K.
        eps: Of all root-mean-square norms.
        routed_scaling: Factor on the routed experts' weights.
    """

    num_requests: int
    rows_per_request: int
    max_positions: int
    index_topk: int
    eps: float
    routed_scaling: float

    @property
    def num_rows(self) -> int:
        """T."""
        return self.num_requests * self.rows_per_request


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRows:
    """The rows of a pass and the pages of their requests; the same memory in every pass that a graph replays.

    Attributes:
        places: Where the rows stand; those of a request stand together.
        page_BP: Physical pages of each request, i32; -1 where another rank has one.
        shards: The same with what ranks that share pages want besides; None where the rank has them all.
    """

    places: DecodeRows
    page_BP: torch.Tensor
    shards: ShardPages | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What the rows of a pass attend to.

    Attributes:
        position_TK: Positions, ascending, -1 behind the last, i32.
        row_TK: Physical rows of the pool that hold them, likewise; of those that are here, in a dcp group.
        count_T: How many these are, i32.
    """

    position_TK: torch.Tensor
    row_TK: torch.Tensor
    count_T: torch.Tensor


class LayerLaunches:
    """Runs layers over passes of one shape, one after the other on one stream.

    Args:
        layers: Those it may be given; for the sizes of its buffers.
        sizes: Of the passes.
        tp: Ranks whose sums make a layer's output.
        dcp: Ranks that share the pages.
        memory: For the choices of passes on one stream; None makes one.

    Attributes:
        delta_TH: What the last part of a layer adds to the residual stream: this rank's share of it, bfloat16.
        normed_TH: The normed residual stream, bfloat16.
    """

    def __init__(
        self,
        layers: Sequence[LayerSlice],
        sizes: PassSizes,
        *,
        tp: Communicator,
        dcp: Communicator | None = None,
        memory: CandidateMemory | None = None,
    ) -> None:
        self._sizes, self._tp = sizes, tp
        attention = layers[0].attention
        self._num_heads, self._nope_dim, self._latent_dim = attention.key_up_ANL.shape
        hidden_dim, device = len(layers[0].input_norm), layers[0].input_norm.device
        self._q_latent_dim = len(attention.q_a_norm)
        indexers = [layer.attention.indexer for layer in layers if layer.attention.indexer is not None]
        num_index_rows = 0 if attention.indexer is None else len(attention.indexer.norm_weight)
        self._rope_dim = len(attention.qkv_a.weight_OI) - num_index_rows - self._q_latent_dim - self._latent_dim
        self._scale = (self._nope_dim + self._rope_dim) ** -0.5

        def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty((sizes.num_rows, *shape), dtype=dtype, device=device)

        self.delta_TH, self.normed_TH = rows(hidden_dim), rows(hidden_dim)
        self._q_latent_TQ = rows(self._q_latent_dim)
        self._query_TAX = rows(self._num_heads, self._latent_dim + self._rope_dim)
        self._value_TAV = rows(self._num_heads, attention.value_up_ALV.shape[2])
        self._latent_TAL = rows(self._num_heads, self._latent_dim)
        self._lse_TA = rows(self._num_heads, dtype=torch.float32)
        if indexers:
            num_index_heads, index_dim = len(indexers[0].weights_proj), len(indexers[0].norm_weight)
            self._index_query_TJD = rows(num_index_heads, index_dim, dtype=torch.uint8)
            self._index_projected_TJ = rows(num_index_heads, dtype=torch.float32)
            self._index_weight_TJ = rows(num_index_heads, dtype=torch.float32)
            self._select = IndexSelect(
                num_rows=sizes.rows_per_request,
                max_requests=sizes.num_requests,
                max_positions=sizes.max_positions,
                k=sizes.index_topk,
                memory=memory,
            )
        self._shards: ShardLaunches | None = None
        if dcp is not None and dcp.size > 1:
            self._shards = ShardLaunches(
                num_rows=sizes.num_rows,
                num_heads=self._num_heads,
                latent_dim=self._latent_dim,
                index_topk=sizes.index_topk,
                max_positions=sizes.max_positions,
                dcp=dcp,
                device=device,
            )
        else:
            self._attend = PackedSparseMla(
                max_rows=sizes.num_rows,
                num_heads=self._num_heads,
                num_slots=sizes.index_topk,
                device=device,
                out_dtype=torch.bfloat16,
                index_dtype=torch.int32,
            )
        self._mixture = MixtureLayer(device, max_tokens=sizes.num_rows, width=_expert_width(layers))
        widths = {
            len(linear.weight_OI)
            for layer in layers
            for linear in (layer.attention.qkv_a, layer.attention.q_b, *_dense_linears(layer))
        }
        self._out_TO = {width: rows(width) for width in widths}

    def of_requests(self, num_requests: int) -> "LayerLaunches":
        """Give the launches of passes of so many requests, no more than these are for, in the same memory."""
        part = copy.copy(self)
        part._sizes = replace(self._sizes, num_requests=num_requests)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(part, name, value[: part._sizes.num_rows])
        part._out_TO = {width: out_TO[: part._sizes.num_rows] for width, out_TO in self._out_TO.items()}
        part._shards = None if self._shards is None else self._shards.of_rows(part._sizes.num_rows)
        return part

    def new_choice(self, count_T: torch.Tensor) -> Choice:
        """Give memory for what the rows attend to.

        Args:
            count_T: Positions of each row, i32, kept where all of them are on this rank.
        """
        shape = len(count_T), self._sizes.index_topk
        return Choice(
            position_TK=torch.full(shape, -1, dtype=torch.int32, device=count_T.device),
            row_TK=torch.full(shape, -1, dtype=torch.int32, device=count_T.device),
            count_T=count_T if self._shards is None else torch.zeros_like(count_T),
        )

    def begin(self, x_TH: torch.Tensor) -> None:
        """Start a pass: its residual stream is nothing but what the ranks have in `delta_TH`."""
        x_TH.zero_()

    def run(self, layer: LayerSlice, pages: LayerPages, rows: PassRows, choice: Choice, x_TH: torch.Tensor) -> None:
        """Run one layer, writing the rows' KV; what its MLP adds to `x_TH` is left in `delta_TH`.

        Args:
            layer: Its weights; a layer with an indexer makes the choice anew.
            pages: Of its KV.
            rows: Of the pass.
            choice: What the rows attend to.
            x_TH: The residual stream, bfloat16, without `delta_TH`; changed in place.
        """
        self.add_norm(x_TH, layer.input_norm)
        self._attention(layer.attention, pages, rows, choice)
        self.add_norm(x_TH, layer.post_norm)
        mlp = layer.mlp
        if isinstance(mlp, DenseSlice):
            gate_up_TX = mlp.gate_up(self.normed_TH, out_TO=self._out(mlp.gate_up))
            gated_TM = gate_up_TX.new_empty((len(gate_up_TX), gate_up_TX.shape[1] // 2))
            gated_product(gate_up_TX, out_TM=gated_TM)
            mlp.down(gated_TM, out_TO=self.delta_TH)
        else:
            self._mixture(
                self.normed_TH, mlp.router, mlp.bias, mlp.experts, self.delta_TH, scaling=self._sizes.routed_scaling
            )

    def add_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        """Add `delta_TH` of all ranks to the residual stream and norm the sum into `normed_TH`, which is given."""
        tp, eps = self._tp, self._sizes.eps
        if isinstance(tp, PeerCommunicator) and tp.adds_rows(x_TH):
            tp.add_norm(x_TH, self.delta_TH, weight_H, eps=eps, normed_TH=self.normed_TH)
            return self.normed_TH
        self.sum_over_ranks(self.delta_TH)
        add_rms_norm(x_TH, self.delta_TH, weight_H, eps=eps, normed_TH=self.normed_TH)
        return self.normed_TH

    def sum_over_ranks(self, x_TH: torch.Tensor) -> None:
        """Add up what each rank has of some rows, in place."""
        ordered_sum(x_TH, self._tp, out=x_TH)

    def _out(self, linear: BlockFp8Linear) -> torch.Tensor:
        return self._out_TO[len(linear.weight_OI)]

    def _attention(self, weights: AttentionSlice, pages: LayerPages, rows: PassRows, choice: Choice) -> None:
        """Attend with the normed rows; the rank's part of the output is left in `delta_TH`."""
        indexer, places = weights.indexer, rows.places
        kv_dim = self._q_latent_dim + self._latent_dim + self._rope_dim
        qkv_TO = weights.qkv_a(self.normed_TH, out_TO=self._out(weights.qkv_a))
        write_kv(
            LatentEntries(
                kv_TX=qkv_TO[:, self._q_latent_dim : kv_dim],
                weight_L=weights.kv_a_norm,
                eps=self._sizes.eps,
                pages_MB=pages.latent_MB,
            ),
            QueryLatents(
                x_TQ=qkv_TO[:, : self._q_latent_dim],
                weight_Q=weights.q_a_norm,
                eps=self._sizes.eps,
                out_TQ=self._q_latent_TQ,
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
            places.rotation,
            places.write_row_T,
            page_size=PAGE_SIZE,
        )
        q_TO = weights.q_b(self._q_latent_TQ, out_TO=self._out(weights.q_b))
        head_dim = self._nope_dim + self._rope_dim
        q_TAY = q_TO[:, : self._num_heads * head_dim].unflatten(1, (self._num_heads, head_dim))
        if indexer is not None:
            self._choose(q_TO[:, self._num_heads * head_dim :], indexer, pages, rows, choice)
        absorbed_query(q_TAY, weights.key_up_ANL, places.rotation, out_TAX=self._query_TAX)
        out = {"scale": self._scale, "out_TAL": self._latent_TAL, "lse_TA": self._lse_TA}
        if self._shards is None:
            # The choice and the cache are older than absorbed_query, which is in front.
            inputs = (self._query_TAX, pages.latent_MB, choice.row_TK, choice.count_T)
            self._attend(*inputs, written_last=WrittenLast.QUERIES, **out)
        else:
            assert rows.shards is not None
            self._shards.attend(
                self._query_TAX, pages.latent_MB, rows.shards, row_TK=choice.row_TK, count_T=choice.count_T, **out
            )
        value_up(self._latent_TAL, weights.value_up_ALV, out_TAV=self._value_TAV, ahead=weights.o.weight_OI)
        weights.o(self._value_TAV.flatten(1), out_TO=self.delta_TH)

    def _choose(
        self, index_q_TO: torch.Tensor, indexer: IndexerSlice, pages: LayerPages, rows: PassRows, choice: Choice
    ) -> None:
        """Choose the positions that this layer and the shared ones behind it attend to."""
        narrow_linear(self.normed_TH, indexer.weights_proj, out_TO=self._index_projected_TJ)
        index_query(
            index_q_TO.unflatten(1, self._index_query_TJD.shape[1:]),
            self._index_projected_TJ,
            rows.places.rotation,
            query_TJD=self._index_query_TJD,
            weight_TJ=self._index_weight_TJ,
        )
        shards, keys = rows.shards, _index_pages(pages)
        queries = IndexQueries(
            query_TJD=self._index_query_TJD,
            weight_TJ=self._index_weight_TJ,
            position_T=rows.places.position_T if shards is None else rows.places.owned_T - 1,
            page_table_RP=rows.page_BP if shards is None else shards.owned_page_BP,
        )
        if self._shards is None:
            self._select(queries, keys, out_position_TK=choice.position_TK, out_row_TK=choice.row_TK)
        else:
            assert shards is not None
            self._shards.choose(
                self._select,
                queries,
                keys,
                shards,
                out_position_TK=choice.position_TK,
                out_row_TK=choice.row_TK,
                out_count_T=choice.count_T,
            )


def _expert_width(layers: Sequence[LayerSlice]) -> int:
    """Width of the rank's slice of an expert; where no layer has any, that of the smallest slice."""
    for layer in layers:
        if isinstance(layer.mlp, MixtureSlice):
            return layer.mlp.experts.down.numel() // ((len(layer.mlp.bias) + 1) * len(layer.input_norm))
    return WIDTH


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


def layer_pages(pool: KvPool) -> list[LayerPages]:
    """Give the pages of every layer of a pool, in the order of the layers; described once for the memory it has.

    Raises:
        ConfigError: The pool is not of the kind that the kernels read: packed FP8, pages of 64 tokens.
    """
    layout = pool.layout
    if layout.kv_format is not KvFormat.FP8_PACKED or layout.page_size != PAGE_SIZE:
        raise ConfigError(
            f"the kernels read pools of {KvFormat.FP8_PACKED} in pages of {PAGE_SIZE} tokens, got {layout.kv_format} "
            f"and {layout.page_size}: set kv_format and page_size"
        )
    if "layer_pages" not in pool.views:
        pool.views["layer_pages"] = _layer_pages(pool)
    pages: list[LayerPages] = pool.views["layer_pages"]
    return pages


def _layer_pages(pool: KvPool) -> list[LayerPages]:
    latents, keys = pool.buffer(EntryKind.LATENT), pool.buffer(EntryKind.INDEX_KEYS)
    latent_place, key_place = (pool.held.place_of[kind] for kind in (EntryKind.LATENT, EntryKind.INDEX_KEYS))
    return [
        LayerPages(
            latent_MB=latents[:, place],
            index_keys=IndexKeyPages.of(keys[:, key_place[layer]]) if layer in key_place else None,
        )
        for layer, place in latent_place.items()
    ]
