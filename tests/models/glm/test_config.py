import json
from typing import Any

import pytest

from specdec.kernels.errors import CheckpointError, ConfigError
from specdec.models.glm.config import GlmConfig
from tests.support.tiny_checkpoint import tiny_config, tiny_spec


def config_with(**changes: Any) -> GlmConfig:
    """The config of preset `share` with keys changed; None removes a key."""
    return GlmConfig.from_dict(tiny_config(tiny_spec("share", config_changes=changes)))


def test_fields_follow_the_config() -> None:
    config = config_with()
    assert config.indexer_types == ("full", "shared", "full", "shared")
    assert config.full_layers == (0, 2)
    assert config.mlp_layer_types == ("dense", "sparse", "sparse", "sparse")
    assert config.qk_head_dim == 32
    assert config.rope_theta == 10000.0
    assert config.eos_token_ids == (476, 483, 485)
    assert config.num_mtp_layers == 1
    assert config.index_share_for_mtp
    assert config.weight_block_size is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_router_dtype", "bfloat16"),
        ("moe_layer_freq", 2),
        ("tie_word_embeddings", True),
        ("rope_interleave", False),
        ("indexer_rope_interleave", False),
        ("rope_scaling", {"type": "yarn", "factor": 40}),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 4096),
        ("use_qk_norm", True),
        ("swiglu_limit", 10.0),
        ("text_config", {}),
        ("num_nextn_predict_layers", 2),
        ("layer_types", ["linear_attention"] * 4),
        ("num_experts", 16),
        ("qk_head_dim", 33),
    ],
)
def test_a_value_that_changes_the_arithmetic_is_refused_by_name_and_value(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        config_with(**{key: value})
    assert key in str(error.value)
    assert repr(value[0] if isinstance(value, list) else value) in str(error.value)


@pytest.mark.parametrize(
    ("rope_parameters", "message"),
    [
        ({"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}, "rope_parameters.rope_type = 'yarn'"),
        ({"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_type": "default"}, "rope_parameters.rope_theta must be a number above 0, got None"),
        ({"rope_theta": "8e6"}, "rope_parameters.rope_theta must be a number above 0, got '8e6'"),
        ([1e4], "rope_parameters must be an object"),
    ],
)
def test_scaled_or_missing_rotation_is_refused(rope_parameters: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        config_with(rope_parameters=rope_parameters)


def test_the_rotation_base_has_no_default() -> None:
    with pytest.raises(ConfigError, match="rope_parameters is missing"):
        config_with(rope_parameters=None)


def test_older_exports_keep_the_rotation_base_at_the_top_level() -> None:
    assert config_with(rope_parameters=None, rope_theta=1000000).rope_theta == 1e6
    with pytest.raises(ConfigError, match="rope_theta = 5 contradicts"):
        config_with(rope_theta=5)


@pytest.mark.parametrize("model_type", ["glm5_next", "deepseek_v3", "glm4_moe", None])
def test_other_model_types_are_refused_by_name(model_type: str | None) -> None:
    with pytest.raises(ConfigError, match=f"model_type {model_type!r} is not supported"):
        config_with(model_type=model_type)


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="GlmMoeDsaForSequenceClassification"):
        config_with(architectures=["GlmMoeDsaForSequenceClassification"])


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, ["modelopt", "NVFP4"]),
        ({"quant_algo": "NVFP4", "group_size": 16}, ["NVFP4"]),
        ({"quant_method": "gptq", "bits": 4}, ["gptq"]),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, ["weight_block_size", "[64, 64]"]),
        ({"quant_method": "fp8"}, ["weight_block_size", "None"]),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, ["fmt", "e5m2"]),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}, ["static"]),
        ("fp8", ["quantization_config must be an object"]),
    ],
)
def test_other_quantisation_is_refused_by_name(quantization: Any, named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config_with(quantization_config=quantization)
    for name in named:
        assert name in str(error.value)


def test_block_fp8_is_accepted_and_its_module_list_ignored() -> None:
    config = GlmConfig.from_dict(tiny_config(tiny_spec("share", weights="fp8")))
    assert config.weight_block_size == (128, 128)
    assert "modules that do not exist" in config.ignored_keys["quantization_config.modules_to_not_convert"]


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "q_lora_rank", "n_routed_experts", "index_topk", "rms_norm_eps", "vocab_size"],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is missing from the config"):
        config_with(**{key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "144"),
        ("hidden_size", True),
        ("num_hidden_layers", 2.0),
        ("rms_norm_eps", 0),
        ("routed_scaling_factor", "2.5"),
        ("norm_topk_prob", 1),
        ("pad_token_id", -1),
        ("eos_token_id", [1, "2"]),
        ("eos_token_id", 512),
        ("dtype", "int8"),
        ("n_shared_experts", 0),
        ("hidden_size", -144),
        ("vocab_size", 1 << 40),
        ("num_hidden_layers", 10**12),
        ("n_routed_experts", 10**9),
        ("index_topk", 10**12),
        ("max_position_embeddings", 1),
        ("max_position_embeddings", 10**12),
        ("max_position_embeddings", 2**64),
        ("routed_scaling_factor", float("inf")),
        ("routed_scaling_factor", float("nan")),
        ("routed_scaling_factor", 10**400),
        ("rms_norm_eps", 1e-60),
        ("layer_types", 3),
        ("dtype", ["float32"]),
    ],
)
def test_a_malformed_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        config_with(**{key: value})
    assert key in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 7, "qk_head_dim": 31}, "qk_rope_head_dim must be even"),
        ({"index_head_dim": 4}, "index_head_dim must be at least qk_rope_head_dim"),
        ({"n_group": 3}, "n_group must divide n_routed_experts"),
        ({"n_group": 8, "topk_group": 2}, "ranked by its two best"),
        ({"n_group": 2, "topk_group": 3}, "topk_group must be at most n_group"),
        ({"num_experts_per_tok": 9}, "hold only 8 experts"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, r"indexer_types\[0\] must be 'full'"),
        ({"indexer_types": ["full"] * 5}, "got 5 for 4 layers"),
        ({"indexer_types": ["full", "full", "none", "full"]}, r"indexer_types\[2\] must be one of"),
        ({"mlp_layer_types": ["dense"]}, "got 1 for 4 layers"),
        ({"indexer_types": None, "index_topk_pattern": "FSXS"}, "letters F and S"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_with(**changes)


def test_ignored_keys_carry_a_reason_and_unknown_keys_are_called_unknown() -> None:
    ignored = config_with(banana=1, bos_token_id=0).ignored_keys
    assert ignored["banana"] == "unknown key"
    for key in ("head_dim", "num_key_value_heads", "ep_size", "pretraining_tp", "attention_dropout", "bos_token_id"):
        assert ignored[key] != "unknown key"
    assert "hidden_size" not in ignored


def test_without_a_schedule_every_layer_is_full() -> None:
    assert config_with(indexer_types=None).indexer_types == ("full",) * 4


def test_schedule_by_frequency_and_offset() -> None:
    changes = {"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 3, "num_hidden_layers": 12}
    full = config_with(**changes).full_layers
    assert full == (0, 1, 2, 6, 10)


def test_a_pattern_overrides_the_frequency_and_a_list_overrides_both() -> None:
    pattern = {"index_topk_pattern": "FFSS", "index_topk_freq": 4}
    config = config_with(indexer_types=None, **pattern)
    assert config.indexer_types == ("full", "full", "shared", "shared")
    assert config.ignored_keys["index_topk_freq"] == "index_topk_pattern lists the layers"
    config = config_with(**pattern)
    assert config.indexer_types == ("full", "shared", "full", "shared")
    assert config.ignored_keys["index_topk_pattern"] == "indexer_types lists the layers"


def test_the_mlp_list_overrides_the_number_of_dense_layers() -> None:
    config = config_with(mlp_layer_types=["sparse", "dense", "sparse", "sparse"])
    assert config.mlp_layer_types == ("sparse", "dense", "sparse", "sparse")
    assert "first_k_dense_replace" in config.ignored_keys


def test_a_single_end_token_and_none_at_all_are_accepted() -> None:
    assert config_with(eos_token_id=7).eos_token_ids == (7,)
    assert config_with(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a": 1, "a": 2}', "the key 'a' stands in it twice"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Any, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match="cannot be read"):
        GlmConfig.from_file(path)
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message) as error:
        GlmConfig.from_file(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"hidden_size": -1}, CheckpointError),
        ({"rms_norm_eps": None}, CheckpointError),
        ({"num_experts_per_tok": 9}, CheckpointError),
        ({"routed_scaling_factor": float("inf")}, CheckpointError),
        ({"model_type": "llama"}, ConfigError),
        ({"architectures": 3}, ConfigError),
        ({"scoring_func": "softmax"}, ConfigError),
        ({"quantization_config": {"quant_method": "gptq"}}, ConfigError),
    ],
)
def test_a_file_is_damaged_or_asks_for_what_is_not_implemented(
    tmp_path: Any, changes: dict[str, Any], kind: type[Exception]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config(tiny_spec("share", config_changes=changes))))
    with pytest.raises(kind, match=next(iter(changes))) as error:
        GlmConfig.from_file(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_config_saved_by_transformers_is_read(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    values = tiny_config(tiny_spec("groups"))
    transformers.GlmMoeDsaConfig(**values).save_pretrained(tmp_path)
    assert GlmConfig.from_file(tmp_path / "config.json") == GlmConfig.from_dict(values)
