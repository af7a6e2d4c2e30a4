"""What a model is, as plain data: from its config alone, or from the headers of its checkpoint too.

No weights are read. A checkpoint whose files do not fit its config raises the same errors as loading it would.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.dcp.geometry import PoolRole
from specdec.dcp.layout import EntryKind, KvFormat, PoolLayout
from specdec.kernels.errors import ConfigError
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.config_keys import MODEL_TYPE
from specdec.models.glm.json_files import read_optional_json_object
from specdec.models.glm.manifest import Component, TensorSpec, derive_manifest
from specdec.models.glm.matching import match_tensors
from specdec.models.glm.released import ModelLocation, locate_model
from specdec.models.glm.safetensors_files import open_checkpoint
from specdec.models.glm.template_facts import TemplateFacts, read_template_facts
from specdec.models.glm.vocabulary import (
    GENERATION_CONFIG_NAME,
    TOKENIZER_NAME,
    generation_end_ids,
    open_tokenizer,
    vocabulary_faults,
)

_PAGE_SIZE = 64  # bytes per token do not depend on it


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentSize:
    """Sums over the tensors of one part of the model; scales count as tensors and bytes, not as parameters."""

    component: str
    num_tensors: int
    num_parameters: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KvBytes:
    """Bytes of KV that one token takes over all layers, by entry kind; None where a format does not fit the model."""

    kv_format: str
    target_latent: int | None
    target_index_keys: int | None
    draft_latent: int | None
    draft_index_keys: int | None

    @property
    def total(self) -> int | None:
        """All four kinds together, on one rank that holds both pools."""
        parts = (self.target_latent, self.target_index_keys, self.draft_latent, self.draft_index_keys)
        return None if None in parts else sum(part for part in parts if part is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopToken:
    """A token that ends a turn; `text` is None without a tokenizer."""

    token_id: int
    text: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Everything `specdec inspect` shows.

    Attributes:
        source: "checkpoint" when file headers were read, "config" when the tensors are derived from the config alone.
        architecture: The numbers of the config, by their field names.
        indexer_types: "full" or "shared", layer by layer; the MTP layer is not among them.
        mlp_layer_types: "dense" or "sparse", layer by layer.
        has_mtp: The checkpoint holds an MTP layer (by its config, when only that is known).
        quantisation: How most matrices are stored.
        num_tensors, num_scales, num_parameters, size_bytes: Sums over all tensors that belong to the model.
        ignored_tensors: Stored tensors that loading leaves out, with the reason.
        ignored_keys: Keys of config.json that are not used, with the reason.
        generation_defaults: Sampling parameters of generation_config.json.
        template: What the chat template understands; None without one.
        warnings: What a user should know.
    """

    model: str
    model_type: str
    source: str
    architecture: dict[str, Any]
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    has_mtp: bool
    quantisation: str
    num_tensors: int
    num_scales: int
    num_parameters: int
    size_bytes: int
    components: tuple[ComponentSize, ...]
    kv_bytes_per_token: tuple[KvBytes, ...]
    stop_tokens: tuple[StopToken, ...]
    generation_defaults: dict[str, Any]
    template: TemplateFacts | None
    ignored_tensors: dict[str, str]
    ignored_keys: dict[str, str]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; each KV format has its total added."""
        values = asdict(self)
        values["kv_bytes_per_token"] = [asdict(kv) | {"total": kv.total} for kv in self.kv_bytes_per_token]
        return values


def inspect_model(model: str | Path) -> Inspection:
    """Describe a checkpoint directory, a config.json or a released name.

    Raises:
        ConfigError: No such model, or its config asks for something that is not implemented.
        CheckpointError: Its files are damaged or do not hold what the config calls for.
    """
    location = locate_model(model)
    config = GlmConfig.from_file(location.config_path)
    stored = _stored_tensors(config, location)
    beside = location.config_path.parent if location.directory is None else location.directory
    generation_config = read_optional_json_object(beside / GENERATION_CONFIG_NAME)
    return Inspection(
        model=location.name,
        model_type=MODEL_TYPE,
        source="config" if location.directory is None else "checkpoint",
        architecture=_architecture(config),
        indexer_types=config.indexer_types,
        mlp_layer_types=config.mlp_layer_types,
        has_mtp=stored.has_mtp,
        quantisation="block-FP8 (e4m3, 128 x 128)"
        if config.weight_block_size
        else str(config.dtype).removeprefix("torch."),
        num_tensors=len(stored.tensors),
        num_scales=sum(tensor.is_scale for tensor in stored.tensors),
        num_parameters=sum(tensor.num_elements for tensor in stored.tensors if not tensor.is_scale),
        size_bytes=sum(tensor.size_bytes for tensor in stored.tensors),
        components=_component_sizes(stored.tensors),
        kv_bytes_per_token=tuple(_kv_bytes(config, kv_format, has_mtp=stored.has_mtp) for kv_format in KvFormat),
        stop_tokens=_stop_tokens(config, beside),
        generation_defaults={
            key: generation_config[key]
            for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")
            if generation_config.get(key) is not None
        },
        template=read_template_facts(beside),
        ignored_tensors=stored.ignored,
        ignored_keys=dict(config.ignored_keys),
        warnings=stored.warnings + vocabulary_faults(config, beside),
    )


@dataclass(frozen=True)
class _StoredTensors:
    tensors: list[TensorSpec]
    has_mtp: bool
    ignored: dict[str, str]
    warnings: tuple[str, ...]


def _stored_tensors(config: GlmConfig, location: ModelLocation) -> _StoredTensors:
    """The tensors that loading would read: from the file headers where there are files."""
    if location.directory is None:
        tensors = list(derive_manifest(config).tensors.values())
        return _StoredTensors(tensors, config.num_mtp_layers > 0, {}, ())
    matched = match_tensors(config, open_checkpoint(location.directory))
    derived = derive_manifest(config, with_mtp=matched.has_mtp).tensors
    tensors = []
    for name, weight in matched.weights.items():
        tensors.append(derived[name]._replace(dtype=weight.dtype))
        scale = matched.scales.get(name)
        if scale is not None:
            component = derived[name].component
            tensors.append(TensorSpec(scale.name, scale.shape, scale.dtype, component, is_scale=True))
    return _StoredTensors(tensors, matched.has_mtp, matched.ignored, matched.warnings)


def _architecture(config: GlmConfig) -> dict[str, Any]:
    left_out = {"indexer_types", "mlp_layer_types", "ignored_keys", "dtype", "eos_token_ids", "weight_block_size"}
    return {name: value for name, value in asdict(config).items() if name not in left_out}


def _component_sizes(tensors: Iterable[TensorSpec]) -> tuple[ComponentSize, ...]:
    by_component: dict[Component, list[TensorSpec]] = {component: [] for component in Component}
    for tensor in tensors:
        by_component[tensor.component].append(tensor)
    return tuple(
        ComponentSize(
            component=component.value,
            num_tensors=len(members),
            num_parameters=sum(tensor.num_elements for tensor in members if not tensor.is_scale),
            size_bytes=sum(tensor.size_bytes for tensor in members),
        )
        for component, members in by_component.items()
        if members
    )


def _kv_bytes(config: GlmConfig, kv_format: KvFormat, *, has_mtp: bool) -> KvBytes:
    sizes: dict[tuple[PoolRole, EntryKind], int | None] = {}
    pools = ((PoolRole.TARGET, config.num_layers, config.full_layers), (PoolRole.DRAFT, int(has_mtp), (0,)))
    for role, num_layers, index_layers in pools:
        for kind in EntryKind:
            sizes[role, kind] = 0
        if num_layers == 0:
            continue
        try:
            layout = PoolLayout(
                role=role,
                page_size=_PAGE_SIZE,
                kv_format=kv_format,
                kv_lora_rank=config.kv_lora_rank,
                rope_head_dim=config.qk_rope_head_dim,
                index_head_dim=config.index_head_dim,
                num_latent_layers=num_layers,
                index_layers=index_layers,
                fp8_scales=(1.0,) * num_layers if kv_format is KvFormat.FP8 else (),
            )
        except ConfigError:
            for kind in EntryKind:
                sizes[role, kind] = None
            continue
        for entry in layout.entries:
            sizes[role, entry.kind] = entry.bytes_per_token * len(entry.layers)
    return KvBytes(
        kv_format=kv_format.value,
        target_latent=sizes[PoolRole.TARGET, EntryKind.LATENT],
        target_index_keys=sizes[PoolRole.TARGET, EntryKind.INDEX_KEYS],
        draft_latent=sizes[PoolRole.DRAFT, EntryKind.LATENT],
        draft_index_keys=sizes[PoolRole.DRAFT, EntryKind.INDEX_KEYS],
    )


def _stop_tokens(config: GlmConfig, directory: Path) -> tuple[StopToken, ...]:
    """End tokens of both configs, in order, with their texts where there is a tokenizer."""
    token_ids = dict.fromkeys([*config.eos_token_ids, *generation_end_ids(directory)])
    path = directory / TOKENIZER_NAME
    tokenizer = open_tokenizer(path) if path.exists() else None
    return tuple(
        StopToken(token_id=token_id, text=None if tokenizer is None else tokenizer.id_to_token(token_id))
        for token_id in token_ids
    )
