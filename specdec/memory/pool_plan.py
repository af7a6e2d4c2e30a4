"""The KV memory of one rank, decided before it is allocated: by the engine to allocate, by the planner to price.

The target pool is sharded by page over `dcp_size` ranks; the draft pool is replicated. There is one space of page ids,
so where a rank has M target pages it has M x dcp_size draft pages: the draft pool multiplier is a consequence.
"""

from dataclasses import dataclass

from specdec.dcp.geometry import PoolRole
from specdec.dcp.held_layers import layers_of_ranks
from specdec.dcp.layout import EntryKind, EntryLayout, KvFormat, PoolLayout
from specdec.dcp.page_ids import NUM_RESERVED_PAGES, num_page_ids
from specdec.errors import ConfigError
from specdec.models.glm.config import GlmConfig

_USUAL_PAGE_SIZE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLayouts:
    """What a page id costs a rank.

    Attributes:
        target: Layout of the target pool.
        draft: Layout of the draft pool; None without an MTP draft.
        dcp_size: Ranks that share the target pages of a request.
        replicates_index_keys: Every rank holds the target index keys of all ranks: a price, for the engine shards them.
        cp_size: Ranks of a layer split, which hold the layers that are theirs and one more of each kind in passing.
        cp_rank: Which of them.
    """

    target: PoolLayout
    draft: PoolLayout | None
    dcp_size: int
    replicates_index_keys: bool = False
    cp_size: int = 1
    cp_rank: int = 0

    @property
    def entries(self) -> tuple[tuple[PoolRole, EntryLayout], ...]:
        """Every kind of entry, target first."""
        pools = (self.target,) if self.draft is None else (self.target, self.draft)
        return tuple((pool.role, entry) for pool in pools for entry in pool.entries)

    @property
    def draft_pool_token_multiplier(self) -> int:
        """Draft tokens that a rank holds for each of its target tokens; 0 without a draft pool."""
        return 0 if self.draft is None else self.dcp_size

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a rank for one more target page on every rank."""
        return sum(self.page_bytes(role, entry) * self.num_copies(role, entry.kind) for role, entry in self.entries)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a rank for one token of context; a fraction of the target's bytes where ranks share it."""
        return self.bytes_per_page / (self.target.page_size * self.dcp_size)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the scratch and zero pages of a rank."""
        return sum(NUM_RESERVED_PAGES * self.page_bytes(role, entry) for role, entry in self.entries)

    def page_bytes(self, role: PoolRole, entry: EntryLayout) -> int:
        """Bytes of one physical page of a kind on this rank: of all layers, or of those that a layer split gives it."""
        if self.cp_size == 1:
            return entry.bytes_per_page
        layout = self.target if role is PoolRole.TARGET else self.draft
        assert layout is not None
        held = layers_of_ranks(layout, self.cp_size)[self.cp_rank]
        num_places = sum(layer in held for layer in entry.layers) + min(1, len(entry.layers))
        return num_places * entry.bytes_per_layer_page

    def num_copies(self, role: PoolRole, kind: EntryKind) -> int:
        """Pages of one kind that a rank holds for each of its target pages."""
        is_replicated = role is PoolRole.DRAFT or (self.replicates_index_keys and kind is EntryKind.INDEX_KEYS)
        return num_page_ids(1, self.dcp_size) if is_replicated else 1

    def num_pages_within(self, pool_bytes: int) -> int:
        """Most target pages of a rank whose pools take at most `pool_bytes`, reserved pages included; 0 if none."""
        return max(pool_bytes - self.reserved_bytes, 0) // self.bytes_per_page


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """The pools of one rank.

    Attributes:
        layouts: What a page id costs.
        num_pages: Physical target pages of a rank, reserved ones not counted.
    """

    layouts: PoolLayouts
    num_pages: int

    @property
    def num_page_ids(self) -> int:
        """Page ids over all ranks that share a request."""
        return num_page_ids(self.num_pages, self.layouts.dcp_size)

    @property
    def num_tokens(self) -> int:
        """Tokens of context that all page ids hold."""
        return self.num_page_ids * self.layouts.target.page_size

    @property
    def num_draft_pages(self) -> int:
        """Physical draft pages of a rank, reserved ones not counted; one for each page id."""
        return self.num_pages * self.layouts.draft_pool_token_multiplier

    @property
    def live_bytes(self) -> dict[tuple[PoolRole, EntryKind], int]:
        """Bytes of the pages that hold KV, by kind of entry."""
        return {
            (role, entry.kind): self.num_pages
            * self.layouts.num_copies(role, entry.kind)
            * self.layouts.page_bytes(role, entry)
            for role, entry in self.layouts.entries
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of a rank's pools, reserved pages included."""
        return sum(self.live_bytes.values()) + self.layouts.reserved_bytes

    def pool_bytes(self, role: PoolRole) -> dict[EntryKind, int]:
        """Bytes that one pool allocates, its reserved pages included."""
        return {
            entry.kind: self.live_bytes[role, entry.kind] + NUM_RESERVED_PAGES * self.layouts.page_bytes(role, entry)
            for entry_role, entry in self.layouts.entries
            if entry_role is role
        }


def check_page_size(page_size: int, *, max_model_len: int) -> None:
    """Refuse pages of which even the longest request would leave half empty; up to 64 tokens they always may.

    Raises:
        ConfigError: The page size is above the power of two at or above `max_model_len`.
    """
    largest = max(_USUAL_PAGE_SIZE, 1 << (max_model_len - 1).bit_length())
    if page_size > largest:
        raise ConfigError(
            f"page_size must be at most {largest} where no request has more than {max_model_len} tokens, "
            f"got {page_size}: take 64"
        )


def plan_layouts(
    model: GlmConfig,
    *,
    page_size: int,
    kv_format: KvFormat,
    kv_scale: float | None,
    with_draft: bool,
    dcp_size: int,
    replicates_index_keys: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> PoolLayouts:
    """Lay out both pools of a model.

    Args:
        model: The model.
        page_size: Tokens of a page.
        kv_format: Storage format of both pools.
        kv_scale: Scale of the plain FP8 format, for every layer; None for every other format.
        with_draft: Whether a draft pool is needed.
        dcp_size: Ranks that share the target pages of a request.
        replicates_index_keys: See `PoolLayouts`.
        cp_size: Ranks of a layer split.
        cp_rank: Which of them.

    Raises:
        ConfigError: The format or the page size does not fit the model.
    """
    if dcp_size < 1:
        raise ConfigError(f"dcp_size must be >= 1, got {dcp_size}")

    def layout(role: PoolRole, num_layers: int, index_layers: tuple[int, ...]) -> PoolLayout:
        return PoolLayout(
            role=role,
            page_size=page_size,
            kv_format=kv_format,
            kv_lora_rank=model.kv_lora_rank,
            rope_head_dim=model.qk_rope_head_dim,
            index_head_dim=model.index_head_dim,
            num_latent_layers=num_layers,
            index_layers=index_layers,
            fp8_scales=() if kv_scale is None else (kv_scale,) * num_layers,
        )

    return PoolLayouts(
        target=layout(PoolRole.TARGET, model.num_layers, model.full_layers),
        draft=layout(PoolRole.DRAFT, 1, (0,)) if with_draft else None,
        dcp_size=dcp_size,
        replicates_index_keys=replicates_index_keys,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
