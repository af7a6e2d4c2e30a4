"""How much context a model has room for: memory of a rank, weights, pools, and what each choice costs.

    pools = static_fraction * gpu_memory - reserve - weights        (or pool_bytes, where that is given)

What the static fraction leaves over is for activations, graphs and workspace; the reserve is taken on top of that. The
weights and pools are those that loading and the engine allocate; nothing is allocated here.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from specdec.dcp.layout import KvFormat
from specdec.errors import ConfigError
from specdec.memory.pool_plan import PoolPlan, check_page_size, plan_layouts
from specdec.memory.rank_memory import RankMemory, size_text
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.expert_split import ExpertSplit, choose_expert_split
from specdec.models.glm.matching import match_tensors
from specdec.models.glm.parallel_sizes import check_parallel_sizes, fitting_dcp_sizes, fitting_tp_sizes
from specdec.models.glm.released import locate_model
from specdec.models.glm.safetensors_files import open_checkpoint
from specdec.models.glm.weight_bytes import WeightFormat, count_weights, stored_weight_format

_USUAL_CONTEXT = 131_072
_KV_FORMAT_OF_WEIGHTS = {WeightFormat.FLOAT32: KvFormat.FLOAT32}  # the others compute in bfloat16


class IndexKeys(StrEnum):
    """Who holds the target index keys; the engine shards them, replicas exist as a price."""

    SHARDED = "sharded"
    REPLICATED = "replicated"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """What is planned for. None is decided by the planner; the fields of a kind also take the text of a member.

    Attributes:
        gpu_memory: Bytes of one rank's device; may be None where `pool_bytes` is given.
        static_fraction: Share of it for weights, pools and reserve.
        reserve: Bytes kept free within that share, for graphs and workspace.
        pool_bytes: Bytes of one rank's pools, instead of what the weights leave.
        tp_size: Tensor-parallel ranks.
        dcp_size: Ranks that share the target pages of a request.
        cp_size: Ranks of a layer split, each with all weights; the plan is that of the rank with the most KV.
        kv_format: Storage format of the pools; None is float32 for float32 weights, else bfloat16.
        weight_format: How weights lie in memory; None is the checkpoint's.
        expert_split: How ranks share experts; None asks `choose_expert_split`.
        draft: Whether there is a draft pool; None where the checkpoint has an MTP layer.
        index_keys: Whether ranks share the target index keys.
        page_size: Tokens of a page.
        max_model_len: Most tokens of a request; None is the model's limit.
        context: Tokens of each request for which the largest batch is asked; None is 131,072, or the limit below it.
    """

    gpu_memory: int | None = None
    static_fraction: float = 0.85
    reserve: int = 0
    pool_bytes: int | None = None
    tp_size: int = 1
    dcp_size: int = 1
    cp_size: int = 1
    kv_format: KvFormat | None = None
    weight_format: WeightFormat | None = None
    expert_split: ExpertSplit | None = None
    draft: bool | None = None
    index_keys: IndexKeys = IndexKeys.SHARDED
    page_size: int = 64
    max_model_len: int | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        for name, kind in _ENUMERATIONS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if value not in list(kind):
                raise ConfigError(f"{name} must be one of {', '.join(kind)}, got {value!r}")
            object.__setattr__(self, name, kind(value))
        for name in ("gpu_memory", "pool_bytes", "max_model_len", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        if self.cp_size < 1 or (self.cp_size > 1 and self.tp_size > 1):
            raise ConfigError(
                f"cp_size must be >= 1, and 1 where tp_size is above 1, got cp_size {self.cp_size} and tp_size "
                f"{self.tp_size}: ranks of a layer split hold all weights"
            )
        if self.reserve < 0:
            raise ConfigError(f"reserve must be >= 0 bytes, got {self.reserve}")
        if not 0 < self.static_fraction <= 1:
            raise ConfigError(f"static_fraction must be above 0 and at most 1, got {self.static_fraction}")
        if self.gpu_memory is None and self.pool_bytes is None:
            raise ConfigError(
                "give the memory of one device (--gpu-memory 141GiB), or the size of its pools (--pool-bytes 32GB)"
            )


_ENUMERATIONS: dict[str, type[StrEnum]] = {
    "kv_format": KvFormat,
    "weight_format": WeightFormat,
    "expert_split": ExpertSplit,
    "index_keys": IndexKeys,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Where the memory of one rank goes, and what context all ranks together hold.

    Attributes:
        settings: As planned, nothing left open but `gpu_memory` or `pool_bytes`.
        rank: Weights and pools of one rank.
        max_model_len: Most tokens of a request by the model and the settings.
        context: Tokens of each request of `largest_batch`.
    """

    settings: MemorySettings
    rank: RankMemory
    max_model_len: int
    context: int

    @property
    def num_tokens(self) -> int:
        """Tokens of context in total."""
        return self.rank.pools.num_tokens

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request that fits."""
        return min(self.max_model_len, self.num_tokens)

    @property
    def largest_batch(self) -> int:
        """Requests of `context` tokens that fit at the same time."""
        return self.rank.pools.num_page_ids // -(-self.context // self.settings.page_size)

    @property
    def unplanned_bytes(self) -> int | None:
        """What the device has beyond weights, pools and reserve; None where its memory is not known."""
        if self.settings.gpu_memory is None:
            return None
        return self.settings.gpu_memory - self.rank.size_bytes - self.settings.reserve

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know."""
        notes = []
        if self.num_tokens < self.max_model_len:
            notes.append(
                f"a request of {self.max_model_len:,} tokens does not fit: start with --max-model-len "
                f"{self.num_tokens} or less"
            )
        if self.settings.weight_format is WeightFormat.FP8:
            notes.append("fp8 weights are a price: loading dequantises them to bfloat16 or float32")
        if self.settings.index_keys is IndexKeys.REPLICATED:
            notes.append("replicated index keys are a price: the engine shards them")
        return tuple(notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The same plan with one setting changed, or left as it is.

    Attributes:
        setting: Field of `MemorySettings`.
        value: Its value here.
        is_current: The value of the plan itself.
        plan: The plan; None where it is impossible.
        fault: Why it is impossible; empty where it is not.
    """

    setting: str
    value: str
    is_current: bool
    plan: MemoryPlan | None
    fault: str = ""


class MemoryPlanner:
    """Plans for one model."""

    def __init__(self, config: GlmConfig, *, has_mtp: bool) -> None:
        self._config = config
        self._has_mtp = has_mtp
        self._census = count_weights(config, with_mtp=has_mtp)  # the MTP layer is loaded with or without a draft

    @classmethod
    def of_model(cls, model: str | Path) -> "MemoryPlanner":
        """Plan for a checkpoint directory, a config.json or a released name; reads file headers only.

        Raises:
            ConfigError: No such model, or its config asks for something that is not implemented.
            CheckpointError: Its files are damaged or do not hold what the config calls for.
        """
        location = locate_model(model)
        config = GlmConfig.from_file(location.config_path)
        if location.directory is None:
            return cls(config, has_mtp=config.num_mtp_layers > 0)
        return cls(config, has_mtp=match_tensors(config, open_checkpoint(location.directory)).has_mtp)

    def plan(self, settings: MemorySettings) -> MemoryPlan:
        """Divide the memory of a rank.

        Raises:
            ConfigError: The settings do not fit the model, each other, or the memory.
        """
        decided = self._decide(settings)
        check_page_size(settings.page_size, max_model_len=decided.max_model_len)
        layouts = plan_layouts(
            self._config,
            page_size=settings.page_size,
            kv_format=decided.kv_format,
            kv_scale=1.0 if decided.kv_format is KvFormat.FP8 else None,  # bytes do not depend on it
            with_draft=decided.draft,
            dcp_size=settings.dcp_size,
            replicates_index_keys=settings.index_keys is IndexKeys.REPLICATED,
            cp_size=settings.cp_size,
        )
        weights = self._census.rank_bytes(
            decided.weight_format, tp_size=settings.tp_size, expert_split=decided.expert_split
        )
        resolved = replace(settings, **decided._asdict())
        pool_bytes = self._pool_bytes(resolved, sum(weights.values()))
        # All ranks of a layer split have as many pages: as many as fit where they are largest.
        each_rank = [replace(layouts, cp_rank=rank) for rank in range(settings.cp_size)]
        layouts = min(each_rank, key=lambda each: each.num_pages_within(pool_bytes))
        num_pages = layouts.num_pages_within(pool_bytes)
        if num_pages < 1:
            smallest = layouts.reserved_bytes + layouts.bytes_per_page
            raise ConfigError(
                f"the pools of a rank need {smallest} bytes for their first page, {pool_bytes} are left: give more "
                "memory, a smaller page_size, or a smaller kv_format"
            )
        return MemoryPlan(
            settings=resolved,
            rank=RankMemory(weights=weights, pools=PoolPlan(layouts=layouts, num_pages=num_pages)),
            max_model_len=decided.max_model_len,
            context=decided.context,
        )

    def choices(self, plan: MemoryPlan) -> tuple[Choice, ...]:
        """What each setting costs: the plan with one of them changed at a time."""
        settings = plan.settings
        options: dict[str, tuple[Any, ...]] = {
            "dcp_size": fitting_dcp_sizes(settings.tp_size),
            **({"cp_size": (1, 2, 4, 8)} if settings.cp_size > 1 else {}),
            "kv_format": tuple(KvFormat),
            "draft": (True, False) if self._has_mtp else (False,),
            "index_keys": tuple(IndexKeys),
        }
        if settings.pool_bytes is None:  # otherwise weights do not change the pools
            options |= {"weight_format": tuple(WeightFormat), "expert_split": tuple(ExpertSplit)}
        return tuple(self._choice(plan, name, value) for name, values in options.items() for value in values)

    def _choice(self, plan: MemoryPlan, name: str, value: Any) -> Choice:
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        is_current = getattr(plan.settings, name) == value
        if is_current:
            return Choice(setting=name, value=text, is_current=True, plan=plan)
        try:
            changed = self.plan(replace(plan.settings, **{name: value}))
        except ConfigError as error:
            return Choice(setting=name, value=text, is_current=False, plan=None, fault=str(error))
        return Choice(setting=name, value=text, is_current=False, plan=changed)

    def _decide(self, settings: MemorySettings) -> "_Decided":
        config = self._config
        check_parallel_sizes(
            config, tp_size=settings.tp_size, dcp_size=settings.dcp_size, expert_split=settings.expert_split
        )
        if settings.draft and not self._has_mtp:
            raise ConfigError("the checkpoint has no MTP layer, so there is no draft pool to plan: leave the draft off")
        limit = config.max_position_embeddings
        max_model_len = settings.max_model_len or limit
        if max_model_len > limit:
            raise ConfigError(f"max_model_len must be at most max_position_embeddings {limit}, got {max_model_len}")
        context = settings.context or min(_USUAL_CONTEXT, max_model_len)
        if context > max_model_len:
            raise ConfigError(f"context must be at most max_model_len {max_model_len}, got {context}")
        weight_format = settings.weight_format or stored_weight_format(config)
        return _Decided(
            kv_format=settings.kv_format or _KV_FORMAT_OF_WEIGHTS.get(weight_format, KvFormat.BFLOAT16),
            weight_format=weight_format,
            expert_split=settings.expert_split or choose_expert_split(config, settings.tp_size),
            draft=self._has_mtp if settings.draft is None else settings.draft,
            max_model_len=max_model_len,
            context=context,
        )

    def _pool_bytes(self, settings: MemorySettings, num_weight_bytes: int) -> int:
        """Bytes for the pools of a rank."""
        if settings.gpu_memory is None:
            assert settings.pool_bytes is not None
            return settings.pool_bytes
        static = int(settings.static_fraction * settings.gpu_memory)
        left = static - settings.reserve - num_weight_bytes
        if left < (settings.pool_bytes or 1):
            wanted = f", pool_bytes {settings.pool_bytes}" if settings.pool_bytes else ""
            larger = [size for size in fitting_tp_sizes(self._config) if size > settings.tp_size]
            fixes = [f"a larger tp_size ({', '.join(map(str, larger))})"] if larger else []
            if settings.weight_format is not WeightFormat.FP8:
                fixes.append("a smaller weight_format")
            fixes.append("devices with more memory, or a larger share of it")
            raise ConfigError(
                f"the weights of a rank take {size_text(num_weight_bytes)} in {settings.weight_format} at tp_size "
                f"{settings.tp_size}, reserve {size_text(settings.reserve)}{wanted}; static_fraction "
                f"{settings.static_fraction} of gpu_memory {size_text(settings.gpu_memory)} is {size_text(static)}: "
                f"take {', '.join(fixes)}"
            )
        return left if settings.pool_bytes is None else settings.pool_bytes


class _Decided(NamedTuple):
    """The settings that may be left open, by their names."""

    kv_format: KvFormat
    weight_format: WeightFormat
    expert_split: ExpertSplit
    draft: bool
    max_model_len: int
    context: int
