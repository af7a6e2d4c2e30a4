"""Which rows of which pages go from which source rank to which destination rank: pure data, planned per request.

A plan holds, for each kind of entry, *pieces* of tokens (arrays) and *routes* of layers (`transfer.routes`); a path is
a route and the pieces of its two shards, and says: these layers of these pieces. Paths between the same two shards
share one set of pieces, and kinds with the same pages share all of them. Nothing here knows an address: expansion to
bytes is `transfer.descriptors`, and `transfer.plan_check` checks a plan before it is used.

"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specdec.kernels.errors import TransferError
from specdec.transfer.pieces import Pieces, Span, cut_into_pieces
from specdec.transfer.routes import LayerRun, Route, RouteTable, find_routes

__all__ = ["EntryPlan", "Path", "ReshardPlan", "Span", "plan_reshard"]

_FORMAT = b"reshard-plan-1"  # changes with every change of what is planned for the same spans


@dataclass(frozen=True, slots=True)
class Path:
    """What one source rank sends to one destination rank of one kind of entry; it may have no pieces.

    Attributes:
        kind: Name of the kind of entry.
        route: Ranks and layers.
        pieces: Tokens and pages.
    """

    kind: str
    route: Route
    pieces: Pieces

    @property
    def source_rank(self) -> int:
        """Rank that is read."""
        return self.route.source_rank

    @property
    def destination_rank(self) -> int:
        """Rank that is written."""
        return self.route.destination_rank

    @property
    def layer_runs(self) -> tuple[LayerRun, ...]:
        """Places of the layers on both sides."""
        return self.route.layer_runs

    @property
    def num_tokens(self) -> int:
        """Tokens that move in each layer."""
        return int(self.pieces.num_tokens_E.sum())


@dataclass(frozen=True, kw_only=True)
class EntryPlan:
    """The plan of one kind of entry.

    Attributes:
        kind: Its name.
        span: What was planned.
        table: Ranks and layers.
        pieces: Of all pairs of shards.
        bounds: Pieces of destination shard d and source shard s are bounds[i]..bounds[i + 1] - 1 with
            i = d x source shards + s; one more than pairs.
    """

    kind: str
    span: Span
    table: RouteTable
    pieces: Pieces
    bounds: tuple[int, ...]

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """Every path by destination rank, then source rank; one without pieces still has to be completed."""
        parts: dict[int, Pieces] = {}  # shared by all paths between the same two shards
        paths = []
        for route in self.table.routes:
            pair = route.destination_shard * self.span.source.num_shards + route.source_shard
            if pair not in parts:
                parts[pair] = self.pieces[self.bounds[pair] : self.bounds[pair + 1]]
            paths.append(Path(self.kind, route, parts[pair]))
        return tuple(paths)


@dataclass(frozen=True)
class ReshardPlan:
    """The plan of one request, or of one chunk of it.

    Attributes:
        entries: Plans by name of the kind of entry.
    """

    entries: Mapping[str, EntryPlan]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of all kinds."""
        return tuple(path for entry in self.entries.values() for path in entry.paths)

    def paths_from(self, source_rank: int) -> tuple[Path, ...]:
        """What one source rank has to send."""
        return tuple(path for path in self.paths if path.source_rank == source_rank)

    @cached_property
    def digest(self) -> str:
        """Hex digest of what was planned: spans, both placements, and the pages in use.

        A plan is a function of these and of the plan format, so equal digests mean equal plans on both sides, and
        whoever has the spans needs no plan to know its digest.
        """
        digest = hashlib.blake2b(_FORMAT, digest_size=32)
        for kind, entry in self.entries.items():
            span = entry.span
            source_pages = span.source.pages_in_use(span.source_pages, span.begin, span.end)
            destination_pages = span.destination.pages_in_use(span.destination_pages, span.begin, span.end)
            shape = f"{kind!r} {span.begin} {span.end} {source_pages.shape} {destination_pages.shape} "
            digest.update(shape.encode() + span.source.fingerprint + span.destination.fingerprint)
            digest.update(source_pages.tobytes())
            digest.update(destination_pages.tobytes())
        return digest.hexdigest()


def plan_reshard(spans: Mapping[str, Span]) -> ReshardPlan:
    """Plan one request, or one chunk of it.

    Args:
        spans: What is to be moved, by name of the kind of entry. Kinds whose spans have the same page arrays (the same
            objects), tokens and ownership share their pieces.

    Raises:
        TransferError: The spans do not fit their page tables, or a layer is nowhere at the source.
    """
    cut: dict[tuple[object, ...], tuple[Pieces, tuple[int, ...]]] = {}
    entries = {}
    for kind, span in spans.items():
        _check_span(kind, span)
        source, destination = span.source, span.destination
        pages = id(span.source_pages), id(span.destination_pages)
        key = (pages, source.ownership, destination.ownership, span.begin, span.end)
        if key not in cut:
            cut[key] = cut_into_pieces(span)
        pieces, bounds = cut[key]
        table = find_routes(source, destination)
        entries[kind] = EntryPlan(kind=kind, span=span, table=table, pieces=pieces, bounds=bounds)
    return ReshardPlan(entries)


def _check_span(kind: str, span: Span) -> None:
    if not 0 <= span.begin <= span.end:
        raise TransferError(f"{kind}: tokens must satisfy 0 <= begin <= end, got {span.begin} and {span.end}")
    for side, placement, pages in (
        ("source", span.source, span.source_pages),
        ("destination", span.destination, span.destination_pages),
    ):
        if pages.dtype != np.int64:
            raise TransferError(f"{kind}: {side} pages must be int64, got {pages.dtype}")
        if placement.block_width is None:
            if pages.ndim != 1 or len(pages) * placement.page_size < span.end:
                raise TransferError(
                    f"{kind}: {span.end} tokens take {-(-span.end // placement.page_size)} {side} page ids [P], got "
                    f"pages of shape {pages.shape}"
                )
            continue
        num_pages = -(-placement.local_length(span.end, 0) // placement.page_size)  # shard 0 is never shorter
        if pages.ndim != 2 or len(pages) != placement.num_shards or pages.shape[1] < num_pages:
            raise TransferError(
                f"{kind}: {span.end} tokens take {num_pages} {side} pages on each of {placement.num_shards} shards "
                f"[N, P], got pages of shape {pages.shape}"
            )
