"""One decoder layer: attention and a dense or sparse MLP, each behind a norm and added to the residual stream."""

from collections.abc import Mapping

import torch

from specdec.dcp.communicator import ParallelGroups, ordered_sum
from specdec.dcp.exchange import ExchangeStrategy
from specdec.dcp.kv_store import KvStore
from specdec.dcp.metadata import BatchMetadata
from specdec.kernels.expert_routing import Routing, route
from specdec.kernels.gated_mlp import expert_mlp, gated_mlp
from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.rotary import Rotation
from specdec.models.glm.attention import LatentAttention
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.selection import Selection
from specdec.models.glm.trace import ForwardTrace


class DenseMlp:
    """The gated MLP of a dense layer; a rank holds a share of its width."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], prefix: str, *, parallel: ParallelGroups) -> None:
        self.tp = parallel.tp
        self.gate_up_proj = parameters[f"{prefix}.gate_up_proj"]
        self.down_proj = parameters[f"{prefix}.down_proj"]

    def forward(self, x_TH: torch.Tensor, *, num_live: int, layer: int, trace: ForwardTrace | None) -> torch.Tensor:
        """Apply the MLP to every row."""
        return ordered_sum(gated_mlp(x_TH, self.gate_up_proj, self.down_proj), self.tp)


class SparseMlp:
    """Routed experts and the shared expert of a sparse layer.

    Every rank routes all tokens; it holds a share of each expert's width, or whole experts, and of the shared expert a
    share of its width.
    """

    def __init__(
        self, config: GlmConfig, parameters: Mapping[str, torch.Tensor], prefix: str, *, parallel: ParallelGroups
    ) -> None:
        self.tp = parallel.tp
        self.num_chosen = config.num_experts_per_token
        self.num_groups = config.num_expert_groups
        self.num_chosen_groups = config.topk_groups
        self.normalise = config.norm_topk_prob
        self.scaling = config.routed_scaling_factor
        self.router = parameters[f"{prefix}.router"]
        self.router_bias = parameters[f"{prefix}.router_bias"]
        self.expert_gate_up_proj = parameters[f"{prefix}.expert_gate_up_proj"]
        self.expert_down_proj = parameters[f"{prefix}.expert_down_proj"]
        self.shared_gate_up_proj = parameters[f"{prefix}.shared_gate_up_proj"]
        self.shared_down_proj = parameters[f"{prefix}.shared_down_proj"]
        num_held = len(self.expert_down_proj)
        self.first_expert = 0 if num_held == config.num_experts else self.tp.rank * num_held

    def forward(self, x_TH: torch.Tensor, *, num_live: int, layer: int, trace: ForwardTrace | None) -> torch.Tensor:
        """Add each live row's experts to the shared expert, which is not scaled; padding rows visit no expert."""
        routing = route(
            x_TH,
            self.router,
            self.router_bias,
            num_chosen=self.num_chosen,
            num_groups=self.num_groups,
            num_chosen_groups=self.num_chosen_groups,
            normalise=self.normalise,
            scaling=self.scaling,
        )
        live = Routing(routing.expert_TC[:num_live], routing.weight_TC[:num_live])
        if trace is not None:
            trace.expert_TC[layer] = live.expert_TC
        out_TH = gated_mlp(x_TH, self.shared_gate_up_proj, self.shared_down_proj)
        out_TH[:num_live] += expert_mlp(
            x_TH[:num_live], live, self.expert_gate_up_proj, self.expert_down_proj, first_expert=self.first_expert
        )
        return ordered_sum(out_TH, self.tp)


class DecoderLayer:
    """The weights of one decoder layer."""

    def __init__(
        self,
        config: GlmConfig,
        parameters: Mapping[str, torch.Tensor],
        prefix: str,
        *,
        has_indexer: bool,
        is_sparse: bool,
        latent_norm_eps: float,
        parallel: ParallelGroups,
        exchange: ExchangeStrategy,
    ) -> None:
        self.eps = config.rms_norm_eps
        self.input_layernorm = parameters[f"{prefix}.input_layernorm"]
        self.post_attention_layernorm = parameters[f"{prefix}.post_attention_layernorm"]
        self.attention = LatentAttention(
            config,
            parameters,
            prefix,
            has_indexer=has_indexer,
            latent_norm_eps=latent_norm_eps,
            parallel=parallel,
            exchange=exchange,
        )
        self.mlp: DenseMlp | SparseMlp = (
            SparseMlp(config, parameters, f"{prefix}.moe", parallel=parallel)
            if is_sparse
            else DenseMlp(parameters, f"{prefix}.mlp", parallel=parallel)
        )

    def forward(
        self,
        x_TH: torch.Tensor,
        rotation: Rotation,
        selection: Selection | None,
        *,
        metadata: BatchMetadata,
        pool: KvStore,
        layer: int,
        trace: ForwardTrace | None = None,
    ) -> tuple[torch.Tensor, Selection]:
        """Run the layer on T rows; see `LatentAttention.forward` for the arguments.

        Returns:
            The residual stream [T, H] and the selection the layer used, for the shared layers after it.
        """
        attended_TH, selection = self.attention.forward(
            rms_norm(x_TH, self.input_layernorm, eps=self.eps),
            rotation,
            selection,
            metadata=metadata,
            pool=pool,
            layer=layer,
            trace=trace,
        )
        x_TH = x_TH + attended_TH
        normed_TH = rms_norm(x_TH, self.post_attention_layernorm, eps=self.eps)
        x_TH = x_TH + self.mlp.forward(normed_TH, num_live=metadata.num_tokens, layer=layer, trace=trace)
        if trace is not None:
            trace.selected_TK[layer] = selection.position_TK
            trace.hidden_TH[layer] = x_TH[: metadata.num_tokens]
        return x_TH, selection
