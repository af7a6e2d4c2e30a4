"""What one rank keeps in memory: the weights and the pools, by component."""

from collections.abc import Mapping
from dataclasses import dataclass

from specdec.dcp.geometry import PoolRole
from specdec.dcp.layout import EntryKind
from specdec.memory.pool_plan import PoolPlan
from specdec.models.glm.manifest import Component

_ENTRY_NAMES = {
    (PoolRole.TARGET, EntryKind.LATENT): "target latents",
    (PoolRole.TARGET, EntryKind.INDEX_KEYS): "target index keys",
    (PoolRole.DRAFT, EntryKind.LATENT): "draft latents",
    (PoolRole.DRAFT, EntryKind.INDEX_KEYS): "draft index keys",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        weights: By part of the model.
        pools: The KV memory.
        workspace_bytes: What kernels choose positions in.
    """

    weights: Mapping[Component, int]
    pools: PoolPlan
    workspace_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(self.weights.values())

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.pools.size_bytes + self.workspace_bytes

    @property
    def weights_by_component(self) -> dict[str, int]:
        """Parts of the model that this rank has a share of."""
        return {component.value: size for component, size in self.weights.items() if size}

    @property
    def pools_by_component(self) -> dict[str, int]:
        """Kinds of entries, and the pages that hold none."""
        sizes = {_ENTRY_NAMES[entry]: size for entry, size in self.pools.live_bytes.items()}
        return sizes | {"scratch and zero pages": self.pools.layouts.reserved_bytes}

    def report_lines(self) -> tuple[str, str]:
        """Two lines for a log: what the memory of a rank goes to, and what context it holds."""
        pools, layouts = self.pools, self.pools.layouts
        parts = [f"weights {size_text(self.weight_bytes)}"]
        for role, num_pages in ((PoolRole.TARGET, pools.num_pages), (PoolRole.DRAFT, pools.num_draft_pages)):
            pool_bytes = sum(pools.pool_bytes(role).values())
            if pool_bytes:
                parts.append(f"{role.value} pool {size_text(pool_bytes)} in {num_pages:,} pages")
        if self.workspace_bytes:
            parts.append(f"workspace {size_text(self.workspace_bytes)}")
        context = (
            f"{pools.num_tokens:,} tokens of context in {pools.num_page_ids:,} page ids of {layouts.target.page_size} "
            f"tokens, {layouts.target.kv_format.value}, dcp_size {layouts.dcp_size}, draft_pool_token_multiplier "
            f"{layouts.draft_pool_token_multiplier}"
        )
        return f"each rank: {', '.join(parts)}", context


def size_text(num_bytes: int) -> str:
    """Write bytes in the largest decimal unit that leaves at least one whole."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} bytes"
