"""Which stored tensors a config needs, whether they are what it says, and what to do with the others.

Nothing is read here but headers, so a checkpoint that cannot be loaded is refused before any work.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from specdec.kernels.block_fp8 import BLOCK_SIZE
from specdec.kernels.errors import CheckpointError
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.manifest import SCALE_SUFFIX, Component, TensorSpec, derive_manifest, layer_prefix
from specdec.models.glm.safetensors_files import CheckpointFiles, StoredTensor

_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SCALE_SUFFIXES = (SCALE_SUFFIX, "_scale_2", "_scale")
_BIAS_SUFFIX = ".e_score_correction_bias"


@dataclass(frozen=True)
class MatchedTensors:
    """The verdict on every stored tensor.

    Attributes:
        weights: Tensors to read, by name.
        scales: Scale tensor of each FP8 weight, by the weight's name.
        ignored: Every other stored tensor, with the reason.
        has_mtp: The MTP layer is stored, and complete.
        warnings: What a user should know though it does not stop the loading.
    """

    weights: dict[str, StoredTensor]
    scales: dict[str, StoredTensor]
    ignored: dict[str, str]
    has_mtp: bool
    warnings: tuple[str, ...]


def match_tensors(config: GlmConfig, files: CheckpointFiles) -> MatchedTensors:
    """Check the stored tensors against the config.

    Raises:
        CheckpointError: A tensor is missing, has another shape or dtype, lacks its scale, or is unknown. The message
            names the file and the tensor.
    """
    stored = files.tensors
    full = derive_manifest(config, with_mtp=config.num_mtp_layers > 0).tensors
    has_mtp = any(spec.component is Component.MTP and name in stored for name, spec in full.items())
    needed = [spec for spec in full.values() if not spec.is_scale and (has_mtp or spec.component is not Component.MTP)]
    missing = [spec.name for spec in needed if spec.name not in stored]
    if missing:
        raise CheckpointError(_missing_message(config, files, missing))
    weights = {spec.name: stored[spec.name] for spec in needed}
    scales: dict[str, StoredTensor] = {}
    for spec in needed:
        _check_weight(spec, weights[spec.name], config)
        if weights[spec.name].dtype is torch.float8_e4m3fn:
            scales[spec.name] = _scale_of(weights[spec.name], stored)
    used = weights.keys() | {scale.name for scale in scales.values()}
    ignored = {name: _reason_to_ignore(config, tensor, weights) for name, tensor in stored.items() if name not in used}
    return MatchedTensors(weights, scales, ignored, has_mtp, _warnings(config, weights, has_mtp=has_mtp))


def _missing_message(config: GlmConfig, files: CheckpointFiles, missing: list[str]) -> str:
    name = missing[0]
    others = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
    message = f"{files.directory}: no file holds {name}{others}, which config.json calls for"
    match = _LAYER.fullmatch(name)
    if match is None:
        return message
    layer, rest = int(match[1]), match[2]
    fused = files.tensors.get(f"{layer_prefix(layer)}mlp.experts.gate_up_proj")
    if fused is not None:
        return (
            f"{fused.file}: {fused.name} holds all experts of the layer in one tensor; store one matrix per expert, as "
            "`save_pretrained` of transformers does"
        )
    if layer == config.num_layers:
        return f"{message}; the MTP layer is stored in part: add the tensor, or remove all of layer {layer}"
    if rest.startswith("self_attn.indexer."):
        return f"{message}; layer {layer} is 'full' in indexer_types and must own an indexer"
    return message


def _check_weight(spec: TensorSpec, tensor: StoredTensor, config: GlmConfig) -> None:
    if tensor.shape != spec.shape:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has the shape {list(tensor.shape)}, config.json makes it {list(spec.shape)}"
        )
    if tensor.dtype is torch.float8_e4m3fn and len(tensor.shape) == 2:
        if config.weight_block_size is None:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} is FP8, but config.json has no quantization_config that says how it is "
                "scaled"
            )
    elif tensor.dtype not in _PLAIN_DTYPES:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has the dtype {_dtype_name(tensor.dtype)}; weights are float32, bfloat16 or "
            "float16, and matrices may be float8_e4m3fn with a scale"
        )


def _scale_of(weight: StoredTensor, stored: Mapping[str, StoredTensor]) -> StoredTensor:
    name = weight.name + SCALE_SUFFIX
    scale = stored.get(name)
    if scale is None:
        raise CheckpointError(f"{weight.file}: {weight.name} is FP8 and its scale {name} is in no file")
    expected = tuple(-(-size // BLOCK_SIZE) for size in weight.shape)
    if scale.shape != expected:
        raise CheckpointError(
            f"{scale.file}: {name} has the shape {list(scale.shape)}, must be {list(expected)}: one scale for each "
            f"block of {BLOCK_SIZE} by {BLOCK_SIZE} of {list(weight.shape)}"
        )
    if scale.dtype is not torch.float32:
        raise CheckpointError(f"{scale.file}: {name} has the dtype {_dtype_name(scale.dtype)}, must be float32")
    return scale


def _reason_to_ignore(config: GlmConfig, tensor: StoredTensor, weights: Mapping[str, StoredTensor]) -> str:
    """Why a stored tensor that nothing reads may be there; a tensor without such a reason is an error."""
    name = tensor.name
    if name.endswith("rotary_emb.inv_freq"):
        return "the rotation angles are computed from rope_theta"
    match = _LAYER.fullmatch(name)
    layer, rest = (int(match[1]), match[2]) if match else (-1, "")
    if layer == config.num_layers and rest == "embed_tokens.weight":
        return "the MTP layer uses the target's embedding"
    if layer == config.num_layers and rest == "shared_head.head.weight":
        return "the MTP layer uses the target's head"
    if layer > config.num_layers:
        return f"layer {layer} is beyond the MTP layer, {config.num_layers}"
    if layer == config.num_layers and config.num_mtp_layers == 0:
        return "config.json declares no MTP layer (num_nextn_predict_layers)"
    is_shared = 0 <= layer < config.num_layers and config.indexer_types[layer] == "shared"
    if is_shared and rest.startswith("self_attn.indexer."):
        return "the layer is 'shared' in indexer_types and runs no indexer"
    suffix = next((suffix for suffix in _SCALE_SUFFIXES if name.endswith(suffix)), None)
    if suffix is not None:
        weight = weights.get(name.removesuffix(suffix))
        if weight is None:
            return "the scale of a weight that is not used"
        if weight.dtype is not torch.float8_e4m3fn:
            raise CheckpointError(
                f"{tensor.file}: holds the scale {name}, but {weight.name} is {_dtype_name(weight.dtype)} and needs "
                "none; remove the scale if the weight was dequantised"
            )
    raise CheckpointError(
        f"{tensor.file}: holds {name}, which no part of the model reads; the config belongs to another checkpoint, or "
        "the name is not the one that Hugging Face writes"
    )


def _warnings(config: GlmConfig, weights: Mapping[str, StoredTensor], *, has_mtp: bool) -> tuple[str, ...]:
    warnings = []
    if not has_mtp:
        warnings.append("no MTP layer in this checkpoint: only --num-draft-tokens 0, or another draft source, works")
    rounded = [name for name, w in weights.items() if name.endswith(_BIAS_SUFFIX) and w.dtype is not torch.float32]
    if rounded:
        warnings.append(
            f"{rounded[0]} and {len(rounded) - 1} more router biases are stored as "
            f"{_dtype_name(weights[rounded[0]].dtype)}: the rounding reorders experts, the releases keep float32"
        )
    return tuple(warnings)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
