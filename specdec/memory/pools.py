"""Allocate the pools of a rank as they were planned."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.page_ids import num_page_ids
from specdec.dcp.pool import KvPool
from specdec.errors import ConfigError
from specdec.memory.pool_plan import PoolPlan
from specdec.memory.rank_memory import size_text
from specdec.transfer.placement import entry_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """The KV memory of one rank; `draft` is None without an MTP draft."""

    target: KvPool
    draft: KvPool | None

    @property
    def memory_by_kind(self) -> dict[str, torch.Tensor]:
        """All memory of every kind of entry by its name; see `KvPool.memory`."""
        return {
            entry_name(pool.layout.role, entry.kind): pool.memory(entry.kind)
            for pool in (self.target, self.draft)
            if pool is not None
            for entry in pool.layout.entries
        }


def allocate_pools(
    plan: PoolPlan,
    *,
    dcp_rank: int,
    device: torch.device | str,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> Pools:
    """Allocate a rank's share of the target's pages, and the draft's page of every page id.

    Args:
        plan: With sharded index keys; replicas exist as a price only.
        dcp_rank: The rank's place among those that share the target pages.
        device: Where the pools live.
        allocate: Gives memory that other engines can read and write; None takes the usual.

    Raises:
        ConfigError: The device has no room for them.
    """
    try:
        return _allocate(plan, dcp_rank=dcp_rank, device=device, allocate=allocate)
    except (RuntimeError, MemoryError) as error:  # torch raises the first, whatever the device
        raise ConfigError(
            f"the pools take {size_text(plan.size_bytes)} in {plan.num_pages} pages of "
            f"{plan.layouts.target.page_size} tokens, which {device} cannot allocate: lower num_pages (--num-pages) or "
            "max_model_len (--max-model-len)"
        ) from error


def _allocate(
    plan: PoolPlan,
    *,
    dcp_rank: int,
    device: torch.device | str,
    allocate: Callable[[int], torch.Tensor] | None,
) -> Pools:
    layouts = plan.layouts
    geometry = Geometry(layouts.dcp_size, dcp_rank, PoolRole.TARGET)
    target = KvPool(layouts.target, num_pages=plan.num_pages, geometry=geometry, device=device, allocate=allocate)
    assert target.nbytes == plan.pool_bytes(PoolRole.TARGET)
    if layouts.draft is None:
        return Pools(target=target, draft=None)
    geometry = Geometry(1, 0, PoolRole.DRAFT)
    draft = KvPool(layouts.draft, num_pages=plan.num_draft_pages, geometry=geometry, device=device, allocate=allocate)
    assert draft.nbytes == plan.pool_bytes(PoolRole.DRAFT)
    # One id space serves both: an id beyond the smaller pool would write into memory that is not its page.
    assert draft.num_pages == num_page_ids(target.num_pages, layouts.dcp_size)
    return Pools(target=target, draft=draft)
