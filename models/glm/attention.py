"""Multi-head latent attention over the paged cache, in absorbed form, with DSA selection.

    q_latent = rms(q_a x);  q = q_b q_latent;  c, k_rope = split(kv_a x);  c = rms(c)      cached: c, rope(k_rope)
    score    = ((key_up^T q_nope) . c + rope(q_rope) . k_rope) / sqrt(N + R)
    out      = o_proj( value_up (sum softmax(score) c) )

T = rows, H = hidden, A = heads, Q = query latent, L = kv latent, N / R / V = nope, rope and value head dims, K = slots.
Source: DeepSeek-V2, section 2.1; `GlmMoeDsaForCausalLM` in transformers for the layout of the projections.
"""

from collections.abc import Mapping

import torch

from specdec.dcp.metadata import BatchMetadata
from specdec.dcp.pool import KvPool
from specdec.kernels.linear import head_linear, linear
from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.rotary import Rotation, rotate
from specdec.kernels.row_padding import ROW_MULTIPLE
from specdec.kernels.sparse_mla import sparse_mla
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.indexer import Indexer
from specdec.models.glm.selection import Selection

_GATHER_VALUES = 1 << 19  # values of cached rows gathered at once: 2 MiB stay in a CPU core's cache (1.4x over 64 MiB)


class LatentAttention:
    """The attention weights of one layer, and its indexer where it has one."""

    def __init__(
        self,
        config: GlmConfig,
        parameters: Mapping[str, torch.Tensor],
        prefix: str,
        *,
        has_indexer: bool,
        latent_norm_eps: float,
    ) -> None:
        self.q_lora_rank = config.q_lora_rank
        self.kv_lora_rank = config.kv_lora_rank
        self.nope_dim = config.qk_nope_head_dim
        self.scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        self.latent_norm_eps = latent_norm_eps
        self.qkv_a_proj = parameters[f"{prefix}.attention.qkv_a_proj"]
        self.q_a_layernorm = parameters[f"{prefix}.attention.q_a_layernorm"]
        self.kv_a_layernorm = parameters[f"{prefix}.attention.kv_a_layernorm"]
        self.q_b_proj = parameters[f"{prefix}.attention.q_b_proj"]
        kv_b_proj = parameters[f"{prefix}.attention.kv_b_proj"]
        self.num_heads = kv_b_proj.shape[0]
        self.key_up_ANL = kv_b_proj[:, : self.nope_dim]
        self.value_up_ALV = kv_b_proj[:, self.nope_dim :].transpose(1, 2)
        self.o_proj = parameters[f"{prefix}.attention.o_proj"]
        self.indexer = Indexer(config, parameters, f"{prefix}.indexer") if has_indexer else None

    def forward(
        self,
        x_TH: torch.Tensor,
        rotation: Rotation,
        selection: Selection | None,
        *,
        metadata: BatchMetadata,
        pool: KvPool,
        layer: int,
    ) -> tuple[torch.Tensor, Selection]:
        """Write the rows' KV, choose slots, attend.

        Args:
            x_TH: Normed input rows, T a multiple of the row block.
            rotation: Rotation of each row.
            selection: Slots to use as they are; None has this layer's own indexer choose. A layer without an indexer
                must be given one.
            metadata: Of the pool's geometry.
            pool: Holds this layer's latents and index keys.
            layer: The layer's number in the pool.

        Returns:
            The attention output [T, H] (zeros before `o_proj` in padding rows), and the selection used.
        """
        q_latent_TQ, kv_latent_TL, k_rope_TR = linear(x_TH, self.qkv_a_proj).split_with_sizes(
            (self.q_lora_rank, self.kv_lora_rank, self.qkv_a_proj.shape[0] - self.q_lora_rank - self.kv_lora_rank),
            dim=-1,
        )
        q_latent_TQ = rms_norm(q_latent_TQ, self.q_a_layernorm, eps=self.latent_norm_eps)
        kv_latent_TL = rms_norm(kv_latent_TL, self.kv_a_layernorm, eps=self.latent_norm_eps)
        pool.write_latent(layer, kv_latent_TL, rotate(k_rope_TR, rotation), metadata)
        if selection is None:
            if self.indexer is None:
                raise AssertionError(f"layer {layer} shares a selection but none was carried to it")
            selection = self.indexer.select(x_TH, q_latent_TQ, rotation, metadata=metadata, pool=pool, layer=layer)
        q_TAX = linear(q_latent_TQ, self.q_b_proj).unflatten(-1, (self.num_heads, -1))
        q_absorbed_TAL = head_linear(q_TAX[..., : self.nope_dim], self.key_up_ANL)
        query_TAX = torch.cat((q_absorbed_TAL, rotate(q_TAX[..., self.nope_dim :], rotation)), dim=-1)
        latent_TAL = self._attend(query_TAX.float(), selection, metadata=metadata, pool=pool, layer=layer)
        value_TAV = head_linear(latent_TAL.to(x_TH.dtype), self.value_up_ALV)
        return linear(value_TAV.flatten(1), self.o_proj), selection

    def _attend(
        self, query_TAX: torch.Tensor, selection: Selection, *, metadata: BatchMetadata, pool: KvPool, layer: int
    ) -> torch.Tensor:
        """Attend for the live rows, a bounded number of gathered slots at a time; padding rows give zeros."""
        num_live = metadata.num_tokens
        latent_TAL = query_TAX.new_zeros((query_TAX.shape[0], self.num_heads, self.kv_lora_rank))
        step = max(ROW_MULTIPLE, _GATHER_VALUES // (selection.row_TK.shape[1] * query_TAX.shape[-1]))
        for start in range(0, num_live, step):
            rows = slice(start, min(start + step, num_live))
            latent_TAL[rows] = sparse_mla(
                query_TAX[rows],
                pool.gather_latent(layer, selection.row_TK[rows]),
                selection.owned_TK[rows],
                scale=self.scale,
                latent_dim=self.kv_lora_rank,
            ).out_TAL
        return latent_TAL
