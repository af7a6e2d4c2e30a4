"""The weights of a rank as the GPU's kernels take them, made of loaded parameters that stayed in FP8.

Matrices that a pass multiplies with the same rows stand below one another: the indexer's `wk` behind `kv_a`, its `wq_b`
behind `q_b`. The experts are packed once, the shared one behind the routed ones.
"""

from collections.abc import MutableMapping
from dataclasses import replace

import torch

from specdec.kernels.block_fp8 import BLOCK_SIZE
from specdec.kernels.block_fp8_linear import SCALE_ROWS, BlockFp8Linear, Workspace, concatenated_weights
from specdec.kernels.errors import CheckpointError
from specdec.kernels.moe_experts import PackedExperts, pack_down, pack_gate_up
from specdec.kernels.rotary import inverse_frequency
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.fingerprint import fingerprint_sample
from specdec.models.glm.fp8_parameters import SCALE
from specdec.models.glm.layer_slice import (
    AttentionSlice,
    DenseSlice,
    IndexerSlice,
    LayerSlice,
    MixtureSlice,
    ModelSlice,
    MtpSlice,
    VocabularySlice,
)


def model_slice(
    config: GlmConfig,
    parameters: MutableMapping[str, torch.Tensor],
    *,
    max_rows: int,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> ModelSlice:
    """Make a rank's slice of a checkpoint.

    Args:
        config: The checkpoint's config.
        parameters: As `load_checkpoint` gives them to this rank for bfloat16 with `keep_fp8`. What is joined or packed
            is a copy, and only a sample of it stays here, which is all that `model_fingerprint` looks at: a GPU has no
            room for both.
        max_rows: Most rows of a pass.
        tp_rank: The rank.
        tp_size: Ranks that share the model.

    Raises:
        CheckpointError: A matrix that the kernels take in FP8 is stored otherwise, or a router has more than bfloat16.
    """
    embedding_VH = parameters["embed_tokens"]
    workspace = Workspace(embedding_VH.device)
    layers = [
        _Layer(parameters, f"layers.{number}", max_rows=max_rows, workspace=workspace).slice(is_sparse=kind == "sparse")
        for number, kind in enumerate(config.mlp_layer_types)
    ]
    mtp = None
    if "mtp.eh_proj" in parameters:
        layer = _Layer(parameters, "mtp.layer", max_rows=max_rows, workspace=workspace).slice(is_sparse=True)
        num_columns = parameters["mtp.eh_proj"].shape[1] // tp_size
        mtp = MtpSlice(
            enorm=parameters["mtp.enorm"],
            hnorm=parameters["mtp.hnorm"],
            eh_proj=parameters["mtp.eh_proj"].narrow(1, tp_rank * num_columns, num_columns),
            first_column=tp_rank * num_columns,
            layer=layer,
            recycled=without_indexer(layer, workspace),
            head_norm=parameters["mtp.shared_head_norm"],
        )
    return ModelSlice(
        layers=layers,
        final_norm=parameters["norm"],
        vocabulary=VocabularySlice(
            first_id=tp_rank * len(embedding_VH), embedding_VH=embedding_VH, head_VH=parameters["lm_head"]
        ),
        mtp=mtp,
        inverse_frequency_F=inverse_frequency(
            theta=config.rope_theta, dim=config.qk_rope_head_dim, device=embedding_VH.device
        ),
        index_topk=config.index_topk,
        eps=config.rms_norm_eps,
        routed_scaling=config.routed_scaling_factor,
    )


def without_indexer(layer: LayerSlice, workspace: Workspace) -> LayerSlice:
    """Give the same layer as passes run it that choose nothing; its matrices are the first rows of the same memory.

    Args:
        layer: With or without an indexer.
        workspace: Of the matrices.
    """
    attention = layer.attention
    if attention.indexer is None:
        return layer
    num_index_rows = attention.indexer.norm_weight.numel()
    num_query_rows = len(attention.indexer.weights_proj) * num_index_rows
    return replace(
        layer,
        attention=replace(
            attention,
            qkv_a=_without_last_rows(attention.qkv_a, num_index_rows, workspace),
            q_b=_without_last_rows(attention.q_b, num_query_rows, workspace),
            indexer=None,
        ),
    )


def _without_last_rows(linear: BlockFp8Linear, num_rows: int, workspace: Workspace) -> BlockFp8Linear:
    num_left = len(linear.weight_OI) - num_rows
    return BlockFp8Linear(
        linear.weight_OI[:num_left],
        linear.scale_JB[: -(-num_left // SCALE_ROWS)],
        max_rows=linear.max_rows,
        workspace=workspace,
    )


class _Layer:
    """Makes the slice of one layer."""

    def __init__(
        self, parameters: MutableMapping[str, torch.Tensor], prefix: str, *, max_rows: int, workspace: Workspace
    ) -> None:
        self._parameters = parameters
        self._prefix = prefix
        self._max_rows = max_rows
        self._workspace = workspace

    def slice(self, *, is_sparse: bool) -> LayerSlice:
        return LayerSlice(
            input_norm=self._get("input_layernorm"),
            attention=self._attention(),
            post_norm=self._get("post_attention_layernorm"),
            mlp=self._mixture() if is_sparse else self._dense(),
        )

    def _attention(self) -> AttentionSlice:
        qkv_a, q_b = ["attention.qkv_a_proj"], ["attention.q_b_proj"]
        indexer = None
        if f"{self._prefix}.indexer.wk" in self._parameters:
            qkv_a.append("indexer.wk")
            q_b.append("indexer.wq_b")
            indexer = IndexerSlice(
                norm_weight=self._get("indexer.k_norm_weight"),
                norm_bias=self._get("indexer.k_norm_bias"),
                weights_proj=self._get("indexer.weights_proj"),
            )
        kv_b = self._get("attention.kv_b_proj")
        value_dim = self._get("attention.o_proj").shape[1] // len(kv_b)
        return AttentionSlice(
            qkv_a=self._linear(*qkv_a),
            q_a_norm=self._get("attention.q_a_layernorm"),
            kv_a_norm=self._get("attention.kv_a_layernorm"),
            q_b=self._linear(*q_b),
            key_up_ANL=kv_b[:, :-value_dim],
            value_up_ALV=kv_b[:, -value_dim:].transpose(1, 2),
            o=self._linear("attention.o_proj"),
            indexer=indexer,
        )

    def _dense(self) -> DenseSlice:
        return DenseSlice(gate_up=self._linear("mlp.gate_up_proj"), down=self._linear("mlp.down_proj"))

    def _mixture(self) -> MixtureSlice:
        router = self._get("moe.router")
        rounded = router.to(torch.bfloat16)
        if not torch.equal(rounded.float(), router):
            raise CheckpointError(
                f"{self._prefix}.moe.router has values that bfloat16, in which the kernels take it, does not hold"
            )
        experts = PackedExperts(*pack_gate_up(*self._experts("gate_up")), *pack_down(*self._experts("down")))
        return MixtureSlice(router=rounded, bias=self._get("moe.router_bias"), experts=experts)

    def _experts(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights of all experts, e4m3 [E + 1, rows, columns], and a scale for each 128 by 128 of them."""
        routed, routed_scale = self._taken(f"moe.expert_{kind}_proj")
        shared, shared_scale = self._taken(f"moe.shared_{kind}_proj")
        num_rows = routed.shape[1]
        scale_EJB = torch.cat((routed_scale, shared_scale)).view(len(routed) + 1, num_rows // SCALE_ROWS, -1)
        return concatenated_weights((routed, shared[None])), scale_EJB[:, :: BLOCK_SIZE // SCALE_ROWS]

    def _linear(self, *names: str) -> BlockFp8Linear:
        if len(names) == 1:
            weight_OI, scale_JB = self._fp8(names[0])
        else:
            weights, scales = zip(*map(self._taken, names), strict=True)
            weight_OI, scale_JB = concatenated_weights(weights), torch.cat(scales)
        return BlockFp8Linear(weight_OI, scale_JB, max_rows=self._max_rows, workspace=self._workspace)

    def _taken(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Give a matrix and its scales, and leave samples in their place."""
        values, scales = self._fp8(name)
        hidden_size = len(self._get("input_layernorm"))
        for key, tensor in ((name, values), (name + SCALE, scales)):
            full_name = f"{self._prefix}.{key}"
            self._parameters[full_name] = fingerprint_sample(full_name, tensor, hidden_size).clone()
        return values, scales

    def _fp8(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._get(name)
        if values.dtype != torch.float8_e4m3fn:
            raise CheckpointError(
                f"{self._prefix}.{name} is {values.dtype}, the kernels take block-FP8: load an FP8 checkpoint with "
                "keep_fp8"
            )
        return values, self._get(name + SCALE)

    def _get(self, name: str) -> torch.Tensor:
        return self._parameters[f"{self._prefix}.{name}"]
