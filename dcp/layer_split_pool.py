"""The KV memory of one rank of a layer split: ranks share the rows of a pass, and each stores whole layers.

    storage     the layers of this rank, all pages
    transient   one slot for each kind of entry, all pages: the layer that the pass is at

A rank attends with its own rows to the whole context, so it needs the whole context of one layer at a time. When a pass
comes to a layer, the rank that stores it broadcasts the pages of the prior context into every rank's slot. Then the new
rows of all ranks are gathered in order of position: as stored bytes, so that each row is encoded once, by the rank that
computed it. All ranks write them into their slot, and the layer's own rank into its storage too. Rows are read from the
slot on every rank, the layer's own included.

What a rank has stored counts once the pass that wrote it has ended. Before a pass the ranks compare these counts and
begin it only where all of them have all of its prior context (`specdec.dcp.agreement.agree_prefix`): so the size of
every broadcast is known to all ranks before the first, and all of them take part in the same collectives.

N = ranks, T = rows of the pass, O = rows of this rank, S = rows of the longest slice, R = requests, P = pages of the
longest request, X = some pages, M = physical pages, K = selected slots, L = latent values, R (behind T) = rope values,
D = index head dim, B = bytes of a token or of a layer's page.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specdec.dcp.communicator import Communicator
from specdec.dcp.geometry import Geometry
from specdec.dcp.held_layers import hold_layers, hold_one_layer
from specdec.dcp.layer_split import split_layers
from specdec.dcp.layout import EntryKind, PoolLayout
from specdec.dcp.metadata import BatchMetadata, place_rows
from specdec.dcp.page_table import Int64Array, PageTable
from specdec.dcp.pool import KvPool

_BROADCAST_BYTES = 1 << 26  # of one collective: bounds the copy that the sender makes


class LayerSplitPool:
    """The layers that one rank stores, and the slot through which it sees those of the others.

    Args:
        layout: Of the whole pool, the same on every rank.
        num_pages: Physical pages, reserved ones not counted; the same on every rank, and page ids are physical pages.
        layers_of_ranks: Layers that each rank stores, as `layers_of_ranks` gives them.
        cp: The ranks that share the rows.
        device: Where the memory lies.
        allocate: Gives the memory of `storage`; see `KvPool`.

    Attributes:
        geometry: Of one rank: the layers are shared, the pages are not.
        layers: The layers stored here.
        storage: Holds them; in its buffers layer l lies at place l - layers.start, index keys of layers that have an
            indexer side by side.
        transient: The slot.
        num_committed_M: Leading rows of each page that are stored here for all of `layers`, i64. Whoever finds a page
            damaged may lower it: the ranks then compute the rows again.
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        num_pages: int,
        layers_of_ranks: Sequence[range],
        cp: Communicator,
        device: torch.device | str = "cpu",
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.geometry = Geometry(1, 0, layout.role)
        self.device = torch.device(device)
        self.cp = cp
        self.layers = layers_of_ranks[cp.rank]
        self.owner_of_layer = {layer: rank for rank, layers in enumerate(layers_of_ranks) for layer in layers}
        shared: Any = {"num_pages": num_pages, "geometry": self.geometry, "device": device}
        self.storage = KvPool(layout, held=hold_layers(layout, self.layers), allocate=allocate, **shared)
        self.transient = KvPool(layout, held=hold_one_layer(layout), **shared)
        self.num_committed_M = np.zeros(num_pages, dtype=np.int64)

    @property
    def nbytes(self) -> dict[EntryKind, int]:
        """Allocated bytes by kind of entry: those of the stored layers and of the slot."""
        return {kind: size + self.transient.nbytes[kind] for kind, size in self.storage.nbytes.items()}

    def buffer(self, kind: EntryKind) -> torch.Tensor:
        """Memory of one kind in `storage`: u8 [M + 1, stored layers, bytes of a layer's page], scratch page last."""
        return self.storage.buffer(kind)

    def memory(self, kind: EntryKind) -> torch.Tensor:
        """All memory of one kind in `storage`; see `KvPool.memory`."""
        return self.storage.memory(kind)

    def place(self, pages: PageTable, *, request_index: Int64Array, position: Int64Array) -> "SplitPass":
        """Place the rows of a pass, which each rank computes a slice of.

        Args:
            pages: Pages of the requests.
            request_index: Request of each row of the pass, i64 [T].
            position: Position of each row; those of one request ascend without a gap, i64 [T].

        Raises:
            ValueError: A row lies outside the table, or has no page to write to.
        """
        return SplitPass(self, pages, request_index=request_index, position=position)

    def committed_prefix(self, page_id_RP: Int64Array, num_rows_R: Int64Array) -> Int64Array:
        """Count the leading rows of each request that are stored here, i64 [R], at most those asked about.

        Args:
            page_id_RP: Its pages, -1 padded.
            num_rows_R: The rows asked about; there are pages for them.
        """
        page_size = self.layout.page_size
        first_row_P = np.arange(page_id_RP.shape[1]) * page_size
        wanted_RP = (num_rows_R[:, None] - first_row_P).clip(0, page_size)
        has_RP = np.minimum(self.num_committed_M[page_id_RP], wanted_RP)
        is_short_RP = has_RP < wanted_RP
        page_R = is_short_RP.argmax(axis=1)
        prefix_R = page_R * page_size + np.take_along_axis(has_RP, page_R[:, None], axis=1)[:, 0]
        return np.where(is_short_RP.any(axis=1), prefix_R, num_rows_R)


