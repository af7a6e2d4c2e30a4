"""Which keys of a config.json must have the one value we implement, and which are harmless.

A key that could change what the model computes is never skipped in silence: a fixed key with another value is refused
with the key, the value and the value that works. Keys nobody here has heard of are reported as unknown.
"""

from collections.abc import Mapping
from typing import Any

import torch

from specdec.kernels.errors import ConfigError

MODEL_TYPE = "glm_moe_dsa"
ARCHITECTURE = "GlmMoeDsaForCausalLM"
FP8_BLOCK_SIZE = (128, 128)

# Bounds far beyond every model: a larger value is a damaged file, and must not become an allocation.
MAX_COUNT = 1 << 12  # layers, heads, experts
MAX_SIZE = 1 << 24  # widths, the vocabulary
MAX_SELECTED = 1 << 16  # slots that the indexer chooses
MAX_POSITIONS = 1 << 30

_REQUIRED = object()  # the default of a key that has none

# Key -> the one value that means what the code does; None stands for a key that must be absent or null.
_FIXED_KEYS: dict[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_router_dtype": "float32",
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "use_qk_norm": False,
    "swiglu_limit": None,
    "logit_scale": 1.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "compression_config": None,
    "text_config": None,
    "vision_config": None,
}

_FLOAT32 = torch.finfo(torch.float32)

_OF_TRANSFORMERS = "a setting of the transformers library"
_OF_TRAINING = "used in training only"
_HARMLESS_KEYS: dict[str, str] = {
    "head_dim": "means nothing under latent attention: qk_nope_head_dim and qk_rope_head_dim give the widths",
    "num_key_value_heads": "means nothing under latent attention: every head reads the same latent",
    "bos_token_id": "the chat template writes the opening tokens",
    "ep_size": "expert parallelism is chosen at run time",
    "pretraining_tp": "tensor parallelism is chosen at run time",
    "attention_dropout": _OF_TRAINING,
    "initializer_range": _OF_TRAINING,
    "output_router_logits": _OF_TRAINING,
    "router_aux_loss_coef": _OF_TRAINING,
    "aux_loss_alpha": _OF_TRAINING,
    "seq_aux": _OF_TRAINING,
    "index_topk_pattern": "empty",
    "use_cache": _OF_TRANSFORMERS,
    "transformers_version": _OF_TRANSFORMERS,
    "auto_map": _OF_TRANSFORMERS,
    "_name_or_path": _OF_TRANSFORMERS,
    "chunk_size_feed_forward": _OF_TRANSFORMERS,
    "id2label": _OF_TRANSFORMERS,
    "label2id": _OF_TRANSFORMERS,
    "is_encoder_decoder": _OF_TRANSFORMERS,
    "output_attentions": _OF_TRANSFORMERS,
    "output_hidden_states": _OF_TRANSFORMERS,
    "problem_type": _OF_TRANSFORMERS,
    "return_dict": _OF_TRANSFORMERS,
}

_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")  # one thing under its new and its old name

_HARMLESS_QUANTIZATION_KEYS = {
    "modules_to_not_convert": "the dtype and the scale of each tensor decide, the list names modules that do not exist",
    "ignored_layers": "the dtype and the scale of each tensor decide",
    "scale_fmt": "the stored float32 scales are used as they are",
    "dequantize": "weights are always dequantised on loading",
}


class UnsupportedConfigError(ConfigError):
    """A config is sound, and asks for what is not implemented; any other fault is a damaged config."""


