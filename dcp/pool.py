"""The KV memory of one pool on one rank.

One buffer of bytes per kind of entry, page-major: all layers of a page that are kept lie side by side. Behind the live
pages lies the scratch page, which takes the writes of padded and unowned rows and is never read. In front of page 0
lies a page of zeros that is never written: physical index -1 reads it, so missing entries cost no mask (it took three
times as long as the gather) and dead memory, NaN included, cannot leak.

T = query rows, K = selected slots, R = requests, O = pages of a request that a rank owns, L = latent values, R (behind
T) = rope values, D = index head dim, M = physical pages, S = tokens of a page, B = bytes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from specdec.dcp.geometry import Geometry
from specdec.dcp.held_layers import HeldLayers, hold_layers
from specdec.dcp.layout import EntryKind, EntryLayout, KvFormat, PoolLayout
from specdec.dcp.metadata import BatchMetadata, place_rows
from specdec.dcp.page_ids import NUM_RESERVED_PAGES
from specdec.dcp.page_table import Int64Array, PageTable
from specdec.kernels.errors import ConfigError, GeometryError
from specdec.kernels.index_key_format import decode_index_keys, encode_index_keys
from specdec.kernels.latent_formats import decode_fp8, decode_fp8_packed, encode_fp8, encode_fp8_packed

_STORAGE_DTYPE = {
    KvFormat.FLOAT32: torch.float32,
    KvFormat.BFLOAT16: torch.bfloat16,
    KvFormat.FP8: torch.uint8,
    KvFormat.FP8_PACKED: torch.uint8,
}


class KvPool:
    """Latents and index keys, read and written through metadata of the pool's own geometry.

    Args:
        layout: What a page holds.
        num_pages: Live physical pages.
        geometry: The only geometry this pool serves.
        device: Where the memory lies.
        held: Which layers are kept; None keeps all.
        allocate: Gives zeroed memory of so many bytes on the device, u8, where others shall read and write it; None
            takes the usual.

    Attributes:
        layout: What a page holds.
        num_pages: Live physical pages; the reserved ones are not counted.
        geometry: The only geometry this pool serves.
        device: Where the memory lies.
        held: Which layers of the layout are kept, and where in a page; all of them unless it was given.
        views: What others made of the memory, by name; emptied when the pool takes other memory.
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        num_pages: int,
        geometry: Geometry,
        device: torch.device | str = "cpu",
        held: HeldLayers | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        if num_pages < 1:
            raise ConfigError(f"a {layout.role.value} pool needs at least one page, got num_pages={num_pages}")
        if geometry.role is not layout.role:
            raise GeometryError(f"a pool with the {layout.role.value} layout was given {geometry}")
        self.layout = layout
        self.num_pages = num_pages
        self.geometry = geometry
        self.device = torch.device(device)
        self.held = held or hold_layers(layout, range(layout.num_latent_layers))
        self._dtype = _STORAGE_DTYPE[layout.kv_format]
        self._page_shift = layout.page_size.bit_length() - 1
        self._storage: dict[EntryKind, torch.Tensor] = {}
        self._latent_write: dict[int, torch.Tensor] = {}
        self._latent_rows: dict[int, torch.Tensor] = {}
        self._index_pages: dict[int, torch.Tensor] = {}
        self._index_write: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.views: dict[str, Any] = {}
        self.take_memory(allocate)

    def take_memory(self, allocate: Callable[[int], torch.Tensor] | None) -> None:
        """Take new memory; what was stored is gone, and the old memory is given back before.

        Args:
            allocate: As for the constructor.
        """
        layout = self.layout
        self.views.clear()
        for views in (self._latent_write, self._latent_rows, self._index_pages, self._index_write, self._storage):
            views.clear()
        self._storage |= {
            entry.kind: _allocate(entry, self.held.num_places[entry.kind], self.num_pages, self.device, allocate)
            for entry in layout.entries
        }

        # Views of each layer, made once. Pages from 0 on for writes; from the zero page on for reads.
        page_size, place_of = layout.page_size, self.held.place_of[EntryKind.LATENT]
        tokens = self._storage[EntryKind.LATENT].view(self._dtype)
        tokens = tokens.view(*tokens.shape[:2], page_size, tokens.shape[2] // page_size)
        self._latent_write = {layer: tokens[1:, place] for layer, place in place_of.items()}
        rows = tokens.flatten(0, 2)
        self._latent_rows = {layer: rows[place * page_size :] for layer, place in place_of.items()}
        # A token row and the same row with all layers of its page side by side differ by this many rows per page.
        self._rows_of_other_layers = (self.held.num_places[EntryKind.LATENT] - 1) * page_size

        pages = self._storage[EntryKind.INDEX_KEYS].view(self._dtype)
        place_of = self.held.place_of[EntryKind.INDEX_KEYS]
        self._index_pages = {layer: pages[:, place] for layer, place in place_of.items()}
        self._index_write = {layer: self._index_fields(pages[1:]) for layer, pages in self._index_pages.items()}

    @property
    def nbytes(self) -> dict[EntryKind, int]:
        """Allocated bytes by kind of entry; where all layers are held, those of `layout.pool_bytes(num_pages)`."""
        return {kind: storage.nbytes for kind, storage in self._storage.items()}

    def buffer(self, kind: EntryKind) -> torch.Tensor:
        """Memory of one kind: u8 [M + 1, held layers, bytes of a layer's page], the pool's own, scratch page last."""
        return self._storage[kind][1:]

    def memory(self, kind: EntryKind) -> torch.Tensor:
        """All memory of one kind as it was allocated: u8 [1 + M + 1, held layers, bytes of a layer's page].

        Page 0 stands behind `NUM_FRONT_PAGES`.
        """
        return self._storage[kind]

    def place(self, pages: PageTable, *, request_index: Int64Array, position: Int64Array) -> "WholePass":
        """Place the rows of a pass, all of which this rank computes; see `place_rows`."""
        return WholePass(place_rows(pages, request_index=request_index, position=position), self)

    def write_latent(self, layer: int, latent_TL: torch.Tensor, rope_TR: torch.Tensor, meta: BatchMetadata) -> None:
        """Store the latents of a pass, f32 or bf16, at `meta`'s write rows; values are converted, the pool never is.

        Raises:
            GeometryError: `meta` was built for another pool.
        """
        self._check(meta)
        place = (meta.write_page_T, meta.write_offset_T)
        kv_format, kv_lora_rank = self.layout.kv_format, self.layout.kv_lora_rank
        _check_shape("latent_TL", latent_TL, len(place[0]), kv_lora_rank)
        _check_shape("rope_TR", rope_TR, len(place[0]), self.layout.rope_head_dim)
        pages_MSB = self._latent_write[layer]
        if kv_format is KvFormat.FP8:
            pages_MSB.index_put_(place, encode_fp8(latent_TL, rope_TR, self.layout.fp8_scales[layer]))
        elif kv_format is KvFormat.FP8_PACKED:
            pages_MSB.index_put_(place, encode_fp8_packed(latent_TL, rope_TR))
        else:
            pages_MSB[..., :kv_lora_rank].index_put_(place, latent_TL.to(self._dtype))
            pages_MSB[..., kv_lora_rank:].index_put_(place, rope_TR.to(self._dtype))

    def gather_latent(self, layer: int, rows_TK: torch.Tensor) -> torch.Tensor:
        """Read latents: f32 [T, K, L + R], exact zeros where a row is -1.

        Args:
            layer: Model layer.
            rows_TK: Physical token rows from `BatchMetadata.rows_of` of this pool's metadata, i64.
        """
        slot_TK = rows_TK + self.layout.page_size  # the zero page is page 0 here, and -1 its last token
        slot_TK = torch.add(slot_TK, slot_TK >> self._page_shift, alpha=self._rows_of_other_layers)
        stored = self._latent_rows[layer].index_select(0, slot_TK.reshape(-1))
        stored = stored.view(*rows_TK.shape, stored.shape[-1])
        match self.layout.kv_format:
            case KvFormat.FP8:
                return decode_fp8(stored, self.layout.fp8_scales[layer])
            case KvFormat.FP8_PACKED:
                return decode_fp8_packed(stored, self.layout.kv_lora_rank, self.layout.rope_head_dim)
            case _:
                return stored.float()

    def write_index_key(self, layer: int, key_TD: torch.Tensor, meta: BatchMetadata) -> None:
        """Store the index keys of a pass, f32 or bf16, at `meta`'s write rows, for a model layer that has an indexer.

        Raises:
            GeometryError: `meta` was built for another pool.
        """
        self._check(meta)
        place = (meta.write_page_T, meta.write_offset_T)
        _check_shape("key_TD", key_TD, len(place[0]), self.layout.index_head_dim)
        keys_MSD, scales_MS = self._index_write[layer]
        if scales_MS is None:
            keys_MSD.index_put_(place, key_TD.to(self._dtype))
            return
        stored_TD, scale_T = encode_index_keys(key_TD)
        keys_MSD.index_put_(place, stored_TD)
        scales_MS.index_put_(place, scale_T)

    def gather_index_keys(self, layer: int, meta: BatchMetadata) -> torch.Tensor:
        """Read the index keys of every request that this rank owns: f32 [R, O * page_size, D], by position.

        Owned pages stand side by side, whole: `BatchMetadata.owned_positions` tells the position of a column, and
        `owned_length_T` how many columns a query row may see. Behind a request's last owned page stand zeros; rows past
        its length are whatever its page holds: the caller masks them.

        Raises:
            GeometryError: `meta` was built for another pool.
        """
        self._check(meta)
        page_RO = meta.pages.owned_page_RO
        pages = self._index_pages[layer].index_select(0, (page_RO + 1).reshape(-1))
        stored, scales = self._index_fields(pages)
        keys = stored.float() if scales is None else decode_index_keys(stored, scales)
        return keys.view(len(page_RO), page_RO.shape[1] * meta.page_size, self.layout.index_head_dim)

    def _index_fields(self, pages_MB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys [M, S, D] and, in the FP8 formats, scales [M, S] as views of pages of index keys."""
        fields, page_size = self.layout.index_keys.fields, self.layout.page_size
        if len(fields) == 1:
            return pages_MB.view(len(pages_MB), page_size, self.layout.index_head_dim), None
        scales_offset = fields[1].offset
        keys = pages_MB[:, :scales_offset].view(len(pages_MB), page_size, self.layout.index_head_dim)
        return keys, pages_MB[:, scales_offset:].view(torch.float32)

    def _check(self, meta: BatchMetadata) -> None:
        if meta.geometry != self.geometry:
            raise GeometryError(f"metadata of {meta.geometry} was given to the pool of {self.geometry}")
        if meta.page_size != self.layout.page_size or meta.num_pages != self.num_pages:
            raise GeometryError(
                f"metadata for {meta.num_pages} pages of {meta.page_size} tokens was given to a "
                f"{self.layout.role.value} pool of {self.num_pages} pages of {self.layout.page_size}"
            )


class WholePass:
    """The rows of a pass, all of which this rank computes: a `PlacedPass`."""

    rows = slice(None)

    def __init__(self, metadata: BatchMetadata, store: KvPool) -> None:
        self.metadata = metadata
        self.store = store

    def run(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run the model; gives what it gives of the rows, without padding."""
        return forward()[: self.metadata.num_tokens]

    def whole(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Give the rows back: they are all."""
        return x_TH


def _check_shape(name: str, tensor: torch.Tensor, num_rows: int, num_values: int) -> None:
    """Refuse what `index_put_` would broadcast."""
    if tensor.shape != (num_rows, num_values):
        raise ValueError(f"{name} must be [{num_rows}, {num_values}] like the metadata and layout, got {tensor.shape}")


def _allocate(
    entry: EntryLayout,
    num_places: int,
    num_pages: int,
    device: torch.device,
    allocate: Callable[[int], torch.Tensor] | None,
) -> torch.Tensor:
    shape = (num_pages + NUM_RESERVED_PAGES, num_places, entry.bytes_per_layer_page)
    if allocate is None or not math.prod(shape):  # a rank of a layer split may hold no layer
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    return allocate(math.prod(shape)).view(shape)
