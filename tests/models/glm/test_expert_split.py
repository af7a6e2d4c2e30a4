from dataclasses import replace
from pathlib import Path

import pytest

import specdec.models.glm.config as config_module
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.expert_split import ExpertSplit, choose_expert_split

GLM = GlmConfig.from_file(Path(config_module.__file__).parent / "configs" / "glm-5.2.json")  # 256 experts of 2048


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
def test_experts_are_sliced_while_a_slice_is_a_multiple_of_128_wide(tp_size: int) -> None:
    assert choose_expert_split(GLM, tp_size) is ExpertSplit.SLICE


@pytest.mark.parametrize("tp_size", [32, 64])
def test_narrower_slices_give_way_to_whole_experts(tp_size: int) -> None:
    assert choose_expert_split(GLM, tp_size) is ExpertSplit.EXPERT


def test_a_width_that_the_ranks_do_not_divide_gives_way_to_whole_experts() -> None:
    assert choose_expert_split(replace(GLM, moe_intermediate_size=1536), 16) is ExpertSplit.EXPERT


def test_one_rank_has_one_slice_of_any_width() -> None:
    assert choose_expert_split(replace(GLM, moe_intermediate_size=136), 1) is ExpertSplit.SLICE


def test_experts_that_the_ranks_do_not_divide_stay_sliced() -> None:
    assert choose_expert_split(replace(GLM, moe_intermediate_size=136, num_experts=9), 2) is ExpertSplit.SLICE
