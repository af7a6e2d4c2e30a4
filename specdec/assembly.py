"""From a checkpoint and settings to a core that runs: pools, slots, scheduler, draft."""

from dataclasses import dataclass

from specdec.core import EngineCore
from specdec.dcp.allocator import PageAllocator
from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.layout import KvFormat, PoolLayout
from specdec.dcp.pool import KvPool
from specdec.dcp.prefix_tree import PrefixTree
from specdec.draft import DraftSource
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError
from specdec.models.glm.checkpoint import LoadedCheckpoint
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.mtp import MtpIndexSharing, MtpLayer
from specdec.models.glm.target import GlmTarget
from specdec.mtp_draft import MtpDraft
from specdec.scheduler import Scheduler
from specdec.slot_table import SlotTable

_AUTO_POOL_BYTES = 1 << 30
_FORMAT_OF_DTYPE = {"torch.float32": KvFormat.FLOAT32, "torch.bfloat16": KvFormat.BFLOAT16}


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPlan:
    """What the KV memory of an engine will be, decided before any of it is allocated.

    Attributes:
        target: Layout of the target pool.
        draft: Layout of the draft pool; None without an MTP draft.
        num_pages: Page ids.
        max_model_len: Most tokens of a request.
    """

    target: PoolLayout
    draft: PoolLayout | None
    num_pages: int
    max_model_len: int


def plan_kv(model: GlmConfig, config: EngineConfig, *, dtype: str, with_draft: bool) -> KvPlan:
    """Decide layouts and sizes.

    Args:
        model: The checkpoint's config.
        config: The engine's settings.
        dtype: The parameters' dtype, which chooses the KV format where the settings do not.
        with_draft: Whether a draft pool is needed.

    Raises:
        ConfigError: The settings contradict the checkpoint or each other.
    """
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len must be at most the checkpoint's max_position_embeddings {model.max_position_embeddings}, "
            f"got {max_model_len}"
        )
    kv_format = config.kv_format or _FORMAT_OF_DTYPE[dtype]

    def layout(role: PoolRole, num_layers: int, index_layers: tuple[int, ...]) -> PoolLayout:
        return PoolLayout(
            role=role,
            page_size=config.page_size,
            kv_format=kv_format,
            kv_lora_rank=model.kv_lora_rank,
            rope_head_dim=model.qk_rope_head_dim,
            index_head_dim=model.index_head_dim,
            num_latent_layers=num_layers,
            index_layers=index_layers,
            fp8_scales=() if config.kv_scale is None else (config.kv_scale,) * num_layers,
        )

    target = layout(PoolRole.TARGET, model.num_layers, model.full_layers)
    draft = layout(PoolRole.DRAFT, 1, (0,)) if with_draft else None
    pages_of_request = -(-max_model_len // config.page_size)
    num_pages = config.num_pages
    if num_pages is None:
        page_bytes = target.bytes_per_page + (draft.bytes_per_page if draft else 0)
        num_pages = min(pages_of_request * config.max_num_requests, _AUTO_POOL_BYTES // page_bytes)
        num_pages = max(num_pages, pages_of_request)
    if num_pages < pages_of_request:
        # One request of full length must fit alone: then preempting the others always lets the oldest go on.
        raise ConfigError(
            f"a request of max_model_len {max_model_len} needs {pages_of_request} pages of {config.page_size} tokens, "
            f"num_pages is {num_pages}: raise num_pages or lower max_model_len"
        )
    return KvPlan(target=target, draft=draft, num_pages=num_pages, max_model_len=max_model_len)


def build_core(
    checkpoint: LoadedCheckpoint,
    config: EngineConfig,
    *,
    draft_source: DraftSource | None = None,
) -> EngineCore:
    """Allocate the pools and wire the parts of a round together.

    Args:
        checkpoint: The loaded model.
        config: The engine's settings.
        draft_source: Used instead of the checkpoint's MTP layer.

    Raises:
        ConfigError: Speculation is asked for, and the checkpoint has no MTP layer and no source was given; or the
            settings do not fit the checkpoint.
    """
    model = checkpoint.config
    uses_mtp = config.num_draft_tokens > 0 and draft_source is None
    if uses_mtp and not checkpoint.report.has_mtp:
        raise ConfigError(
            "the checkpoint has no MTP layer to draft with: pass num_draft_tokens 0 (--num-draft-tokens 0), or use a "
            "checkpoint that holds its MTP layer"
        )
    embedding = checkpoint.parameters["embed_tokens"]
    plan = plan_kv(model, config, dtype=str(embedding.dtype), with_draft=uses_mtp)
    target = GlmTarget(model, checkpoint.parameters, latent_norm_eps=config.latent_norm_eps)
    target_pool = KvPool(
        plan.target, num_pages=plan.num_pages, geometry=Geometry(1, 0, PoolRole.TARGET), device=embedding.device
    )
    slots = SlotTable(
        num_slots=config.max_num_requests,
        max_model_len=plan.max_model_len,
        max_draft_tokens=config.num_draft_tokens,
        page_size=config.page_size,
    )
    draft = draft_source
    if plan.draft is not None:
        sharing = config.mtp_index_sharing
        if sharing is None:
            sharing = MtpIndexSharing.ANCHOR if model.index_share_for_mtp else MtpIndexSharing.OFF
        draft = MtpDraft(
            MtpLayer(model, checkpoint.parameters, target, latent_norm_eps=config.latent_norm_eps),
            KvPool(
                plan.draft, num_pages=plan.num_pages, geometry=Geometry(1, 0, PoolRole.DRAFT), device=embedding.device
            ),
            rule=config.acceptance,
            num_slots=config.max_num_requests,
            index_sharing=sharing,
        )
    allocator = PageAllocator(plan.num_pages, 1)
    scheduler = Scheduler(
        slots,
        allocator,
        PrefixTree(allocator, config.page_size) if config.prefix_cache else None,
        num_draft_tokens=config.num_draft_tokens if draft is not None else 0,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
    )
    return EngineCore(
        target=target,
        pool=target_pool,
        scheduler=scheduler,
        draft=draft,
        rule=config.acceptance,
    )
