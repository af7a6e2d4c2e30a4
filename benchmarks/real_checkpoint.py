"""Write a block-FP8 checkpoint of random weights with GLM-5.2's real dimensions, as deep as one disk holds.

    value[r, c] = e4m3[r, c] * scale_inv[r // 128, c // 128],   of variance 1 / C over random codes

The config is the released one of GLM-5.2-FP8 with the first layers of its schedules: four are three dense and a sparse
one, the first three with an indexer and the last without; the MTP layer stands behind them, 24.9 GB in all. Names,
shapes and dtypes are those of the config's manifest, so every one is where the release has it.

C = columns of a matrix. A product with a normed row has variance one, and activations stay within a few units. What
layers add to the residual stream is scaled down, and the MTP layer's first projection passes the embedding on: the next
token depends mostly on the last one, which both see alike, so that drafts are often right.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.models.glm.checkpoint import CONFIG_NAME
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.manifest import SCALE_SUFFIX, TensorSpec, derive_manifest
from specdec.models.glm.released import locate_model
from specdec.models.glm.safetensors_files import INDEX_NAME

RELEASE = "glm-5.2-fp8"
SMALL: Mapping[str, Any] = {  # eight ranks cut it between blocks of scales; kv_a keeps its 576 rows
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "vocab_size": 512,
    "eos_token_id": [500],
    "pad_token_id": 500,
}

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
_CHUNK_BYTES = 64 << 20  # that host memory holds of a tensor
_E4M3_RMS = 104.0  # of random even e4m3 codes
_ROUTER_BIAS = 8.0  # a common offset far above the spread, as in the releases
_HEAD_GAIN = 3.0  # standard deviation of the logits
_BRANCH_GAIN = 0.1


def checkpoint_config(num_layers: int = 4, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The released config.json, cut to its first layers.

    Args:
        num_layers: Layers in front of the MTP layer.
        changes: Keys laid over it, such as `SMALL`.
    """
    values: dict[str, Any] = json.loads(locate_model(RELEASE).config_path.read_text())
    for schedule in ("mlp_layer_types", "indexer_types"):
        values[schedule] = values[schedule][:num_layers]
    return values | {"num_hidden_layers": num_layers} | dict(changes or {})


def write_checkpoint(
    directory: Path,
    *,
    num_layers: int = 4,
    device: torch.device | str,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    shard_bytes: int = 4 << 30,
) -> int:
    """Write config.json, numbered shards and their index; returns the bytes of all tensors.

    Args:
        directory: Made where it is missing; files of the same names are replaced.
        num_layers: As for `checkpoint_config`.
        device: Where tensors are drawn, one at a time; the same seed gives other values on another kind of device.
        seed: Of all values.
        changes: As for `checkpoint_config`.
        shard_bytes: A shard ends with the tensor that reaches it.
    """
    values = checkpoint_config(num_layers, changes)
    tensors = derive_manifest(GlmConfig.from_dict(values)).tensors
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n")
    shards = _shards(tensors.values(), shard_bytes)
    make = _RandomTensors(tensors, torch.device(device), torch.Generator(device).manual_seed(seed))
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(directory / name, specs, make)
        weight_map |= {spec.name: name for spec in specs}
    total_size = sum(spec.size_bytes for spec in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return total_size


def _shards(specs: Iterable[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Tensors of one file after the other, wide dtypes first: none then lies off its alignment."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if size >= shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.size_bytes
    return [sorted(shard, key=lambda spec: -spec.dtype.itemsize) for shard in shards]


def _write_shard(path: Path, specs: list[TensorSpec], make: "_RandomTensors") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.size_bytes
        header[spec.name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    staging = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=make.device.type == "cuda")
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for spec in specs:
            for chunk in make(spec).view(-1).view(torch.uint8).split(_CHUNK_BYTES):
                file.write(staging[: len(chunk)].copy_(chunk).numpy().data)


@dataclass(frozen=True)
class _RandomTensors:
    """Draws tensors one after the other."""

    tensors: Mapping[str, TensorSpec]
    device: torch.device
    generator: torch.Generator

    def __call__(self, spec: TensorSpec) -> torch.Tensor:
        if spec.is_scale:
            num_cols = self.tensors[spec.name.removesuffix(SCALE_SUFFIX)].shape[1]
            gain = _BRANCH_GAIN if "o_proj." in spec.name or "down_proj." in spec.name else 1.0
            values = torch.empty(spec.shape, device=self.device)
            return values.uniform_(0.5, 1.5, generator=self.generator).mul_(gain / (_E4M3_RMS * num_cols**0.5))
        if spec.is_quantised:
            return self._even_codes(spec)
        if len(spec.shape) == 1:
            return self._normal(spec, *_vector_moments(spec.name))
        if "eh_proj." in spec.name:
            values = self._normal(spec, 0.0, _BRANCH_GAIN * spec.shape[1] ** -0.5)
            values.diagonal().add_(1)  # of the embedding's half
            return values
        gain = _HEAD_GAIN if spec.name.startswith("lm_head.") else 1.0
        spread = 1.0 if "embed_tokens." in spec.name else gain * spec.shape[1] ** -0.5
        return self._normal(spec, 0.0, spread)

    def _even_codes(self, spec: TensorSpec) -> torch.Tensor:
        """Random bytes whose last bit is zero: all finite, for NaN is 0x7F and 0xFF."""
        values = torch.empty(spec.shape, dtype=torch.uint8, device=self.device)
        words = values.view(-1).view(torch.int64)
        words.random_(-(1 << 63), None, generator=self.generator).bitwise_and_(-0x0101010101010102)
        return values.view(spec.dtype)

    def _normal(self, spec: TensorSpec, mean: float, spread: float) -> torch.Tensor:
        values = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        return values.normal_(mean, spread, generator=self.generator)


def _vector_moments(name: str) -> tuple[float, float]:
    """Mean and standard deviation of a vector's values."""
    if name.endswith("e_score_correction_bias"):
        return _ROUTER_BIAS, 0.1
    return (0.0, 0.1) if name.endswith(".bias") else (1.0, 0.1)
