"""Which source rank sends which layers to which destination rank, for two placements of one kind of entry.

The answer depends on the placements alone, not on a request, and is kept. Every destination rank reads each of its
cells from exactly one source rank; where several hold it, the readers go round them:

    as many readers as replicas, or more     reader k takes replica k mod R
    fewer readers                            reader k takes replicas k, k + K, ..., each a run of its layers

R = replicas of a cell, K = destination ranks that may read it, numbered from 0.
"""

import functools
import math
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from specdec.dcp.layer_split import split_layers
from specdec.kernels.errors import TransferError
from specdec.transfer.placement import Placement


class LayerRun(NamedTuple):
    """Layers at evenly spaced places on both sides: places base, base + stride, ... of each, `num_layers` of them."""

    source_base: int
    source_stride: int
    destination_base: int
    destination_stride: int
    num_layers: int

    @property
    def places(self) -> tuple[range, range]:
        """Places at the source and at the destination."""
        return (
            range(self.source_base, self.source_base + self.num_layers * self.source_stride, self.source_stride),
            range(
                self.destination_base,
                self.destination_base + self.num_layers * self.destination_stride,
                self.destination_stride,
            ),
        )


@dataclass(frozen=True, slots=True)
class Route:
    """Layers that one source rank sends to one destination rank, for the tokens that both of their shards hold.

    Attributes:
        source_rank: Rank that is read.
        destination_rank: Rank that is written.
        source_shard: Shard of the source rank.
        destination_shard: Shard of the destination rank.
        layers: Ids of the layers, ascending.
        layer_runs: The same as places in the memory of both ranks.
    """

    source_rank: int
    destination_rank: int
    source_shard: int
    destination_shard: int
    layers: tuple[int, ...]
    layer_runs: tuple[LayerRun, ...]


@dataclass(frozen=True, eq=False, slots=True)
class RouteTable:
    """Routes between two placements; a table equals itself only, so that what was found out about it can be kept.

    Attributes:
        source: Placement that is read.
        destination: Placement that is written.
        routes: By destination rank, then source rank.
    """

    source: Placement
    destination: Placement
    routes: tuple[Route, ...]


@functools.lru_cache(maxsize=256)
def find_routes(source: Placement, destination: Placement) -> RouteTable:
    """Decide who reads from whom.

    Raises:
        TransferError: A destination rank has a layer that no source rank holds for some of its tokens.
    """
    layers_of: dict[tuple[int, int], list[int]] = {}
    common = math.gcd(source.num_shards, destination.num_shards)
    for source_shard in range(source.num_shards):
        readers = [
            rank
            for rank, layers in enumerate(destination.rank_layers)
            if layers and _may_meet(source, source_shard, destination, destination.rank_shard[rank])
        ]
        # Pages that go round both sides in turn pair shards of equal remainder: these must not choose one replica.
        readers.sort(key=lambda rank: destination.rank_shard[rank] % common)
        for k, reader in enumerate(readers):
            # A layer's replicas are the ranks of this shard that hold it; neighbours with the same ones go together.
            replicas_of = functools.partial(_replicas, source, source_shard)
            for replicas, group in groupby(destination.rank_layers[reader], key=replicas_of):
                layers = list(group)
                if not replicas:
                    raise TransferError(
                        f"destination rank {reader} wants layer {layers[0]}, which no source rank of shard "
                        f"{source_shard} holds"
                    )
                taken = replicas[k :: len(readers)] if len(readers) < len(replicas) else [replicas[k % len(replicas)]]
                for rank, places in zip(taken, split_layers(len(layers), len(taken)), strict=True):
                    layers_of.setdefault((reader, rank), []).extend(layers[i] for i in places)
    return RouteTable(
        source,
        destination,
        tuple(_route(source, destination, *ranks, layers) for ranks, layers in sorted(layers_of.items()) if layers),
    )


def _route(
    source: Placement, destination: Placement, destination_rank: int, source_rank: int, layers: list[int]
) -> Route:
    source_places = [source.rank_layers[source_rank].index(layer) for layer in layers]
    destination_places = [destination.rank_layers[destination_rank].index(layer) for layer in layers]
    return Route(
        source_rank=source_rank,
        destination_rank=destination_rank,
        source_shard=source.rank_shard[source_rank],
        destination_shard=destination.rank_shard[destination_rank],
        layers=tuple(layers),
        layer_runs=tuple(_evenly_spaced(source_places, destination_places)),
    )


def _evenly_spaced(source: list[int], destination: list[int]) -> list[LayerRun]:
    """Cut places into runs that are evenly spaced on both sides, each as long as it can be from where it begins."""
    runs: list[LayerRun] = []
    begin = 0
    while begin < len(source):
        end, steps = begin + 1, (1, 1)
        while end < len(source):
            step = (source[end] - source[end - 1], destination[end] - destination[end - 1])
            if end > begin + 1 and step != steps:
                break
            steps, end = step, end + 1
        runs.append(LayerRun(source[begin], steps[0], destination[begin], steps[1], end - begin))
        begin = end
    return runs


@functools.lru_cache(maxsize=4096)
def _replicas(source: Placement, shard: int, layer: int) -> tuple[int, ...]:
    """Source ranks that hold a layer of a shard."""
    ranks = zip(source.rank_layers, source.rank_shard, strict=True)
    return tuple(rank for rank, (layers, own) in enumerate(ranks) if own == shard and layer in layers)


def _may_meet(source: Placement, source_shard: int, destination: Placement, destination_shard: int) -> bool:
    """Whether some token can belong to both shards; with page ids on a side every pair of shards can meet."""
    if source.block_width is None or destination.block_width is None:
        return True
    period = math.lcm(source.block_width * source.num_shards, destination.block_width * destination.num_shards)
    token_T = np.arange(period)
    meets = (token_T // source.block_width % source.num_shards == source_shard) & (
        token_T // destination.block_width % destination.num_shards == destination_shard
    )
    return bool(meets.any())
