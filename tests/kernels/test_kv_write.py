"""Cache entries written in one launch against the formats' own definitions, byte for byte, and nothing beside them.

The query latents that the launch norms besides are those of `rms_norm`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.kernels.index_key_format import decode_index_keys
from specdec.kernels.kv_write import IndexKeyEntries, LatentEntries, QueryLatents, write_kv, write_kv_ref
from specdec.kernels.latent_formats import decode_fp8_packed
from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.rotary import Rotation
from tests.support.far_rows import far_rows
from tests.support.gpu import needs_gpu
from tests.support.triton_process import ptx_for_hopper, run_interpreted

LATENT, ROPE, DIM, QUERY, PAGE, RECORD = 512, 64, 128, 2048, 64, 656
SENTINEL = 0x55

# The interpreter does not round to e4m3 and bfloat16 as hardware does: what it shows is where bytes go.
KERNEL_CHECK = """
import torch
from specdec.kernels.kv_write import IndexKeyEntries, LatentEntries, QueryLatents, write_kv, write_kv_ref
from specdec.kernels.rotary import Rotation

step = (1 << 29) + 8  # the last query latent begins behind 2^31 values: in 32 bits its place would be outside
query = torch.empty(4 * step + 300, dtype=torch.bfloat16).as_strided((5, 300), (step, 1)).copy_(torch.randn(5, 300))
query_weight = torch.randn(300).bfloat16()
kv, key = torch.randn(5, 600).bfloat16()[:, :576], torch.randn(5, 128)
angle = 6 * torch.rand(5, 32)
rotation = Rotation(cos_TP=angle.cos(), sin_TP=angle.sin())
row = torch.tensor([0, -1, 191, 64, 3])
written = []
for write in (write_kv, write_kv_ref):
    records, key_pages = (torch.full((3, 2, 64 * size), 0x55, dtype=torch.uint8) for size in (656, 132))
    latents = LatentEntries(kv_TX=kv, weight_L=torch.ones(512).bfloat16(), eps=1e-5, pages_MB=records[:, 1])
    keys = IndexKeyEntries(
        key_TD=key, weight_D=torch.ones(128), bias_D=torch.zeros(128), eps=1e-6, pages_MB=key_pages[:, 1]
    )
    normed = torch.full((5, 300), torch.nan).bfloat16()
    queries = QueryLatents(x_TQ=query, weight_Q=query_weight, eps=1e-5, out_TQ=normed)
    write(latents, queries, keys, rotation, row, page_size=64)
    written.append((records, key_pages, normed))
(records, key_pages, normed), (expected_records, expected_key_pages, expected_normed) = written
torch.testing.assert_close(normed, expected_normed, rtol=2**-6, atol=0)  # truncated where hardware rounds
for got, expected in ((records, expected_records), (key_pages, expected_key_pages)):
    assert torch.equal(got[:, 0], expected[:, 0])
    touched, expected_touched = (pages != 0x55 for pages in (got, expected))
    assert (touched != expected_touched).sum() < 16  # values that happen to be the sentinel
