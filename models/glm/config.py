"""The config of a `glm_moe_dsa` checkpoint (GLM-5, 5.1, 5.2, 5.3), with every key judged.

A key of config.json is read into a field, or must have the one value we implement (anything else is refused by name),
or is listed in `ignored_keys` with the reason. Field meanings follow `GlmMoeDsaConfig` of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec.kernels.errors import CheckpointError, ConfigError
from specdec.models.glm.config_keys import (
    MAX_COUNT,
    MAX_POSITIONS,
    MAX_SELECTED,
    ConfigReader,
    UnsupportedConfigError,
    check_model_type,
    read_block_size,
    read_rope_theta,
)
from specdec.models.glm.json_files import read_json_object

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PATTERN_LETTERS = {"F": "full", "S": "shared"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GlmConfig:
    """Everything the model, the loader and the engine read from config.json.

    Attributes:
        mlp_layer_types: "dense" or "sparse" for each of the `num_layers` layers; the MTP layer is always sparse.
        indexer_types: "full" or "shared" for each layer. A shared layer owns no indexer and takes the selection of the
            last full layer before it; the MTP layer always owns one.
        index_share_for_mtp: Draft steps 2 and on reuse the index selection of step 1.
        num_mtp_layers: MTP layers that config.json declares, 0 or 1; the file may still leave it out.
        weight_block_size: Rows and columns that share one FP8 scale; None for an unquantised checkpoint.
        dtype: The dtype of unquantised weights on disk.
        ignored_keys: Keys of config.json that were not used, with the reason.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    mlp_layer_types: tuple[str, ...]
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    num_expert_groups: int
    topk_groups: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    index_topk: int
    index_num_heads: int
    index_head_dim: int
    indexer_types: tuple[str, ...]
    index_share_for_mtp: bool
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    num_mtp_layers: int
    weight_block_size: tuple[int, int] | None
    dtype: torch.dtype
    ignored_keys: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: the plain part and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which are stored as one MLP."""
        return self.moe_intermediate_size * self.num_shared_experts

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that own an indexer and index keys, the MTP layer not among them."""
        return tuple(layer for layer, kind in enumerate(self.indexer_types) if kind == "full")

    def __post_init__(self) -> None:
        _check_schedule("mlp_layer_types", self.mlp_layer_types, self.num_layers, ("dense", "sparse"))
        _check_schedule("indexer_types", self.indexer_types, self.num_layers, ("full", "shared"))
        if self.indexer_types[0] != "full":
            raise ConfigError(
                "indexer_types[0] must be 'full': a shared layer takes the selection of a layer before it"
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim must be even to rotate pairs, got {self.qk_rope_head_dim}")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ConfigError(
                "index_head_dim must be at least qk_rope_head_dim, whose components are rotated, "
                f"got {self.index_head_dim} and {self.qk_rope_head_dim}"
            )
        if self.num_experts % self.num_expert_groups:
            raise ConfigError(
                f"n_group must divide n_routed_experts, got {self.num_expert_groups} and {self.num_experts}"
            )
        group_size = self.num_experts // self.num_expert_groups
        if self.num_expert_groups > 1 and group_size < 2:
            raise ConfigError(f"a group of experts is ranked by its two best, got groups of {group_size}")
        if self.topk_groups > self.num_expert_groups:
            raise ConfigError(f"topk_group must be at most n_group, got {self.topk_groups} of {self.num_expert_groups}")
        if self.num_experts_per_token > self.topk_groups * group_size:
            raise ConfigError(
                f"num_experts_per_tok is {self.num_experts_per_token}, but the {self.topk_groups} chosen groups hold "
                f"only {self.topk_groups * group_size} experts"
            )
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(f"eos_token_id {token_id} is outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_file(cls, path: str | Path) -> "GlmConfig":
        """Read a config.json.

        Raises:
            ConfigError: It asks for what is not implemented.
            CheckpointError: The file cannot be read, or a value in it is missing, malformed or impossible.
        """
        values = read_json_object(Path(path))
        try:
            return cls.from_dict(values)
        except UnsupportedConfigError as error:
            raise UnsupportedConfigError(f"{path}: {error}") from error
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GlmConfig":
        """Read the keys of a config.json.

        Raises:
            ConfigError: Another model type, a missing or malformed value, or a value that changes the arithmetic in a
                way that is not implemented. The message names the key and the value.
        """
        check_model_type(values)
        reader = ConfigReader(values)
        num_layers = reader.positive_int("num_hidden_layers", maximum=MAX_COUNT)
        num_experts = reader.positive_int("n_routed_experts", maximum=MAX_COUNT)
        nope, rope = reader.positive_int("qk_nope_head_dim"), reader.positive_int("qk_rope_head_dim")
        reader.same_value("num_experts", num_experts, "n_routed_experts")
        reader.same_value("num_local_experts", num_experts, "n_routed_experts")
        reader.same_value("qk_head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
        num_mtp_layers = reader.non_negative_int("num_nextn_predict_layers", 0)
        if num_mtp_layers > 1:
            raise UnsupportedConfigError(
                f"num_nextn_predict_layers = {num_mtp_layers} is not supported: one MTP layer, run several times, is"
            )
        config_values: dict[str, Any] = {
            "hidden_size": reader.positive_int("hidden_size"),
            "num_layers": num_layers,
            "num_heads": reader.positive_int("num_attention_heads", maximum=MAX_COUNT),
            "q_lora_rank": reader.positive_int("q_lora_rank"),
            "kv_lora_rank": reader.positive_int("kv_lora_rank"),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": reader.positive_int("v_head_dim"),
            "intermediate_size": reader.positive_int("intermediate_size"),
            "mlp_layer_types": _mlp_layer_types(reader, num_layers),
            "num_experts": num_experts,
            "num_experts_per_token": reader.positive_int("num_experts_per_tok"),
            "num_shared_experts": reader.positive_int("n_shared_experts", maximum=MAX_COUNT),
            "moe_intermediate_size": reader.positive_int("moe_intermediate_size"),
            "num_expert_groups": reader.positive_int("n_group", 1),
            "topk_groups": reader.positive_int("topk_group", 1),
            "norm_topk_prob": reader.boolean("norm_topk_prob", default=True),
            "routed_scaling_factor": reader.positive_float("routed_scaling_factor"),
            "index_topk": reader.positive_int("index_topk", maximum=MAX_SELECTED),
            "index_num_heads": reader.positive_int("index_n_heads", maximum=MAX_COUNT),
            "index_head_dim": reader.positive_int("index_head_dim"),
            "indexer_types": _indexer_types(reader, num_layers),
            "index_share_for_mtp": reader.boolean("index_share_for_mtp_iteration", default=False),
            "rope_theta": read_rope_theta(reader),
            # a prompt token and an output token at least
            "max_position_embeddings": reader.positive_int("max_position_embeddings", minimum=2, maximum=MAX_POSITIONS),
            "rms_norm_eps": reader.positive_float("rms_norm_eps"),
            "vocab_size": reader.positive_int("vocab_size"),
            "eos_token_ids": _eos_token_ids(reader),
            "pad_token_id": None if reader.get("pad_token_id") is None else reader.non_negative_int("pad_token_id", 0),
            "num_mtp_layers": num_mtp_layers,
            "weight_block_size": read_block_size(reader),
            "dtype": _dtype(reader),
        }
        return cls(**config_values, ignored_keys=reader.ignored_keys())


def _check_schedule(key: str, schedule: tuple[str, ...], num_layers: int, allowed: tuple[str, str]) -> None:
    if len(schedule) != num_layers:
        raise ConfigError(f"{key} must have one entry per layer, got {len(schedule)} for {num_layers} layers")
    for layer, kind in enumerate(schedule):
        if kind not in allowed:
            raise ConfigError(f"{key}[{layer}] must be one of {allowed}, got {kind!r}")


def _mlp_layer_types(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """The list decides where there is one; `first_k_dense_replace` counts the dense layers otherwise."""
    listed = reader.get("mlp_layer_types")
    if listed is not None:
        reader.ignore("first_k_dense_replace", "mlp_layer_types lists the layers")
        return _strings("mlp_layer_types", listed)
    num_dense = min(reader.non_negative_int("first_k_dense_replace"), num_layers)
    return ("dense",) * num_dense + ("sparse",) * (num_layers - num_dense)


def _indexer_types(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """The list decides, then the pattern, then the schedule; without any of them every layer is full.

    The stored weights follow `indexer_types` even where a schedule was forced upon the config later, so the list comes
    first (transformers and SGLang agree; vLLM reads the schedule only).
    """
    listed, pattern = reader.get("indexer_types"), reader.get("index_topk_pattern")
    if listed is not None:
        for key in ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"):
            reader.ignore(key, "indexer_types lists the layers")
        return _strings("indexer_types", listed)
    if pattern is not None:
        for key in ("index_topk_freq", "index_skip_topk_offset"):
            reader.ignore(key, "index_topk_pattern lists the layers")
        if isinstance(pattern, str):
            if set(pattern) - set(_PATTERN_LETTERS):
                raise ConfigError(f"index_topk_pattern must be made of the letters F and S, got {pattern!r}")
            return tuple(_PATTERN_LETTERS[letter] for letter in pattern)
        return _strings("index_topk_pattern", pattern)
    freq = reader.positive_int("index_topk_freq", 1)
    offset = reader.non_negative_int("index_skip_topk_offset", 2)
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers))


def _strings(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{key} must be a list of strings, got {value!r}")
    return tuple(value)


def _eos_token_ids(reader: ConfigReader) -> tuple[int, ...]:
    value = reader.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ConfigError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _dtype(reader: ConfigReader) -> torch.dtype:
    old_name = reader.get("torch_dtype")
    name = reader.get("dtype") or old_name or "bfloat16"
    if not isinstance(name, str) or name not in _DTYPES:
        raise UnsupportedConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]
