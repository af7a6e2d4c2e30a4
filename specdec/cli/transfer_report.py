"""What a hand-off from prefill to decode would move: the real plan, made for fresh pools and only counted."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specdec.dcp.geometry import PoolRole
from specdec.dcp.held_layers import layers_of_ranks
from specdec.dcp.layer_split import split_layers
from specdec.dcp.layout import EntryLayout, KvFormat
from specdec.errors import ConfigError
from specdec.memory.pool_plan import PoolLayouts, check_page_size, plan_layouts
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.released import locate_model
from specdec.transfer.descriptors import RegionMemory, expand_path
from specdec.transfer.placement import Placement, by_rank, dcp, entry_name, replicated
from specdec.transfer.plan_check import check_plan
from specdec.transfer.reshard_plan import ReshardPlan, Span, plan_reshard

_SOURCE = re.compile(r"(?P<kind>cp|pp|tp|dcp):(?P<size>[1-9][0-9]*)(x(?P<replicas>[1-9][0-9]*))?", flags=re.ASCII)
_LAYER_SPLITS = ("cp", "pp")
LAYOUTS = ("page-major", "layer-major")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferSettings:
    """What is planned for.

    Attributes:
        tokens: Tokens of the prompt.
        prefix: Tokens of it that decode has already.
        source: How prefill ranks hold the KV: "cp:N" split by layers over N ranks, "pp:N" N pipeline stages, "pp:NxT"
            of T ranks each, "tp:N" all of it on each of N ranks, "dcp:N" pages spread over N ranks.
        tp_size: Decode ranks.
        dcp_size: Decode ranks that share the target pages of a request.
        kv_format: Storage format of the pools.
        page_size: Tokens of a page.
        layout: Order of the pools, "page-major" as the engine's, or "layer-major".
    """

    tokens: int = 32_768
    prefix: int = 0
    source: str = "cp:8"
    tp_size: int = 1
    dcp_size: int = 1
    kv_format: KvFormat = KvFormat.BFLOAT16
    page_size: int = 64
    layout: str = LAYOUTS[0]

    def __post_init__(self) -> None:
        if self.kv_format not in list(KvFormat):
            raise ConfigError(f"kv_format must be one of {', '.join(KvFormat)}, got {self.kv_format!r}")
        object.__setattr__(self, "kv_format", KvFormat(self.kv_format))
        if not 0 <= self.prefix < self.tokens:
            raise ConfigError(f"prefix must be 0..tokens - 1, got {self.prefix} of {self.tokens}")
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if self.dcp_size < 1 or self.tp_size < 1 or self.tp_size % self.dcp_size:
            raise ConfigError(f"dcp_size must divide tp_size, got {self.dcp_size} and {self.tp_size}")
        found = _SOURCE.fullmatch(self.source)
        if found is None or (found["replicas"] and found["kind"] != "pp"):
            raise ConfigError(
                f"source must be cp:N, pp:N, pp:NxT, tp:N or dcp:N with N and T >= 1, got {self.source!r}"
            )

    @property
    def source_kind(self) -> str:
        """How prefill ranks hold the KV."""
        return self.source.partition(":")[0]

    @property
    def source_size(self) -> int:
        """Parts that the KV is in: ranks, or pipeline stages."""
        return int(self.source.partition(":")[2].partition("x")[0])

    @property
    def source_replicas(self) -> int:
        """Ranks of each pipeline stage."""
        return int(self.source.partition("x")[2] or 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryReport:
    """What moves of one kind of entry. S = source ranks, D = destination ranks.

    Attributes:
        kind: Its name.
        num_layers: Layers that have such entries.
        layers_SD: Layers of each path, i64; 0 where there is no path.
        bytes_SD: Bytes of each path, i64.
        descriptors_SD: Descriptors of each path, i64.
        whole_bytes: Bytes of all cells, once.
    """

    kind: str
    num_layers: int
    layers_SD: npt.NDArray[np.int64]
    bytes_SD: npt.NDArray[np.int64]
    descriptors_SD: npt.NDArray[np.int64]
    whole_bytes: int

    @property
    def num_paths(self) -> int:
        """Pairs of ranks between which something moves."""
        return int((self.bytes_SD > 0).sum())

    @property
    def total_bytes(self) -> int:
        """Bytes of all paths."""
        return int(self.bytes_SD.sum())

    @property
    def share(self) -> float:
        """Part of what sending all cells to every destination rank would take."""
        return self.total_bytes / max(self.whole_bytes * int(self.bytes_SD.shape[1]), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """A hand-off, counted.

    Attributes:
        settings: As planned.
        source_layers: Target layers that each source rank holds.
        entries: By kind of entry.
        hidden_state_bytes: The last token's hidden state, f32, which goes once, with the last message.
        digest: Of the plan.
    """

    settings: TransferSettings
    source_layers: tuple[int, ...]
    entries: tuple[EntryReport, ...]
    hidden_state_bytes: int
    digest: str


def report_transfer(model: str | Path, settings: TransferSettings) -> TransferReport:
    """Plan, check and count a hand-off.

    Raises:
        ConfigError: The settings do not fit the model or each other.
    """
    config = GlmConfig.from_file(locate_model(model).config_path)
    if settings.tokens > config.max_position_embeddings:
        raise ConfigError(f"tokens must be at most {config.max_position_embeddings}, got {settings.tokens}")
    check_page_size(settings.page_size, max_model_len=config.max_position_embeddings)
    layouts = plan_layouts(
        config,
        page_size=settings.page_size,
        kv_format=settings.kv_format,
        kv_scale=1.0 if settings.kv_format is KvFormat.FP8 else None,  # bytes do not depend on it
        with_draft=config.num_mtp_layers > 0,
        dcp_size=settings.dcp_size,
    )
    spans = {entry_name(role, entry.kind): _span(settings, role, entry, layouts) for role, entry in layouts.entries}
    plan = plan_reshard(spans)
    check_plan(plan)
    entries = tuple(
        _count(plan, entry_name(role, entry.kind), entry, is_page_major=settings.layout == LAYOUTS[0])
        for role, entry in layouts.entries
    )
    num_layers = layouts.target.num_latent_layers
    if settings.source_kind in _LAYER_SPLITS:
        runs = split_layers(num_layers, settings.source_size)
        source_layers = tuple(len(run) for run in runs for _ in range(settings.source_replicas))
    else:
        source_layers = (num_layers,) * settings.source_size
    return TransferReport(
        settings=settings,
        source_layers=source_layers,
        entries=entries,
        hidden_state_bytes=4 * config.hidden_size,
        digest=plan.digest,
    )


def _span(settings: TransferSettings, role: PoolRole, entry: EntryLayout, layouts: PoolLayouts) -> Span:
    """Placements of one kind on both sides, in pools that hold this request and nothing else.

    The draft's row of the last token is written by decode, so it does not travel.
    """
    num_pages = -(-settings.tokens // settings.page_size)
    page_ids = np.arange(num_pages)
    is_draft = role is PoolRole.DRAFT
    end = settings.tokens - 1 if is_draft else settings.tokens
    sizes = {"page_size": settings.page_size, "num_pages": num_pages}
    layers = entry.layers
    source: Placement
    if settings.source_kind in _LAYER_SPLITS:
        layout = next(each for each in (layouts.target, layouts.draft) if each is not None and each.role is role)
        stages = layers_of_ranks(layout, settings.source_size)
        held = [[layer for layer in layers if layer in stage] for stage in stages]
        source = by_rank([each for each in held for _ in range(settings.source_replicas)], **sizes)
    elif settings.source_kind == "tp" or is_draft:
        source = replicated(layers, num_ranks=settings.source_size, **sizes)
    else:
        source = dcp(layers, dcp_size=settings.source_size, **sizes)
    if is_draft:
        destination = replicated(layers, num_ranks=settings.tp_size, **sizes)
    else:
        destination = dcp(layers, dcp_size=settings.dcp_size, tp_size=settings.tp_size, **sizes)
    return Span(
        source=source,
        destination=destination,
        source_pages=page_ids,
        destination_pages=page_ids,
        begin=min(settings.prefix, end),
        end=end,
    )


def _count(plan: ReshardPlan, kind: str, entry: EntryLayout, *, is_page_major: bool) -> EntryReport:
    entry_plan = plan.entries[kind]
    span = entry_plan.span
    shape = (span.source.num_ranks, span.destination.num_ranks)
    layers_SD, bytes_SD, descriptors_SD = (np.zeros(shape, np.int64) for _ in range(3))
    for path in entry_plan.paths:
        where = path.source_rank, path.destination_rank
        memory = [
            _memory(entry, side, rank, is_page_major=is_page_major)
            for side, rank in zip((span.source, span.destination), where, strict=True)
        ]
        descriptors = expand_path(path, *memory)
        layers_SD[where] = len(path.route.layers)
        bytes_SD[where] = descriptors.num_bytes
        descriptors_SD[where] = len(descriptors)
    return EntryReport(
        kind=kind,
        num_layers=len(entry.layers),
        layers_SD=layers_SD,
        bytes_SD=bytes_SD,
        descriptors_SD=descriptors_SD,
        whole_bytes=(span.end - span.begin) * len(entry.layers) * entry.bytes_per_token,
    )


def _memory(entry: EntryLayout, side: Placement, rank: int, *, is_page_major: bool) -> RegionMemory:
    if is_page_major:
        return RegionMemory.page_major(entry, num_layers=len(side.rank_layers[rank]))
    return RegionMemory.layer_major(entry, num_pages=side.num_pages)


def report_as_dict(model: str, report: TransferReport) -> Mapping[str, object]:
    """The report as JSON types."""
    settings = report.settings
    return {
        "model": model,
        "settings": {name: getattr(settings, name) for name in TransferSettings.__dataclass_fields__},
        "source_layers": list(report.source_layers),
        "digest": report.digest,
        "hidden_state_bytes": report.hidden_state_bytes,
        "entries": [
            {
                "kind": entry.kind,
                "num_layers": entry.num_layers,
                "num_paths": entry.num_paths,
                "num_descriptors": int(entry.descriptors_SD.sum()),
                "total_bytes": entry.total_bytes,
                "source_rank_bytes": entry.bytes_SD.sum(axis=1).tolist(),
                "destination_rank_bytes": entry.bytes_SD.sum(axis=0).tolist(),
                "share_of_everything_everywhere": entry.share,
                "paths": [
                    {
                        "source_rank": source,
                        "destination_rank": destination,
                        "layers": int(entry.layers_SD[source, destination]),
                        "bytes": int(entry.bytes_SD[source, destination]),
                        "descriptors": int(entry.descriptors_SD[source, destination]),
                    }
                    for source, destination in np.argwhere(entry.bytes_SD > 0).tolist()
                ],
            }
            for entry in report.entries
        ],
    }
