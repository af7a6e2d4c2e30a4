"""The checkpoint of GLM-5.2's dimensions is what the release would be, and the load benchmark sees a wrong slice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.load_checkpoint import TP_SIZE, different
from benchmarks.real_checkpoint import RELEASE, SMALL, checkpoint_config, write_checkpoint
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.manifest import derive_manifest
from specdec.models.glm.parameters import TensorParallel
from specdec.models.glm.released import locate_model
from tests.support.tiny_checkpoint import dequantised_tensors, read_tensors

ROOT = Path(__file__).parents[2]
SHARD_BYTES = 8 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("real")
    write_checkpoint(path, device="cpu", changes=SMALL, shard_bytes=SHARD_BYTES)
    return path


def load(directory: Path, share: TensorParallel) -> dict[str, torch.Tensor]:
    return load_checkpoint(directory, dtype=torch.bfloat16, tensor_parallel=share, keep_fp8=True).parameters


def test_its_tensors_are_those_of_the_release() -> None:
    config = GlmConfig.from_dict(checkpoint_config())
    assert config.mlp_layer_types == ("dense", "dense", "dense", "sparse")
    assert config.indexer_types == ("full", "full", "full", "shared")
    assert config.num_mtp_layers == 1
    released = derive_manifest(GlmConfig.from_file(locate_model(RELEASE).config_path)).tensors
    manifest = derive_manifest(config)
    for name, tensor in manifest.tensors.items():
        there = released[name.replace("model.layers.4.", "model.layers.78.")]
        assert (tensor.shape, tensor.dtype) == (there.shape, there.dtype), name
    assert manifest.tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 48)
    assert manifest.size_bytes == 24_914_631_616


def test_files_hold_the_manifest(directory: Path) -> None:
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 2 * SHARD_BYTES for file in files)
    stored = read_tensors(directory)
    specs = derive_manifest(GlmConfig.from_file(directory / "config.json")).tensors
    assert stored.keys() == specs.keys()
    for name, spec in specs.items():
        assert (stored[name].shape, stored[name].dtype) == (spec.shape, spec.dtype), name
        assert stored[name].float().isfinite().all(), name
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())


def test_a_matrix_keeps_the_size_of_a_normed_row(directory: Path) -> None:
    for name, weight in dequantised_tensors(directory).items():
        if weight.dim() == 2 and "embed_tokens" not in name:
            size = float((torch.randn(200, weight.shape[1]) @ weight.T).square().mean().sqrt())
            is_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 3 if name == "lm_head.weight" else 0.1 if is_branch else 1
            assert 0.4 < size / expected < 1.6, name  # a block may be of 0.5 or 1.5


def test_the_same_seed_gives_the_same_files(directory: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "same", device="cpu", changes=SMALL, shard_bytes=SHARD_BYTES)
    write_checkpoint(tmp_path / "other", device="cpu", changes=SMALL, shard_bytes=SHARD_BYTES, seed=1)
    for path in directory.iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes()
        is_data = path.suffix == ".safetensors"
        assert ((tmp_path / "other" / path.name).read_bytes() != path.read_bytes()) == is_data


def test_slices_are_the_cut_of_the_whole(directory: Path) -> None:
    whole = load(directory, TensorParallel())
    for rank in range(TP_SIZE):
        assert different(whole, load(directory, TensorParallel(rank=rank, size=TP_SIZE)), rank) == []


@pytest.mark.parametrize(
    "name",
    [
        "layers.3.moe.expert_gate_up_proj",
        "layers.3.moe.expert_down_proj.scale",
        "layers.0.attention.qkv_a_proj.scale",
        "layers.0.attention.o_proj",
        "mtp.eh_proj",
        "norm",
    ],
)
def test_a_wrong_bit_is_named(directory: Path, name: str) -> None:
    whole, part = load(directory, TensorParallel()), load(directory, TensorParallel(rank=5, size=TP_SIZE))
    part[name].view(-1).view(torch.uint8)[-1] ^= 1
    assert different(whole, part, 5) == [name]
    del part[name]
    assert different(whole, part, 5) == [name]


def test_another_ranks_slice_is_seen(directory: Path) -> None:
    whole, part = load(directory, TensorParallel()), load(directory, TensorParallel(rank=5, size=TP_SIZE))
    kinds = {name.removesuffix(".scale").rsplit(".", 1)[1] for name in different(whole, part, 4) if "." in name}
    gate_up_down = {f"{part}{kind}_proj" for part in ("", "expert_", "shared_") for kind in ("gate_up", "down")}
    assert kinds == {"q_b_proj", "kv_b_proj", "o_proj"} | gate_up_down


def test_the_script_runs_without_a_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = subprocess.run(
        [sys.executable, "benchmarks/load_checkpoint.py", "--json", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    loads = json.loads(report.read_text())["loads"]
    names = ["plain", "plain", "whole", "whole", *(f"rank {rank}" for rank in range(TP_SIZE)), "rank 0"]
    assert [load["name"] for load in loads] == names
    assert [load["num_different"] for load in loads] == [None] * 4 + [0] * 9
    assert all(load["used_bytes"] < loads[2]["used_bytes"] / 2 for load in loads[4:])
