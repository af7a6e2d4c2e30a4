"""Tiny GLM-5.x checkpoints with random weights, as Hugging Face would write them.

Every tensor depends on the seed and on its own name only, so two checkpoints that differ in one option (dtype, number
of shards, MTP layer present or not) hold the same values wherever both hold the tensor. Weights are scaled so that
logits have a standard deviation of about 3 and greedy text is not one repeated token; `eh_proj` passes the embedding
on, so that the MTP layer's drafts are right now and then.

The router bias has a large common offset and a spread of a few bf16 steps, as in trained checkpoints: an engine that
rounds it to bf16 picks other experts.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BLOCK = 128  # rows and columns that share one FP8 scale

SPECIAL_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|begin_of_audio|>", "<|end_of_audio|>", "<|begin_of_transcription|>", "<|end_of_transcription|>",
    "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "/nothink", "<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>",
)  # fmt: skip

Weights = Literal["float32", "bfloat16", "fp8", "fp8_twin"]


@dataclass(frozen=True, kw_only=True)
class TinySpec:
    """What one tiny checkpoint looks like; `tiny_spec` makes one from a preset.

    Attributes:
        weights: "fp8" writes block-FP8 as the FP8 releases do; "fp8_twin" writes the values those bytes stand for, as
            float32 without any quantization.
        indexer_types: One of "full", "shared" per layer; None leaves the key out of the config, and all are full.
        num_shards: 1 writes `model.safetensors`; more write numbered shards and an index.
        mtp_copies: The MTP layer carries its own copies of the embedding and the head, as older exports do.
        config_changes: Keys laid over config.json at the end; a value of None removes the key.
    """

    hidden_size: int = 144
    num_layers: int = 4
    num_dense_layers: int = 1
    num_heads: int = 8
    q_lora_rank: int = 48
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 24
    qk_rope_head_dim: int = 8
    v_head_dim: int = 32
    intermediate_size: int = 272
    moe_intermediate_size: int = 136
    num_experts: int = 8
    num_experts_per_token: int = 2
    num_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 2.5
    index_topk: int = 8
    index_num_heads: int = 16
    index_head_dim: int = 16
    indexer_types: tuple[str, ...] | None = None
    rope_theta: float = 10000.0
    max_position_embeddings: int = 256
    rms_norm_eps: float = 1e-5
    vocab_size: int = 512
    weights: Weights = "float32"
    num_shards: int = 1
    mtp: bool = True
    mtp_copies: bool = False
    seed: int = 0
    config_changes: dict[str, Any] = field(default_factory=dict)

    @property
    def first_special_id(self) -> int:
        """Id of <|endoftext|>, the first of the 36 special tokens."""
        return self.vocab_size - len(SPECIAL_TOKENS)

    def special_id(self, token: str) -> int:
        """Id of a special token such as "<|user|>"."""
        return self.first_special_id + SPECIAL_TOKENS.index(token)


PRESETS: dict[str, TinySpec] = {
    "share": TinySpec(indexer_types=("full", "shared", "full", "shared")),
    "all_full": TinySpec(),
    "real_dims": TinySpec(
        num_layers=3,
        num_heads=2,
        q_lora_rank=192,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        index_num_heads=32,
        index_head_dim=128,
        indexer_types=("full", "full", "shared"),
        rope_theta=8e6,
    ),
    "groups": TinySpec(num_layers=3, num_experts=16, num_experts_per_token=4, n_group=4, topk_group=2),
}


def tiny_spec(preset: str = "share", *, long: bool = False, **changes: Any) -> TinySpec:
    """A preset, with fields changed by keyword; `long` sets index_topk to 2048, above every test length."""
    spec = PRESETS[preset]
    if long:
        spec = replace(spec, index_topk=2048)
    return replace(spec, **changes)


def write_tiny_checkpoint(path: str | Path, spec: TinySpec) -> Path:
    """Write config, generation config, tokenizer, chat template and weights into `path`, and return it."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", tiny_config(spec))
    _write_json(path / "generation_config.json", _generation_config(spec))
    _write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    _byte_tokenizer(spec).save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_shards(path, dict(tiny_tensors(spec)), num_shards=spec.num_shards)
    return path


