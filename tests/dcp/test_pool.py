"""What is written to a pool is read from it, by its owner, and nothing else ever is."""

import struct

import numpy as np
import pytest
import torch

from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.layout import EntryKind, KvFormat, PoolLayout
from specdec.dcp.metadata import BatchMetadata, build_metadata
from specdec.dcp.page_ids import owner
from specdec.dcp.pool import KvPool
from specdec.kernels.errors import ConfigError, GeometryError
from specdec.kernels.index_key_format import decode_index_keys, encode_index_keys
from specdec.kernels.latent_formats import decode_fp8, decode_fp8_packed, encode_fp8, encode_fp8_packed

KV_LORA_RANK, ROPE_HEAD_DIM, INDEX_HEAD_DIM = 130, 6, 12
NUM_LAYERS, INDEX_LAYERS = 3, (0, 2)
FP8_SCALES = (1.0, 0.25, 0.037)
NAN_BYTE = 0xFF  # NaN in float32, bfloat16 and e4m3 alike
PAGE_TABLE = np.array([[6, 1, 8, -1], [3, 4, -1, -1], [0, -1, -1, -1]])
NUM_IDS = 16

parametrize_formats = pytest.mark.parametrize("kv_format", KvFormat)


def make_layout(kv_format: KvFormat, *, page_size: int = 4, role: PoolRole = PoolRole.TARGET) -> PoolLayout:
    return PoolLayout(
        role=role,
        page_size=page_size,
        kv_format=kv_format,
        kv_lora_rank=KV_LORA_RANK,
        rope_head_dim=ROPE_HEAD_DIM,
        index_head_dim=INDEX_HEAD_DIM,
        num_latent_layers=NUM_LAYERS,
        index_layers=INDEX_LAYERS,
        fp8_scales=FP8_SCALES if kv_format is KvFormat.FP8 else (),
    )


