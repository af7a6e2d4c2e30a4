"""Planned pools: what they take, what they hold, and that they are what is allocated."""

from pathlib import Path
from typing import Any

import pytest

import specdec.models.glm.config as config_module
from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.layout import EntryKind, KvFormat
from specdec.dcp.pool import KvPool
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError
from specdec.memory.kv_plan import plan_kv
from specdec.memory.pool_plan import PoolLayouts, PoolPlan, plan_layouts
from specdec.memory.pools import allocate_pools
from specdec.models.glm.config import GlmConfig
from tests.support.tiny_checkpoint import tiny_config, tiny_spec

GLM = GlmConfig.from_file(Path(config_module.__file__).parent / "configs" / "glm-5.2.json")
TINY = GlmConfig.from_dict(tiny_config(tiny_spec("share")))


def layouts_of(
    model: GlmConfig,
    *,
    kv_format: KvFormat = KvFormat.FP8_PACKED,
    page_size: int = 64,
    dcp_size: int = 1,
    with_draft: bool = True,
    replicates_index_keys: bool = False,
) -> PoolLayouts:
    return plan_layouts(
        model,
        page_size=page_size,
        kv_format=kv_format,
        kv_scale=0.5 if kv_format is KvFormat.FP8 else None,
        with_draft=with_draft,
        dcp_size=dcp_size,
        replicates_index_keys=replicates_index_keys,
    )


