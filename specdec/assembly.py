"""From ranks and settings to a core that schedules them: slots, pages, draft source."""

from specdec.core import EngineCore
from specdec.dcp.allocator import PageAllocator
from specdec.dcp.prefix_tree import PrefixTree
from specdec.drafting.draft import DraftSource
from specdec.drafting.draft_length import DraftLength
from specdec.engine_config import EngineConfig
from specdec.ranks.passes import Ranks
from specdec.scheduler import Scheduler
from specdec.slot_table import SlotTable


def build_core(ranks: Ranks, config: EngineConfig, *, draft_source: DraftSource | None = None) -> EngineCore:
    """Put slots, pages and a scheduler above the ranks.

    Args:
        ranks: With their pools.
        config: The engine's settings.
        draft_source: Used instead of the checkpoint's MTP layer.
    """
    pool, model = ranks.worker.pool, ranks.worker.target.config
    draft: DraftSource | None = draft_source
    if draft is None and ranks.worker.draft is not None:
        draft = ranks
    slots = SlotTable(
        num_slots=config.max_num_requests,
        max_model_len=config.max_model_len or model.max_position_embeddings,
        max_draft_tokens=config.num_draft_tokens,
        page_size=config.page_size,
    )
    allocator = PageAllocator(pool.num_pages, pool.geometry.size)
    num_draft_tokens = config.num_draft_tokens if draft is not None else 0
    draft_length = None
    if num_draft_tokens and config.is_draft_length_auto:
        draft_length = DraftLength(num_draft_tokens, prefill_chunk_tokens=config.prefill_chunk_tokens)
    scheduler = Scheduler(
        slots,
        allocator,
        PrefixTree(allocator, config.page_size) if config.prefix_cache else None,
        num_draft_tokens=num_draft_tokens,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        draft_length=draft_length,
        # A round on the device also writes the draft KV of the next one's drafts.
        num_lookahead=0 if ranks.worker.device_rounds is None else num_draft_tokens,
    )
    return EngineCore(ranks=ranks, scheduler=scheduler, draft=draft)
