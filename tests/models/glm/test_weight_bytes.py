"""Planned bytes of weights against the parameters that loading makes, and against the pieces it reads."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import specdec.models.glm.config as config_module
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.manifest import Component, derive_manifest
from specdec.models.glm.parameters import ParameterPlan, TensorParallel, plan_parameters
from specdec.models.glm.weight_bytes import WeightFormat, count_weights, stored_weight_format
from tests.support.tiny_checkpoint import tiny_config, tiny_spec, write_tiny_checkpoint

CONFIGS = Path(config_module.__file__).parent / "configs"
DTYPES = {WeightFormat.FLOAT32: torch.float32, WeightFormat.BFLOAT16: torch.bfloat16}
SIZES = [1, 2, 4, 8]


def released(name: str, *, num_layers: int) -> GlmConfig:
    """The first layers of a release."""
    config = GlmConfig.from_file(CONFIGS / f"{name}.json")
    return replace(
        config,
        num_layers=num_layers,
        mlp_layer_types=config.mlp_layer_types[:num_layers],
        indexer_types=config.indexer_types[:num_layers],
    )


def planned_parameters(config: GlmConfig, rank: int, size: int, split: ExpertSplit) -> list[ParameterPlan]:
    share = TensorParallel(rank=rank, size=size, expert_split=split)
    return plan_parameters(config, dtype=torch.bfloat16, with_mtp=True, tensor_parallel=share)


@pytest.mark.parametrize("split", ExpertSplit)
@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("weight_format", DTYPES)
def test_a_rank_of_a_release_takes_the_bytes_of_its_parameters(
    weight_format: WeightFormat, tp_size: int, split: ExpertSplit
) -> None:
    config = released("glm-5.2", num_layers=5)  # three dense layers, three full ones
    component_of = {name: tensor.component for name, tensor in derive_manifest(config).tensors.items()}
    expected: Counter[Component] = Counter()
    share = TensorParallel(rank=tp_size - 1, size=tp_size, expert_split=split)
    for plan in plan_parameters(config, dtype=DTYPES[weight_format], with_mtp=True, tensor_parallel=share):
        num_bytes = torch.Size(plan.shape).numel() * plan.dtype.itemsize
        expected[component_of[plan.pieces[0].tensor]] += num_bytes
    planned = count_weights(config, with_mtp=True).rank_bytes(weight_format, tp_size=tp_size, expert_split=split)
    assert planned == {component: expected[component] for component in Component}


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("weight_format", DTYPES)
def test_loading_allocates_what_was_planned(
    tmp_path: Path, weight_format: WeightFormat, tp_size: int, *, mtp: bool
) -> None:
    spec = tiny_spec("share", weights="bfloat16", mtp=mtp)
    directory = write_tiny_checkpoint(tmp_path, spec)
    census = count_weights(GlmConfig.from_dict(tiny_config(spec)), with_mtp=mtp)
    for split in ExpertSplit:
        share = TensorParallel(rank=tp_size - 1, size=tp_size, expert_split=split)
        loaded = load_checkpoint(directory, dtype=DTYPES[weight_format], tensor_parallel=share)
        allocated = sum(parameter.nbytes for parameter in loaded.parameters.values())
        assert sum(census.rank_bytes(weight_format, tp_size=tp_size, expert_split=split).values()) == allocated


def test_a_release_in_fp8_takes_its_bytes_on_disk_and_the_router_and_key_norms_in_float32() -> None:
    config = GlmConfig.from_file(CONFIGS / "glm-5.2-fp8.json")
    sizes = count_weights(config, with_mtp=True).rank_bytes(WeightFormat.FP8, tp_size=1, expert_split=ExpertSplit.SLICE)
    widened = 76 * 256 * 6144 + 22 * 2 * 128  # router weights of sparse layers, weights and biases of key norms
    assert sum(sizes.values()) == 755_617_140_416 + 2 * widened


@pytest.mark.parametrize("name", ["glm-5.2", "tiny"])
@pytest.mark.parametrize("split", ExpertSplit)
@pytest.mark.parametrize("tp_size", SIZES)
def test_fp8_takes_a_byte_a_value_and_four_a_block_it_touches(name: str, split: ExpertSplit, tp_size: int) -> None:
    # In the tiny model shares end inside blocks: the most scales of any rank are planned, tensor by tensor.
    if name == "tiny":
        config = GlmConfig.from_dict(tiny_config(tiny_spec("share", weights="fp8")))
    else:
        config = replace(released(name, num_layers=4), weight_block_size=(128, 128), num_experts=16)
    manifest = derive_manifest(config).tensors
    experts_seen = []
    most: Counter[str] = Counter()
    for rank in range(tp_size):
        expert_bytes = 0
        for plan in planned_parameters(config, rank, tp_size, split):
            for piece in plan.pieces:
                num_bytes = piece.num_rows * piece.num_cols * plan.dtype.itemsize
                if manifest[piece.tensor].is_quantised:
                    rows = {row // 128 for row in range(piece.first_row, piece.first_row + piece.num_rows)}
                    cols = {col // 128 for col in range(piece.first_col, piece.first_col + piece.num_cols)}
                    num_bytes = piece.num_rows * piece.num_cols + 4 * len(rows) * len(cols)
                if split is ExpertSplit.EXPERT and ".experts." in piece.tensor:
                    expert_bytes += num_bytes
                else:
                    most[piece.tensor] = max(most[piece.tensor], num_bytes)
        experts_seen.append(expert_bytes)
    sizes = count_weights(config, with_mtp=True).rank_bytes(WeightFormat.FP8, tp_size=tp_size, expert_split=split)
    assert sum(sizes.values()) == sum(most.values()) + max(experts_seen)
    assert min(experts_seen) == max(experts_seen)


@pytest.mark.parametrize(("name", "weight_format"), [("glm-5.2", WeightFormat.BFLOAT16), ("glm-5.3", WeightFormat.FP8)])
def test_the_stored_format_is_the_configs(name: str, weight_format: WeightFormat) -> None:
    assert stored_weight_format(GlmConfig.from_file(CONFIGS / f"{name}.json")) is weight_format


def test_a_float32_checkpoint_is_float32() -> None:
    config = GlmConfig.from_dict(tiny_config(tiny_spec("share")))
    assert stored_weight_format(config) is WeightFormat.FLOAT32
