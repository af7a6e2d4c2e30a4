"""Do two processes compute with the same model? A digest to compare, the same for every number of ranks.

Equal KV needs equal weights, equal numbers in the config, and equal rounding. Of every parameter one row is digested,
or one column where ranks share the columns: what the leading rank holds whatever the tensor-parallel size. Training
moves all of a matrix, so another checkpoint of the same model shows in each of them.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import fields

import torch

from specdec.models.glm.config import GlmConfig
from specdec.models.glm.fp8_parameters import SCALE

# Of the config, what says how a checkpoint is stored, used or ended, and not what is computed.
_NOT_COMPUTED_WITH = frozenset(
    {
        "max_position_embeddings",
        "eos_token_ids",
        "pad_token_id",
        "num_mtp_layers",
        "index_share_for_mtp",
        "weight_block_size",
        "dtype",
        "ignored_keys",
    }
)
_SHARED_BY_COLUMNS = ("o_proj", "down_proj")


def model_fingerprint(
    config: GlmConfig, parameters: Mapping[str, torch.Tensor], *, latent_norm_eps: float | None, of_mtp: bool
) -> str:
    """Digest a loaded model, or its MTP layer.

    Args:
        config: The checkpoint's config.
        parameters: Of the leading rank.
        latent_norm_eps: As in `GlmTarget`.
        of_mtp: The MTP layer; else everything but that layer.

    Returns:
        32 hex digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    for item in fields(config):
        if item.name not in _NOT_COMPUTED_WITH:
            digest.update(f"{item.name}={getattr(config, item.name)!r};".encode())
    digest.update(f"latent_norm_eps={config.rms_norm_eps if latent_norm_eps is None else latent_norm_eps!r};".encode())
    for name in sorted(parameters):
        if name.startswith("mtp.") is of_mtp:
            sample = fingerprint_sample(name, parameters[name], config.hidden_size)
            digest.update(f"{name}:{sample.dtype};".encode())
            digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def fingerprint_sample(name: str, parameter: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """Give the part of a parameter that is digested, 1-D; of a sample the sample itself."""
    if parameter.dim() == 1:
        return parameter
    rows = parameter.reshape(-1, parameter.shape[-1])
    return rows[:hidden_size, 0] if name.removesuffix(SCALE).endswith(_SHARED_BY_COLUMNS) else rows[0]
