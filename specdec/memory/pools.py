"""Allocate the pools of a rank as they were planned."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from specdec.dcp.communicator import Communicator
from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.held_layers import layers_of_ranks
from specdec.dcp.layer_split_pool import LayerSplitPool
from specdec.dcp.layout import PoolLayout
from specdec.dcp.page_ids import num_page_ids
from specdec.dcp.pool import KvPool
from specdec.errors import ConfigError
from specdec.memory.pool_plan import PoolPlan
from specdec.memory.rank_memory import size_text
from specdec.transfer.placement import entry_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """The KV memory of one rank; `draft` is None without an MTP draft."""

    target: KvPool | LayerSplitPool
    draft: KvPool | LayerSplitPool | None

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
    cp: Communicator | None = None,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> Pools:
    """Allocate a rank's share of the target's pages or layers, and of the draft's.

    Args:
        plan: With sharded index keys; replicas exist as a price only.
        dcp_rank: The rank's place among those that share the target pages.
        device: Where the pools live.
        cp: The ranks of a layer split; None where every rank has all layers.
        allocate: Gives memory that other engines can read and write; None takes the usual.

    Raises:
        ConfigError: The device has no room for them.
    """
    layouts = plan.layouts
    new_pool = partial(_new_pool, device=device, cp=cp, allocate=allocate)
    try:
        target = new_pool(
            layouts.target,
            num_pages=plan.num_pages,
            geometry=Geometry(layouts.dcp_size, dcp_rank, PoolRole.TARGET),
        )
        draft = None
        if layouts.draft is not None:
            geometry = Geometry(1, 0, PoolRole.DRAFT)
            draft = new_pool(layouts.draft, num_pages=plan.num_draft_pages, geometry=geometry)
    except (RuntimeError, MemoryError) as error:  # torch raises the first, whatever the device
        raise ConfigError(
            f"the pools take {size_text(plan.size_bytes)} in {plan.num_pages} pages of "
            f"{plan.layouts.target.page_size} tokens, which {device} cannot allocate: lower num_pages (--num-pages) or "
            "max_model_len (--max-model-len)"
        ) from error
    assert target.nbytes == plan.pool_bytes(PoolRole.TARGET)
    if draft is not None:
        assert draft.nbytes == plan.pool_bytes(PoolRole.DRAFT)
        # One id space serves both: an id beyond the smaller pool would write into memory that is not its page.
        assert draft.num_pages == num_page_ids(target.num_pages, layouts.dcp_size)
    return Pools(target=target, draft=draft)


def _new_pool(
    layout: PoolLayout,
    *,
    num_pages: int,
    geometry: Geometry,
    device: torch.device | str,
    cp: Communicator | None,
    allocate: Callable[[int], torch.Tensor] | None,
) -> KvPool | LayerSplitPool:
    if cp is None:
        return KvPool(layout, num_pages=num_pages, geometry=geometry, device=device, allocate=allocate)
    layers = layers_of_ranks(layout, cp.size)
    return LayerSplitPool(layout, num_pages=num_pages, layers_of_ranks=layers, cp=cp, device=device, allocate=allocate)
