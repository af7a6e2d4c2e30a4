"""The KV memory of an engine, decided from its settings before any of it is allocated."""

from dataclasses import dataclass, replace

from specdec.dcp.layout import KvFormat
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError
from specdec.memory.pool_plan import PoolPlan, check_page_size, plan_layouts
from specdec.memory.rank_memory import size_text
from specdec.models.glm.config import GlmConfig

_AUTO_POOL_BYTES = 1 << 30
_MAX_TABLE_BYTES = 1 << 34
_MAX_ADDRESS = (1 << 63) - 1
_FORMAT_OF_DTYPE = {"torch.float32": KvFormat.FLOAT32, "torch.bfloat16": KvFormat.BFLOAT16}


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPlan:
    """What the KV memory of an engine will be, decided before any of it is allocated.

    Attributes:
        pools: Both pools of a rank.
        max_model_len: Most tokens of a request.
    """

    pools: PoolPlan
    max_model_len: int


def plan_kv(model: GlmConfig, config: EngineConfig, *, dtype: str, with_draft: bool, cp_rank: int = 0) -> KvPlan:
    """Decide layouts and sizes.

    Args:
        model: The checkpoint's config.
        config: The engine's settings.
        dtype: The parameters' dtype, which chooses the KV format where the settings do not.
        with_draft: Whether a draft pool is needed.
        cp_rank: Which rank of a layer split is planned for.

    Raises:
        ConfigError: The settings contradict the checkpoint or each other.
    """
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len must be at most the checkpoint's max_position_embeddings {model.max_position_embeddings}, "
            f"got {max_model_len}"
        )
    check_page_size(config.page_size, max_model_len=max_model_len)
    _check_tables(model, config, max_model_len=max_model_len)
    dcp_size = config.dcp_size
    layouts = plan_layouts(
        model,
        page_size=config.page_size,
        kv_format=config.kv_format or _FORMAT_OF_DTYPE[dtype],
        kv_scale=config.kv_scale,
        with_draft=with_draft,
        dcp_size=dcp_size,
        cp_size=config.cp_size,
        cp_rank=cp_rank,
    )
    pages_of_request = -(-max_model_len // config.page_size)
    pages_of_rank = -(-pages_of_request // dcp_size)
    num_pages = config.num_pages
    if num_pages is None:
        enough = -(-pages_of_request * config.max_num_requests // dcp_size)
        each_rank = [replace(layouts, cp_rank=rank) for rank in range(config.cp_size)]
        num_fitting = min(each.num_pages_within(_AUTO_POOL_BYTES) for each in each_rank)
        num_pages = max(min(enough, num_fitting), pages_of_rank)
    if num_pages < pages_of_rank:
        # One request of full length must fit alone: then preempting the others always lets the oldest go on.
        raise ConfigError(
            f"a request of max_model_len {max_model_len} needs {pages_of_rank} pages of {config.page_size} tokens on "
            f"each rank, num_pages is {num_pages}: raise num_pages or lower max_model_len"
        )
    pools = PoolPlan(layouts=layouts, num_pages=num_pages)
    if pools.size_bytes > _MAX_ADDRESS:
        raise ConfigError(
            f"the pools of a rank take {size_text(pools.size_bytes)} in {num_pages} pages of {config.page_size} "
            "tokens, more than can be addressed: lower num_pages or max_model_len"
        )
    return KvPlan(pools=pools, max_model_len=max_model_len)


def _check_tables(model: GlmConfig, config: EngineConfig, *, max_model_len: int) -> None:
    """Refuse more requests than the tables that are kept of each of them leave room for."""
    run = config.num_draft_tokens + 1
    num_pages = -(-max_model_len // config.page_size)
    # token ids, page ids, counts of accepted drafts, and the hidden state that the next draft begins with
    bytes_per_request = 4 * (max_model_len + run) + 8 * num_pages + 8 * run**2 + 4 * model.hidden_size
    table_bytes = bytes_per_request * config.max_num_requests
    if table_bytes > _MAX_TABLE_BYTES:
        raise ConfigError(
            f"max_num_requests {config.max_num_requests} takes {size_text(table_bytes)} for the tables of requests of "
            f"{max_model_len} tokens, at most {size_text(_MAX_TABLE_BYTES)} may be: lower max_num_requests or "
            "max_model_len"
        )