def write_shards(path: Path, tensors: dict[str, torch.Tensor], *, num_shards: int) -> None:
    """Write tensors to one file, or dealt in turn to `num_shards` files with an index (so scales part from weights)."""
    metadata = {"format": "pt"}
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        shard_names = names[shard::num_shards]
        save_file({name: tensors[name] for name in shard_names}, path / file_name, metadata)
        weight_map |= dict.fromkeys(shard_names, file_name)
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(path / "model.safetensors.index.json", index)


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint directory, as stored."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return tensors


def dequantised_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Every weight of a checkpoint directory as float32, FP8 blocks multiplied by their scales."""
    stored = read_tensors(path)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        scale = stored.get(f"{name}_scale_inv")
        weights[name] = tensor.float() if scale is None else _dequantise(tensor, scale)
    return weights


def reference_model(path: str | Path) -> Any:
    """The `GlmMoeDsaForCausalLM` of transformers for a checkpoint, without its MTP layer, float32, eager attention.

    The weights are dequantised here: transformers 5.24 cannot read block-FP8 on a CPU (it derives the block height from
    the row counts).
    """
    import transformers  # noqa: PLC0415 - seconds to import, and few tests need it

    path = Path(path)
    values = json.loads((path / "config.json").read_text())
    values.pop("quantization_config", None)
    mtp_prefix = f"model.layers.{values['num_hidden_layers']}."
    weights = {name: weight for name, weight in dequantised_tensors(path).items() if not name.startswith(mtp_prefix)}
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    load: Any = transformers.GlmMoeDsaForCausalLM.from_pretrained  # its annotations leave out the loading info
    model, info = load(
        None,
        config=transformers.GlmMoeDsaConfig(**values),
        state_dict=weights,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise AssertionError(f"transformers and the generator disagree on {path}: {info}")
    return model.eval()


def tiny_config(spec: TinySpec) -> dict[str, Any]:
    """The config.json of a spec, with the keys a released checkpoint has."""
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32" if spec.weights in ("float32", "fp8_twin") else "bfloat16",
        "eos_token_id": [spec.special_id(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")],
        "ep_size": 1,
        "first_k_dense_replace": spec.num_dense_layers,
        "head_dim": spec.qk_nope_head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "index_head_dim": spec.index_head_dim,
        "index_n_heads": spec.index_num_heads,
        "index_topk": spec.index_topk,
        "indexer_rope_interleave": True,
        "initializer_range": 0.02,
        "intermediate_size": spec.intermediate_size,
        "kv_lora_rank": spec.kv_lora_rank,
        "max_position_embeddings": spec.max_position_embeddings,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": spec.n_group,
        "n_routed_experts": spec.num_experts,
        "n_shared_experts": spec.num_shared_experts,
        "norm_topk_prob": True,
        "num_attention_heads": spec.num_heads,
        "num_experts_per_tok": spec.num_experts_per_token,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_heads,
        "num_nextn_predict_layers": int(spec.mtp),
        "pad_token_id": spec.first_special_id,
        "pretraining_tp": 1,
        "q_lora_rank": spec.q_lora_rank,
        "qk_head_dim": spec.qk_nope_head_dim + spec.qk_rope_head_dim,
        "qk_nope_head_dim": spec.qk_nope_head_dim,
        "qk_rope_head_dim": spec.qk_rope_head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "routed_scaling_factor": spec.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": spec.topk_group,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": spec.v_head_dim,
        "vocab_size": spec.vocab_size,
    }
    if spec.indexer_types is not None:
        config["indexer_types"] = list(spec.indexer_types)
        config["index_share_for_mtp_iteration"] = True
    if spec.weights == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.indexers_proj"],
        }
    config |= spec.config_changes
    return {key: value for key, value in config.items() if value is not None}


def tiny_tensors(spec: TinySpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, tensor) of a checkpoint, in the dtypes of the releases."""
    for name, weight in _weights_float32(spec):
        if spec.weights == "float32" or name.endswith("e_score_correction_bias"):
            yield name, weight
        elif spec.weights == "bfloat16" or not _is_quantised(name):
            rounded = weight.bfloat16()
            yield name, rounded.float() if spec.weights == "fp8_twin" else rounded
        else:
            quantised, scale = _quantise(weight)
            if spec.weights == "fp8_twin":
                yield name, _dequantise(quantised, scale)
            else:
                yield name, quantised
                yield f"{name}_scale_inv", scale