scale, expected_scale = (pages[:, 1, 64 * 128 :].view(torch.float32) for pages in (key_pages, expected_key_pages))
assert torch.equal(scale, expected_scale)
"""


def make_entries(
    num_rows: int, *, num_pages: int = 5, seed: int = 0
) -> tuple[LatentEntries, QueryLatents, IndexKeyEntries, Rotation, torch.Tensor]:
    """Entries of the second of two layers; every fifth row is another rank's."""
    generator = torch.Generator().manual_seed(seed)
    kv_TX = torch.randn(num_rows, 2624, generator=generator).bfloat16()[:, -LATENT - ROPE :]
    records, key_pages = (
        torch.full((num_pages, 2, PAGE * size), SENTINEL, dtype=torch.uint8) for size in (RECORD, DIM + 4)
    )
    weight_L = (1 + torch.rand(LATENT, generator=generator)).bfloat16()
    latents = LatentEntries(kv_TX=kv_TX, weight_L=weight_L, eps=1e-5, pages_MB=records[:, 1])
    queries = QueryLatents(
        x_TQ=torch.randn(num_rows, QUERY + 77, generator=generator).bfloat16()[:, 3 : QUERY + 3],
        weight_Q=torch.randn(QUERY, generator=generator).bfloat16(),
        eps=1e-5,
        out_TQ=torch.full((num_rows, QUERY), torch.nan, dtype=torch.bfloat16),
    )
    keys = IndexKeyEntries(
        key_TD=torch.randn(num_rows, DIM, generator=generator).bfloat16(),
        weight_D=torch.rand(DIM, generator=generator),
        bias_D=torch.randn(DIM, generator=generator),
        eps=1e-6,
        pages_MB=key_pages[:, 1],
    )
    angle_TP = 6 * torch.rand(num_rows, ROPE // 2, generator=generator)
    row_T = torch.randperm(num_pages * PAGE, generator=generator)[:num_rows]
    row_T[1::5] = -1
    return latents, queries, keys, Rotation(cos_TP=angle_TP.cos(), sin_TP=angle_TP.sin()), row_T


def test_the_definition_stores_what_the_formulas_give() -> None:
    latents, queries, keys, rotation, row_T = make_entries(7)
    write_kv_ref(latents, queries, keys, rotation, row_T, page_size=PAGE)
    assert torch.equal(queries.out_TQ, rms_norm(queries.x_TQ, queries.weight_Q, eps=1e-5))
    live = row_T >= 0
    page_T, slot_T = row_T[live] // PAGE, row_T[live] % PAGE
    turn_TP = torch.complex(rotation.cos_TP[live], rotation.sin_TP[live]).to(torch.complex128)

    stored_TX = decode_fp8_packed(latents.pages_MB.unflatten(1, (PAGE, -1))[page_T, slot_T], LATENT, ROPE).double()
    latent_TL, rope_TR = latents.kv_TX[live].double().split((LATENT, ROPE), dim=1)
    latent_TL = latent_TL / (latent_TL.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * latents.weight_L.double()
    torch.testing.assert_close(stored_TX[:, :LATENT], latent_TL, rtol=2**-4, atol=0.02)
    torch.testing.assert_close(stored_TX[:, LATENT:], turned(rope_TR, turn_TP), rtol=2**-8, atol=1e-6)

    pages_MSD = keys.pages_MB[:, : PAGE * DIM].unflatten(1, (PAGE, -1))
    scales_MS = keys.pages_MB[:, PAGE * DIM :].view(torch.float32)
    key_TD = keys.key_TD[live].double()
    key_TD = (key_TD - key_TD.mean(dim=1, keepdim=True)) / (key_TD.var(dim=1, correction=0, keepdim=True) + 1e-6).sqrt()
    key_TD = key_TD * keys.weight_D.double() + keys.bias_D.double()
    key_TD[:, :ROPE] = turned(key_TD[:, :ROPE], turn_TP)
    stored_TD = decode_index_keys(pages_MSD[page_T, slot_T], scales_MS[page_T, slot_T]).double()
    torch.testing.assert_close(stored_TD, key_TD, rtol=2**-4, atol=0.02)


def test_rows_of_other_ranks_write_nothing() -> None:
    latents, queries, keys, rotation, row_T = make_entries(7)
    write_kv_ref(latents, queries, keys, rotation, row_T.fill_(-1), page_size=PAGE)
    assert (latents.pages_MB == SENTINEL).all()
    assert (keys.pages_MB == SENTINEL).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_TX": torch.zeros(7, 576)}, "kv_TX must be"),
        ({"weight_L": torch.zeros(384, dtype=torch.bfloat16)}, "powers of two"),
        ({"pages_MB": torch.zeros(5, PAGE * 640, dtype=torch.uint8)}, "latent pages_MB must be"),
        (
            {"pages_MB": torch.zeros(5, PAGE * RECORD + 2, dtype=torch.uint8)[:, 2:]},
            "latent pages must lie at multiples",
        ),
    ],
)
def test_other_shapes_and_dtypes_are_refused(changes: dict[str, Any], message: str) -> None:
    latents, queries, keys, rotation, row_T = make_entries(7)
    with pytest.raises(ValueError, match=message):
        write_kv(replace(latents, **changes), queries, keys, rotation, row_T, page_size=PAGE)
    with pytest.raises(ValueError, match="row_T must be"):
        write_kv(latents, queries, keys, rotation, row_T.int(), page_size=PAGE)
    with pytest.raises(
        ValueError, match="page_size must be a positive multiple of 4, so that scales are aligned, got 6"
    ):
        write_kv(latents, queries, keys, rotation, row_T, page_size=6)
    half = IndexKeyEntries(
        key_TD=keys.key_TD[:, :64], weight_D=keys.weight_D[:64], bias_D=keys.bias_D[:64], eps=1e-6,
        pages_MB=torch.zeros(5, PAGE * 68, dtype=torch.uint8),
    )  # fmt: skip
    wide = Rotation(cos_TP=torch.zeros(7, 64), sin_TP=torch.zeros(7, 64))
    with pytest.raises(ValueError, match="D must be at least R, got 64 and 128"):
        write_kv(latents, queries, half, wide, row_T, page_size=PAGE)
    across = replace(rotation, cos_TP=rotation.sin_TP.T.contiguous().T)
    with pytest.raises(ValueError, match=r"cos_TP must be torch\.float32 .*contiguous"):
        write_kv(latents, queries, keys, across, row_T, page_size=PAGE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_TQ": torch.zeros(7, QUERY)}, "x_TQ must be torch.bfloat16"),
        ({"x_TQ": torch.zeros(7, 2 * QUERY).bfloat16()[:, ::2]}, "x_TQ must be .*rows that are contiguous"),
        ({"weight_Q": torch.zeros(2 * QUERY).bfloat16()[::2]}, "weight_Q must be .*contiguous"),
        ({"out_TQ": torch.zeros(7, QUERY + 1).bfloat16()[:, 1:]}, "out_TQ must be .*contiguous"),
    ],
)
def test_query_latents_of_another_kind_are_refused(changes: dict[str, Any], message: str) -> None:
    latents, queries, keys, rotation, row_T = make_entries(7)
    with pytest.raises(ValueError, match=message):
        write_kv(latents, replace(queries, **changes), keys, rotation, row_T, page_size=PAGE)