@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize("dcp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("kv_format", KvFormat)
def test_planned_bytes_are_allocated_bytes(
    kv_format: KvFormat, page_size: int, dcp_size: int, *, with_draft: bool
) -> None:
    layouts = layouts_of(TINY, kv_format=kv_format, page_size=page_size, dcp_size=dcp_size, with_draft=with_draft)
    plan = PoolPlan(layouts=layouts, num_pages=5)
    # Built here by the plainest rule: five pages of the sharded pool, and a draft page for every page id.
    geometry = Geometry(dcp_size, dcp_size - 1, PoolRole.TARGET)
    target = KvPool(layouts.target, num_pages=5, geometry=geometry)
    allocated = sum(target.nbytes.values())
    assert plan.pool_bytes(PoolRole.TARGET) == target.nbytes
    if layouts.draft is not None:
        draft = KvPool(layouts.draft, num_pages=5 * dcp_size, geometry=Geometry(1, 0, PoolRole.DRAFT))
        assert plan.pool_bytes(PoolRole.DRAFT) == draft.nbytes
        allocated += sum(draft.nbytes.values())
    assert plan.size_bytes == allocated
    assert sum(plan.live_bytes.values()) + layouts.reserved_bytes == allocated


@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize("dcp_size", [1, 2, 8])
def test_the_engines_pools_are_the_planned_ones(dcp_size: int, *, with_draft: bool) -> None:
    plan = PoolPlan(layouts=layouts_of(TINY, page_size=4, dcp_size=dcp_size, with_draft=with_draft), num_pages=3)
    for rank in range(dcp_size):
        pools = allocate_pools(plan, dcp_rank=rank, device="cpu")
        assert pools.target.geometry == Geometry(dcp_size, rank, PoolRole.TARGET)
        assert pools.target.num_pages == 3
        assert sum(pools.target.nbytes.values()) == sum(plan.pool_bytes(PoolRole.TARGET).values())
        assert (pools.draft is not None) == with_draft
        if pools.draft is not None:
            assert pools.draft.geometry == Geometry(1, 0, PoolRole.DRAFT)
            assert pools.draft.num_pages == 3 * dcp_size == plan.num_page_ids


def test_a_packed_token_of_target_and_draft_takes_54728_bytes() -> None:
    assert layouts_of(GLM).bytes_per_token == 54_728


@pytest.mark.parametrize(
    ("replicates_index_keys", "million_tokens"),
    [(False, (0.59, 1.16, 2.25, 4.27)), (True, (0.59, 1.10, 1.97, 3.23))],
)
def test_tokens_of_eight_ranks_with_32_gb_of_pool_each(
    million_tokens: tuple[float, ...], *, replicates_index_keys: bool
) -> None:
    for dcp_size, expected in zip((1, 2, 4, 8), million_tokens, strict=True):
        layouts = layouts_of(GLM, dcp_size=dcp_size, replicates_index_keys=replicates_index_keys)
        plan = PoolPlan(layouts=layouts, num_pages=layouts.num_pages_within(32_200_000_000))
        assert plan.num_tokens / 1e6 == pytest.approx(expected, abs=0.0075)


@pytest.mark.parametrize("dcp_size", [1, 2, 4, 8])
def test_the_draft_pool_holds_every_page_id_on_every_rank(dcp_size: int) -> None:
    plan = PoolPlan(layouts=layouts_of(GLM, dcp_size=dcp_size), num_pages=7)
    assert plan.layouts.draft_pool_token_multiplier == dcp_size
    assert plan.num_draft_pages == plan.num_page_ids == 7 * dcp_size
    assert plan.live_bytes[PoolRole.DRAFT, EntryKind.LATENT] == 7 * dcp_size * 64 * 656
    assert plan.live_bytes[PoolRole.TARGET, EntryKind.LATENT] == 7 * 64 * 656 * 78
    assert plan.live_bytes[PoolRole.TARGET, EntryKind.INDEX_KEYS] == 7 * 64 * 132 * 21


def test_replicated_index_keys_hold_every_page_id_too() -> None:
    plan = PoolPlan(layouts=layouts_of(GLM, dcp_size=4, replicates_index_keys=True), num_pages=7)
    assert plan.live_bytes[PoolRole.TARGET, EntryKind.INDEX_KEYS] == 7 * 4 * 64 * 132 * 21
    assert plan.live_bytes[PoolRole.TARGET, EntryKind.LATENT] == 7 * 64 * 656 * 78


def test_without_a_draft_there_is_no_draft_pool() -> None:
    plan = PoolPlan(layouts=layouts_of(GLM, dcp_size=4, with_draft=False), num_pages=7)
    assert plan.num_draft_pages == plan.layouts.draft_pool_token_multiplier == 0
    assert plan.pool_bytes(PoolRole.DRAFT) == {}


@pytest.mark.parametrize("dcp_size", [1, 3])
@pytest.mark.parametrize("num_pages", [1, 2, 1000])
def test_as_many_pages_fit_as_bytes_allow_the_reserved_ones_included(num_pages: int, dcp_size: int) -> None:
    layouts = layouts_of(GLM, dcp_size=dcp_size)
    needed = PoolPlan(layouts=layouts, num_pages=num_pages).size_bytes
    assert layouts.num_pages_within(needed) == num_pages
    assert layouts.num_pages_within(needed - 1) == num_pages - 1


def test_no_page_fits_into_less_than_the_reserved_pages() -> None:
    layouts = layouts_of(GLM)
    assert layouts.num_pages_within(layouts.reserved_bytes - 1) == layouts.num_pages_within(0) == 0


def test_no_ranks_share_nothing() -> None:
    with pytest.raises(ConfigError, match="dcp_size must be >= 1, got 0"):
        layouts_of(TINY, dcp_size=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_pages": 99999999999999999999}, r"the pools of a rank take \d+\.\d\d GB in 99999999999999999999 pages"),
        ({"max_num_requests": 10**9}, r"max_num_requests 1000000000 takes \d+\.\d\d GB for the tables of requests"),
        ({"page_size": 2**62}, "page_size must be at most 256 where no request has more than 256 tokens"),
        ({"page_size": 512}, "page_size must be at most 256 where no request has more than 256 tokens"),
        (
            {"page_size": 128, "max_model_len": 2},
            "page_size must be at most 64 where no request has more than 2 tokens",
        ),
    ],
)
def test_sizes_that_no_machine_has_are_refused_before_allocation(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_kv(TINY, EngineConfig(**settings), dtype="torch.float32", with_draft=True)


@pytest.mark.parametrize(("page_size", "max_model_len"), [(64, 2), (256, 129), (256, 256)])
def test_a_page_may_hold_the_longest_request(page_size: int, max_model_len: int) -> None:
    config = EngineConfig(page_size=page_size, max_model_len=max_model_len)
    assert plan_kv(TINY, config, dtype="torch.float32", with_draft=True).max_model_len == max_model_len


def test_pools_that_cannot_be_allocated_are_refused_with_their_bytes() -> None:
    plan = PoolPlan(layouts=layouts_of(TINY), num_pages=10**12)
    with pytest.raises(
        ConfigError, match=r"the pools take \d+\.\d\d GB in 1000000000000 pages of 64 tokens, which cpu"
    ):
        allocate_pools(plan, dcp_rank=0, device="cpu")
