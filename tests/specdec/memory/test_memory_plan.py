"""What the planner makes of settings, against sums written out here; GLM-5.2 in FP8 on 8 devices of 141 GiB."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ConfigError
from specdec.memory.memory_plan import IndexKeys, MemoryPlan, MemoryPlanner, MemorySettings
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.weight_bytes import WeightFormat
from tests.support.tiny_checkpoint import tiny_spec, write_tiny_checkpoint

GIB = 1 << 30
PACKED = MemorySettings(gpu_memory=141 * GIB, tp_size=8, kv_format="fp8_packed")  # type: ignore[arg-type]  # as text


@functools.cache
def planner(model: str = "glm-5.2-fp8") -> MemoryPlanner:
    return MemoryPlanner.of_model(model)


def planned(**changes: Any) -> MemoryPlan:
    return planner().plan(replace(PACKED, **changes))


@pytest.mark.parametrize("dcp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("index_keys", IndexKeys)
def test_the_pools_take_what_weights_and_reserve_leave_to_less_than_a_page(
    index_keys: IndexKeys, dcp_size: int, *, draft: bool
) -> None:
    plan = planned(dcp_size=dcp_size, draft=draft, index_keys=index_keys, reserve=3 * GIB)
    left = int(0.85 * 141 * GIB) - 3 * GIB - plan.rank.weight_bytes
    assert 0 <= left - plan.rank.pools.size_bytes < plan.rank.pools.layouts.bytes_per_page
    assert plan.unplanned_bytes == 141 * GIB - 3 * GIB - plan.rank.weight_bytes - plan.rank.pools.size_bytes


@pytest.mark.parametrize(
    ("index_keys", "million_tokens"),
    [(IndexKeys.SHARDED, (0.59, 1.16, 2.25, 4.27)), (IndexKeys.REPLICATED, (0.59, 1.10, 1.97, 3.23))],
)
def test_a_pool_of_given_size_holds_the_known_tokens(index_keys: IndexKeys, million_tokens: tuple[float, ...]) -> None:
    for dcp_size, expected in zip((1, 2, 4, 8), million_tokens, strict=True):
        plan = planned(gpu_memory=None, pool_bytes=32_200_000_000, dcp_size=dcp_size, index_keys=index_keys)
        assert plan.num_tokens / 1e6 == pytest.approx(expected, abs=0.0075)


def test_a_pool_of_given_size_needs_no_device_memory_and_takes_its_part_of_one() -> None:
    assert planned(gpu_memory=None, pool_bytes=10**9).unplanned_bytes is None
    plan = planned(pool_bytes=10**9)
    assert plan.rank.pools.size_bytes <= 10**9
    with pytest.raises(ConfigError, match="pool_bytes 99000000000"):
        planned(pool_bytes=99_000_000_000)


def test_batch_and_request_limits_count_whole_pages() -> None:
    plan = planned(gpu_memory=None, pool_bytes=10**9, context=65)
    num_pages = plan.rank.pools.num_page_ids
    assert plan.largest_batch == num_pages // 2  # 65 tokens take two pages of 64
    assert plan.num_tokens == num_pages * 64
    assert plan.max_request_tokens == plan.num_tokens < plan.max_model_len
    assert any("does not fit" in note for note in plan.notes)
    shorter = planned(gpu_memory=None, pool_bytes=10**9, max_model_len=1000)
    assert (shorter.max_request_tokens, shorter.context) == (1000, 1000)
    assert not any("does not fit" in note for note in shorter.notes)


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_a_layer_split_holds_as_many_pages_as_its_fullest_rank(cp_size: int, *, draft: bool) -> None:
    """Layers of a rank and one more of each kind in passing: 78 over 8 are 10,10,10,10,10,10,9,9, plus one."""
    plan = planned(gpu_memory=None, pool_bytes=10**10, tp_size=1, cp_size=cp_size, draft=draft)
    latent, index_key, draft_latent = 656 * 64, 132 * 64, 656 * 64
    full = planner()._config.full_layers
    share = -(-78 // cp_size)
    sizes = [78 // cp_size + (rank < 78 % cp_size) for rank in range(cp_size)]
    assert max(sizes) == share
    bounds = [sum(sizes[:rank]) for rank in range(cp_size + 1)]
    bytes_per_page = [
        (sizes[rank] + 1) * latent
        + (sum(bounds[rank] <= layer < bounds[rank + 1] for layer in full) + 1) * index_key
        + draft * ((rank == cp_size - 1) + 1) * (draft_latent + index_key)
        for rank in range(cp_size)
    ]
    assert plan.rank.pools.layouts.bytes_per_page == max(bytes_per_page)
    assert plan.rank.pools.num_pages == (10**10 - 2 * max(bytes_per_page)) // max(bytes_per_page)
    assert plan.rank.weights == planned(gpu_memory=None, pool_bytes=10**10, tp_size=1).rank.weights


def test_what_is_left_open_is_decided_by_the_model() -> None:
    settings = planner().plan(MemorySettings(gpu_memory=141 * GIB, tp_size=8)).settings
    assert (settings.weight_format, settings.kv_format) == ("fp8", "bfloat16")
    assert (settings.expert_split, settings.draft) == ("slice", True)
    assert (settings.max_model_len, settings.context) == (1_048_576, 131_072)


def test_every_choice_is_the_plan_with_one_setting_changed() -> None:
    plan = planned(dcp_size=4)
    choices = planner().choices(plan)
    by_name = {(choice.setting, choice.value): choice for choice in choices}
    for setting in ("dcp_size", "kv_format", "draft", "index_keys", "weight_format", "expert_split"):
        current = [choice for choice in choices if choice.setting == setting and choice.is_current]
        assert [choice.plan for choice in current] == [plan]
    assert by_name["dcp_size", "8"].plan == planned(dcp_size=8)
    assert by_name["draft", "off"].plan == planned(dcp_size=4, draft=False)
    assert by_name["index_keys", "replicated"].plan == planned(dcp_size=4, index_keys=IndexKeys.REPLICATED)
    assert by_name["expert_split", "expert"].plan == planned(dcp_size=4, expert_split=ExpertSplit.EXPERT)
    assert by_name["weight_format", "bfloat16"].plan is None
    assert "take a larger tp_size (16, 32, 64)" in by_name["weight_format", "bfloat16"].fault


def test_weights_are_no_choice_where_the_pool_is_given() -> None:
    choices = planner().choices(planned(gpu_memory=None, pool_bytes=10**9))
    assert {choice.setting for choice in choices} == {"dcp_size", "kv_format", "draft", "index_keys"}


def test_prices_that_the_engine_does_not_have_are_noted() -> None:
    notes = " ".join(planned(index_keys=IndexKeys.REPLICATED).notes)
    assert "fp8 weights are a price" in notes
    assert "replicated index keys are a price" in notes
    assert planner("glm-5.2").plan(replace(PACKED, tp_size=16, dcp_size=2)).notes == ()


@pytest.mark.parametrize("mtp", [True, False])
def test_a_checkpoint_has_a_draft_where_it_holds_an_mtp_layer(tmp_path: Path, *, mtp: bool) -> None:
    directory = write_tiny_checkpoint(tmp_path, tiny_spec("share", mtp=mtp))
    settings = MemorySettings(pool_bytes=10**7, page_size=4)
    plan = MemoryPlanner.of_model(directory).plan(settings)
    assert plan.settings.draft is mtp
    assert plan.settings.weight_format is WeightFormat.FLOAT32
    assert ("mtp" in plan.rank.weights_by_component) == mtp
    if not mtp:
        with pytest.raises(ConfigError, match="no MTP layer"):
            MemoryPlanner.of_model(directory).plan(replace(settings, draft=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_size": 6}, "tp_size must divide num_attention_heads 64.*take one of 1, 2, 4, 8"),
        ({"dcp_size": 3}, "dcp_size must divide tp_size 8, got 3"),
        ({"cp_size": 2}, "cp_size must be >= 1, and 1 where tp_size is above 1, got cp_size 2 and tp_size 8"),
        ({"cp_size": 0}, "cp_size must be >= 1"),
        ({"tp_size": 4}, "weights of a rank take 190.55 GB in fp8 at tp_size 4.*larger tp_size \\(8, 16, 32, 64\\)"),
        ({"reserve": 33 * GIB}, "reserve 35.43 GB"),
        ({"gpu_memory": None, "pool_bytes": 5000}, "bytes for their first page, 5000 are left"),
        ({"context": 1_048_577}, "context must be at most max_model_len 1048576, got 1048577"),
        ({"max_model_len": 1000, "context": 1001}, "context must be at most max_model_len 1000"),
        ({"max_model_len": 1_048_577}, "max_position_embeddings 1048576, got 1048577"),
        ({"page_size": 3}, "page_size must be a power of two"),
        ({"page_size": 2**21}, "page_size must be at most 1048576 where no request has more than 1048576 tokens"),
    ],
)
def test_what_cannot_be_is_refused_with_value_rule_and_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(**changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "--gpu-memory 141GiB.*--pool-bytes"),
        ({"gpu_memory": 0}, "gpu_memory must be >= 1"),
        ({"gpu_memory": 1, "reserve": -1}, "reserve must be >= 0"),
        ({"gpu_memory": 1, "static_fraction": 0.0}, "static_fraction must be above 0"),
        ({"gpu_memory": 1, "static_fraction": 1.5}, "static_fraction must be above 0 and at most 1"),
        ({"gpu_memory": 1, "kv_format": "fp4"}, "kv_format must be one of float32, bfloat16, fp8, fp8_packed"),
        ({"gpu_memory": 1, "expert_split": "half"}, "expert_split must be one of slice, expert, got 'half'"),
        ({"gpu_memory": 1, "context": 0}, "context must be >= 1"),
    ],
)
def test_settings_are_checked_alone(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemorySettings(**values)