class SplitPass:
    """The rows of one pass over a layer-split pool: a `PlacedPass`, and the store that the model is given.

    Attributes:
        rows: The rows of this rank: a contiguous slice, as even over the ranks as it can be; it may be empty.
        metadata: Of these.
    """

    def __init__(
        self, pool: LayerSplitPool, pages: PageTable, *, request_index: Int64Array, position: Int64Array
    ) -> None:
        self._pool = pool
        whole = place_rows(pages, request_index=request_index, position=position)
        num_rows, cp = whole.num_tokens, pool.cp
        slices = split_layers(num_rows, cp.size)  # rows are split as layers are
        self.rows = slice(slices[cp.rank].start, slices[cp.rank].stop)
        self.metadata = place_rows(pages, request_index=request_index[self.rows], position=position[self.rows])
        self._num_slice_rows = len(slices[0])
        # Where each row stands in the gathered slices of all ranks, flattened.
        first_rows = np.arange(cp.size) * self._num_slice_rows
        gathered = [first + np.arange(len(each)) for first, each in zip(first_rows, slices, strict=True)]
        self._gathered_T = torch.from_numpy(np.concatenate(gathered)).to(pool.device)
        self._token_T = whole.write_page_T[:num_rows], whole.write_offset_T[:num_rows]
        self._written_pages = pages.write_page_RQ[request_index, 1 + (position >> pages.page_shift)]
        self._written_offsets = position & pages.offset_mask
        start_R = np.zeros(pages.num_requests, dtype=np.int64)
        start_R[request_index[::-1]] = position[::-1]  # of several, the last that is assigned is the first row
        page_id_RP = pages.page_id_RQ[: pages.num_requests, 1 : 1 + pages.max_pages]
        is_prior_RP = np.arange(pages.max_pages) * pages.page_size < start_R[:, None]
        # Requests may share pages: each travels once.
        self._prior_page_X = torch.from_numpy(np.unique(page_id_RP[is_prior_RP])).to(pool.device)
        self._layer_of: dict[EntryKind, int] = {}  # that the slot holds

    @property
    def store(self) -> "SplitPass":
        """Takes and gives the KV of the rows."""
        return self

    def run(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run the model over the rows of this rank, together with the other ranks; gives its rows without padding.

        What the pass writes counts as stored once it has ended.
        """
        num_committed_M = self._pool.num_committed_M
        np.minimum.at(num_committed_M, self._written_pages, self._written_offsets)
        result = forward()[: self.metadata.num_tokens]
        np.maximum.at(num_committed_M, self._written_pages, self._written_offsets + 1)
        return result

    def whole(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all ranks in order: [T, ...] on every rank. A collective."""
        slice_SH = x_TH.new_zeros((self._num_slice_rows, *x_TH.shape[1:]))
        slice_SH[: len(x_TH)] = x_TH
        return self._pool.cp.all_gather(slice_SH).flatten(0, 1).index_select(0, self._gathered_T)

    def write_latent(self, layer: int, latent_TL: torch.Tensor, rope_TR: torch.Tensor, meta: BatchMetadata) -> None:
        """Bring a layer's latents into the slot: prior context and new rows; its own rank stores the new rows."""
        self._broadcast_prior(EntryKind.LATENT, layer)
        self._pool.transient.write_latent(layer, latent_TL, rope_TR, meta)
        self._gather_rows(EntryKind.LATENT, layer)

    def gather_latent(self, layer: int, rows_TK: torch.Tensor) -> torch.Tensor:
        """Read latents of the layer in the slot; see `KvPool.gather_latent`."""
        self._check_slot(EntryKind.LATENT, layer)
        return self._pool.transient.gather_latent(layer, rows_TK)

    def write_index_key(self, layer: int, key_TD: torch.Tensor, meta: BatchMetadata) -> None:
        """Bring a layer's index keys into the slot, as `write_latent` does with latents."""
        self._broadcast_prior(EntryKind.INDEX_KEYS, layer)
        self._pool.transient.write_index_key(layer, key_TD, meta)
        self._gather_rows(EntryKind.INDEX_KEYS, layer)

    def gather_index_keys(self, layer: int, meta: BatchMetadata) -> torch.Tensor:
        """Read the index keys of the layer in the slot; see `KvPool.gather_index_keys`."""
        self._check_slot(EntryKind.INDEX_KEYS, layer)
        return self._pool.transient.gather_index_keys(layer, meta)

    def _broadcast_prior(self, kind: EntryKind, layer: int) -> None:
        """Fill the slot with the pages of the prior context, whole: rows behind it are dead, as they are in storage."""
        pool, cp = self._pool, self._pool.cp
        owner, slot_MB = pool.owner_of_layer[layer], pool.transient.buffer(kind)[:, 0]
        num_at_once = max(1, _BROADCAST_BYTES // slot_MB.shape[1])
        for begin in range(0, len(self._prior_page_X), num_at_once):  # without prior context all ranks skip
            page_X = self._prior_page_X[begin : begin + num_at_once]
            if owner == cp.rank:
                place = pool.storage.held.place_of[kind][layer]
                pages_XB = pool.storage.buffer(kind)[:, place].index_select(0, page_X)
            else:
                pages_XB = slot_MB.new_empty((len(page_X), slot_MB.shape[1]))
            slot_MB.index_copy_(0, page_X, cp.broadcast(pages_XB, source=owner))

    def _gather_rows(self, kind: EntryKind, layer: int) -> None:
        """Complete the slot with the rows that the other ranks computed, and store all rows where the layer lives."""
        pool, slot = self._pool, _token_fields(self._pool.transient, kind, layer)
        page_O, offset_O = (each[self.rows] for each in self._token_T)
        # As they are stored, field behind field.
        rows_TB = self.whole(torch.cat([field[page_O, offset_O] for field in slot], dim=1))
        is_here = pool.owner_of_layer[layer] == pool.cp.rank
        for fields in (slot, _token_fields(pool.storage, kind, layer)) if is_here else (slot,):
            for field, values in zip(fields, rows_TB.split([each.shape[2] for each in fields], dim=1), strict=True):
                field.index_put_(self._token_T, values)
        self._layer_of[kind] = layer

    def _check_slot(self, kind: EntryKind, layer: int) -> None:
        held = self._layer_of.get(kind)
        if held != layer:
            raise AssertionError(f"{kind} of layer {layer} were asked for, but the slot holds layer {held}")


def _token_fields(pool: KvPool, kind: EntryKind, layer: int) -> list[torch.Tensor]:
    """Give the fields of the tokens of a layer as views, u8 [M + 1, page_size, bytes of the field]."""
    entry = pool.layout.latent if kind is EntryKind.LATENT else pool.layout.index_keys
    pages_MB = pool.buffer(kind)[:, pool.held.place_of[kind][layer]]
    return [
        pages_MB[:, field.offset : field.offset + field.size * entry.page_size].unflatten(1, (-1, field.size))
        for field in entry.fields
    ]