@needs_gpu
@pytest.mark.parametrize("num_rows", [0, 1, 6, 192])
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("hostile", [False, True])
def test_a_gpu_stores_the_same_bytes(num_rows: int, indexed: bool, hostile: bool) -> None:
    latents, queries, keys, rotation, row_T = make_entries(num_rows, seed=num_rows)
    if hostile and num_rows > 5:
        latents.kv_TX[0, 3], latents.kv_TX[2, 3], latents.kv_TX[4, 520] = torch.inf, torch.nan, torch.inf
        latents.kv_TX[3, :LATENT] = 0
        keys.bias_D.zero_()
        keys.key_TD[0], keys.key_TD[2, 5] = 0, torch.nan
        queries.x_TQ[0, 7] = torch.nan
        queries.x_TQ[3] = 0
    gpu_latents, gpu_keys, gpu_queries = on_gpu(latents), on_gpu(keys), queries_on_gpu(queries)
    gpu_rotation = Rotation(cos_TP=rotation.cos_TP.cuda(), sin_TP=rotation.sin_TP.cuda())
    write_kv_ref(latents, queries, keys if indexed else None, rotation, row_T, page_size=PAGE)
    write_kv(gpu_latents, gpu_queries, gpu_keys if indexed else None, gpu_rotation, row_T.cuda(), page_size=PAGE)
    normed_TQ = gpu_queries.out_TQ.cpu()  # a rounding on the border, then another
    torch.testing.assert_close(normed_TQ, queries.out_TQ, rtol=2**-6, atol=0, equal_nan=True)
    assert int((normed_TQ != queries.out_TQ)[queries.out_TQ.isfinite()].sum()) <= 1e-3 * normed_TQ.numel()
    for got, expected in ((gpu_latents.pages_MB, latents.pages_MB), (gpu_keys.pages_MB, keys.pages_MB)):
        differs = got.cpu() != expected
        both_nan = ((got.cpu() & 0x7F) == 0x7F) & ((expected & 0x7F) == 0x7F)  # the sign of a NaN is not kept
        # Sums in another order move a value over an edge now and then; where it is a group's largest, the group moves.
        assert int((differs & ~both_nan).sum()) <= 2 + 1e-4 * int((expected != SENTINEL).sum())
        between = got.as_strided(got.shape, got.stride(), got.storage_offset() - got.shape[1])
        assert bool((between == SENTINEL).all())