def _weights_float32(spec: TinySpec) -> Iterator[tuple[str, torch.Tensor]]:
    hidden = spec.hidden_size

    def matrix(name: str, out: int, inputs: int, gain: float = 1.0) -> tuple[str, torch.Tensor]:
        return name, _normal(spec, name, out, inputs) * (gain / math.sqrt(inputs))

    def norm(name: str, size: int) -> tuple[str, torch.Tensor]:
        return name, 1.0 + 0.1 * _normal(spec, name, size)

    def mlp(prefix: str, width: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield matrix(f"{prefix}.gate_proj.weight", width, hidden)
        yield matrix(f"{prefix}.up_proj.weight", width, hidden)
        yield matrix(f"{prefix}.down_proj.weight", hidden, width)

    def layer(prefix: str, *, has_indexer: bool, sparse: bool) -> Iterator[tuple[str, torch.Tensor]]:
        heads, latent, rope = spec.num_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
        attention = f"{prefix}.self_attn"
        yield norm(f"{prefix}.input_layernorm.weight", hidden)
        yield norm(f"{prefix}.post_attention_layernorm.weight", hidden)
        yield matrix(f"{attention}.q_a_proj.weight", spec.q_lora_rank, hidden)
        yield norm(f"{attention}.q_a_layernorm.weight", spec.q_lora_rank)
        # 1.5: attention that prefers some keys, so that a wrong selection shows
        yield matrix(f"{attention}.q_b_proj.weight", heads * (spec.qk_nope_head_dim + rope), spec.q_lora_rank, 1.5)
        yield matrix(f"{attention}.kv_a_proj_with_mqa.weight", latent + rope, hidden)
        yield norm(f"{attention}.kv_a_layernorm.weight", latent)
        yield matrix(f"{attention}.kv_b_proj.weight", heads * (spec.qk_nope_head_dim + spec.v_head_dim), latent)
        yield matrix(f"{attention}.o_proj.weight", hidden, heads * spec.v_head_dim, 1.5)
        if has_indexer:
            indexer = f"{attention}.indexer"
            yield matrix(f"{indexer}.wq_b.weight", spec.index_num_heads * spec.index_head_dim, spec.q_lora_rank)
            yield matrix(f"{indexer}.wk.weight", spec.index_head_dim, hidden)
            yield norm(f"{indexer}.k_norm.weight", spec.index_head_dim)
            yield f"{indexer}.k_norm.bias", 0.1 * _normal(spec, f"{indexer}.k_norm.bias", spec.index_head_dim)
            yield matrix(f"{indexer}.weights_proj.weight", spec.index_num_heads, hidden)
        if not sparse:
            yield from mlp(f"{prefix}.mlp", spec.intermediate_size)
            return
        yield matrix(f"{prefix}.mlp.gate.weight", spec.num_experts, hidden)
        bias = f"{prefix}.mlp.gate.e_score_correction_bias"
        yield bias, 8.0 + 0.1 * _normal(spec, bias, spec.num_experts)
        yield from mlp(f"{prefix}.mlp.shared_experts", spec.moe_intermediate_size * spec.num_shared_experts)
        for expert in range(spec.num_experts):
            yield from mlp(f"{prefix}.mlp.experts.{expert}", spec.moe_intermediate_size)

    embedding = _normal(spec, "model.embed_tokens.weight", spec.vocab_size, hidden)
    head = matrix("lm_head.weight", spec.vocab_size, hidden, 3.0)
    yield "model.embed_tokens.weight", embedding
    for i in range(spec.num_layers):
        has_indexer = spec.indexer_types is None or spec.indexer_types[i] == "full"
        yield from layer(f"model.layers.{i}", has_indexer=has_indexer, sparse=i >= spec.num_dense_layers)
    yield norm("model.norm.weight", hidden)
    yield head
    if not spec.mtp:
        return
    mtp = f"model.layers.{spec.num_layers}"
    yield from layer(mtp, has_indexer=True, sparse=True)
    yield norm(f"{mtp}.enorm.weight", hidden)
    yield norm(f"{mtp}.hnorm.weight", hidden)
    yield norm(f"{mtp}.shared_head.norm.weight", hidden)
    name, projection = matrix(f"{mtp}.eh_proj.weight", hidden, 2 * hidden)
    projection[:, :hidden] += 2.0 * torch.eye(hidden)
    yield name, projection
    if spec.mtp_copies:
        yield f"{mtp}.embed_tokens.weight", embedding.clone()
        yield f"{mtp}.shared_head.head.weight", head[1].clone()


def _normal(spec: TinySpec, name: str, *shape: int) -> torch.Tensor:
    """Standard normal float32 values that depend on the seed and the name only."""
    digest = hashlib.sha256(f"{spec.seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "little")))
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


def _is_quantised(name: str) -> bool:
    """Whether the FP8 releases store this tensor in FP8."""
    if not name.endswith("_proj.weight") and not name.endswith(("proj_with_mqa.weight", ".wq_b.weight", ".wk.weight")):
        return False
    return not name.endswith((".weights_proj.weight", ".eh_proj.weight"))


def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values [rows, cols] and float32 scales [ceil(rows/128), ceil(cols/128)], block by block."""
    num_rows, num_cols = weight.shape
    values = torch.empty(num_rows, num_cols, dtype=torch.float8_e4m3fn)
    scale = torch.empty(math.ceil(num_rows / BLOCK), math.ceil(num_cols / BLOCK))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scale[i, j] = weight[block].abs().max() / 448.0
            values[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return values, scale


def _dequantise(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    weight = values.float()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            weight[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] *= scale[i, j]
    return weight


def _byte_tokenizer(spec: TinySpec) -> Tokenizer:
    """Byte-level BPE without merges: text becomes one token per byte.

    The ids between the bytes and the specials are syllables: they never come from encoding, they only give every
    generated id a text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = [f"{space}{c}{v}" for space in ("", "Ġ") for c in "bcdfghjklmnpqrstvwxyz" for v in "aeiou"]
    pieces = alphabet + syllables
    pieces += [f"{i:03d}" for i in range(spec.first_special_id - len(pieces))]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces[: spec.first_special_id])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tags = ("think>", "tool_call>", "tool_response>", "arg_key>", "arg_value>", "/nothink")
    for token in SPECIAL_TOKENS:  # one by one: `add_special_tokens` and `add_tokens` would reorder the two kinds
        added = AddedToken(token, special=not token.endswith(tags), normalized=False)
        tokenizer.add_tokens([added])
    return tokenizer


def _generation_config(spec: TinySpec) -> dict[str, Any]:
    config = tiny_config(spec)
    return {
        "eos_token_id": config.get("eos_token_id"),
        "pad_token_id": config.get("pad_token_id"),
        "temperature": 1.0,
        "top_p": 0.95,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
Tools you may call, one JSON object a line:
<tools>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}</tools>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}<|observation|>{%- endif -%}
<tool_response>{{ message.content }}</tool_response>
{%- elif message.role == "assistant" -%}
<|assistant|><think>{{ message.reasoning_content or "" }}</think>{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>
{{- value if value is string else value | tojson(ensure_ascii=False) -}}
</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- else -%}
<|{{ message.role }}|>{{ message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ "<think></think>" if enable_thinking is defined and not enable_thinking else "<think>" }}
{%- endif -%}
"""
