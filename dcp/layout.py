"""What the KV of one token is, byte by byte, for each kind of cache entry.

L = kv_lora_rank, R = rope_head_dim, D = index_head_dim; a page holds `page_size` tokens. Bytes per token and layer:

    latents, every layer                 float32          4 (L + R)                 L latent, R rotated key values
                                         bfloat16         2 (L + R)
                                         fp8              L + R                     e4m3, the scale is the layer's
                                         fp8_packed       L + 4 ceil(L / 128) + 2R  e4m3, f32 scales, bf16 rope
    index keys, layers with an indexer   float32          4 D
                                         bfloat16         2 D
                                         fp8, fp8_packed  D + 4                     e4m3, f32 scale
"""

import hashlib
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any

from specdec.dcp.geometry import PoolRole
from specdec.dcp.page_ids import NUM_RESERVED_PAGES
from specdec.kernels.errors import ConfigError


class KvFormat(StrEnum):
    """How latents and index keys are stored."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"
    FP8_PACKED = "fp8_packed"


class EntryKind(StrEnum):
    """What a cache entry is; with the role of its pool it names one of the four kinds of entries."""

    LATENT = "latent"
    INDEX_KEYS = "index_keys"


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """One field of a token inside the page of one layer, all in bytes: token i lies at `offset + i * stride`."""

    name: str
    offset: int
    stride: int
    size: int


@dataclass(frozen=True, slots=True)
class EntryLayout:
    """The page of one layer for one kind of entry.

    Attributes:
        kind: What is stored.
        layers: Model layers that own such entries, ascending; the place in this tuple is the place in a page.
        page_size: Tokens of a page.
        fields: Disjoint fields that cover the page.
    """

    kind: EntryKind
    layers: tuple[int, ...]
    page_size: int
    fields: tuple[FieldLayout, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer."""
        return sum(field.size for field in self.fields)

    @property
    def bytes_per_layer_page(self) -> int:
        """Bytes of one page of one layer."""
        return self.bytes_per_token * self.page_size

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers that own such entries."""
        return self.bytes_per_layer_page * len(self.layers)


@dataclass(frozen=True, kw_only=True)
class PoolLayout:
    """Layout of one pool: everything two sides must agree on before bytes are moved between them.

    Attributes:
        role: Target or draft.
        page_size: Tokens of a page, a power of two.
        kv_format: Storage format of both kinds of entries.
        kv_lora_rank: L.
        rope_head_dim: R.
        index_head_dim: D; a multiple of 4 in the two FP8 formats, which align f32 scales behind the keys.
        num_latent_layers: Layers of the model; each owns latents.
        index_layers: Model layers that own index keys, ascending.
        fp8_scales: For `KvFormat.FP8` one scale per layer, given even when it is 1.0; empty for every other format.
    """

    role: PoolRole
    page_size: int
    kv_format: KvFormat
    kv_lora_rank: int
    rope_head_dim: int
    index_head_dim: int
    num_latent_layers: int
    index_layers: tuple[int, ...]
    fp8_scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("page_size", "kv_lora_rank", "rope_head_dim", "index_head_dim", "num_latent_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}: take 1, 4 or 64")
        if list(self.index_layers) != sorted(set(self.index_layers) & set(range(self.num_latent_layers))):
            raise ConfigError(
                f"index_layers must ascend within 0..{self.num_latent_layers - 1}, got {self.index_layers}"
            )
        if self._has_fp8_index_keys and self.index_head_dim % 4:
            raise ConfigError(
                f"index_head_dim must be a multiple of 4 for kv format {self.kv_format.value}, "
                f"got {self.index_head_dim}"
            )
        num_scales = self.num_latent_layers if self.kv_format is KvFormat.FP8 else 0
        if len(self.fp8_scales) != num_scales:
            raise ConfigError(
                f"kv format {self.kv_format.value} of {self.num_latent_layers} layers takes {num_scales} fp8_scales "
                f"(one per layer for fp8, none otherwise), got {len(self.fp8_scales)}"
            )
        for layer, scale in enumerate(self.fp8_scales):
            if not 0.0 < scale < float("inf"):
                raise ConfigError(f"fp8_scales[{layer}] must be positive and finite, got {scale}")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is derived: a layout travels with every order of a transfer."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def latent(self) -> EntryLayout:
        """Latents: one field, L latent and R rope values of a token together."""
        # Torch comes with it, which whoever only plans with these types does without.
        from specdec.kernels.latent_formats import packed_row_bytes  # noqa: PLC0415

        num_values = self.kv_lora_rank + self.rope_head_dim
        size = {
            KvFormat.FLOAT32: 4 * num_values,
            KvFormat.BFLOAT16: 2 * num_values,
            KvFormat.FP8: num_values,
            KvFormat.FP8_PACKED: packed_row_bytes(self.kv_lora_rank, self.rope_head_dim),
        }[self.kv_format]
        fields = (FieldLayout("latent", 0, size, size),)
        return EntryLayout(EntryKind.LATENT, tuple(range(self.num_latent_layers)), self.page_size, fields)

    @cached_property
    def index_keys(self) -> EntryLayout:
        """Index keys: one field, or in the FP8 formats two, because scales lie behind the keys of the whole page."""
        num_values = self.index_head_dim
        if self._has_fp8_index_keys:
            fields: tuple[FieldLayout, ...] = (
                FieldLayout("keys", 0, num_values, num_values),
                FieldLayout("scales", num_values * self.page_size, 4, 4),
            )
        else:
            size = (4 if self.kv_format is KvFormat.FLOAT32 else 2) * num_values
            fields = (FieldLayout("keys", 0, size, size),)
        return EntryLayout(EntryKind.INDEX_KEYS, self.index_layers, self.page_size, fields)

    @property
    def entries(self) -> tuple[EntryLayout, EntryLayout]:
        """Both kinds of entries of this pool."""
        return self.latent, self.index_keys

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page: all layers, both kinds."""
        return sum(entry.bytes_per_page for entry in self.entries)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token: all layers, both kinds."""
        return self.bytes_per_page // self.page_size

    def pool_bytes(self, num_pages: int) -> dict[EntryKind, int]:
        """Bytes that a pool of `num_pages` physical pages allocates, its reserved pages included."""
        return {entry.kind: (num_pages + NUM_RESERVED_PAGES) * entry.bytes_per_page for entry in self.entries}

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest, equal exactly where the bytes of a page mean the same."""
        parts = (
            "kv-layout-1",
            self.role.value,
            self.page_size,
            self.kv_format.value,
            self.kv_lora_rank,
            self.rope_head_dim,
            self.index_head_dim,
            self.num_latent_layers,
            self.index_layers,
            [float(scale).hex() for scale in self.fp8_scales],
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def _has_fp8_index_keys(self) -> bool:
        return self.kv_format in (KvFormat.FP8, KvFormat.FP8_PACKED)