def test_the_kernel_equals_the_definition(tmp_path: Path) -> None:
    run_interpreted(KERNEL_CHECK, tmp_path)


@pytest.mark.parametrize("indexed", [True, False])
def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path, indexed: bool) -> None:
    key_types = ("*bf16", "*fp32", "*fp32", "*u8") if indexed else ()
    query_types = ("*bf16", "*bf16", "*bf16")
    types = ("*bf16", "*bf16", "*u8", *query_types, *key_types, "*fp32", "*fp32", "*i64", *["fp32"] * 3, *["i32"] * 5)
    sizes = {"PAGE_SIZE": 64, "LATENT": 512, "QUERY": 2048, "QUERY_BLOCK": 2048, "PAIRS": 32, "INDEX_DIM": 128}
    sizes |= {"GROUP": 128, "STARTS_EARLY": True}
    if not indexed:
        sizes |= dict.fromkeys(("key_ptr", "key_weight_ptr", "key_bias_ptr", "key_pages_ptr"))
    options = {"enable_fp_fusion": False}
    ptx = ptx_for_hopper("kv_write.write_kv_kernel", tmp_path, types=types, constants=sizes, options=options)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx


@needs_gpu
def test_a_gpu_finds_query_latents_that_lie_further_apart_than_32_bits_count() -> None:
    latents, queries, _, rotation, row_T = make_entries(3)
    rows = on_gpu(latents), Rotation(cos_TP=rotation.cos_TP.cuda(), sin_TP=rotation.sin_TP.cuda()), row_T.cuda()
    near = queries_on_gpu(queries)
    far = replace(near, x_TQ=far_rows(near.x_TQ), out_TQ=torch.full_like(near.out_TQ, torch.nan))
    for each in (near, far):
        write_kv(rows[0], each, None, *rows[1:], page_size=PAGE)
    assert bool(near.out_TQ.isfinite().all())
    assert torch.equal(far.out_TQ, near.out_TQ)


def queries_on_gpu(queries: QueryLatents) -> QueryLatents:
    """Copy query latents to a GPU, where other values lie beside them."""
    wide_TX = torch.nn.functional.pad(queries.x_TQ.cuda(), (8, 9), value=torch.nan)
    return QueryLatents(
        x_TQ=wide_TX[:, 8:-9], weight_Q=queries.weight_Q.cuda(), eps=queries.eps, out_TQ=queries.out_TQ.cuda()
    )


def on_gpu(entries: Any) -> Any:
    """Copy entries to a GPU, where the pages lie apart and other rows lie beside those that are read."""
    tensors = {name: getattr(entries, name).cuda() for name in entries.__slots__ if name != "eps"}
    pages_MB = tensors["pages_MB"]
    tensors["pages_MB"] = torch.stack((torch.full_like(pages_MB, SENTINEL), pages_MB), dim=1)[:, 1]
    for name in {"kv_TX", "key_TD"} & tensors.keys():
        rows = tensors[name]
        tensors[name] = torch.cat((torch.full_like(rows, torch.nan), rows), dim=1)[:, rows.shape[1] :]
    return replace(entries, **tensors)


def turned(x_TR: torch.Tensor, turn_TP: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(x_TR.unflatten(1, (-1, 2)).contiguous()) * turn_TP).flatten(1)
