import functools
from pathlib import Path

import pytest
import torch

import specdec.models.glm.config as config_module
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.manifest import Component, Manifest, derive_manifest
from specdec.models.glm.parameters import TensorParallel, plan_parameters
from tests.support.tiny_checkpoint import PRESETS, Weights, tiny_config, tiny_spec, tiny_tensors

CONFIGS = Path(config_module.__file__).parent / "configs"

BF16_FIRST = (59_870, 0, 1_507_728_316_928, 753_864_139_008)  # GLM-5 and 5.1: an indexer in every layer
FP8_FIRST = (119_028, 59_158, 756_162_687_872, 753_864_139_008)
BF16_SHARED = (59_585, 0, 1_506_659_919_872, 753_329_940_480)  # GLM-5.2 and 5.3: 21 indexers for 78 layers
FP8_SHARED = (118_629, 59_044, 755_617_140_416, 753_329_940_480)


@functools.cache
def released(name: str) -> Manifest:
    return derive_manifest(GlmConfig.from_file(CONFIGS / f"{name}.json"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("glm-5", BF16_FIRST),
        ("glm-5-fp8", FP8_FIRST),
        ("glm-5.1", BF16_FIRST),
        ("glm-5.1-fp8", FP8_FIRST),
        ("glm-5.2", BF16_SHARED),
        ("glm-5.2-fp8", FP8_SHARED),
        ("glm-5.3", FP8_SHARED),
        ("glm-5.3-bf16", BF16_SHARED),
    ],
)
def test_released_sizes_follow_from_the_config(name: str, expected: tuple[int, int, int, int]) -> None:
    manifest = released(name)
    assert (manifest.num_tensors, manifest.num_scales, manifest.size_bytes, manifest.num_parameters) == expected


def test_every_released_config_is_one_of_these() -> None:
    assert len(list(CONFIGS.glob("*.json"))) == 8


@pytest.mark.parametrize(("name", "num_tensors"), [("glm-5.2", 791), ("glm-5.2-fp8", 1569)])
def test_the_mtp_layer_is_a_whole_sparse_layer_with_four_tensors_of_its_own(name: str, num_tensors: int) -> None:
    manifest = released(name)
    mtp = [tensor for tensor in manifest.tensors.values() if tensor.component is Component.MTP]
    assert len(mtp) == num_tensors
    assert all(tensor.name.startswith("model.layers.78.") for tensor in mtp)


def test_released_schedules() -> None:
    first = GlmConfig.from_file(CONFIGS / "glm-5.json")
    assert first.full_layers == tuple(range(78))
    assert (first.rope_theta, first.max_position_embeddings, first.index_share_for_mtp) == (1e6, 202_752, False)
    later = GlmConfig.from_file(CONFIGS / "glm-5.3.json")
    assert later.full_layers == (0, 1, *range(2, 75, 4))
    assert (later.rope_theta, later.max_position_embeddings, later.index_share_for_mtp) == (8e6, 1_048_576, True)


def test_known_fp8_shapes() -> None:
    tensors = released("glm-5.2-fp8").tensors
    kv_a = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert (tensors[kv_a].shape, tensors[kv_a].dtype) == ((576, 6144), torch.float8_e4m3fn)
    assert tensors[f"{kv_a}_scale_inv"].shape == (5, 48)
    assert tensors["model.layers.2.self_attn.indexer.wk.weight_scale_inv"].shape == (1, 48)
    assert "model.layers.2.self_attn.indexer.weights_proj.weight_scale_inv" not in tensors
    assert "model.layers.3.self_attn.indexer.wk.weight" not in tensors
    assert "model.layers.78.eh_proj.weight_scale_inv" not in tensors
    assert tensors["model.layers.78.mlp.gate.e_score_correction_bias"].dtype is torch.float32


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mtp", [True, False])
def test_the_manifest_lists_the_tensors_of_a_checkpoint(preset: str, weights: Weights, *, mtp: bool) -> None:
    spec = tiny_spec(preset, weights=weights, mtp=mtp)
    manifest = derive_manifest(GlmConfig.from_dict(tiny_config(spec)))
    stored = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tiny_tensors(spec)}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in manifest.tensors.items()} == stored


@pytest.mark.parametrize("name", ["glm-5.2-fp8", "glm-5"])
def test_parameters_are_made_of_every_weight_of_the_manifest(name: str) -> None:
    config = GlmConfig.from_file(CONFIGS / f"{name}.json")
    plans = plan_parameters(config, dtype=torch.bfloat16, with_mtp=True, tensor_parallel=TensorParallel())
    read = [piece.tensor for plan in plans for piece in plan.pieces]
    weights = {tensor.name for tensor in released(name).tensors.values() if not tensor.is_scale}
    assert len(read) == len(set(read))
    assert set(read) == weights