def make_pool(layout: PoolLayout, *, dcp_size: int = 1, rank: int = 0) -> KvPool:
    """A pool whose memory is NaN."""
    pool = KvPool(layout, num_pages=NUM_IDS // dcp_size, geometry=Geometry(dcp_size, rank, layout.role))
    for kind in EntryKind:
        pool.buffer(kind).fill_(NAN_BYTE)
    return pool


def make_metadata(pool: KvPool, request_index: list[int], position: list[int]) -> BatchMetadata:
    return build_metadata(
        geometry=pool.geometry,
        page_size=pool.layout.page_size,
        num_pages=pool.num_pages,
        request_index=np.array(request_index, dtype=np.int64),
        position=np.array(position, dtype=np.int64),
        page_table=PAGE_TABLE,
    )


def whole_batch(pool: KvPool, lengths: tuple[int, ...]) -> BatchMetadata:
    """All positions of every request, in an order that mixes requests."""
    rows = [(request, position) for request, length in enumerate(lengths) for position in range(length)]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    return make_metadata(pool, [row[0] for row in rows], [row[1] for row in rows])


def lengths_for(page_size: int) -> tuple[int, int, int]:
    """One past a page, one short of a page, a single token."""
    return 2 * page_size + 1, 2 * page_size - 1, 1


def make_values(meta: BatchMetadata, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, rope values and index keys of a pass; NaN in the padding rows."""
    generator = torch.Generator().manual_seed(layer)
    num_rows = len(meta.position_T)
    values = [torch.randn(num_rows, dim, generator=generator) for dim in (KV_LORA_RANK, ROPE_HEAD_DIM, INDEX_HEAD_DIM)]
    for value in values:
        value[meta.num_tokens :] = float("nan")
    return values[0], values[1], values[2]


def write_all(pool: KvPool, meta: BatchMetadata) -> None:
    for layer in range(NUM_LAYERS):
        latent_TL, rope_TR, key_TD = make_values(meta, layer)
        pool.write_latent(layer, latent_TL, rope_TR, meta)
        if layer in INDEX_LAYERS:
            pool.write_index_key(layer, key_TD, meta)


def stored_latents(kv_format: KvFormat, layer: int, latent_TL: torch.Tensor, rope_TR: torch.Tensor) -> torch.Tensor:
    """What a latent is once it went through its format."""
    match kv_format:
        case KvFormat.FLOAT32:
            return torch.cat((latent_TL, rope_TR), dim=-1)
        case KvFormat.BFLOAT16:
            return torch.cat((latent_TL, rope_TR), dim=-1).bfloat16().float()
        case KvFormat.FP8:
            return decode_fp8(encode_fp8(latent_TL, rope_TR, FP8_SCALES[layer]), FP8_SCALES[layer])
        case KvFormat.FP8_PACKED:
            return decode_fp8_packed(encode_fp8_packed(latent_TL, rope_TR), KV_LORA_RANK, ROPE_HEAD_DIM)


def stored_keys(kv_format: KvFormat, key_TD: torch.Tensor) -> torch.Tensor:
    if kv_format is KvFormat.FLOAT32:
        return key_TD
    if kv_format is KvFormat.BFLOAT16:
        return key_TD.bfloat16().float()
    return decode_index_keys(*encode_index_keys(key_TD))


@parametrize_formats
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("dcp_size", [1, 2, 4, 8])
def test_every_position_is_read_back_from_its_owner_and_is_zero_elsewhere(
    kv_format: KvFormat, page_size: int, dcp_size: int
) -> None:
    layout = make_layout(kv_format, page_size=page_size)
    num_owners: dict[tuple[int, int], int] = {}
    for rank in range(dcp_size):
        pool = make_pool(layout, dcp_size=dcp_size, rank=rank)
        meta = whole_batch(pool, lengths_for(page_size))
        write_all(pool, meta)
        selected_TK = torch.stack((meta.position_T, torch.full_like(meta.position_T, -1)), dim=1)
        row_TK = meta.rows_of(selected_TK)
        owned_T = row_TK[:, 0] >= 0
        for layer in range(NUM_LAYERS):
            latent_TL, rope_TR, key_TD = make_values(meta, layer)
            gathered_TKX = pool.gather_latent(layer, row_TK)
            assert gathered_TKX.dtype is torch.float32
            expected = stored_latents(kv_format, layer, latent_TL, rope_TR)
            assert torch.equal(gathered_TKX[owned_T, 0], expected[owned_T])
            assert not gathered_TKX[~owned_T].any()
            assert not gathered_TKX[:, 1].any()
            if layer in INDEX_LAYERS:
                keys_RSD = pool.gather_index_keys(layer, meta)
                expected = stored_keys(kv_format, key_TD)
                for t in owned_T.nonzero().flatten().tolist():
                    assert torch.equal(keys_RSD[meta.request_index_T[t], meta.owned_length_T[t] - 1], expected[t])
        for t in range(meta.num_tokens):
            place = (int(meta.request_index_T[t]), int(meta.position_T[t]))
            num_owners[place] = num_owners.get(place, 0) + int(owned_T[t])
    assert set(num_owners.values()) == {1}


@parametrize_formats
@pytest.mark.parametrize("rank", [0, 1])
def test_owned_pages_of_index_keys_stand_side_by_side_with_zeros_behind_them(kv_format: KvFormat, rank: int) -> None:
    pool = make_pool(make_layout(kv_format), dcp_size=2, rank=rank)
    keys_RSD = pool.gather_index_keys(0, whole_batch(pool, (0, 0, 0)))
    num_owned_R = (owner(PAGE_TABLE, 2) == rank).sum(axis=1)
    assert keys_RSD.shape == (3, 2 * 4, INDEX_HEAD_DIM)  # rank 0 owns two pages of request 0, no rank owns more
    for key_SD, num_owned in zip(keys_RSD, num_owned_R, strict=True):
        assert key_SD[: num_owned * 4].isnan().all()  # owned pages are read whole, dead rows included
        assert not key_SD[num_owned * 4 :].any()


@parametrize_formats
@pytest.mark.parametrize("dcp_size", [1, 4])
def test_a_pass_touches_its_own_rows_and_the_scratch_page_only(kv_format: KvFormat, dcp_size: int) -> None:
    pool = make_pool(make_layout(kv_format), dcp_size=dcp_size, rank=dcp_size - 1)
    before = {kind: pool.buffer(kind).clone() for kind in EntryKind}
    meta = make_metadata(pool, [0, 1, 0], [5, 2, 8])
    write_all(pool, meta)
    live = [page_id for page_id in (1, 3, 8) if page_id % dcp_size == dcp_size - 1]
    for kind in EntryKind:
        changed = (pool.buffer(kind) != before[kind]).flatten(1).any(dim=1)
        assert sorted(changed[: pool.num_pages].nonzero().flatten().tolist()) == [i // dcp_size for i in live]
    for page_id, offset in ((1, 1), (3, 2), (8, 0)):
        if page_id in live:
            page = pool.buffer(EntryKind.LATENT)[page_id // dcp_size].view(NUM_LAYERS, 4, -1)
            untouched = [i for i in range(4) if i != offset]
            assert (page[:, untouched] == NAN_BYTE).all()


@parametrize_formats
def test_reads_never_see_the_scratch_page(kv_format: KvFormat) -> None:
    pool = make_pool(make_layout(kv_format), dcp_size=2, rank=0)
    write_all(pool, make_metadata(pool, [0, 1], [4, 3]))  # both owned by rank 1: NaN padding goes to scratch too
    meta = make_metadata(pool, [0], [0])
    row_TK = meta.rows_of(torch.arange(-1, 8).expand(8, 9))
    unowned = row_TK < 0
    assert unowned[:, 0].all()
    assert not pool.gather_latent(1, row_TK)[unowned].any()


def test_the_last_page_of_the_id_space_is_a_page_like_any_other() -> None:
    for dcp_size in range(1, 9):
        rank, local = (NUM_IDS // dcp_size * dcp_size - 1) % dcp_size, NUM_IDS // dcp_size - 1
        pool = make_pool(make_layout(KvFormat.FLOAT32), dcp_size=dcp_size, rank=rank)
        meta = build_metadata(
            geometry=pool.geometry,
            page_size=4,
            num_pages=pool.num_pages,
            request_index=np.array([0]),
            position=np.array([3]),
            page_table=np.array([[local * dcp_size + rank]]),
        )
        write_all(pool, meta)
        latent_TL, rope_TR, _ = make_values(meta, 2)
        gathered = pool.gather_latent(2, meta.rows_of(torch.tensor([[3]] + [[-1]] * 7)))
        assert torch.equal(gathered[0, 0], torch.cat((latent_TL[0], rope_TR[0])))
        assert pool.buffer(EntryKind.LATENT)[local].ne(NAN_BYTE).any()


@pytest.mark.parametrize("kv_format", [KvFormat.FP8, KvFormat.FP8_PACKED])
def test_latent_rows_lie_at_page_then_layer_then_token(kv_format: KvFormat) -> None:
    pool = make_pool(make_layout(kv_format))
    meta = make_metadata(pool, [0, 2], [6, 0])
    write_all(pool, meta)
    memory = pool.buffer(EntryKind.LATENT).numpy().tobytes()
    row_bytes = pool.layout.latent.bytes_per_token
    for t, (page_id, offset) in enumerate(((1, 2), (0, 0))):
        for layer in range(NUM_LAYERS):
            latent_TL, rope_TR, _ = make_values(meta, layer)
            if kv_format is KvFormat.FP8:
                expected = encode_fp8(latent_TL, rope_TR, FP8_SCALES[layer])[t]
            else:
                expected = encode_fp8_packed(latent_TL, rope_TR)[t]
            first = ((page_id * NUM_LAYERS + layer) * 4 + offset) * row_bytes
            assert memory[first : first + row_bytes] == bytes(expected.tolist())


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("kv_format", [KvFormat.FP8, KvFormat.FP8_PACKED])
def test_index_key_pages_hold_keys_and_behind_them_scales(kv_format: KvFormat, page_size: int) -> None:
    pool = make_pool(make_layout(kv_format, page_size=page_size))
    meta = make_metadata(pool, [0, 1], [2 * page_size, page_size - 1])
    write_all(pool, meta)
    memory = pool.buffer(EntryKind.INDEX_KEYS).numpy().tobytes()
    page_bytes = page_size * (INDEX_HEAD_DIM + 4)
    for t, (page_id, offset) in enumerate(((8, 0), (3, page_size - 1))):
        for place, layer in enumerate(INDEX_LAYERS):
            stored_TD, scale_T = encode_index_keys(make_values(meta, layer)[2])
            page = memory[(page_id * len(INDEX_LAYERS) + place) * page_bytes :][:page_bytes]
            assert page[offset * INDEX_HEAD_DIM :][:INDEX_HEAD_DIM] == bytes(stored_TD[t].tolist())
            assert struct.unpack_from("<f", page, page_size * INDEX_HEAD_DIM + 4 * offset) == (scale_T[t].item(),)


@parametrize_formats
def test_a_later_write_replaces_an_earlier_one(kv_format: KvFormat) -> None:
    pool = make_pool(make_layout(kv_format))
    meta = make_metadata(pool, [1], [3])
    latent_TL, rope_TR, key_TD = make_values(meta, 0)
    for factor in (3.0, 1.0):
        pool.write_latent(0, latent_TL * factor, rope_TR * factor, meta)
        pool.write_index_key(0, key_TD * factor, meta)
    gathered = pool.gather_latent(0, meta.rows_of(meta.position_T[:, None]))
    assert torch.equal(gathered[0, 0], stored_latents(kv_format, 0, latent_TL, rope_TR)[0])
    assert torch.equal(pool.gather_index_keys(0, meta)[1, 3], stored_keys(kv_format, key_TD)[0])


@parametrize_formats
def test_bfloat16_values_are_converted_and_the_pool_never_is(kv_format: KvFormat) -> None:
    pool = make_pool(make_layout(kv_format))
    addresses = {kind: pool.buffer(kind).data_ptr() for kind in EntryKind}
    meta = make_metadata(pool, [1], [3])
    latent_TL, rope_TR, key_TD = (values.bfloat16() for values in make_values(meta, 0))
    pool.write_latent(0, latent_TL, rope_TR, meta)
    pool.write_index_key(0, key_TD, meta)
    assert {kind: pool.buffer(kind).data_ptr() for kind in EntryKind} == addresses
    gathered = pool.gather_latent(0, meta.rows_of(meta.position_T[:, None]))
    assert torch.equal(gathered[0, 0], stored_latents(kv_format, 0, latent_TL.float(), rope_TR.float())[0])
    assert torch.equal(pool.gather_index_keys(0, meta)[1, 3], stored_keys(kv_format, key_TD.float())[0])


def test_values_of_a_wrong_shape_are_refused_and_never_broadcast() -> None:
    pool = make_pool(make_layout(KvFormat.FLOAT32))
    meta = make_metadata(pool, [1], [3])
    latent_TL, rope_TR, key_TD = make_values(meta, 0)
    with pytest.raises(ValueError, match="latent_TL must be"):
        pool.write_latent(0, latent_TL[:1], rope_TR, meta)
    with pytest.raises(ValueError, match="rope_TR must be"):
        pool.write_latent(0, latent_TL, rope_TR[:, :1], meta)
    with pytest.raises(ValueError, match="key_TD must be"):
        pool.write_index_key(0, key_TD[:1], meta)


@pytest.mark.parametrize("layer", [-1, 1, NUM_LAYERS])
def test_layers_without_an_indexer_own_no_index_keys(layer: int) -> None:
    pool = make_pool(make_layout(KvFormat.FLOAT32))
    meta = make_metadata(pool, [1], [3])
    with pytest.raises(KeyError):
        pool.gather_index_keys(layer, meta)


def test_metadata_of_another_geometry_is_refused() -> None:
    layout = make_layout(KvFormat.FLOAT32)
    pool = make_pool(layout, dcp_size=2, rank=1)
    draft_layout = make_layout(KvFormat.FLOAT32, role=PoolRole.DRAFT)
    others = [
        make_pool(layout),  # as if dcp were disabled
        make_pool(layout, dcp_size=2, rank=0),
        make_pool(layout, dcp_size=4, rank=1),
        make_pool(draft_layout),
        make_pool(make_layout(KvFormat.FLOAT32, page_size=1), dcp_size=2, rank=1),
        KvPool(layout, num_pages=pool.num_pages + 1, geometry=pool.geometry),
    ]
    for other in others:
        meta = make_metadata(other, [1], [0])
        latent_TL, rope_TR, key_TD = make_values(meta, 0)
        with pytest.raises(GeometryError):
            pool.write_latent(0, latent_TL, rope_TR, meta)
        with pytest.raises(GeometryError):
            pool.write_index_key(0, key_TD, meta)
        with pytest.raises(GeometryError):
            pool.gather_index_keys(0, meta)
    for kind in EntryKind:
        assert (pool.buffer(kind) == NAN_BYTE).all()


def test_a_pool_is_made_for_the_role_of_its_layout() -> None:
    with pytest.raises(GeometryError, match="target layout"):
        KvPool(make_layout(KvFormat.FLOAT32), num_pages=1, geometry=Geometry(1, 0, PoolRole.DRAFT))
    with pytest.raises(ConfigError, match="num_pages=0"):
        KvPool(make_layout(KvFormat.FLOAT32), num_pages=0, geometry=Geometry(1, 0, PoolRole.TARGET))


@parametrize_formats
@pytest.mark.parametrize("dcp_size", range(1, 9))
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_planned_bytes_are_the_allocated_bytes(kv_format: KvFormat, dcp_size: int, page_size: int) -> None:
    target_layout = make_layout(kv_format, page_size=page_size)
    draft_layout = make_layout(kv_format, page_size=page_size, role=PoolRole.DRAFT)
    target = KvPool(target_layout, num_pages=3, geometry=Geometry(dcp_size, 0, PoolRole.TARGET))
    draft = KvPool(draft_layout, num_pages=3 * dcp_size, geometry=Geometry(1, 0, PoolRole.DRAFT))
    assert target.nbytes == target_layout.pool_bytes(3)
    assert draft.nbytes == draft_layout.pool_bytes(3 * dcp_size)
    for entry in target_layout.entries:
        shape = target.buffer(entry.kind).shape
        assert shape == (3 + 1, len(entry.layers), entry.bytes_per_layer_page)


def test_a_batch_of_nothing_reads_nothing() -> None:
    pool = make_pool(make_layout(KvFormat.FP8_PACKED))
    meta = build_metadata(
        geometry=pool.geometry,
        page_size=4,
        num_pages=pool.num_pages,
        request_index=np.zeros(0, dtype=np.int64),
        position=np.zeros(0, dtype=np.int64),
        page_table=np.zeros((0, 0), dtype=np.int64),
    )
    write_all(pool, meta)
    assert pool.gather_index_keys(0, meta).shape == (0, 0, INDEX_HEAD_DIM)
    assert pool.gather_latent(0, torch.empty(8, 0, dtype=torch.int64)).shape == (8, 0, KV_LORA_RANK + ROPE_HEAD_DIM)
    assert (pool.buffer(EntryKind.LATENT)[:-1] == NAN_BYTE).all()
