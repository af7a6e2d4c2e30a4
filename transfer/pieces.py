"""What tokens move together: pieces, each from one page of the source to one page of the destination.

Where both sides own whole pages a piece is a page. Where a side interleaves tokens, the tokens of one piece are blocks
at even steps: those of a page that belong to one shard. Everything else is cut into runs that are contiguous on both
sides.

E = pieces, T = runs of tokens, P = pages of a request.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from specdec.kernels.errors import TransferError
from specdec.transfer.placement import I64, Placement

_FEW_PAIRS = 16
_FEW_PIECES = 4096  # above, looking for each of a few pairs is faster than sorting


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Span:
    """What is to be moved of one kind of entry: tokens begin..end - 1 of a request.

    Tokens below `begin` are at the destination already, or went with an earlier chunk.

    Attributes:
        source: Where the entries are.
        destination: Where they are wanted.
        source_pages: Pages of the request at the source as `Placement.locate` takes them: page ids i64 [P], or local
            pages i64 [N, P]. Only the pages of begin..end - 1 are looked at.
        destination_pages: The same at the destination.
        begin: First token.
        end: One past the last token; equal to `begin` where there is nothing to move.
    """

    source: Placement
    destination: Placement
    source_pages: I64
    destination_pages: I64
    begin: int
    end: int


class Blocks(NamedTuple):
    """How the tokens of a piece are spaced where they are not one run: blocks of `width`, every so many rows.

    Attributes:
        width: Tokens of a block; the last block of a piece may be shorter.
        token_step: Tokens from the start of a block to that of the next.
        source_step: The same in rows of the source page.
        destination_step: The same in rows of the destination page.
    """

    width: int
    token_step: int
    source_step: int
    destination_step: int


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """Tokens that go from one page to one page, each piece from a row on: i64 [E] each.

    Attributes:
        source_page_E: Local page that is read.
        source_row_E: Row of the first token in it.
        destination_page_E: Local page that is written.
        destination_row_E: Row of the first token in it.
        first_token_E: Position of the first token in the request.
        num_tokens_E: Tokens, >= 1.
        blocks: None where every piece is one run of rows on both sides.
    """

    source_page_E: I64
    source_row_E: I64
    destination_page_E: I64
    destination_row_E: I64
    first_token_E: I64
    num_tokens_E: I64
    blocks: Blocks | None = None

    def __len__(self) -> int:
        return len(self.first_token_E)

    def __getitem__(self, part: slice) -> "Pieces":
        return Pieces(
            self.source_page_E[part],
            self.source_row_E[part],
            self.destination_page_E[part],
            self.destination_row_E[part],
            self.first_token_E[part],
            self.num_tokens_E[part],
            self.blocks,
        )

    def runs(self) -> "Pieces":
        """The same tokens as pieces that are one run of rows each."""
        if self.blocks is None:
            return self
        width, token_step, source_step, destination_step = self.blocks
        num_blocks_E = -(-self.num_tokens_E // width)
        last_R = np.cumsum(num_blocks_E)
        # Number of each block within its piece: a counter over all blocks, less that of the piece's first.
        block_R = np.arange(last_R[-1] if len(last_R) else 0) - np.repeat(last_R - num_blocks_E, num_blocks_E)
        num_tokens_R = np.full(len(block_R), width)
        num_tokens_R[last_R - 1] = self.num_tokens_E - (num_blocks_E - 1) * width
        return Pieces(
            np.repeat(self.source_page_E, num_blocks_E),
            np.repeat(self.source_row_E, num_blocks_E) + block_R * source_step,
            np.repeat(self.destination_page_E, num_blocks_E),
            np.repeat(self.destination_row_E, num_blocks_E) + block_R * destination_step,
            np.repeat(self.first_token_E, num_blocks_E) + block_R * token_step,
            num_tokens_R,
        )


def cut_into_pieces(span: Span) -> tuple[Pieces, tuple[int, ...]]:
    """Cut the tokens of a span where either side breaks off.

    Returns:
        Pieces by pair of shards, destination shard first, and within a pair by position, unless pages of interleaved
        blocks overlap; and the first piece of each pair, with the number of all behind them.

    Raises:
        TransferError: A page that is needed is padding. (Where pages are cut whole, the check of the plan sees it.)
    """
    source, destination = span.source, span.destination
    if span.begin == span.end:
        none = np.zeros(0, np.int64)
        return Pieces(none, none, none, none, none, none), (0,) * (source.num_shards * destination.num_shards + 1)
    owns_pages = source.block_width is None and destination.block_width is None
    if owns_pages and source.page_size == destination.page_size:
        return _cut_whole_pages(span)
    return _cut_runs(span)


def _cut_whole_pages(span: Span) -> tuple[Pieces, tuple[int, ...]]:
    """Pages of one size that both sides own whole: piece i is page i, and only the first and the last may be parts."""
    source, destination, page_size = span.source, span.destination, span.source.page_size
    first_page = span.begin // page_size
    pages = slice(first_page, -(-span.end // page_size))
    source_shard, source_page_E = _split_ids(source, span.source_pages[pages])
    shard, page_E = _split_ids(destination, span.destination_pages[pages])
    pair_E = _pairs(span, source_shard, shard)
    if pair_E is None:
        order_E = np.arange(len(page_E))
        bounds: tuple[int, ...] = (0, len(page_E))
        first, last = 0, len(page_E) - 1
    else:
        order_E, bounds = _order_by_pair(pair_E, source.num_shards * destination.num_shards)
        source_page_E, page_E = source_page_E[order_E], page_E[order_E]
        first, last = bounds[pair_E[0]], bounds[pair_E[-1] + 1] - 1  # the order is stable
    first_token_E = order_E * page_size
    if first_page:
        first_token_E += first_page * page_size
    row_E = np.zeros(len(order_E), np.int64)
    num_tokens_E = np.empty(len(order_E), np.int64)
    num_tokens_E.fill(page_size)
    num_tokens_E[last] = span.end - first_token_E[last]
    skipped = span.begin - first_page * page_size
    if skipped:
        first_token_E[first] += skipped
        row_E[first] = skipped
        num_tokens_E[first] -= skipped
    return Pieces(source_page_E, row_E, page_E, row_E, first_token_E, num_tokens_E), bounds


def _split_ids(placement: Placement, page_id_P: I64) -> tuple[I64 | None, I64]:
    """Shard and local page of page ids; no shard where there is one only. -1 is left to the check of the plan."""
    if placement.num_shards == 1:
        return None, page_id_P
    num_shards = np.asarray(placement.num_shards)  # a Python int would be converted twice
    local_P = page_id_P // num_shards
    return page_id_P - local_P * num_shards, local_P


def _cut_runs(span: Span) -> tuple[Pieces, tuple[int, ...]]:
    """Runs of rows that are contiguous on both sides; where these are evenly spaced blocks, many of them at once."""
    blocks = _blocks(span)
    first_E, num_E = _run_starts(span) if blocks is None else _block_starts(span, blocks)
    source_shard_E, source_page_E, source_row_E = span.source.locate(span.source_pages, first_E)
    shard_E, page_E, row_E = span.destination.locate(span.destination_pages, first_E)
    pair_E = _pairs(
        span,
        source_shard_E if span.source.num_shards > 1 else None,
        shard_E if span.destination.num_shards > 1 else None,
    )
    if pair_E is None:
        return Pieces(source_page_E, source_row_E, page_E, row_E, first_E, num_E, blocks), (0, len(first_E))
    if pair_E.min() < 0:
        raise TransferError("page id -1, which is padding, is among the pages that are to be moved")
    order_E, bounds = _order_by_pair(pair_E, span.source.num_shards * span.destination.num_shards)
    pieces = Pieces(
        source_page_E.take(order_E),
        source_row_E.take(order_E),
        page_E.take(order_E),
        row_E.take(order_E),
        first_E.take(order_E),
        num_E.take(order_E),
        blocks,
    )
    return pieces, bounds


def _pairs(span: Span, source_shard_E: I64 | None, shard_E: I64 | None) -> I64 | None:
    """Number of the pair of shards, destination shard x source shards + source shard; None where there is one only."""
    if shard_E is None or source_shard_E is None:
        return source_shard_E if shard_E is None else shard_E
    return shard_E * span.source.num_shards + source_shard_E


def _order_by_pair(pair_E: I64, num_pairs: int) -> tuple[I64, tuple[int, ...]]:
    """Stable order by pair, and where each pair begins in it."""
    bounds = (0, *accumulate(np.bincount(pair_E, minlength=num_pairs).tolist()))
    small_E = pair_E.astype(np.uint8 if num_pairs <= 1 << 8 else np.uint16 if num_pairs <= 1 << 16 else np.int64)
    if len(small_E) > _FEW_PIECES and num_pairs <= _FEW_PAIRS:
        return np.concatenate([np.flatnonzero(small_E == pair) for pair in range(num_pairs)]), bounds
    return small_E.argsort(kind="stable"), bounds  # integers of 16 bits are sorted by counting


def _run_starts(span: Span) -> tuple[I64, I64]:
    """First token and length of each run that is contiguous on both sides, ascending."""
    begin, end = span.begin, span.end
    units = [_unit(span.source), _unit(span.destination)]
    short, long = min(units), max(units)
    if short and long % short == 0:
        first_T = np.arange(begin // short * short, end, short)
        first_T[0] = begin
    else:
        borders = [np.array([begin]), *_borders(span.source, end), *_borders(span.destination, end)]
        first_T = np.unique(np.concatenate(borders))
        first_T = first_T[(begin <= first_T) & (first_T < end)]
    return first_T, np.diff(first_T, append=end)


def _unit(placement: Placement) -> int:
    """Tokens from one border of a page or block to the next; 0 where a page ends inside of a block."""
    return placement.run_width if placement.page_size % placement.run_width == 0 else 0


def _borders(placement: Placement, end: int) -> list[I64]:
    """Tokens at which a run of rows may begin, at least all below `end`, in no order."""
    unit = _unit(placement)
    if unit:
        return [np.arange(0, end, unit)]
    width, num_shards = placement.run_width, placement.num_shards
    # Where a page of a shard begins within a block: row 0 of the page is token `local` of the shard.
    local = np.arange(0, placement.local_length(end, 0) + 1, placement.page_size)
    inside = (local // width * num_shards + np.arange(num_shards)[:, None]) * width + local % width
    return [np.arange(0, end, width), inside.reshape(-1)]


def _blocks(span: Span) -> Blocks | None:
    """How the blocks of one pair of shards follow each other; None where they do not do so evenly."""
    sides = span.source, span.destination
    widths = {side.run_width for side in sides if side.interleaves}
    if len(widths) != 1:
        return None
    (width,) = widths
    if any(side.page_size % width for side in sides):
        return None
    source_turn, destination_turn = (side.num_shards if side.interleaves else 1 for side in sides)
    token_step = width * math.lcm(source_turn, destination_turn)
    return Blocks(width, token_step, token_step // source_turn, token_step // destination_turn)


def _block_starts(span: Span, blocks: Blocks) -> tuple[I64, I64]:
    """First token and length of each piece: blocks b, b + turn, ... as long as they stay in one page of both sides."""
    width, turn = blocks.width, blocks.token_step // blocks.width
    first_block, end_block = span.begin // width, -(-span.end // width)
    skipped = span.begin - first_block * width
    first_tokens, lengths = [], []
    for residue in range(turn):
        # The blocks of this residue are residue + j x turn.
        begin_j, end_j = -(-(first_block - residue) // turn), -(-(end_block - residue) // turn)
        if begin_j >= end_j:
            continue
        borders = [np.array([begin_j])]
        if skipped and residue == first_block % turn:
            borders.append(np.array([begin_j + 1]))  # a block without its first tokens stands alone
        for side, step in ((span.source, blocks.source_step), (span.destination, blocks.destination_step)):
            shards = blocks.token_step // step
            borders.append(_page_borders(residue // shards, step // width, side.page_size // width, begin_j, end_j))
        j_E = np.unique(np.concatenate(borders))
        j_E = j_E[j_E < end_j]
        first_E = (residue + j_E * turn) * width
        num_E = np.diff(j_E, append=end_j) * width
        if residue == first_block % turn:
            first_E[0] += skipped
            num_E[0] -= skipped
        if residue == (end_block - 1) % turn:
            num_E[-1] -= end_block * width - span.end
        first_tokens.append(first_E)
        lengths.append(num_E)
    return np.concatenate(first_tokens), np.concatenate(lengths)


def _page_borders(first: int, step: int, blocks_per_page: int, begin_j: int, end_j: int) -> I64:
    """Every j in begin_j + 1..end_j - 1 at which block `first + j x step` is in another page than the one before it."""
    if step >= blocks_per_page:
        return np.arange(begin_j + 1, end_j)
    begin_page = (first + begin_j * step) // blocks_per_page + 1
    end_page = (first + (end_j - 1) * step) // blocks_per_page + 1
    return -(-(np.arange(begin_page, end_page) * blocks_per_page - first) // step)
