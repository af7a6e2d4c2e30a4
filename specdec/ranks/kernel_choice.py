"""What computes the model on a rank: torch, or this package's kernels for Hopper GPUs; chosen once, when it is loaded.

The kernels are made of GLM-5.2's sizes and keep its FP8 weights as they are stored. Everything they do not take runs in
torch, whose definitions they are tested against; there FP8 weights are widened as they are loaded.
"""

from dataclasses import dataclass

import torch

from specdec.dcp.exchange import ExchangeStrategy
from specdec.dcp.layout import KvFormat
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError
from specdec.kernel_set import KernelSet
from specdec.kernels.index_key_pages import PAGE_SIZE
from specdec.kernels.latent_attention import HEAD_COUNTS
from specdec.kernels.moe_experts import CHOSEN, EXPERTS, HIDDEN, WIDTHS
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.mtp import MtpIndexSharing

_CAPABILITY = (9, 0)  # Hopper
_MAX_POSITIONS = 1 << 20
_SHARES = list(zip(HEAD_COUNTS, WIDTHS, strict=True))  # heads and width of an expert that a rank may have
_SIZES = {
    "hidden_size": HIDDEN,
    "num_experts": EXPERTS,
    "num_experts_per_token": CHOSEN,
    "num_shared_experts": 1,
    "intermediate_size": 12288,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_num_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "num_expert_groups": 1,
    "norm_topk_prob": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChoice:
    """The choice for one checkpoint.

    Attributes:
        kernels: What computes it.
        reason: What hindered Hopper's kernels where nobody asked for torch; else empty.
    """

    kernels: KernelSet
    reason: str = ""

    @property
    def keeps_fp8(self) -> bool:
        """Whether FP8 weights are loaded as they are stored."""
        return self.kernels is KernelSet.HOPPER

    def __str__(self) -> str:
        """Write a line for a log."""
        return f"kernels: {self.kernels}" + (f" ({self.reason})" if self.reason else "")


def choose_kernels(model: GlmConfig, config: EngineConfig, *, dtype: torch.dtype, device: str) -> KernelChoice:
    """Choose what computes a checkpoint.

    Args:
        model: The checkpoint's config.
        config: The engine's settings; where they name no kernels, Hopper's are taken if nothing hinders.
        dtype: Of the parameters.
        device: Of the rank.

    Raises:
        ConfigError: The settings ask for Hopper's, and something hinders them.
    """
    if config.kernels is KernelSet.TORCH:
        return KernelChoice(kernels=KernelSet.TORCH)
    reason = _hindrance(model, config, dtype=dtype, device=torch.device(device))
    if reason is None:
        return KernelChoice(kernels=KernelSet.HOPPER)
    if config.kernels is KernelSet.HOPPER:
        raise ConfigError(f"kernels hopper cannot compute this: {reason}; take torch, or none to have them chosen")
    return KernelChoice(kernels=KernelSet.TORCH, reason=reason)


def _hindrance(model: GlmConfig, config: EngineConfig, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say what the Hopper kernels do not take of this; None where they take all of it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY:
        return f"the device is {device}, no Hopper GPU"
    if dtype is not torch.bfloat16:
        return f"dtype is {str(dtype).removeprefix('torch.')}, not bfloat16"
    if model.weight_block_size is None:
        return "the checkpoint is not in FP8"
    for name, size in _SIZES.items():
        if getattr(model, name) != size:
            return f"{name} is {getattr(model, name)}, GLM-5.2's is {size}"
    if (model.num_heads / config.tp_size, model.moe_intermediate_size / config.tp_size) not in _SHARES:
        return f"tp_size is {config.tp_size}, with {model.num_heads} heads and experts of {model.moe_intermediate_size}"
    if config.cp_size > 1:
        return f"cp_size is {config.cp_size}, the kernels take a rank that has all layers"
    if config.dcp_size > 1 and config.exchange is not ExchangeStrategy.PACKED:
        return f"exchange is {config.exchange}"
    if config.page_size != PAGE_SIZE or config.kv_format not in {None, KvFormat.FP8_PACKED}:
        return f"the pools are {config.kv_format} in pages of {config.page_size} tokens, not fp8_packed in {PAGE_SIZE}"
    if config.expert_split is ExpertSplit.EXPERT:
        return "expert_split is expert, the kernels take a slice of each"
    if config.latent_norm_eps not in {None, model.rms_norm_eps}:
        return f"latent_norm_eps is {config.latent_norm_eps}, the kernels have one eps, {model.rms_norm_eps}"
    if config.mtp_index_sharing is MtpIndexSharing.ANCHOR_AND_DRAFTS:
        return f"mtp_index_sharing is {config.mtp_index_sharing}"
    if (config.max_model_len or model.max_position_embeddings) > _MAX_POSITIONS:
        return f"max_model_len is above {_MAX_POSITIONS}"
    return None
