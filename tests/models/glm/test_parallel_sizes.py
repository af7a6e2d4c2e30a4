from dataclasses import replace
from pathlib import Path

import pytest

import specdec.models.glm.config as config_module
from specdec.kernels.errors import ConfigError
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.parallel_sizes import check_parallel_sizes, fitting_dcp_sizes, fitting_tp_sizes

GLM = GlmConfig.from_file(Path(config_module.__file__).parent / "configs" / "glm-5.2.json")


@pytest.mark.parametrize(("tp_size", "dcp_size"), [(1, 1), (2, 1), (2, 2), (8, 1), (8, 2), (8, 4), (8, 8), (64, 64)])
def test_sizes_that_fit_are_accepted(tp_size: int, dcp_size: int) -> None:
    check_parallel_sizes(GLM, tp_size=tp_size, dcp_size=dcp_size)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_heads": 60}, "num_attention_heads 60"),
        ({"vocab_size": 154_884}, "vocab_size 154884"),
        ({"intermediate_size": 12_284}, "intermediate_size 12284"),
        ({"moe_intermediate_size": 1028}, "the shared experts' width 1028"),
    ],
)
def test_what_the_ranks_cannot_share_is_named_with_the_sizes_that_fit(change: dict[str, int], named: str) -> None:
    config = replace(GLM, **change)  # type: ignore[arg-type]  # fields by name
    with pytest.raises(ConfigError, match=rf"^tp_size must divide {named}, got 8: take one of 1, 2, 4$"):
        check_parallel_sizes(config, tp_size=8, dcp_size=1)


def test_every_broken_rule_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_parallel_sizes(GLM, tp_size=6, dcp_size=4)
    for rule in ("num_attention_heads 64", "vocab_size 154880", "moe_intermediate_size 2048", "1, 2, 4, 8, 16, 32, 64"):
        assert rule in str(caught.value)
    assert "dcp_size must divide tp_size 6, got 4: take one of 1, 2, 3, 6" in str(caught.value)
    assert "intermediate_size 12288" not in str(caught.value)


def test_a_dcp_group_is_part_of_the_tp_group() -> None:
    with pytest.raises(ConfigError, match="dcp_size must divide tp_size 2, got 4: take one of 1, 2"):
        check_parallel_sizes(GLM, tp_size=2, dcp_size=4)


def test_experts_are_checked_by_the_split_that_is_asked_for() -> None:
    config = replace(GLM, num_experts=250, moe_intermediate_size=2048)
    check_parallel_sizes(config, tp_size=4, dcp_size=1, expert_split=ExpertSplit.SLICE)
    with pytest.raises(ConfigError, match="n_routed_experts 250"):
        check_parallel_sizes(config, tp_size=4, dcp_size=1, expert_split=ExpertSplit.EXPERT)


def test_layers_that_a_model_lacks_set_no_rule() -> None:
    dense = replace(
        GLM, mlp_layer_types=("dense",) * GLM.num_layers, num_mtp_layers=0, moe_intermediate_size=2047, num_experts=255
    )
    check_parallel_sizes(dense, tp_size=8, dcp_size=8)
    sparse = replace(GLM, mlp_layer_types=("sparse",) * GLM.num_layers, intermediate_size=12_287)
    check_parallel_sizes(sparse, tp_size=8, dcp_size=8)


@pytest.mark.parametrize(("tp_size", "dcp_size"), [(0, 1), (1, 0), (-2, 1)])
def test_sizes_are_counts(tp_size: int, dcp_size: int) -> None:
    with pytest.raises(ConfigError, match="must be >= 1"):
        check_parallel_sizes(GLM, tp_size=tp_size, dcp_size=dcp_size)


def test_fitting_sizes() -> None:
    assert fitting_tp_sizes(GLM) == (1, 2, 4, 8, 16, 32, 64)
    assert fitting_tp_sizes(replace(GLM, num_heads=12)) == (1, 2, 4)  # 3 does not divide the vocabulary
    assert fitting_dcp_sizes(12) == (1, 2, 3, 4, 6, 12)
