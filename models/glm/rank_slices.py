"""The weights of a rank as the GPU's kernels take them, made of loaded parameters that stayed in FP8.

Matrices that a pass multiplies with the same rows stand below one another: the indexer's `wk` behind `kv_a`, its `wq_b`
behind `q_b`. The experts are packed once, the shared one behind the routed ones.
"""

from collections.abc import Mapping

import torch

from specdec.kernels.block_fp8 import BLOCK_SIZE
from specdec.kernels.block_fp8_linear import SCALE_ROWS, BlockFp8Linear, Workspace, concatenated_weights
from specdec.kernels.errors import CheckpointError
from specdec.kernels.moe_experts import PackedExperts, pack_down, pack_gate_up
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.fp8_parameters import SCALE
from specdec.models.glm.rank_pass import AttentionSlice, DenseSlice, IndexerSlice, LayerSlice, MixtureSlice


def layer_slices(config: GlmConfig, parameters: Mapping[str, torch.Tensor], *, max_rows: int) -> list[LayerSlice]:
    """Make the slices of all layers, without those of the MTP layer.

    Args:
        config: The checkpoint's config.
        parameters: As `load_checkpoint` gives them for bfloat16 with `keep_fp8`; what is joined or packed is copied.
        max_rows: Most rows of a pass.

    Raises:
        CheckpointError: A matrix that the kernels take in FP8 is stored otherwise, or a router has more than bfloat16.
    """
    workspace = Workspace(parameters["norm"].device)
    return [
        _Layer(parameters, f"layers.{layer}", max_rows=max_rows, workspace=workspace).slice(is_sparse=kind == "sparse")
        for layer, kind in enumerate(config.mlp_layer_types)
    ]


class _Layer:
    """Makes the slice of one layer."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], prefix: str, *, max_rows: int, workspace: Workspace
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
        routed, routed_scale = self._fp8(f"moe.expert_{kind}_proj")
        shared, shared_scale = self._fp8(f"moe.shared_{kind}_proj")
        num_rows = routed.shape[1]
        scale_EJB = torch.cat((routed_scale, shared_scale)).view(len(routed) + 1, num_rows // SCALE_ROWS, -1)
        return concatenated_weights((routed, shared[None])), scale_EJB[:, :: BLOCK_SIZE // SCALE_ROWS]

    def _linear(self, *names: str) -> BlockFp8Linear:
        weights, scales = zip(*map(self._fp8, names), strict=True)
        if len(names) == 1:
            weight_OI, scale_JB = weights[0], scales[0]
        else:
            weight_OI, scale_JB = concatenated_weights(weights), torch.cat(scales)
        return BlockFp8Linear(weight_OI, scale_JB, max_rows=self._max_rows, workspace=self._workspace)

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
