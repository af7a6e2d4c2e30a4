"""Every tensor a checkpoint must hold, derived from its config alone: name, shape, dtype, part of the model.

Names and shapes are those of `GlmMoeDsaForCausalLM` as saved by Hugging Face, one matrix per expert, and of the MTP
layer stored as one more layer. In a block-FP8 checkpoint a quantised `X.weight` is followed by `X.weight_scale_inv`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import torch

from specdec.models.glm.config import GlmConfig

SCALE_SUFFIX = "_scale_inv"


class Component(StrEnum):
    """A part of the model, for sums; everything in the MTP layer counts as MTP."""

    EMBEDDING = "embedding"
    NORMS = "norms"
    ATTENTION = "attention"
    INDEXER = "indexer"
    DENSE_MLP = "dense mlp"
    ROUTER = "router"
    SHARED_EXPERTS = "shared experts"
    EXPERTS = "experts"
    HEAD = "head"
    MTP = "mtp"


class TensorSpec(NamedTuple):
    """One tensor of a checkpoint (a tuple, because a released checkpoint has 118,629 of them).

    Attributes:
        is_quantised: Stored as FP8 blocks with a scale tensor beside it.
        is_scale: The scale tensor of a quantised weight.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    component: Component
    is_quantised: bool = False
    is_scale: bool = False

    @property
    def num_elements(self) -> int:
        """Values in the tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor on disk."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """The tensors of one checkpoint, by name."""

    tensors: dict[str, TensorSpec]

    @property
    def num_tensors(self) -> int:
        """Tensors, scales among them."""
        return len(self.tensors)

    @cached_property
    def num_scales(self) -> int:
        """Scale tensors, one per quantised weight."""
        return sum(tensor.is_scale for tensor in self.tensors.values())

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all tensors on disk, as `total_size` of a shard index counts them."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @cached_property
    def num_parameters(self) -> int:
        """Weights of the model; scales are not weights."""
        return sum(tensor.num_elements for tensor in self.tensors.values() if not tensor.is_scale)


def layer_prefix(layer: int) -> str:
    """The start of the names of a layer's tensors; the MTP layer is layer `num_layers`."""
    return f"model.layers.{layer}."


def derive_manifest(config: GlmConfig, *, with_mtp: bool | None = None) -> Manifest:
    """The tensors of a checkpoint with this config.

    Args:
        config: The config.
        with_mtp: Whether the MTP layer is stored; None asks the config.
    """
    tensors: dict[str, TensorSpec] = {}
    for tensor in _weights(config, with_mtp=config.num_mtp_layers > 0 if with_mtp is None else with_mtp):
        tensors[tensor.name] = tensor
        if tensor.is_quantised and config.weight_block_size is not None:
            scale = _scale(tensor, config.weight_block_size)
            tensors[scale.name] = scale
    return Manifest(tensors)


