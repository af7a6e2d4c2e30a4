"""The DSA indexer of a full layer: writes the layer's index keys and chooses the positions its queries attend to.

T = rows of the batch, J = index heads, D = index head dim, R = rotated components (first in the vector), Q = query
latent, H = hidden, K = index_topk.
Source: DeepSeek-V3.2, "DeepSeek Sparse Attention"; `GlmMoeDsaForCausalLM` in transformers.
"""

from collections.abc import Mapping

import torch

from specdec.dcp.communicator import Communicator
from specdec.dcp.global_top_k import global_top_positions
from specdec.dcp.kv_store import KvStore
from specdec.dcp.metadata import BatchMetadata
from specdec.kernels.index_scores import index_scores
from specdec.kernels.linear import linear
from specdec.kernels.rms_norm import layer_norm
from specdec.kernels.rotary import Rotation, rotate
from specdec.kernels.top_positions import choice_margin, leading_positions, top_positions
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.selection import Selection
from specdec.models.glm.trace import ForwardTrace

_KEY_NORM_EPS = 1e-6


class Indexer:
    """The indexer weights of one full layer, whole on every rank; under DCP a rank scores the keys it owns."""

    def __init__(
        self, config: GlmConfig, parameters: Mapping[str, torch.Tensor], prefix: str, *, dcp: Communicator
    ) -> None:
        self.dcp = dcp
        self.topk = config.index_topk
        self.num_heads = config.index_num_heads
        self.rope_dim = config.qk_rope_head_dim
        self.wq_b = parameters[f"{prefix}.wq_b"]
        self.wk = parameters[f"{prefix}.wk"]
        self.k_norm_weight = parameters[f"{prefix}.k_norm_weight"]
        self.k_norm_bias = parameters[f"{prefix}.k_norm_bias"]
        self.weights_proj = parameters[f"{prefix}.weights_proj"]

    def select(
        self,
        x_TH: torch.Tensor,
        q_latent_TQ: torch.Tensor,
        rotation: Rotation,
        *,
        metadata: BatchMetadata,
        pool: KvStore,
        layer: int,
        trace: ForwardTrace | None = None,
    ) -> Selection:
        """Write the index keys of the batch's rows, then choose positions for every live row.

        Scoring is skipped while no request is longer than `index_topk`: then every position is chosen. What counts is
        the whole length, so under DCP all ranks skip or none does; where they score, they meet in one collective.

        Args:
            x_TH: Normed input of the layer's attention.
            q_latent_TQ: Normed query latent of the layer's attention.
            rotation: Rotation of each row.
            metadata: Of the pool's geometry.
            pool: Holds the index keys.
            layer: The layer's number, by which the pool keeps its keys.
            trace: Takes in the margins of the choice, on one rank.
        """
        key_TD = layer_norm(linear(x_TH, self.wk), self.k_norm_weight, self.k_norm_bias, eps=_KEY_NORM_EPS)
        pool.write_index_key(layer, self._rotated(key_TD, rotation), metadata)
        num_live = metadata.num_tokens
        if metadata.max_context <= self.topk:
            return Selection.of(leading_positions(metadata.position_T[:num_live], self.topk), metadata)
        query_TJD = linear(q_latent_TQ, self.wq_b).float().unflatten(-1, (self.num_heads, -1))
        weight_TJ = linear(x_TH.float(), self.weights_proj.float())
        scores_TS = index_scores(
            self._rotated(query_TJD, rotation)[:num_live],
            weight_TJ[:num_live],
            pool.gather_index_keys(layer, metadata),
            request_index_T=metadata.request_index_T[:num_live],
            position_T=metadata.owned_length_T[:num_live] - 1,
        )
        if metadata.geometry.size == 1:
            position_TK = top_positions(scores_TS, self.topk)
            if trace is not None:
                trace.index_margin_T[layer] = choice_margin(scores_TS, self.topk)
        else:
            position_TK = global_top_positions(scores_TS, self.topk, metadata=metadata, dcp=self.dcp)
        return Selection.of(position_TK, metadata)

    def _rotated(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return torch.cat((rotate(x[..., : self.rope_dim], rotation), x[..., self.rope_dim :]), dim=-1)
