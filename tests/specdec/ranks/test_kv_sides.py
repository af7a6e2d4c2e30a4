"""A side of a transfer travels with every order, and brings nothing but its sizes and layouts."""

import pickle

from specdec.dcp.geometry import PoolRole
from specdec.dcp.layout import KvFormat, PoolLayout
from specdec.ranks.kv_sides import KvSide


def test_what_is_derived_does_not_travel() -> None:
    layout = PoolLayout(
        role=PoolRole.TARGET,
        page_size=4,
        kv_format=KvFormat.FLOAT32,
        kv_lora_rank=4,
        rope_head_dim=2,
        index_head_dim=4,
        num_latent_layers=8,
        index_layers=(0, 4),
    )
    side = KvSide(target=layout, draft=None, num_pages=7, tp_size=8, dcp_size=4)
    fresh = len(pickle.dumps(side))
    placements = side.placements
    assert len(pickle.dumps(side)) == fresh
    again = pickle.loads(pickle.dumps(side))
    assert again == side
    assert again.placements == placements
