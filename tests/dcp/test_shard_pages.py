"""Tables of a rank's pages say the same as the metadata of a pass."""

import numpy as np
import pytest
import torch

from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.page_table import build_page_table
from specdec.dcp.shard_pages import ShardPages


def page_ids() -> np.ndarray:
    ids = np.full((4, 7), -1)
    order = np.random.default_rng(0).permutation(40)
    for row, count in enumerate((7, 3, 1, 6)):
        ids[row, :count] = order[7 * row : 7 * row + count]
    return ids


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_tables_of_every_rank_are_those_of_the_page_table(size: int) -> None:
    ids = page_ids()
    for rank in range(size):
        pages = ShardPages.of(torch.from_numpy(ids).int(), size=size, rank=rank)
        geometry = Geometry(size, rank, PoolRole.TARGET)
        table = build_page_table(ids, geometry=geometry, page_size=64, num_pages=40 // size)
        assert torch.equal(pages.page_BP.long(), table.local_page_RP)
        owned = table.owned_page_RO
        assert torch.equal(pages.owned_page_BP[:, : owned.shape[1]].long(), owned)
        assert bool((pages.owned_page_BP[:, owned.shape[1] :] == -1).all())
        is_owned = owned >= 0
        index = pages.owned_index_BP[:, : owned.shape[1]].long()
        assert torch.equal(index[is_owned], table.owned_index_RO[is_owned])
        if table.owned is not None:
            assert torch.equal(pages.first_owner_B, table.owned.first_owner_R)
        for row in range(len(ids)):
            before = [int((table.local_page_RP[row, :page] >= 0).sum()) for page in range(7)]
            assert pages.before_BP[row].tolist() == before


def test_tables_are_taken_in_where_they_are() -> None:
    pages = ShardPages.of(torch.full((4, 7), -1, dtype=torch.int32), size=2, rank=0)
    address = pages.page_BP.data_ptr()
    other = ShardPages.of(torch.from_numpy(page_ids()).int(), size=2, rank=0)
    pages.take(other)
    assert pages.page_BP.data_ptr() == address
    assert torch.equal(pages.page_BP, other.page_BP)
    assert torch.equal(pages.first_owner_B, other.first_owner_B)