class ConfigReader:
    """Reads keys of a config.json with their type checked, and remembers which ones were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = {"model_type", "architectures"}
        self._ignored: dict[str, str] = {}
        self._check_fixed_keys()

    def get(self, key: str) -> Any:
        """The value of a key as it stands, or None."""
        self._read.add(key)
        return self._values.get(key)

    def positive_int(self, key: str, default: object = _REQUIRED, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """An integer of at least 1, or another smallest one."""
        return self._int(key, default, minimum, maximum)

    def non_negative_int(self, key: str, default: object = _REQUIRED) -> int:
        """An integer of at least 0."""
        return self._int(key, default, 0, MAX_SIZE)

    def positive_float(self, key: str) -> float:
        """A number above 0."""
        return positive_number(key, self._value(key, _REQUIRED))

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false, nothing that merely acts like it."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{key} must be true or false, got {value!r}")
        return value

    def same_value(self, key: str, value: int, source: str) -> None:
        """Refuse a key that repeats a value read elsewhere and says something else."""
        found = self.get(key)
        if found is not None and found != value:
            raise ConfigError(f"{key} = {found!r} contradicts {source} = {value}")

    def ignore(self, key: str, reason: str) -> None:
        """List a key, where present, as ignored for `reason`."""
        if key in self._values:
            self._ignored[key] = reason

    def ignore_nested(self, parent: str, reasons: Mapping[str, str]) -> None:
        """List keys of the object under `parent` as ignored, each with its reason."""
        self._ignored |= {f"{parent}.{key}": reason for key, reason in reasons.items()}

    def ignored_keys(self) -> dict[str, str]:
        """Every key that was not read, with its reason."""
        for key in self._values:
            if key not in self._read and key not in self._ignored:
                self._ignored[key] = _HARMLESS_KEYS.get(key, "unknown key")
        return dict(sorted(self._ignored.items()))

    def _value(self, key: str, default: object) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"{key} is missing from the config; a {MODEL_TYPE} checkpoint needs it")
        return default

    def _int(self, key: str, default: object, minimum: int, maximum: int) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise ConfigError(f"{key} must be an integer in {minimum}..{maximum}, got {value!r}")
        return value

    def _check_fixed_keys(self) -> None:
        for key, implemented in _FIXED_KEYS.items():
            value = self.get(key)
            if value is not None and value != implemented:
                raise UnsupportedConfigError(f"{key} = {value!r} is not supported; only {implemented!r} is implemented")
        layer_types = self.get("layer_types") or []
        if not isinstance(layer_types, list | tuple):
            raise ConfigError(f"layer_types must be a list of strings, got {layer_types!r}")
        for layer, kind in enumerate(layer_types):
            if kind not in _LAYER_TYPES:
                raise UnsupportedConfigError(
                    f"layer_types[{layer}] = {kind!r} is not supported; only {_LAYER_TYPES[0]!r} is"
                )


def check_model_type(values: Mapping[str, Any]) -> None:
    """Refuse every architecture but `glm_moe_dsa`, by name."""
    model_type = values.get("model_type")
    if model_type != MODEL_TYPE:
        hint = ""
        if model_type == "glm5_next":
            hint = (
                " (GLM-5.3-Flash is another architecture: linear attention, pooled index keys, four residual streams)"
            )
        raise UnsupportedConfigError(
            f"model_type {model_type!r} is not supported{hint}; specdec runs {MODEL_TYPE!r}: GLM-5, 5.1, 5.2 and 5.3"
        )
    architectures = values.get("architectures")
    if architectures and (not isinstance(architectures, list | tuple) or ARCHITECTURE not in architectures):
        raise UnsupportedConfigError(f"architectures {architectures!r} is not supported; it must name {ARCHITECTURE!r}")


def positive_number(key: str, value: object) -> float:
    """A number above 0 as a float, or a `ConfigError` that names the key."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"{key} must be a number above 0, got {value!r}")
    if not _FLOAT32.tiny <= value <= _FLOAT32.max:
        raise ConfigError(f"{key} must be a finite number that float32 can hold, got {value!r}")
    return float(value)


def read_rope_theta(reader: ConfigReader) -> float:
    """The base of the rotation angles, which stands in `rope_parameters`; any scaling of positions is refused.

    Older exports keep `rope_theta` at the top level. There is no default: a wrong base looks right on short prompts.
    """
    nested, flat = reader.get("rope_parameters"), reader.get("rope_theta")
    if nested is None:
        if flat is None:
            raise ConfigError("rope_parameters is missing from the config; it must hold rope_theta")
        return positive_number("rope_theta", flat)
    if not isinstance(nested, dict):
        raise ConfigError(f"rope_parameters must be an object, got {nested!r}")
    for key, value in nested.items():
        plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
        if key != "rope_theta" and value is not None and value != plain.get(key):
            raise UnsupportedConfigError(
                f"rope_parameters.{key} = {value!r} is not supported; only the plain rotation (rope_type 'default') is"
            )
    theta = positive_number("rope_parameters.rope_theta", nested.get("rope_theta"))
    if flat is not None and flat != theta:
        raise ConfigError(f"rope_theta = {flat!r} contradicts rope_parameters.rope_theta = {theta}")
    return theta


def read_block_size(reader: ConfigReader) -> tuple[int, int] | None:
    """The FP8 block of a `quantization_config`, or None without one; every other method is refused by name."""
    quantization = reader.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise ConfigError(f"quantization_config must be an object, got {quantization!r}")
    required: dict[str, tuple[object, ...]] = {
        "quant_method": ("fp8",),
        "quant_algo": (None,),
        "fmt": ("e4m3", None),
        "activation_scheme": ("dynamic", None),
        "weight_block_size": (list(FP8_BLOCK_SIZE),),
    }
    for key, allowed in required.items():
        value = quantization.get(key)
        if value not in allowed:
            algorithm = quantization.get("quant_algo")
            detail = f" (quant_algo {algorithm!r})" if key == "quant_method" and algorithm else ""
            raise UnsupportedConfigError(
                f"quantization_config.{key} = {value!r}{detail} is not supported; weights must be bf16, or block-FP8: "
                "quant_method 'fp8', fmt 'e4m3', weight_block_size [128, 128], activation_scheme 'dynamic'"
            )
    others = [key for key in quantization if key not in required]
    reader.ignore_nested(
        "quantization_config", {key: _HARMLESS_QUANTIZATION_KEYS.get(key, "unknown key") for key in others}
    )
    return FP8_BLOCK_SIZE
