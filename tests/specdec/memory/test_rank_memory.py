from pathlib import Path

import pytest
import torch

from specdec.dcp.geometry import PoolRole
from specdec.dcp.layout import KvFormat
from specdec.memory.pool_plan import PoolPlan, plan_layouts
from specdec.memory.pools import allocate_pools
from specdec.memory.rank_memory import RankMemory, size_text
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.weight_bytes import WeightFormat, count_weights
from tests.support.tiny_checkpoint import tiny_spec, write_tiny_checkpoint


@pytest.mark.parametrize("with_draft", [True, False])
def test_the_components_of_a_rank_are_all_its_tensors(tmp_path: Path, *, with_draft: bool) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, tiny_spec("share")), dtype=torch.bfloat16)
    layouts = plan_layouts(
        checkpoint.config,
        page_size=4,
        kv_format=KvFormat.BFLOAT16,
        kv_scale=None,
        with_draft=with_draft,
        dcp_size=2,
    )
    memory = RankMemory(
        weights=count_weights(checkpoint.config, with_mtp=True).rank_bytes(
            WeightFormat.BFLOAT16, tp_size=1, expert_split=ExpertSplit.SLICE
        ),
        pools=PoolPlan(layouts=layouts, num_pages=3),
    )
    pools = allocate_pools(memory.pools, dcp_rank=1, device="cpu")
    allocated_pools = sum(pools.target.nbytes.values())
    if pools.draft is not None:
        allocated_pools += sum(pools.draft.nbytes.values())
    allocated_weights = sum(parameter.nbytes for parameter in checkpoint.parameters.values())
    assert sum(memory.weights_by_component.values()) == memory.weight_bytes == allocated_weights
    assert sum(memory.pools_by_component.values()) == memory.pools.size_bytes == allocated_pools
    assert memory.size_bytes == allocated_weights + allocated_pools
    assert ("draft latents" in memory.pools_by_component) == with_draft


def test_the_report_names_pools_tokens_and_the_draft_multiplier(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, tiny_spec("share")), dtype=torch.float32)
    layouts = plan_layouts(
        checkpoint.config, page_size=4, kv_format=KvFormat.FLOAT32, kv_scale=None, with_draft=True, dcp_size=2
    )
    weights = count_weights(checkpoint.config, with_mtp=True).rank_bytes(
        WeightFormat.FLOAT32, tp_size=1, expert_split=ExpertSplit.SLICE
    )
    memory = RankMemory(weights=weights, pools=PoolPlan(layouts=layouts, num_pages=300))
    target, draft = (sum(memory.pools.pool_bytes(role).values()) for role in (PoolRole.TARGET, PoolRole.DRAFT))
    assert memory.report_lines() == (
        f"each rank: weights {size_text(memory.weight_bytes)}, target pool {size_text(target)} in 300 pages, "
        f"draft pool {size_text(draft)} in 600 pages",
        "2,400 tokens of context in 600 page ids of 4 tokens, float32, dcp_size 2, draft_pool_token_multiplier 2",
    )


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.00 kB"), (1_234_567, "1.23 MB"), (96_333_648_384, "96.33 GB")],
)
def test_sizes_are_written_in_decimal_units(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
