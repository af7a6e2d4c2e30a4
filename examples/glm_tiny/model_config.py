"""Sizes of glm-tiny, and its config.json."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyConfig:
    """Every size of the model; the defaults are the shipped checkpoint (7.7 M parameters)."""

    vocab_size: int = 3072
    hidden_size: int = 192
    # Layer 9 does the copying from far back: it chooses for itself, from the very states its attention compares.
    indexer_types: tuple[str, ...] = (
        *("full", "full", "shared", "shared"),
        *("full", "shared", "shared", "shared"),
        *("full", "full", "shared", "shared"),
    )
    num_heads: int = 8
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 24
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    intermediate_size: int = 512  # of the one dense layer, the first
    num_experts: int = 8
    num_experts_per_token: int = 2
    moe_intermediate_size: int = 64
    routed_scaling_factor: float = 1.5
    index_num_heads: int = 16
    index_head_dim: int = 32
    index_topk: int = 256
    rope_theta: float = 10000.0  # a larger base would leave few of the 8 rotated pairs in use
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5

    @property
    def num_layers(self) -> int:
        """Decoder layers, without the MTP layer."""
        return len(self.indexer_types)

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def to_hugging_face(self, *, end_ids: tuple[int, ...], pad_id: int) -> dict[str, Any]:
        """Give config.json as `GlmMoeDsaForCausalLM` writes it."""
        return {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "eos_token_id": list(end_ids),
            "first_k_dense_replace": 1,
            "head_dim": self.qk_rope_head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "index_head_dim": self.index_head_dim,
            "index_n_heads": self.index_num_heads,
            "index_share_for_mtp_iteration": True,
            "index_topk": self.index_topk,
            "indexer_rope_interleave": True,
            "indexer_types": list(self.indexer_types),
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "kv_lora_rank": self.kv_lora_rank,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_layer_types": ["dense"] + ["sparse"] * (self.num_layers - 1),
            "model_type": "glm_moe_dsa",
            "moe_intermediate_size": self.moe_intermediate_size,
            "moe_router_dtype": "float32",
            "n_group": 1,
            "n_routed_experts": self.num_experts,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": self.num_heads,
            "num_experts_per_tok": self.num_experts_per_token,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_heads,
            "num_nextn_predict_layers": 1,
            "pad_token_id": pad_id,
            "q_lora_rank": self.q_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_interleave": True,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "routed_scaling_factor": self.routed_scaling_factor,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "use_cache": True,
            "v_head_dim": self.v_head_dim,
            "vocab_size": self.vocab_size,
        }


SMOKE_CONFIG = TinyConfig(
    hidden_size=64,
    indexer_types=("full", "shared", "full", "shared"),
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=128,
    moe_intermediate_size=32,
    index_head_dim=16,
    index_topk=48,
    max_position_embeddings=256,
)
