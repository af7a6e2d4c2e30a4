"""Hopper's kernels are taken where they can compute a checkpoint, and what hinders them is said."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError
from specdec.kernel_set import KernelSet
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.released import locate_model
from specdec.ranks.kernel_choice import KernelChoice, choose_kernels

GLM_5_2 = GlmConfig.from_file(locate_model("glm-5.2-fp8").config_path)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))


def chosen(model: GlmConfig = GLM_5_2, *, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> KernelChoice:
    return choose_kernels(model, EngineConfig(**settings), dtype=dtype, device="cuda:0")


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_the_release_in_fp8_runs_on_the_kernels(tp_size: int) -> None:
    choice = chosen(tp_size=tp_size, dcp_size=tp_size)
    assert (choice.kernels, choice.reason, choice.keeps_fp8) == (KernelSet.HOPPER, "", True)
    assert str(choice) == "kernels: hopper"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("change", "settings", "reason"),
    [
        ({}, {"dtype": torch.float32}, "dtype is float32"),
        ({"weight_block_size": None}, {}, "not in FP8"),
        ({"hidden_size": 4096}, {}, "hidden_size is 4096, GLM-5.2's is 6144"),
        ({"norm_topk_prob": False}, {}, "norm_topk_prob is False"),
        ({}, {"tp_size": 16}, "tp_size is 16"),
        ({}, {"cp_size": 2, "num_draft_tokens": 0}, "cp_size is 2"),
        ({}, {"tp_size": 2, "dcp_size": 2, "exchange": "gather-scatter"}, "exchange is gather-scatter"),
        ({}, {"page_size": 32}, "pages of 32 tokens"),
        ({}, {"kv_format": "bfloat16"}, "pools are bfloat16"),
        ({}, {"expert_split": "expert"}, "expert_split"),
        ({}, {"latent_norm_eps": 1e-6}, "latent_norm_eps is 1e-06"),
        ({}, {"mtp_index_sharing": "anchor-and-drafts"}, "mtp_index_sharing"),
    ],
)
def test_what_they_cannot_compute_runs_in_torch_with_the_reason(
    change: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    model = replace(GLM_5_2, **change)
    choice = chosen(model, **settings)
    assert choice.kernels is KernelSet.TORCH
    assert reason in choice.reason
    assert str(choice).startswith("kernels: torch (")
    with pytest.raises(ConfigError, match="kernels hopper cannot compute this: "):
        chosen(model, kernels="hopper", **settings)


def test_another_device_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose_kernels(GLM_5_2, EngineConfig(), dtype=torch.bfloat16, device="cpu")
    assert (choice.kernels, choice.reason) == (KernelSet.TORCH, "the device is cpu, no Hopper GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    assert "no Hopper GPU" in chosen().reason


@pytest.mark.usefixtures("on_hopper")
def test_torch_is_taken_where_it_is_asked_for() -> None:
    assert str(chosen(kernels="torch")) == "kernels: torch"
    with pytest.raises(ConfigError, match="kernels must be one of torch, hopper, got 'triton'"):
        chosen(kernels="triton")
