"""Check a plan before it is used, from its arrays alone and not from how they were made.

    tokens  every token of the span is moved once, and only those
    places  every piece is read where the source placement keeps its tokens and written where the destination keeps
            them, in pages that exist and that hold nothing else of the request
    layers  every destination rank gets each of its layers from each shard of the source once, matched by id

A token has one shard on each side, so together these are an exact, disjoint cover within each dcp group of the
destination, repeated for each group, and a full cover on every rank where the destination is replicated; and no
destination rank reads a cell twice.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from specdec.kernels.errors import TransferError
from specdec.transfer.pieces import Pieces
from specdec.transfer.placement import I64, Placement
from specdec.transfer.reshard_plan import EntryPlan, ReshardPlan
from specdec.transfer.routes import Route, RouteTable


def check_plan(plan: ReshardPlan) -> None:
    """Check every kind of entry of a plan.

    Raises:
        TransferError: A rule is broken; names the kind, the ranks or shards, the page and the rule.
    """
    checked: set[tuple[object, ...]] = set()
    for entry in plan.entries.values():
        if entry.table.source != entry.span.source or entry.table.destination != entry.span.destination:
            raise TransferError(f"{entry.kind}: routes and span of the plan are of different placements")
        span, sides = entry.span, (entry.span.source, entry.span.destination)
        key = (
            *(id(data) for data in (entry.pieces, span.source_pages, span.destination_pages)),
            *((side.num_shards, side.block_width, side.page_size, side.num_pages) for side in sides),
            *(entry.bounds, span.begin, span.end),
        )
        if key not in checked:  # kinds with the same pages share their pieces
            _check_pieces(entry)
            checked.add(key)
        _check_reached(entry, _unreached_pairs(entry.table))


def check_chunks(spans: Iterable[tuple[int, int]], *, begin: int, end: int) -> None:
    """Check that chunks, each (first token, one past its last), follow each other and together are begin..end - 1.

    Raises:
        TransferError: A chunk leaves out tokens, repeats some, or the last one ends early or late.
    """
    position = begin
    for first, last in spans:
        if first != position or last < first:
            raise TransferError(f"the next chunk must begin at token {position}, got tokens {first}..{last - 1}")
        position = last
    if position != end:
        raise TransferError(f"chunks must end with token {end - 1}, the last one ends with token {position - 1}")


def _check_pieces(entry: EntryPlan) -> None:
    """Tokens and places of all pairs of shards at once."""
    span, pieces, bounds = entry.span, entry.pieces, entry.bounds
    source, destination = span.source, span.destination
    num_pairs = source.num_shards * destination.num_shards
    ascends = all(a <= b for a, b in itertools.pairwise(bounds))
    if len(bounds) != num_pairs + 1 or bounds[0] != 0 or bounds[-1] != len(pieces) or not ascends:
        raise TransferError(
            f"{entry.kind}: bounds must ascend from 0 to {len(pieces)} pieces over {num_pairs} pairs of shards"
        )
    if not len(pieces):
        if span.begin != span.end:
            raise TransferError(f"{entry.kind}: tokens {span.begin}..{span.end - 1} are not moved by any piece")
        return
    pair_E: I64 | None = None
    if num_pairs > 1:
        pair_E = np.repeat(np.arange(num_pairs), [b - a for a, b in itertools.pairwise(bounds)])
    _refuse(entry, pieces, pair_E, pieces.num_tokens_E < 1, "a piece has at least one token")
    num_after_E, end_E = _unfold(entry, pair_E)
    _refuse(
        entry,
        pieces,
        pair_E,
        (pieces.first_token_E < span.begin) | (end_E > span.end),
        f"tokens lie within {span.begin}..{span.end - 1}",
    )
    _check_places(entry, "source", pair_E, num_after_E)
    _check_places(entry, "destination", pair_E, num_after_E)
    _check_tokens(entry, pair_E)


def _check_places(entry: EntryPlan, name: str, pair_E: I64 | None, num_after_E: I64 | None) -> None:
    """One side: pages that exist, first tokens where the side keeps them, no piece longer than its page or block."""
    span, pieces, blocks = entry.span, entry.pieces, entry.pieces.blocks
    own_shard_E: I64 | int
    if name == "source":
        side, table, page_E, row_E = span.source, span.source_pages, pieces.source_page_E, pieces.source_row_E
        own_shard_E = 0 if pair_E is None else pair_E % span.source.num_shards
    else:
        side, table = span.destination, span.destination_pages
        page_E, row_E = pieces.destination_page_E, pieces.destination_row_E
        own_shard_E = 0 if pair_E is None else pair_E // span.source.num_shards
    out_of_range_E = (page_E < 0) | (page_E >= side.num_pages)
    _refuse(entry, pieces, pair_E, out_of_range_E, f"{name} pages are 0..{side.num_pages - 1}")
    places = side.locate(table, pieces.first_token_E)
    wrong_E = (places.shard_T != own_shard_E) | (places.page_T != page_E) | (places.row_T != row_E)
    _refuse(entry, pieces, pair_E, wrong_E, f"a piece lies where the {name} keeps its first token")
    if blocks is None or num_after_E is None:
        too_long_E = pieces.num_tokens_E > side.num_contiguous(pieces.first_token_E, places)
    else:
        step = blocks.source_step if name == "source" else blocks.destination_step
        last_block_E = pieces.num_tokens_E - num_after_E * blocks.width
        too_long_E = row_E + num_after_E * step + last_block_E > side.page_size
    _refuse(entry, pieces, pair_E, too_long_E, f"a piece ends with its {name} page, a run of rows with its block")
    _check_pages_differ(entry, name, side, table)


def _unfold(entry: EntryPlan, pair_E: I64 | None) -> tuple[I64 | None, I64]:
    """Blocks of each piece behind its first one, None where pieces are runs, and one past the last token of each.

    The steps of blocks are those at which a side keeps to one shard and, within a page, to its rows; so the place of
    the first token and the length decide about all of a piece.
    """
    pieces, span = entry.pieces, entry.span
    blocks = pieces.blocks
    if blocks is None:
        return None, pieces.first_token_E + pieces.num_tokens_E
    for name, side, step in (
        ("source", span.source, blocks.source_step),
        ("destination", span.destination, blocks.destination_step),
    ):
        turn = blocks.width * side.num_shards if side.interleaves else blocks.width
        fits = side.block_width == blocks.width if side.interleaves else side.page_size % blocks.width == 0
        rows = blocks.token_step // side.num_shards if side.interleaves else blocks.token_step
        if blocks.width < 1 or not fits or blocks.token_step % turn or blocks.token_step < 1 or step != rows:
            raise TransferError(f"{entry.kind}: {blocks} does not follow the tokens of one shard at the {name}")
    num_after_E = (pieces.num_tokens_E - 1) // blocks.width
    offset_E = pieces.first_token_E % blocks.width
    cut_E = (offset_E > 0) & (offset_E + pieces.num_tokens_E > blocks.width)
    _refuse(entry, pieces, pair_E, cut_E, "a piece that begins inside of a block ends with it")
    return num_after_E, pieces.first_token_E + pieces.num_tokens_E + num_after_E * (blocks.token_step - blocks.width)


def _check_tokens(entry: EntryPlan, pair_E: I64 | None) -> None:
    """Pieces that do not overlap, lie within the span and have as many tokens as it are the span."""
    span, pieces = entry.span, entry.pieces
    first_E = pieces.first_token_E
    if pieces.blocks is not None:
        # Put the blocks that a piece goes through side by side: then a piece is one run again.
        width, token_step, _, _ = pieces.blocks
        step_E = first_E // token_step
        inside_E = first_E - step_E * token_step
        block_E = inside_E // width
        num_tokens = (span.end // token_step + 1) * width
        first_E = block_E * num_tokens + step_E * width + (inside_E - block_E * width)
    end_E = first_E + pieces.num_tokens_E
    if pair_E is not None:
        order_E = first_E.argsort()
        first_E, end_E = first_E[order_E], end_E[order_E]
    if (first_E[1:] >= end_E[:-1]).all() and pieces.num_tokens_E.sum() == span.end - span.begin:
        return
    runs = pieces.runs()
    count_T = np.zeros(span.end - span.begin + 1, np.int64)
    np.add.at(count_T, runs.first_token_E - span.begin, 1)
    np.add.at(count_T, runs.first_token_E + runs.num_tokens_E - span.begin, -1)
    count_T = np.cumsum(count_T)[:-1]
    token = int((count_T != 1).argmax())
    raise TransferError(
        f"{entry.kind}: token {span.begin + token} is moved {count_T[token]} times to each destination group; every "
        f"token of {span.begin}..{span.end - 1} is moved once"
    )


def _check_pages_differ(entry: EntryPlan, name: str, side: Placement, table: I64) -> None:
    """Two pages of a request on one rank are two pages: a repeated one would be written, or read, for both."""
    page_size, begin, end = side.page_size, entry.span.begin, entry.span.end
    if side.block_width is None:
        rows: Sequence[I64] = (table[begin // page_size : -(-end // page_size)],)
    else:
        lengths = [(side.local_length(begin, shard), side.local_length(end, shard)) for shard in range(side.num_shards)]
        rows = [table[shard, a // page_size : -(-b // page_size)] for shard, (a, b) in enumerate(lengths)]
    for shard, row in enumerate(rows):
        in_order = row[1:] > row[:-1]
        if in_order.all():
            continue
        ascending = np.sort(row)
        repeated = ascending[1:] == ascending[:-1]
        if repeated.any():
            where = f"page id {ascending[1:][repeated.argmax()]}"
            if side.block_width is not None:
                where = f"page {ascending[1:][repeated.argmax()]} of shard {shard}"
            raise TransferError(f"{entry.kind}: {name} {where} stands for two pages of the request; pages differ")


def _check_reached(entry: EntryPlan, unreached_pairs: Iterable[tuple[int, int]]) -> None:
    """A pair of shards with pieces has routes to every rank of the destination shard."""
    for destination_shard, source_shard in unreached_pairs:
        pair = destination_shard * entry.span.source.num_shards + source_shard
        if entry.bounds[pair] < entry.bounds[pair + 1]:
            raise TransferError(
                f"{entry.kind}: a rank of destination shard {destination_shard} has no route from source shard "
                f"{source_shard}, which holds some of its tokens"
            )


@functools.lru_cache(maxsize=256)
def _unreached_pairs(table: RouteTable) -> tuple[tuple[int, int], ...]:
    """Check the layers of a table, once; gives the (destination, source) shards of which a rank has no route.

    Raises:
        TransferError: A route does not fit its ranks, or a destination rank does not get each of its layers once.
    """
    layers_of: dict[tuple[int, int], list[int]] = {}
    for route in table.routes:
        _check_route(table, route)
        layers_of.setdefault((route.destination_rank, route.source_shard), []).extend(route.layers)
    unreached = set()
    for rank, wanted in enumerate(table.destination.rank_layers):
        for source_shard in range(table.source.num_shards):
            layers = layers_of.get((rank, source_shard), [])
            if not layers and wanted:
                unreached.add((table.destination.rank_shard[rank], source_shard))
                continue
            for layer in {*layers, *wanted}:
                if layers.count(layer) != (layer in wanted):
                    raise TransferError(
                        f"destination rank {rank} reads layer {layer} {layers.count(layer)} times from source shard "
                        f"{source_shard}; every layer it holds is read once, and no other"
                    )
    return tuple(sorted(unreached))


def _check_route(table: RouteTable, route: Route) -> None:
    """Ranks, shards, and layers by id at the places of both sides."""
    for name, side, rank, shard in (
        ("source", table.source, route.source_rank, route.source_shard),
        ("destination", table.destination, route.destination_rank, route.destination_shard),
    ):
        if not 0 <= rank < side.num_ranks or side.rank_shard[rank] != shard:
            raise TransferError(f"{name} rank {rank} must be 0..{side.num_ranks - 1} and of shard {shard}")
        held = side.rank_layers[rank]
        places = [place for run in route.layer_runs for place in run.places[name == "destination"]]
        if any(not 0 <= place < len(held) for place in places):
            raise TransferError(f"{name} rank {rank} has {len(held)} layers, a route reaches for places {places}")
        layers = tuple(held[place] for place in places)
        if layers != route.layers:
            raise TransferError(
                f"{name} rank {rank} has layers {layers} where a route means {route.layers}: layers are matched by id"
            )


def _refuse(entry: EntryPlan, pieces: Pieces, pair_E: I64 | None, broken_E: npt.NDArray[np.bool_], rule: str) -> None:
    """Name the first piece that breaks a rule, if there is one."""
    if not broken_E.any():
        return
    i = int(broken_E.argmax())
    destination_shard, source_shard = divmod(0 if pair_E is None else int(pair_E[i]), entry.span.source.num_shards)
    first = int(pieces.first_token_E[i])
    raise TransferError(
        f"{entry.kind}: {pieces.num_tokens_E[i]} tokens from {first} on, from page {pieces.source_page_E[i]} "
        f"row {pieces.source_row_E[i]} of source shard {source_shard} to page {pieces.destination_page_E[i]} row "
        f"{pieces.destination_row_E[i]} of destination shard {destination_shard}: {rule}"
    )
