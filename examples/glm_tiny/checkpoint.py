"""Write and read the checkpoint under the names Hugging Face gives `glm_moe_dsa`.

One matrix per expert; the MTP layer is stored as the layer after the last, without its own embedding and head; the
router's correction bias stays float32, everything else is bfloat16.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .layers import Layer
from .model import TinyModel
from .model_config import TinyConfig

_ATTENTION = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "self_attn.q_a_proj": "q_a",
    "self_attn.q_a_layernorm": "q_a_norm",
    "self_attn.q_b_proj": "q_b",
    "self_attn.kv_a_proj_with_mqa": "kv_a",
    "self_attn.kv_a_layernorm": "kv_a_norm",
    "self_attn.kv_b_proj": "kv_b",
    "self_attn.o_proj": "o",
}
_INDEXER = {
    "wq_b.weight": "wq_b",
    "wk.weight": "wk",
    "k_norm.weight": "k_norm_weight",
    "k_norm.bias": "k_norm_bias",
    "weights_proj.weight": "weights_proj",
}


def named_views(model: TinyModel) -> Iterator[tuple[str, Tensor]]:
    """Give every tensor of the checkpoint as a view of the model's parameters, by its stored name."""
    yield "model.embed_tokens.weight", model.embed
    yield "model.norm.weight", model.norm
    yield "lm_head.weight", model.head
    for index, layer in enumerate([*model.layers, model.mtp_layer]):
        assert isinstance(layer, Layer)
        for name, view in _layer_views(layer):
            yield f"model.layers.{index}.{name}", view
    prefix = f"model.layers.{model.config.num_layers}."
    yield prefix + "enorm.weight", model.mtp_embed_norm
    yield prefix + "hnorm.weight", model.mtp_hidden_norm
    yield prefix + "eh_proj.weight", model.mtp_eh
    yield prefix + "shared_head.norm.weight", model.mtp_head_norm


def save_checkpoint(model: TinyModel, folder: Path, *, end_ids: tuple[int, ...], pad_id: int) -> None:
    """Write model.safetensors, config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: _stored(name, view) for name, view in named_views(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_hugging_face(end_ids=end_ids, pad_id=pad_id)
    generation = {
        "do_sample": True,
        "eos_token_id": list(end_ids),
        "pad_token_id": pad_id,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


@torch.no_grad()
def load_checkpoint(
    folder: Path,
    config: TinyConfig,
    *,
    device: str,
    compute_dtype: torch.dtype = torch.float32,
    new_indexers: bool = False,
) -> TinyModel:
    """Read a checkpoint into a model with float32 weights; every tensor must be there, and no other.

    With `new_indexers` an indexer that the file lacks starts from random weights.
    """
    model = TinyModel(config, compute_dtype=compute_dtype)
    stored = load_file(folder / "model.safetensors")
    for name, view in named_views(model):
        if new_indexers and ".indexer." in name and name not in stored:
            continue
        view.copy_(stored.pop(name).to(view.dtype))
    if stored:
        raise ValueError(f"{folder}: tensors of no use to the model: {sorted(stored)[:5]}")
    return model.to(device)


def _layer_views(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    for stored, name in _ATTENTION.items():
        yield f"{stored}.weight", getattr(layer, name)
    if layer.indexer is not None:
        for stored, name in _INDEXER.items():
            yield f"self_attn.indexer.{stored}", getattr(layer.indexer, name)
    names = ["mlp"]
    if layer.router is not None:
        yield "mlp.gate.weight", layer.router
        yield "mlp.gate.e_score_correction_bias", layer.router_bias
        names = [f"mlp.experts.{i}" for i in range(len(layer.router))] + ["mlp.shared_experts"]
    for index, name in enumerate(names):
        yield f"{name}.gate_proj.weight", layer.gate_up[index, 0]
        yield f"{name}.up_proj.weight", layer.gate_up[index, 1]
        yield f"{name}.down_proj.weight", layer.down[index]


def _stored(name: str, view: Tensor) -> Tensor:
    dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
    return view.detach().to("cpu", dtype).clone().contiguous()
