"""Bytes of a token and of a page, and what two sides must agree on."""

from dataclasses import replace

import pytest

from specdec.dcp.geometry import PoolRole
from specdec.dcp.layout import EntryKind, FieldLayout, KvFormat, PoolLayout
from specdec.kernels.errors import ConfigError

NUM_LAYERS = 78
FULL_LAYERS = tuple(range(3)) + tuple(range(6, 78, 4))  # 21 layers with an indexer


def glm_layout(kv_format: KvFormat, role: PoolRole = PoolRole.TARGET) -> PoolLayout:
    num_layers = NUM_LAYERS if role is PoolRole.TARGET else 1
    return PoolLayout(
        role=role,
        page_size=64,
        kv_format=kv_format,
        kv_lora_rank=512,
        rope_head_dim=64,
        index_head_dim=128,
        num_latent_layers=num_layers,
        index_layers=FULL_LAYERS if role is PoolRole.TARGET else (0,),
        fp8_scales=(1.0,) * num_layers if kv_format is KvFormat.FP8 else (),
    )


@pytest.mark.parametrize(
    ("kv_format", "latent_bytes", "index_bytes"),
    [
        (KvFormat.FLOAT32, 2304, 512),
        (KvFormat.BFLOAT16, 1152, 256),
        (KvFormat.FP8, 576, 132),
        (KvFormat.FP8_PACKED, 656, 132),
    ],
)
def test_bytes_of_a_token_in_one_layer(kv_format: KvFormat, latent_bytes: int, index_bytes: int) -> None:
    layout = glm_layout(kv_format)
    assert layout.latent.bytes_per_token == latent_bytes
    assert layout.index_keys.bytes_per_token == index_bytes
    assert layout.bytes_per_token == NUM_LAYERS * latent_bytes + len(FULL_LAYERS) * index_bytes
    assert layout.bytes_per_page == 64 * layout.bytes_per_token


def test_a_token_of_packed_target_and_draft_takes_54728_bytes() -> None:
    layouts = [glm_layout(KvFormat.FP8_PACKED, role) for role in PoolRole]
    assert sum(layout.bytes_per_token for layout in layouts) == 54_728


def test_bfloat16_takes_95232_bytes_a_token_and_1408_for_the_draft() -> None:
    assert glm_layout(KvFormat.BFLOAT16).bytes_per_token == 95_232
    assert glm_layout(KvFormat.BFLOAT16, PoolRole.DRAFT).bytes_per_token == 1_408


def test_index_key_pages_hold_all_keys_and_then_all_scales() -> None:
    layout = glm_layout(KvFormat.FP8_PACKED)
    assert layout.index_keys.fields == (FieldLayout("keys", 0, 128, 128), FieldLayout("scales", 128 * 64, 4, 4))
    assert layout.latent.fields == (FieldLayout("latent", 0, 656, 656),)


@pytest.mark.parametrize("kv_format", KvFormat)
def test_fields_cover_a_page_exactly_once(kv_format: KvFormat) -> None:
    for entry in glm_layout(kv_format).entries:
        covered = [0] * entry.bytes_per_layer_page
        for field in entry.fields:
            for token in range(entry.page_size):
                for byte in range(field.size):
                    covered[field.offset + token * field.stride + byte] += 1
        assert set(covered) == {1}


def test_a_short_last_group_of_the_packed_format_has_its_scale() -> None:
    layout = replace(glm_layout(KvFormat.FP8_PACKED), kv_lora_rank=130, rope_head_dim=3)
    assert layout.latent.bytes_per_token == 130 + 2 * 4 + 2 * 3


def test_a_pool_is_priced_with_its_two_reserved_pages() -> None:
    layout = glm_layout(KvFormat.BFLOAT16)
    assert layout.pool_bytes(10) == {
        EntryKind.LATENT: 12 * 64 * NUM_LAYERS * 1152,
        EntryKind.INDEX_KEYS: 12 * 64 * len(FULL_LAYERS) * 256,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 3},
        {"page_size": 0},
        {"kv_lora_rank": 0},
        {"num_latent_layers": 0},
        {"index_layers": (0, 78)},
        {"index_layers": (-1,)},
        {"index_layers": (4, 0)},
        {"index_layers": (4, 4)},
        {"index_head_dim": 6},
        {"fp8_scales": ()},
        {"fp8_scales": (1.0,) * 79},
        {"fp8_scales": (1.0,) * 77 + (0.0,)},
        {"fp8_scales": (1.0,) * 77 + (float("nan"),)},
        {"fp8_scales": (1.0,) * 77 + (float("inf"),)},
        {"kv_format": KvFormat.BFLOAT16},
    ],
)
def test_layouts_that_cannot_work_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(change))).replace("kv_format", "fp8_scales")):
        replace(glm_layout(KvFormat.FP8), **change)  # type: ignore[arg-type]


def test_the_fingerprint_sees_every_field() -> None:
    layout = glm_layout(KvFormat.FP8)
    changed = [
        layout,
        replace(layout, role=PoolRole.DRAFT),
        replace(layout, page_size=4),
        replace(layout, kv_format=KvFormat.BFLOAT16, fp8_scales=()),
        replace(layout, kv_lora_rank=511),
        replace(layout, rope_head_dim=32),
        replace(layout, index_head_dim=64),
        replace(layout, num_latent_layers=79, fp8_scales=(1.0,) * 79),
        replace(layout, index_layers=FULL_LAYERS[1:]),
        replace(layout, fp8_scales=(1.0,) * 77 + (1.0000001,)),
    ]
    assert len({each.fingerprint for each in changed}) == len(changed)


def test_equal_layouts_have_equal_fingerprints() -> None:
    assert glm_layout(KvFormat.FP8).fingerprint == glm_layout(KvFormat.FP8).fingerprint
