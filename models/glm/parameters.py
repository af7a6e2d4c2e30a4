"""The parameters of the model, and which rows of which checkpoint tensors each one is made of.

Checkpoint matrices are joined where the model multiplies them at once (q_a with kv_a, gate with up, all experts of a
layer), and cut where a tensor-parallel rank needs only its share: heads, MLP widths, vocabulary rows, and of the
experts either every width or some of them whole. Everything else is whole on every rank.

A parameter of any shape is seen here as rows of its last axis; a piece fills consecutive rows over their full width.
H hidden, V vocabulary, Q and L latent ranks, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec.kernels.errors import ConfigError
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.expert_split import ExpertSplit, choose_expert_split
from specdec.models.glm.manifest import layer_prefix


class Piece(NamedTuple):
    """A rectangle of one checkpoint tensor and the parameter row where it goes; vectors count as one column.

    Attributes:
        tensor: Name in the checkpoint.
        first_row: First row of the rectangle in the whole tensor, which is also what FP8 scales are indexed by.
        first_col: First column of it.
        target_row: First row in the parameter.
    """

    tensor: str
    first_row: int
    num_rows: int
    first_col: int
    num_cols: int
    target_row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPlan:
    """One parameter of this rank: name, shape, dtype, and the pieces that fill it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the last axis; the elements of a vector."""
        return self.shape[0] if len(self.shape) == 1 else torch.Size(self.shape[:-1]).numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """Which share of the cut axes a rank holds.

    Attributes:
        rank: The tensor-parallel rank.
        size: Ranks that share the axes.
        expert_split: How the experts are shared; None asks `choose_expert_split`.
    """

    rank: int = 0
    size: int = 1
    expert_split: ExpertSplit | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"tp_rank must be in 0..tp_size - 1, got {self.rank} of {self.size}")

    def share(self, key: str, total: int) -> tuple[int, int]:
        """First element and number of elements of this rank's share of an axis of `total`."""
        if total % self.size:
            raise ConfigError(f"tp_size must divide {key}, got {self.size} and {total}")
        return self.rank * (total // self.size), total // self.size


def plan_parameters(
    config: GlmConfig, *, dtype: torch.dtype, with_mtp: bool, tensor_parallel: TensorParallel
) -> list[ParameterPlan]:
    """Every parameter that a rank holds.

    Args:
        config: The checkpoint's config.
        dtype: Of all parameters but the router, its bias and the index key norm, which are float32.
        with_mtp: Plan the MTP layer too.
        tensor_parallel: The rank's share.

    Raises:
        ConfigError: The size does not divide the heads, an MLP width or the vocabulary.
    """
    return list(_Planner(config, dtype, tensor_parallel).parameters(with_mtp=with_mtp))


@dataclass(frozen=True)
class _Planner:
    config: GlmConfig
    dtype: torch.dtype
    tp: TensorParallel

    def parameters(self, *, with_mtp: bool) -> Iterator[ParameterPlan]:
        config = self.config
        vocab_share = self.tp.share("vocab_size", config.vocab_size)
        hidden = config.hidden_size
        yield self._rows("embed_tokens", "model.embed_tokens.weight", vocab_share, hidden)
        for layer in range(config.num_layers):
            yield from self._layer(
                f"layers.{layer}",
                layer_prefix(layer),
                has_indexer=config.indexer_types[layer] == "full",
                is_sparse=config.mlp_layer_types[layer] == "sparse",
            )
        yield self._vector("norm", "model.norm.weight", hidden)
        yield self._rows("lm_head", "lm_head.weight", vocab_share, hidden)
        if with_mtp:
            source = layer_prefix(config.num_layers)
            yield self._vector("mtp.enorm", f"{source}enorm.weight", hidden)
            yield self._vector("mtp.hnorm", f"{source}hnorm.weight", hidden)
            yield self._vector("mtp.shared_head_norm", f"{source}shared_head.norm.weight", hidden)
            yield self._rows("mtp.eh_proj", f"{source}eh_proj.weight", (0, hidden), 2 * hidden)
            yield from self._layer("mtp.layer", source, has_indexer=True, is_sparse=True)

    def _layer(self, name: str, source: str, *, has_indexer: bool, is_sparse: bool) -> Iterator[ParameterPlan]:
        hidden = self.config.hidden_size
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield self._vector(f"{name}.{norm}", f"{source}{norm}.weight", hidden)
        yield from self._attention(f"{name}.attention", f"{source}self_attn.")
        if has_indexer:
            yield from self._indexer(f"{name}.indexer", f"{source}self_attn.indexer.")
        if is_sparse:
            yield from self._moe(f"{name}.moe", f"{source}mlp.")
        else:
            share = self.tp.share("intermediate_size", self.config.intermediate_size)
            yield from self._mlp(f"{name}.mlp.", [f"{source}mlp."], share)

    def _attention(self, name: str, source: str) -> Iterator[ParameterPlan]:
        config = self.config
        hidden, latent, rope = config.hidden_size, config.kv_lora_rank, config.qk_rope_head_dim
        first_head, num_heads = self.tp.share("num_attention_heads", config.num_heads)
        q_rank, kv_rows = config.q_lora_rank, latent + rope
        yield ParameterPlan(
            name=f"{name}.qkv_a_proj",
            shape=(q_rank + kv_rows, hidden),
            dtype=self.dtype,
            pieces=(
                _rectangle(f"{source}q_a_proj.weight", (0, q_rank), (0, hidden), 0),
                _rectangle(f"{source}kv_a_proj_with_mqa.weight", (0, kv_rows), (0, hidden), q_rank),
            ),
        )
        yield self._vector(f"{name}.q_a_layernorm", f"{source}q_a_layernorm.weight", q_rank)
        yield self._vector(f"{name}.kv_a_layernorm", f"{source}kv_a_layernorm.weight", latent)
        q_dim, kv_dim, v_dim = config.qk_head_dim, config.qk_nope_head_dim + config.v_head_dim, config.v_head_dim
        q_rows = first_head * q_dim, num_heads * q_dim
        yield self._rows(f"{name}.q_b_proj", f"{source}q_b_proj.weight", q_rows, q_rank)
        kv_b_rows = first_head * kv_dim, num_heads * kv_dim
        yield ParameterPlan(
            name=f"{name}.kv_b_proj",
            shape=(num_heads, kv_dim, latent),
            dtype=self.dtype,
            pieces=(_rectangle(f"{source}kv_b_proj.weight", kv_b_rows, (0, latent), 0),),
        )
        o_cols = first_head * v_dim, num_heads * v_dim
        yield ParameterPlan(
            name=f"{name}.o_proj",
            shape=(hidden, num_heads * v_dim),
            dtype=self.dtype,
            pieces=(_rectangle(f"{source}o_proj.weight", (0, hidden), o_cols, 0),),
        )

    def _indexer(self, name: str, source: str) -> Iterator[ParameterPlan]:
        """Whole on every rank: all ranks must make the same selection."""
        config = self.config
        heads, dim, hidden = config.index_num_heads, config.index_head_dim, config.hidden_size
        yield self._rows(f"{name}.wq_b", f"{source}wq_b.weight", (0, heads * dim), config.q_lora_rank)
        yield self._rows(f"{name}.wk", f"{source}wk.weight", (0, dim), hidden)
        yield self._vector(f"{name}.k_norm_weight", f"{source}k_norm.weight", dim, dtype=torch.float32)
        yield self._vector(f"{name}.k_norm_bias", f"{source}k_norm.bias", dim, dtype=torch.float32)
        yield self._rows(f"{name}.weights_proj", f"{source}weights_proj.weight", (0, heads), hidden)

    def _moe(self, name: str, source: str) -> Iterator[ParameterPlan]:
        """The router is float32: rounding its bias reorders experts."""
        config = self.config
        num_experts, hidden = config.num_experts, config.hidden_size
        router = self._rows(f"{name}.router", f"{source}gate.weight", (0, num_experts), hidden, dtype=torch.float32)
        yield router
        bias = f"{source}gate.e_score_correction_bias"
        yield self._vector(f"{name}.router_bias", bias, num_experts, dtype=torch.float32)
        width = config.moe_intermediate_size
        if (self.tp.expert_split or choose_expert_split(config, self.tp.size)) is ExpertSplit.EXPERT:
            (first_expert, num_held), share = self.tp.share("n_routed_experts", num_experts), (0, width)
        else:
            (first_expert, num_held), share = (0, num_experts), self.tp.share("moe_intermediate_size", width)
        experts = [f"{source}experts.{expert}." for expert in range(first_expert, first_expert + num_held)]
        yield from self._mlp(f"{name}.expert_", experts, share, leading_axis=True)
        share = self.tp.share("the shared experts' width", config.shared_intermediate_size)
        yield from self._mlp(f"{name}.shared_", [f"{source}shared_experts."], share)

    def _mlp(
        self, name: str, sources: list[str], share: tuple[int, int], *, leading_axis: bool = False
    ) -> Iterator[ParameterPlan]:
        """Gate and up rows joined, and down columns, of one MLP or of a stack of them."""
        hidden, (_, width) = self.config.hidden_size, share
        stack = (len(sources),) if leading_axis else ()
        yield ParameterPlan(
            name=f"{name}gate_up_proj",
            shape=(*stack, 2 * width, hidden),
            dtype=self.dtype,
            pieces=tuple(
                _rectangle(f"{source}{half}_proj.weight", share, (0, hidden), (2 * i + j) * width)
                for i, source in enumerate(sources)
                for j, half in enumerate(("gate", "up"))
            ),
        )
        yield ParameterPlan(
            name=f"{name}down_proj",
            shape=(*stack, hidden, width),
            dtype=self.dtype,
            pieces=tuple(
                _rectangle(f"{source}down_proj.weight", (0, hidden), share, i * hidden)
                for i, source in enumerate(sources)
            ),
        )

    def _rows(
        self, name: str, tensor: str, rows: tuple[int, int], num_cols: int, *, dtype: torch.dtype | None = None
    ) -> ParameterPlan:
        """Consecutive rows of one matrix."""
        piece = _rectangle(tensor, rows, (0, num_cols), 0)
        return ParameterPlan(name=name, shape=(rows[1], num_cols), dtype=dtype or self.dtype, pieces=(piece,))

    def _vector(self, name: str, tensor: str, size: int, *, dtype: torch.dtype | None = None) -> ParameterPlan:
        piece = _rectangle(tensor, (0, size), (0, 1), 0)
        return ParameterPlan(name=name, shape=(size,), dtype=dtype or self.dtype, pieces=(piece,))


def _rectangle(tensor: str, rows: tuple[int, int], cols: tuple[int, int], target_row: int) -> Piece:
    """A piece from (first, number) of rows and of columns."""
    return Piece(
        tensor=tensor,
        first_row=rows[0],
        num_rows=rows[1],
        first_col=cols[0],
        num_cols=cols[1],
        target_row=target_row,
    )