def _scale(weight: TensorSpec, block_size: tuple[int, int]) -> TensorSpec:
    return TensorSpec(
        name=weight.name + SCALE_SUFFIX,
        shape=tuple(-(-size // block) for size, block in zip(weight.shape, block_size, strict=True)),
        dtype=torch.float32,
        component=weight.component,
        is_scale=True,
    )


def _weights(config: GlmConfig, *, with_mtp: bool) -> Iterator[TensorSpec]:
    hidden, vocab = config.hidden_size, config.vocab_size
    top = _Namer(config, "model.")
    yield top.plain("embed_tokens.weight", Component.EMBEDDING, vocab, hidden)
    for layer in range(config.num_layers):
        namer = _Namer(config, layer_prefix(layer))
        has_indexer = config.indexer_types[layer] == "full"
        yield from _layer(namer, has_indexer=has_indexer, is_sparse=config.mlp_layer_types[layer] == "sparse")
    yield top.plain("norm.weight", Component.NORMS, hidden)
    yield _Namer(config, "").plain("lm_head.weight", Component.HEAD, vocab, hidden)
    if with_mtp:
        mtp = _Namer(config, layer_prefix(config.num_layers), override=Component.MTP)
        yield from _layer(mtp, has_indexer=True, is_sparse=True)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield mtp.plain(f"{norm}.weight", Component.MTP, hidden)
        yield mtp.plain("eh_proj.weight", Component.MTP, hidden, 2 * hidden)


def _layer(namer: "_Namer", *, has_indexer: bool, is_sparse: bool) -> Iterator[TensorSpec]:
    config = namer.config
    hidden, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
    yield namer.plain("input_layernorm.weight", Component.NORMS, hidden)
    yield namer.plain("post_attention_layernorm.weight", Component.NORMS, hidden)
    part = Component.ATTENTION
    yield namer.matrix("self_attn.q_a_proj.weight", part, config.q_lora_rank, hidden)
    yield namer.plain("self_attn.q_a_layernorm.weight", part, config.q_lora_rank)
    yield namer.matrix("self_attn.q_b_proj.weight", part, heads * config.qk_head_dim, config.q_lora_rank)
    yield namer.matrix("self_attn.kv_a_proj_with_mqa.weight", part, latent + config.qk_rope_head_dim, hidden)
    yield namer.plain("self_attn.kv_a_layernorm.weight", part, latent)
    kv_b_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield namer.matrix("self_attn.kv_b_proj.weight", part, kv_b_rows, latent)
    yield namer.matrix("self_attn.o_proj.weight", part, hidden, heads * config.v_head_dim)
    if has_indexer:
        part, index_dim = Component.INDEXER, config.index_head_dim
        index_rows = config.index_num_heads * index_dim
        yield namer.matrix("self_attn.indexer.wq_b.weight", part, index_rows, config.q_lora_rank)
        yield namer.matrix("self_attn.indexer.wk.weight", part, index_dim, hidden)
        yield namer.plain("self_attn.indexer.k_norm.weight", part, index_dim)
        yield namer.plain("self_attn.indexer.k_norm.bias", part, index_dim)
        yield namer.plain("self_attn.indexer.weights_proj.weight", part, config.index_num_heads, hidden)
    if not is_sparse:
        yield from _mlp(namer, "mlp", Component.DENSE_MLP, config.intermediate_size)
        return
    yield namer.plain("mlp.gate.weight", Component.ROUTER, config.num_experts, hidden)
    yield namer.float32("mlp.gate.e_score_correction_bias", Component.ROUTER, config.num_experts)
    yield from _mlp(namer, "mlp.shared_experts", Component.SHARED_EXPERTS, config.shared_intermediate_size)
    for expert in range(config.num_experts):
        yield from _mlp(namer, f"mlp.experts.{expert}", Component.EXPERTS, config.moe_intermediate_size)


def _mlp(namer: "_Namer", prefix: str, component: Component, width: int) -> Iterator[TensorSpec]:
    hidden = namer.config.hidden_size
    yield namer.matrix(f"{prefix}.gate_proj.weight", component, width, hidden)
    yield namer.matrix(f"{prefix}.up_proj.weight", component, width, hidden)
    yield namer.matrix(f"{prefix}.down_proj.weight", component, hidden, width)


@dataclass(frozen=True)
class _Namer:
    """Makes the tensor specs below one name prefix; `override` counts all of them as one component."""

    config: GlmConfig
    prefix: str
    override: Component | None = None

    def matrix(self, name: str, component: Component, *shape: int) -> TensorSpec:
        """A weight that an FP8 checkpoint stores in FP8."""
        if self.config.weight_block_size is None:
            return self.plain(name, component, *shape)
        return self._spec(name, component, shape, torch.float8_e4m3fn, is_quantised=True)

    def plain(self, name: str, component: Component, *shape: int) -> TensorSpec:
        """A weight in the checkpoint's own dtype."""
        return self._spec(name, component, shape, self.config.dtype)

    def float32(self, name: str, component: Component, *shape: int) -> TensorSpec:
        """A weight in float32 in every release."""
        return self._spec(name, component, shape, torch.float32)

    def _spec(
        self, name: str, component: Component, shape: tuple[int, ...], dtype: torch.dtype, *, is_quantised: bool = False
    ) -> TensorSpec:
        return TensorSpec(
            name=self.prefix + name,
            shape=shape,
            dtype=dtype,
            component=self.override or component,
            is_quantised=is_quantised,
        )
