"""Where placements say that tokens lie, and what they refuse."""

from typing import Any

import numpy as np
import pytest

from specdec.dcp.geometry import PoolRole
from specdec.dcp.layout import EntryKind
from specdec.kernels.errors import TransferError
from specdec.transfer.placement import (
    Placement,
    by_rank,
    dcp,
    entry_name,
    layer_split,
    on_one_rank,
    replicated,
    sharded,
    token_interleaved,
)
from tests.support.reshard_cases import place_of

SIZES = {"page_size": 4, "num_pages": 32}


def test_a_rank_of_a_layer_split_holds_contiguous_layers_and_of_those_what_exists() -> None:
    latents = layer_split(range(78), num_ranks=8, model_layers=78, **SIZES)
    assert [len(layers) for layers in latents.rank_layers] == [10, 10, 10, 10, 10, 10, 9, 9]
    index_keys = layer_split([0, 1, 2, 10, 77], num_ranks=8, model_layers=78, **SIZES)
    assert index_keys.rank_layers == ((0, 1, 2), (10,), (), (), (), (), (), (77,))


def test_the_constructors_name_layers_and_shard_of_each_rank() -> None:
    assert replicated([3, 4], num_ranks=2, **SIZES).rank_layers == ((3, 4), (3, 4))
    assert on_one_rank([0], rank=2, num_ranks=3, **SIZES).rank_layers == ((), (), (0,))
    groups = dcp([0], dcp_size=2, tp_size=6, **SIZES)
    assert groups.rank_shard == (0, 1, 0, 1, 0, 1)
    stages = sharded([[0, 1], [2]], dcp_size=2, tp_size=4, **SIZES)
    assert stages.rank_layers == ((0, 1),) * 4 + ((2,),) * 4
    assert stages.rank_shard == (0, 1, 0, 1) * 2


@pytest.mark.parametrize("dcp_size", [1, 2, 3, 8])
def test_whole_pages_are_where_their_ids_say(dcp_size: int) -> None:
    side = dcp([0], dcp_size=dcp_size, **SIZES)
    pages = np.random.default_rng(0).permutation(32 * dcp_size)[:10]
    places = side.locate(pages, np.arange(37))
    found = np.stack(places, axis=1).tolist()
    assert found == [list(place_of(side, pages, token)) for token in range(37)]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_blocks_go_round_the_shards_and_lie_densely_on_each(width: int, num_shards: int) -> None:
    side = token_interleaved([0], width=width, num_shards=num_shards, **SIZES)
    pages = np.stack([np.random.default_rng(shard).permutation(32)[:10] for shard in range(num_shards)])
    tokens = np.arange(37)
    places = side.locate(pages, tokens)
    found = np.stack(places, axis=1).tolist()
    assert found == [list(place_of(side, pages, token)) for token in tokens]
    assert [int((places.shard_T == shard).sum()) for shard in range(num_shards)] == [
        side.local_length(37, shard) for shard in range(num_shards)
    ]
    for token, count in zip(tokens.tolist(), side.num_contiguous(tokens, places).tolist(), strict=True):
        first = place_of(side, pages, token)
        for step in range(1, count):
            assert place_of(side, pages, token + step) == (*first[:2], first[2] + step)


def test_the_length_of_a_shard_of_pages_depends_on_ids() -> None:
    assert replicated([0], **SIZES).local_length(9, 0) == 9
    with pytest.raises(TransferError, match="depends on the ids"):
        dcp([0], dcp_size=2, **SIZES).local_length(9, 0)


def test_placements_are_equal_by_value() -> None:
    one, other = (dcp([0, 1], dcp_size=2, **SIZES) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != dcp([0, 2], dcp_size=2, **SIZES).fingerprint


def test_kinds_of_entries_have_names() -> None:
    assert entry_name(PoolRole.TARGET, EntryKind.LATENT) == "target.latent"
    assert entry_name(PoolRole.DRAFT, EntryKind.INDEX_KEYS) == "draft.index_keys"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shards": 0}, "num_shards of a placement must be >= 1"),
        ({"page_size": 0}, "page_size of a placement must be >= 1"),
        ({"num_pages": 0}, "num_pages of a placement must be >= 1"),
        ({"block_width": 0}, r"block_width must be 1\.\.page_size = 4"),
        ({"block_width": 5}, r"block_width must be 1\.\.page_size = 4"),
        ({"rank_shard": (0,)}, "2 and 1 ranks"),
        ({"rank_shard": (0, 2)}, r"shard of rank 1 must be 0\.\.1"),
        ({"rank_layers": ((0, 1), (3, 2))}, "layers of rank 1 must be ascending"),
        ({"rank_layers": ((0, 0), ())}, "layers of rank 0 must be ascending"),
        ({"rank_layers": ((-1, 0), ())}, "layers of rank 0 must be ascending"),
    ],
)
def test_placements_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"rank_layers": ((0,), (0,)), "rank_shard": (0, 1), "num_shards": 2, **SIZES}
    with pytest.raises(TransferError, match=message):
        Placement(**(fields | changes))


def test_groups_of_ranks_are_whole() -> None:
    with pytest.raises(TransferError, match="must be a multiple of its shards, got 6 and 4"):
        dcp([0], dcp_size=4, tp_size=6, **SIZES)
    with pytest.raises(TransferError, match="names layers and shard of each rank"):
        by_rank([], **SIZES)
