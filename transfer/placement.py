"""What each rank of one side holds of one kind of cache entry, and where: pure data, no addresses.

A kind of entry is a grid of cells, layers x tokens. A rank holds the cells of some layers and of one *shard* of the
tokens; ranks of one shard that hold the same layer are replicas. Tokens are spread over the shards in one of two ways:

    by page    every page of a request has an id, and id v is local page v // N of shard v % N (`dcp.page_ids`). With
               N = 1 every rank holds all tokens and an id is the local page.
    by block   block b of w tokens belongs to shard b % N, wherever it lies in memory; a shard stores its own tokens
               densely, one behind the other, in its own local pages. The layout of engines that interleave tokens.

Layers are named by their id in the model and matched by id, never by position; a layer's *place* is its position among
the layers that its rank holds. T = tokens, P = pages of a request, N = shards.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.dcp.geometry import PoolRole
from specdec.dcp.layer_split import split_layers
from specdec.dcp.layout import EntryKind
from specdec.dcp.page_ids import owner
from specdec.kernels.errors import TransferError

I64 = npt.NDArray[np.int64]


def entry_name(role: PoolRole, kind: EntryKind) -> str:
    """Name of a kind of entry in plans and of its memory regions, such as "target.latent"."""
    return f"{role.value}.{kind.value}"


class TokenPlaces(NamedTuple):
    """Where tokens lie: shard, local page on it, and row within the page, i64 [T] each."""

    shard_T: I64
    page_T: I64
    row_T: I64


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One side of one kind of entry. The constructors below build the common ones.

    Attributes:
        rank_layers: Layer ids that each rank holds, ascending; a rank may hold none.
        rank_shard: Shard whose tokens each rank holds, 0..num_shards - 1.
        num_shards: N, ranks over which the tokens of a request are spread.
        block_width: Tokens of a block, 1..page_size; None where whole pages are owned by their ids.
        page_size: Tokens of a page.
        num_pages: Physical pages of each rank; local pages are 0..num_pages - 1.
    """

    rank_layers: tuple[tuple[int, ...], ...]
    rank_shard: tuple[int, ...]
    num_shards: int = 1
    block_width: int | None = None
    page_size: int
    num_pages: int
    ownership: tuple[int, ...] = field(init=False, repr=False, compare=False)  # what decides where a token lies
    fingerprint: bytes = field(init=False, repr=False, compare=False)  # equal for equal placements
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_shards", "page_size", "num_pages"):
            if getattr(self, name) < 1:
                raise TransferError(f"{name} of a placement must be >= 1, got {getattr(self, name)}")
        if self.block_width is not None and not 1 <= self.block_width <= self.page_size:
            raise TransferError(f"block_width must be 1..page_size = {self.page_size}, got {self.block_width}")
        if len(self.rank_layers) != len(self.rank_shard) or not self.rank_shard:
            raise TransferError(
                f"a placement names layers and shard of each rank, got {len(self.rank_layers)} and "
                f"{len(self.rank_shard)} ranks"
            )
        for rank, layers in enumerate(self.rank_layers):
            if any(layer < 0 for layer in layers) or any(a >= b for a, b in pairwise(layers)):
                raise TransferError(f"layers of rank {rank} must be ascending ids >= 0, got {layers}")
        for rank, shard in enumerate(self.rank_shard):
            if not 0 <= shard < self.num_shards:
                raise TransferError(f"shard of rank {rank} must be 0..{self.num_shards - 1}, got {shard}")
        parts = (self.rank_layers, self.rank_shard, self.num_shards, self.block_width, self.page_size, self.num_pages)
        ownership = (self.num_shards, self.block_width or 0, self.page_size)
        object.__setattr__(self, "ownership", ownership)
        fingerprint = hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
        object.__setattr__(self, "fingerprint", fingerprint)
        object.__setattr__(self, "_hash", hash(parts))  # a look-up by placement must not hash every layer again

    def __hash__(self) -> int:
        return self._hash

    @property
    def num_ranks(self) -> int:
        """Ranks of this side."""
        return len(self.rank_shard)

    @property
    def interleaves(self) -> bool:
        """Whether neighbouring blocks of tokens belong to different shards, so that rows of a page are not in order."""
        return self.block_width is not None and self.num_shards > 1

    @property
    def run_width(self) -> int:
        """Tokens from the start of a page, or of a block where neighbours have different shards, to the next."""
        if self.block_width is None or self.num_shards == 1:
            return self.page_size
        return self.block_width

    def locate(self, pages: I64, token_T: I64) -> TokenPlaces:
        """Find tokens of a request.

        Args:
            pages: By page: page ids of the request, i64 [P], the page of token 0 first. By block: local pages of each
                shard in the order of its tokens, i64 [N, P].
            token_T: Positions in the request, i64 [T], within `pages`.
        """
        if self.block_width is None:
            place_T = token_T // self.page_size
            row_T = token_T - place_T * self.page_size
            page_id_T = pages.take(place_T)
            if self.num_shards == 1:
                return TokenPlaces(np.zeros_like(page_id_T), page_id_T, row_T)
            return TokenPlaces(owner(page_id_T, self.num_shards), page_id_T // self.num_shards, row_T)
        block_T = token_T // self.block_width
        turn_T = block_T // self.num_shards
        shard_T = block_T - turn_T * self.num_shards
        # Position among the tokens of the shard: whole blocks of earlier turns, then the place in this block.
        local_T = turn_T * self.block_width + (token_T - block_T * self.block_width)
        place_T = local_T // self.page_size
        page_T = pages.reshape(-1).take(shard_T * pages.shape[1] + place_T)
        return TokenPlaces(shard_T, page_T, local_T - place_T * self.page_size)

    def num_contiguous(self, token_T: I64, places: TokenPlaces) -> I64:
        """Tokens, from each given one on, that lie behind each other in one local page: i64 [T], >= 1."""
        left_in_page_T = self.page_size - places.row_T
        if not self.interleaves:
            return left_in_page_T
        return np.minimum(left_in_page_T, self.run_width - token_T % self.run_width)

    def pages_in_use(self, pages: I64, begin: int, end: int) -> I64:
        """Part of a page table that tokens begin..end - 1 lie in: page ids [P], or local pages [N, P]."""
        if self.block_width is None:
            return pages[begin // self.page_size : -(-end // self.page_size)]
        turn = self.block_width * self.num_shards
        first = begin // turn * self.block_width // self.page_size
        last = -(-end // turn) * self.block_width
        return pages[:, first : -(-last // self.page_size)]

    def local_length(self, num_tokens: int, shard: int) -> int:
        """Tokens among the first `num_tokens` that a shard holds; only where blocks decide, not page ids."""
        if self.block_width is None:
            if self.num_shards == 1:
                return num_tokens
            raise TransferError("where pages are owned by their ids, the length of a shard depends on the ids")
        turns, rest = divmod(num_tokens, self.block_width * self.num_shards)
        return turns * self.block_width + min(max(rest - shard * self.block_width, 0), self.block_width)


def replicated(layers: Iterable[int], *, num_ranks: int = 1, page_size: int, num_pages: int) -> Placement:
    """Every rank holds everything: tensor-parallel latents, a draft pool, a single rank."""
    return by_rank([layers] * num_ranks, page_size=page_size, num_pages=num_pages)


def layer_split(
    layers: Iterable[int], *, num_ranks: int, model_layers: int, page_size: int, num_pages: int
) -> Placement:
    """Rank r holds the r-th contiguous run of the model's layers and, of those, the ones in `layers`, all tokens.

    Args:
        layers: Layers with entries of this kind; index keys exist in some layers only.
        num_ranks: Ranks of the split.
        model_layers: Layers that are split, the MTP layer not among them.
        page_size: Tokens of a page.
        num_pages: Physical pages of each rank.
    """
    held = sorted(layers)
    stages = [[layer for layer in held if layer in run] for run in split_layers(model_layers, num_ranks)]
    return by_rank(stages, page_size=page_size, num_pages=num_pages)


def on_one_rank(layers: Iterable[int], *, rank: int, num_ranks: int, page_size: int, num_pages: int) -> Placement:
    """One rank holds everything, the others nothing: the MTP layer of a layer-split group is on its last rank."""
    held = tuple(layers)
    return by_rank([held if r == rank else () for r in range(num_ranks)], page_size=page_size, num_pages=num_pages)


def by_rank(rank_layers: Sequence[Iterable[int]], *, page_size: int, num_pages: int) -> Placement:
    """Each rank holds all tokens of its own layers: pipeline stages, with or without replicas."""
    layers = _frozen(rank_layers)
    return Placement(rank_layers=layers, rank_shard=(0,) * len(layers), page_size=page_size, num_pages=num_pages)


def dcp(
    layers: Iterable[int], *, dcp_size: int, tp_size: int | None = None, page_size: int, num_pages: int
) -> Placement:
    """Pages are spread over groups by their ids; tp_size / dcp_size groups hold the same, dcp_rank = rank % dcp_size.

    Args:
        layers: Layers of every rank.
        dcp_size: Ranks that share the pages of a request.
        tp_size: Ranks of the side, a multiple of `dcp_size`; one group where not given.
        page_size: Tokens of a page.
        num_pages: Physical pages of each rank.
    """
    return sharded([layers], dcp_size=dcp_size, tp_size=tp_size, page_size=page_size, num_pages=num_pages)


def token_interleaved(
    layers: Iterable[int],
    *,
    width: int,
    num_shards: int,
    tp_size: int | None = None,
    page_size: int,
    num_pages: int,
) -> Placement:
    """Blocks of `width` tokens go round `num_shards` ranks, whatever their pages are; otherwise like `dcp`."""
    return sharded(
        [layers], dcp_size=num_shards, tp_size=tp_size, block_width=width, page_size=page_size, num_pages=num_pages
    )


def sharded(
    stages: Sequence[Iterable[int]],
    *,
    dcp_size: int,
    tp_size: int | None = None,
    block_width: int | None = None,
    page_size: int,
    num_pages: int,
) -> Placement:
    """Pipeline stages, each of tp_size / dcp_size groups of shards: rank = stage x tp_size + tp_rank.

    Args:
        stages: Layers of each stage.
        dcp_size: Shards.
        tp_size: Ranks of a stage, a multiple of `dcp_size`; one group where not given.
        block_width: Tokens of a block; None where pages are owned by their ids.
        page_size: Tokens of a page.
        num_pages: Physical pages of each rank.
    """
    tp_size = dcp_size if tp_size is None else tp_size
    if dcp_size < 1 or tp_size < dcp_size or tp_size % dcp_size:
        raise TransferError(f"ranks of a stage must be a multiple of its shards, got {tp_size} and {dcp_size}")
    layers = _frozen(stages)
    return Placement(
        rank_layers=tuple(held for held in layers for _ in range(tp_size)),
        rank_shard=tuple(rank % dcp_size for _ in layers for rank in range(tp_size)),
        num_shards=dcp_size,
        block_width=block_width,
        page_size=page_size,
        num_pages=num_pages,
    )


def _frozen(rank_layers: Sequence[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(layers) for layers in rank_layers)
