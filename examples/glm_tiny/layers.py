"""One decoder layer of `glm_moe_dsa` as pure functions for training: dense shapes, no cache.

B = sequences, S = positions, H = hidden, A = heads, N / R / V = nope, rope and value head dims, Q / L = latent ranks,
E = routed experts, X = E + 1 (the shared expert is the last), M = expert width, J / D = index heads and their dim.

The residual stream, norms, router and indexer are float32; matrix products run in `compute_dtype`. All experts are
computed and unchosen ones multiplied by zero: at this size two large products beat gathering tokens by expert.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model_config import TinyConfig


class Projected(NamedTuple):
    """What a layer's input turns into before attention.

    Attributes:
        q_BASd: Queries, nope then rotated part.
        k_BASd: Keys, expanded from the latent, nope then rotated part.
        v_BASV: Values.
        x_BSH: Normed input, float32, which also feeds the indexer.
        q_latent_BSQ: Normed query latent, float32, likewise.
    """

    q_BASd: Tensor
    k_BASd: Tensor
    v_BASV: Tensor
    x_BSH: Tensor
    q_latent_BSQ: Tensor


class Layer(nn.Module):
    """Weights of one decoder layer; `project`, `attend` and `finish` are its three stages."""

    def __init__(self, config: TinyConfig, *, is_dense: bool, has_indexer: bool) -> None:
        super().__init__()
        c = config
        self.input_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.q_a = _matrix(c.q_lora_rank, c.hidden_size)
        self.q_a_norm = nn.Parameter(torch.ones(c.q_lora_rank))
        self.q_b = _matrix(c.num_heads * c.qk_head_dim, c.q_lora_rank)
        self.kv_a = _matrix(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
        self.kv_a_norm = nn.Parameter(torch.ones(c.kv_lora_rank))
        self.kv_b = _matrix(c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.o = nn.Parameter(torch.zeros(c.hidden_size, c.num_heads * c.v_head_dim))
        self.post_norm = nn.Parameter(torch.ones(c.hidden_size))
        num_experts, width = (1, c.intermediate_size) if is_dense else (c.num_experts + 1, c.moe_intermediate_size)
        self.gate_up = nn.Parameter(torch.randn(num_experts, 2, width, c.hidden_size) * c.hidden_size**-0.5)
        self.down = nn.Parameter(torch.zeros(num_experts, c.hidden_size, width))
        self.router = None if is_dense else nn.Parameter(torch.randn(c.num_experts, c.hidden_size) * 0.02)
        self.router_bias: Tensor
        self.register_buffer("router_bias", torch.zeros(c.num_experts))
        self.indexer = Indexer(config) if has_indexer else None


class Indexer(nn.Module):
    """Weights of the DSA indexer."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        c = config
        self.wq_b = _matrix(c.index_num_heads * c.index_head_dim, c.q_lora_rank)
        self.wk = _matrix(c.index_head_dim, c.hidden_size)
        self.k_norm_weight = nn.Parameter(torch.ones(c.index_head_dim))
        self.k_norm_bias = nn.Parameter(torch.zeros(c.index_head_dim))
        self.weights_proj = _matrix(c.index_num_heads, c.hidden_size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in float32 and scale; float32 out."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope_table(positions: Tensor, config: TinyConfig) -> tuple[Tensor, Tensor]:
    """Give cos and sin, float32 [..., R/2], for integer positions of any shape."""
    half = torch.arange(0, config.qk_rope_head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions[..., None].float() * config.rope_theta ** (-half / config.qk_rope_head_dim)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of the last dim; firsts then seconds in the result (queries and keys alike)."""
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def project(  # noqa: PLR0917 (compiled: positional arguments keep its guards simple)
    x_BSH: Tensor, layer: Layer, cos: Tensor, sin: Tensor, config: TinyConfig, dtype: torch.dtype
) -> Projected:
    """Turn the residual stream into queries, keys and values; cos and sin are [S, R/2]."""
    c, (batch, length, _) = config, x_BSH.shape
    normed = rms_norm(x_BSH, layer.input_norm, c.rms_norm_eps)
    q_latent = rms_norm(F.linear(normed.to(dtype), layer.q_a.to(dtype)), layer.q_a_norm, c.rms_norm_eps)
    q = (
        F.linear(q_latent.to(dtype), layer.q_b.to(dtype))
        .view(batch, length, c.num_heads, c.qk_head_dim)
        .transpose(1, 2)
    )
    q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
    kv = F.linear(normed.to(dtype), layer.kv_a.to(dtype))
    latent, k_rope = kv.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    latent = rms_norm(latent, layer.kv_a_norm, c.rms_norm_eps).to(dtype)
    expanded = F.linear(latent, layer.kv_b.to(dtype)).view(batch, length, c.num_heads, -1).transpose(1, 2)
    k_nope, v = expanded.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
    k_rope = rotate(k_rope, cos, sin)[:, None].expand(-1, c.num_heads, -1, -1)
    q = torch.cat([q_nope, rotate(q_rope, cos, sin)], dim=-1)
    k = torch.cat([k_nope, k_rope], dim=-1)
    return Projected(q, k, v.contiguous(), normed, q_latent)


def attend(p: Projected, mask: Tensor | None) -> Tensor:
    """Softmax attention over the allowed keys: causal without a mask, else `mask` [B, 1, S, S], additive."""
    padding = p.q_BASd.shape[-1] - p.v_BASV.shape[-1]  # one head width lets the fused kernels run
    v = F.pad(p.v_BASV, (0, padding))
    if mask is None:
        out = F.scaled_dot_product_attention(p.q_BASd, p.k_BASd, v, is_causal=True)
    else:
        mask = mask.expand(-1, p.q_BASd.shape[1], -1, -1)
        out = F.scaled_dot_product_attention(p.q_BASd, p.k_BASd, v, attn_mask=mask)
    return out[..., : p.v_BASV.shape[-1]]


def finish(
    x_BSH: Tensor, heads_BASV: Tensor, layer: Layer, config: TinyConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Add attention's output and the MLP; also give each expert's share of the tokens, [E] (zeros if dense)."""
    flat = heads_BASV.transpose(1, 2).flatten(2)
    x_BSH = x_BSH + F.linear(flat.to(dtype), layer.o.to(dtype))
    normed = rms_norm(x_BSH, layer.post_norm, config.rms_norm_eps)
    num_experts, _, width, hidden = layer.gate_up.shape
    gate_up = F.linear(normed.to(dtype), layer.gate_up.view(-1, hidden).to(dtype)).unflatten(
        -1, (num_experts, 2, width)
    )
    inner = F.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
    load = torch.zeros_like(layer.router_bias)
    if layer.router is not None:
        weight, load = _route(normed, layer.router, layer.router_bias, config)
        inner = inner * weight[..., None].to(dtype)
    down = layer.down.transpose(0, 1).reshape(hidden, -1)
    return x_BSH + F.linear(inner.flatten(-2), down.to(dtype)), load


def index_parts(
    p: Projected, indexer: Indexer, cos: Tensor, sin: Tensor, config: TinyConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Give index queries [B, J, S, D], keys [B, S, D] and head weights [B, S, J] (scaled), float32, inputs detached."""
    c, x, q_latent = config, p.x_BSH.detach(), p.q_latent_BSQ.detach()
    rotated = c.qk_rope_head_dim
    q = F.linear(q_latent, indexer.wq_b).unflatten(-1, (c.index_num_heads, c.index_head_dim)).transpose(1, 2)
    k = F.layer_norm(F.linear(x, indexer.wk), (c.index_head_dim,), indexer.k_norm_weight, indexer.k_norm_bias, 1e-6)
    q = torch.cat([rotate(q[..., :rotated], cos, sin), q[..., rotated:]], dim=-1)
    k = torch.cat([rotate(k[..., :rotated], cos, sin), k[..., rotated:]], dim=-1)
    head_weights = F.linear(x, indexer.weights_proj) * (c.index_num_heads * c.index_head_dim) ** -0.5
    return q, k, head_weights


def index_scores(q_BJTD: Tensor, k_BSD: Tensor, weights_BTJ: Tensor) -> Tensor:
    """Score every key for T query rows: sum_j weight_j relu(q_j . k), float32 [B, T, S], not masked."""
    relu = torch.relu(q_BJTD @ k_BSD[:, None].transpose(-1, -2))
    return (relu * weights_BTJ.transpose(1, 2)[..., None]).sum(1)


def _route(normed: Tensor, router: Tensor, bias: Tensor, config: TinyConfig) -> tuple[Tensor, Tensor]:
    scores = F.linear(normed, router).sigmoid()
    chosen = (scores.detach() + bias).topk(config.num_experts_per_token, dim=-1).indices
    mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    kept = scores * mask
    routed = kept / (kept.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    return torch.cat([routed, torch.ones_like(routed[..., :1])], dim=-1), mask.flatten(0, -2).mean(0)


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)
