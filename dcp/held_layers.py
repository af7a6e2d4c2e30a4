"""Which layers of a layout a pool keeps, and where in a page: all of them, the layers of one rank, or one at a time."""

from collections.abc import Mapping
from typing import NamedTuple

from specdec.dcp.geometry import PoolRole
from specdec.dcp.layer_split import split_layers
from specdec.dcp.layout import EntryKind, PoolLayout


class HeldLayers(NamedTuple):
    """Where a pool keeps the layers of its layout.

    Attributes:
        place_of: By kind of entry: the place in a page of each model layer that is kept.
        num_places: By kind of entry: layers that a page has room for.
    """

    place_of: Mapping[EntryKind, Mapping[int, int]]
    num_places: Mapping[EntryKind, int]


def layers_of_ranks(layout: PoolLayout, num_ranks: int) -> tuple[range, ...]:
    """Layers that each rank of a layer split stores: contiguous and even for the target.

    The draft's layer stands outside this split: it belongs to the last rank.
    """
    if layout.role is PoolRole.DRAFT:
        return (*(range(0) for _ in range(num_ranks - 1)), range(layout.num_latent_layers))
    return split_layers(layout.num_latent_layers, num_ranks)


def hold_layers(layout: PoolLayout, layers: range) -> HeldLayers:
    """Keep some layers: side by side in order of the model, the index keys of those that have an indexer."""
    held = {entry.kind: [layer for layer in entry.layers if layer in layers] for entry in layout.entries}
    return HeldLayers(
        place_of={kind: {layer: place for place, layer in enumerate(each)} for kind, each in held.items()},
        num_places={kind: len(each) for kind, each in held.items()},
    )


def hold_one_layer(layout: PoolLayout) -> HeldLayers:
    """Keep whichever layer was written last: one slot for each kind of entry, which every layer uses in turn."""
    return HeldLayers(
        place_of={entry.kind: dict.fromkeys(entry.layers, 0) for entry in layout.entries},
        num_places={entry.kind: min(1, len(entry.layers)) for entry in layout.entries},
    )
