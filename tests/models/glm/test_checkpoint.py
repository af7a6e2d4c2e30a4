import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.kernels.errors import CheckpointError, ConfigError
from specdec.models.glm.checkpoint import LoadedCheckpoint, load_checkpoint
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.parameters import TensorParallel
from tests.support.tiny_checkpoint import (
    PRESETS,
    TinySpec,
    Weights,
    dequantised_tensors,
    read_tensors,
    tiny_spec,
    write_shards,
    write_tiny_checkpoint,
)


def load(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    tp_rank: int = 0,
    tp_size: int = 1,
    expert_split: ExpertSplit = ExpertSplit.SLICE,
) -> LoadedCheckpoint:
    share = TensorParallel(rank=tp_rank, size=tp_size, expert_split=expert_split)
    return load_checkpoint(path, dtype=dtype, tensor_parallel=share)


def expected_parameters(path: Path, spec: TinySpec, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters by their definition: checkpoint tensors dequantised in full, joined, then rounded."""
    weights = dequantised_tensors(path)
    parameters: dict[str, torch.Tensor] = {
        "embed_tokens": weights["model.embed_tokens.weight"],
        "norm": weights["model.norm.weight"],
        "lm_head": weights["lm_head.weight"],
    }

    def add_layer(name: str, layer: int, *, has_indexer: bool, is_sparse: bool) -> None:
        source = {
            key.removeprefix(f"model.layers.{layer}."): value
            for key, value in weights.items()
            if key.startswith(f"model.layers.{layer}.")
        }
        attention = {key: source[f"self_attn.{key}.weight"] for key in ("q_a_layernorm", "kv_a_layernorm", "q_b_proj")}
        attention["o_proj"] = source["self_attn.o_proj.weight"]
        kv_b = source["self_attn.kv_b_proj.weight"]
        attention["kv_b_proj"] = kv_b.view(spec.num_heads, -1, spec.kv_lora_rank)
        both = source["self_attn.q_a_proj.weight"], source["self_attn.kv_a_proj_with_mqa.weight"]
        attention["qkv_a_proj"] = torch.cat(both)
        parts = {f"attention.{key}": value for key, value in attention.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            parts[norm] = source[f"{norm}.weight"]
        if has_indexer:
            for key in ("wq_b", "wk", "weights_proj"):
                parts[f"indexer.{key}"] = source[f"self_attn.indexer.{key}.weight"]
            for key in ("weight", "bias"):
                parts[f"indexer.k_norm_{key}"] = source[f"self_attn.indexer.k_norm.{key}"]

        def gate_up(mlp: str) -> torch.Tensor:
            return torch.cat([source[f"{mlp}.gate_proj.weight"], source[f"{mlp}.up_proj.weight"]])

        if is_sparse:
            experts = [f"mlp.experts.{expert}" for expert in range(spec.num_experts)]
            parts["moe.router"] = source["mlp.gate.weight"]
            parts["moe.router_bias"] = source["mlp.gate.e_score_correction_bias"]
            parts["moe.expert_gate_up_proj"] = torch.stack([gate_up(expert) for expert in experts])
            parts["moe.expert_down_proj"] = torch.stack([source[f"{expert}.down_proj.weight"] for expert in experts])
            parts["moe.shared_gate_up_proj"] = gate_up("mlp.shared_experts")
            parts["moe.shared_down_proj"] = source["mlp.shared_experts.down_proj.weight"]
        else:
            parts["mlp.gate_up_proj"] = gate_up("mlp")
            parts["mlp.down_proj"] = source["mlp.down_proj.weight"]
        parameters.update({f"{name}.{key}": value for key, value in parts.items()})

    for layer in range(spec.num_layers):
        has_indexer = spec.indexer_types is None or spec.indexer_types[layer] == "full"
        add_layer(f"layers.{layer}", layer, has_indexer=has_indexer, is_sparse=layer >= spec.num_dense_layers)
    if spec.mtp:
        add_layer("mtp.layer", spec.num_layers, has_indexer=True, is_sparse=True)
        mtp = f"model.layers.{spec.num_layers}"
        parameters["mtp.enorm"] = weights[f"{mtp}.enorm.weight"]
        parameters["mtp.hnorm"] = weights[f"{mtp}.hnorm.weight"]
        parameters["mtp.shared_head_norm"] = weights[f"{mtp}.shared_head.norm.weight"]
        parameters["mtp.eh_proj"] = weights[f"{mtp}.eh_proj.weight"]
    float32_names = (".router", ".router_bias", ".k_norm_weight", ".k_norm_bias")
    return {name: value if name.endswith(float32_names) else value.to(dtype) for name, value in parameters.items()}


def assert_same(parameters: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert parameters.keys() == expected.keys()
    for name, value in expected.items():
        assert parameters[name].dtype is value.dtype, name
        assert torch.equal(parameters[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_the_joined_tensors(tmp_path: Path, preset: str, weights: Weights, dtype: torch.dtype) -> None:
    spec = tiny_spec(preset, weights=weights, num_shards=3)
    write_tiny_checkpoint(tmp_path, spec)
    assert_same(load(tmp_path, dtype=dtype).parameters, expected_parameters(tmp_path, spec, dtype=dtype))


def test_an_fp8_checkpoint_loads_as_its_dequantised_twin(tmp_path: Path) -> None:
    for weights in ("fp8", "fp8_twin"):
        write_tiny_checkpoint(tmp_path / weights, tiny_spec("real_dims", weights=weights))
    assert_same(load(tmp_path / "fp8").parameters, load(tmp_path / "fp8_twin").parameters)


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_the_number_of_shards_changes_nothing(tmp_path: Path, num_shards: int) -> None:
    write_tiny_checkpoint(tmp_path / "a", tiny_spec("share", weights="fp8"))
    write_tiny_checkpoint(tmp_path / "b", tiny_spec("share", weights="fp8", num_shards=num_shards))
    assert_same(load(tmp_path / "b").parameters, load(tmp_path / "a").parameters)


def rank_share(name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's share of a parameter, by the axis that is cut: heads, MLP widths, vocabulary rows."""

    def cut(axis: int) -> torch.Tensor:
        return whole.chunk(size, dim=axis)[rank]

    if name.endswith("gate_up_proj"):
        gate, up = whole.chunk(2, dim=-2)
        return torch.cat([gate.chunk(size, dim=-2)[rank], up.chunk(size, dim=-2)[rank]], dim=-2)
    if name.endswith(("o_proj", "down_proj")):
        return cut(-1)
    if name.endswith(("embed_tokens", "lm_head", "q_b_proj", "kv_b_proj")):
        return cut(0)
    return whole


@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_shares_of_all_ranks_make_the_whole(tmp_path: Path, weights: Weights, tp_size: int) -> None:
    """At 8 ranks the shares of 17 and 34 MLP columns and of 56 kv_b rows lie across the borders of FP8 blocks."""
    write_tiny_checkpoint(tmp_path, tiny_spec("share", weights=weights, num_shards=2))
    whole = load(tmp_path).parameters
    for rank in range(tp_size):
        share = load(tmp_path, tp_rank=rank, tp_size=tp_size).parameters
        assert_same(share, {name: rank_share(name, value, rank, tp_size) for name, value in whole.items()})


@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_ranks_may_hold_whole_experts(tmp_path: Path, weights: Weights) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share", weights=weights, num_shards=2))
    whole = load(tmp_path).parameters
    for rank in range(4):
        share = load(tmp_path, tp_rank=rank, tp_size=4, expert_split=ExpertSplit.EXPERT)
        expected = {
            name: value.chunk(4)[rank] if ".moe.expert_" in name else rank_share(name, value, rank, 4)
            for name, value in whole.items()
        }
        assert_same(share.parameters, expected)
        others = [name for name, reason in share.report.ignored.items() if reason == "an expert of another rank"]
        held = {int(name.split(".experts.")[1].split(".")[0]) for name in others}
        num_experts = whole["layers.1.moe.router"].shape[0]
        assert held == set(range(num_experts)) - set(range(rank * num_experts // 4, (rank + 1) * num_experts // 4))


def test_a_size_that_does_not_divide_the_heads_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share"))
    with pytest.raises(ConfigError, match="tp_size must divide num_attention_heads, got 16 and 8"):
        load(tmp_path, tp_size=16)
    with pytest.raises(ConfigError, match="tp_rank must be in"):
        load(tmp_path, tp_rank=2, tp_size=2)


@pytest.mark.parametrize("weights", ["float32", "fp8"])
def test_bytes_read_are_all_bytes_of_the_used_tensors(tmp_path: Path, weights: Weights) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share", weights=weights, mtp_copies=True))
    report = load(tmp_path).report
    used = [tensor.nbytes for name, tensor in read_tensors(tmp_path).items() if name not in report.ignored]
    assert report.bytes_read == sum(used)


def test_a_rank_reads_the_bytes_of_its_share_only(tmp_path: Path) -> None:
    spec = tiny_spec("share")
    write_tiny_checkpoint(tmp_path, spec)
    for rank in range(4):
        loaded = load(tmp_path, tp_rank=rank, tp_size=4)
        # float32 on disk and in memory: what is read is what is held
        assert loaded.report.bytes_read == sum(parameter.nbytes for parameter in loaded.parameters.values())


def test_files_give_the_rows_of_a_rank_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share", num_shards=2))
    given, preadv = [], os.preadv

    def counting(file: int, buffers: list[memoryview], offset: int) -> int:
        given.append(preadv(file, buffers, offset))
        return given[-1]

    monkeypatch.setattr(os, "preadv", counting)
    load(tmp_path, tp_rank=2, tp_size=4)
    rows_are_cut = ("embed_tokens", "lm_head", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
    expected = [
        tensor.nbytes // (4 if name.removesuffix(".weight").endswith(rows_are_cut) else 1)
        for name, tensor in read_tensors(tmp_path).items()
    ]
    assert sum(given) == sum(expected)


@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_a_tensor_larger_than_a_request_arrives_whole(tmp_path: Path, weights: Weights) -> None:
    sizes = {"hidden_size": 656, "intermediate_size": 6928, "num_layers": 2, "vocab_size": 4000, "mtp": False}
    spec = tiny_spec("share", weights=weights, indexer_types=("full", "shared"), **sizes)
    write_tiny_checkpoint(tmp_path, spec)  # more than 4 MB: in FP8 the dense MLP alone
    whole = expected_parameters(tmp_path, spec, dtype=torch.float32)
    assert_same(load(tmp_path).parameters, whole)
    share = {name: rank_share(name, parameter, 3, 4) for name, parameter in whole.items()}
    assert_same(load(tmp_path, tp_rank=3, tp_size=4).parameters, share)


def test_a_rank_of_an_fp8_checkpoint_reads_the_scales_of_its_blocks_only(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share", weights="fp8", mtp=False))
    whole = load(tmp_path).report.bytes_read
    shares = [load(tmp_path, tp_rank=rank, tp_size=8).report.bytes_read for rank in range(8)]
    stored = read_tensors(tmp_path)
    cut = ("embed_tokens.weight", "lm_head.weight", "q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight")
    is_cut = {name: name.endswith(cut) or ("mlp." in name and name.endswith("_proj.weight")) for name in stored}
    replicated = sum(tensor.nbytes for name, tensor in stored.items() if not is_cut[name.removesuffix("_scale_inv")])
    # a block on the border of two shares has its scale read by both
    assert whole - replicated <= sum(shares) - 8 * replicated < 1.01 * (whole - replicated)


def test_router_and_index_key_norm_stay_float32(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share", weights="bfloat16"))
    parameters = load(tmp_path, dtype=torch.bfloat16).parameters
    float32 = {name for name, parameter in parameters.items() if parameter.dtype is torch.float32}
    assert {name.rsplit(".", 1)[1] for name in float32} == {"router", "router_bias", "k_norm_weight", "k_norm_bias"}
    stored = read_tensors(tmp_path)["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(parameters["layers.1.moe.router_bias"], stored)
    assert not torch.equal(stored.bfloat16().float(), stored)


@pytest.mark.parametrize("mtp_copies", [True, False])
def test_the_mtp_layer_may_carry_its_own_embedding_and_head(tmp_path: Path, *, mtp_copies: bool) -> None:
    write_tiny_checkpoint(tmp_path / "plain", tiny_spec("share"))
    write_tiny_checkpoint(tmp_path / "copies", tiny_spec("share", mtp_copies=mtp_copies))
    loaded = load(tmp_path / "copies")
    assert_same(loaded.parameters, load(tmp_path / "plain").parameters)
    assert loaded.report.has_mtp
    expected = {
        "model.layers.4.embed_tokens.weight": "the MTP layer uses the target's embedding",
        "model.layers.4.shared_head.head.weight": "the MTP layer uses the target's head",
    }
    assert loaded.report.ignored == (expected if mtp_copies else {})


def test_a_missing_mtp_layer_is_reported(tmp_path: Path) -> None:
    spec = tiny_spec("share", mtp=False, config_changes={"num_nextn_predict_layers": 1})
    write_tiny_checkpoint(tmp_path, spec)
    loaded = load(tmp_path)
    assert not loaded.report.has_mtp
    assert not any(name.startswith("mtp.") for name in loaded.parameters)
    assert "no MTP layer" in loaded.report.warnings[0]


def test_an_mtp_layer_that_the_config_does_not_declare_is_ignored(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share", config_changes={"num_nextn_predict_layers": None}))
    report = load(tmp_path).report
    assert not report.has_mtp
    assert report.ignored.keys() == {name for name in read_tensors(tmp_path) if name.startswith("model.layers.4.")}
    assert set(report.ignored.values()) == {"config.json declares no MTP layer (num_nextn_predict_layers)"}


def test_counts_of_the_report_add_up(tmp_path: Path) -> None:
    """A stray scale of a head that the MTP layer does not own is ignored; the scales of its experts are not."""
    write_tiny_checkpoint(tmp_path, tiny_spec("share", weights="fp8"))
    stray = "model.layers.4.shared_head.head.weight_scale"
    tensors = read_tensors(tmp_path) | {stray: torch.ones(4, 2)}
    write_shards(tmp_path, tensors, num_shards=1)
    loaded = load(tmp_path)
    report = loaded.report
    assert report.ignored == {stray: "the scale of a weight that is not used"}
    assert report.num_tensors == len(tensors) == report.num_loaded + len(report.ignored)
    assert report.num_scales == sum(name.endswith("_scale_inv") for name in tensors)
    assert report.num_mapped == len(loaded.parameters)
    assert f"loaded {report.num_loaded:,} tensors" in report.summary()
    assert "ignored 1" in report.summary()
    experts = dequantised_tensors(tmp_path)["model.layers.4.mlp.experts.7.down_proj.weight"]
    assert torch.equal(loaded.parameters["mtp.layer.moe.expert_down_proj"][7], experts)


def test_layers_that_share_an_indexer_carry_none(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share"))
    owners = {name.split(".indexer.")[0] for name in load(tmp_path).parameters if ".indexer." in name}
    assert owners == {"layers.0", "layers.2", "mtp.layer"}


def test_the_list_decides_which_indexers_are_loaded_and_others_are_ignored(tmp_path: Path) -> None:
    """All layers ship an indexer and the list shares some of them, as when a schedule is forced upon GLM-5.1."""
    schedule = ["full", "full", "full", "shared"]
    spec = tiny_spec("all_full", config_changes={"indexer_types": schedule, "index_topk_freq": 2})
    write_tiny_checkpoint(tmp_path, spec)
    loaded = load(tmp_path)
    assert loaded.config.indexer_types == tuple(schedule)
    assert set(loaded.report.ignored.values()) == {"the layer is 'shared' in indexer_types and runs no indexer"}
    assert all(name.startswith("model.layers.3.self_attn.indexer.") for name in loaded.report.ignored)
    assert len(loaded.report.ignored) == 5


def test_rotation_tables_of_old_exports_are_ignored(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share"))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_shards(tmp_path, read_tensors(tmp_path) | {name: torch.ones(4)}, num_shards=1)
    assert load(tmp_path).report.ignored == {name: "the rotation angles are computed from rope_theta"}


def test_a_router_bias_rounded_by_its_export_is_loaded_with_a_warning(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share", weights="bfloat16"))
    rounded = {name: tensor.bfloat16() for name, tensor in read_tensors(tmp_path).items()}
    write_shards(tmp_path, rounded, num_shards=1)
    assert "e_score_correction_bias" in load(tmp_path).report.warnings[0]


def test_progress_ends_at_the_bytes_of_all_parameters(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share"))
    calls: list[tuple[int, int]] = []
    on_progress: Callable[[int, int], None] = lambda done, total: calls.append((done, total))  # noqa: E731
    loaded = load_checkpoint(tmp_path, dtype=torch.float32, on_progress=on_progress)
    total = sum(parameter.nbytes for parameter in loaded.parameters.values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) == len(loaded.parameters)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_number_of_threads_changes_nothing(tmp_path: Path, num_threads: int) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share", weights="fp8", num_shards=2))
    loaded = load_checkpoint(tmp_path, dtype=torch.bfloat16, num_threads=num_threads)
    assert_same(loaded.parameters, load(tmp_path, dtype=torch.bfloat16).parameters)


def test_an_integer_dtype_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share"))
    with pytest.raises(ConfigError, match=r"got torch\.int8"):
        load(tmp_path, dtype=torch.int8)


def test_a_config_without_weights_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(tmp_path)
