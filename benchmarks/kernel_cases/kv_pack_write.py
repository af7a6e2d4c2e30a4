"""What follows a layer's first projection, in one launch: cache entries stored, query latents normed."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import graph_us, num_sets, relative_error
from benchmarks.kernel_cases.rates import memory_us
from benchmarks.kernel_cases.result import CaseResult
from specdec.kernels.index_key_format import decode_index_keys, encode_index_keys
from specdec.kernels.kv_write import IndexKeyEntries, LatentEntries, QueryLatents, write_kv
from specdec.kernels.latent_formats import decode_fp8_packed, encode_fp8_packed
from specdec.kernels.rms_norm import layer_norm, rms_norm
from specdec.kernels.rotary import Rotation, inverse_frequency, rotate, rotation_at

_LATENT, _ROPE, _INDEX_DIM, _PAGE, _QUERY, _QKV = 512, 64, 128, 64, 2048, 2752
_RECORD = 656


def run() -> list[CaseResult]:
    """Time a layer with an indexer and one without; a quarter of the rows belong to other ranks."""
    return [_measure(rows, indexed=indexed) for rows in (6, 192) for indexed in (True, False)]


def _measure(num_rows: int, *, indexed: bool) -> CaseResult:
    num_pages = num_rows + 4
    num_bytes = num_rows * (2 * (_LATENT + _ROPE) + _RECORD + 4 * _ROPE + (2 * _INDEX_DIM + 132 if indexed else 0))
    num_bytes += 4 * num_rows * _QUERY
    ours: list[Callable[[], object]] = []
    torches: list[Callable[[], object]] = []
    for _ in range(num_sets(num_bytes, most=16)):
        projected_TO = torch.randn(num_rows, _QKV, device="cuda").bfloat16()
        x_TQ, kv_TX, key_TD = projected_TO.split((_QUERY, _LATENT + _ROPE, _INDEX_DIM), dim=1)
        weight_L = (1 + 0.1 * torch.randn(_LATENT, device="cuda")).bfloat16()
        weight_D, bias_D = (
            1 + 0.1 * torch.randn(_INDEX_DIM, device="cuda"),
            0.1 * torch.randn(_INDEX_DIM, device="cuda"),
        )
        weight_Q = (1 + 0.1 * torch.randn(_QUERY, device="cuda")).bfloat16()
        records, key_pages = (
            torch.zeros(num_pages, _PAGE * size, dtype=torch.uint8, device="cuda") for size in (_RECORD, _INDEX_DIM + 4)
        )
        latents = LatentEntries(kv_TX=kv_TX, weight_L=weight_L, eps=1e-5, pages_MB=records)
        out_TQ = torch.empty(num_rows, _QUERY, dtype=torch.bfloat16, device="cuda")
        queries = QueryLatents(x_TQ=x_TQ, weight_Q=weight_Q, eps=1e-5, out_TQ=out_TQ)
        keys = IndexKeyEntries(key_TD=key_TD, weight_D=weight_D, bias_D=bias_D, eps=1e-6, pages_MB=key_pages)
        position_T = torch.randint(1 << 20, (num_rows,), device="cuda")
        rotation = rotation_at(position_T, inverse_frequency(theta=8e6, dim=_ROPE, device=kv_TX.device))
        row_T = torch.randperm(num_pages * _PAGE, device="cuda")[:num_rows]
        scratch_T = torch.where(torch.rand(num_rows, device="cuda") < 0.25, 0, row_T)  # torch has no row that is not
        row_T = row_T.masked_fill(scratch_T == 0, -1)
        entries = latents, queries, keys if indexed else None, rotation
        ours.append(partial(write_kv, *entries, row_T, page_size=_PAGE))
        torches.append(partial(_in_torch, *entries, scratch_T))
    records.zero_()
    ours[-1]()
    error = _error(latents, queries, keys if indexed else None, rotation, row_T)
    return CaseResult(
        case="kv_pack_write",
        shape=f"T={num_rows}" + (", index keys" if indexed else ""),
        ours_us=graph_us(ours),
        floor_us=memory_us(num_bytes),
        error=error,
        peers_us={"torch": graph_us(torches)},
        note="one e4m3 rounding is 0.03; the floor is less than a launch",
    )


def _error(
    latents: LatentEntries,
    queries: QueryLatents,
    keys: IndexKeyEntries | None,
    rotation: Rotation,
    row_T: torch.Tensor,
) -> float:
    """Compare what was stored with the formulas in float64."""
    live_T = row_T >= 0
    row_T = row_T[live_T]
    stored_TX = decode_fp8_packed(latents.pages_MB.view(-1, _RECORD)[row_T], _LATENT, _ROPE)
    latent_TL, rope_TR = latents.kv_TX[live_T].double().split((_LATENT, _ROPE), dim=1)
    scale_T1 = (latent_TL.square().mean(dim=1, keepdim=True) + latents.eps).rsqrt()
    latent_TL = latent_TL * scale_T1 * latents.weight_L.double()
    exact_TX = torch.cat((latent_TL, _rotated(rope_TR, rotation, live_T)), dim=1)
    x_TQ = queries.x_TQ.double()
    exact_TQ = x_TQ * (x_TQ.square().mean(dim=1, keepdim=True) + queries.eps).rsqrt() * queries.weight_Q.double()
    error = max(relative_error(stored_TX, exact_TX), relative_error(queries.out_TQ, exact_TQ))
    if keys is None:
        return error
    page_T, slot_T = row_T // _PAGE, row_T % _PAGE
    q_TD, scale_T = (field[page_T, slot_T] for field in _index_fields(keys.pages_MB))
    weight_D, bias_D = keys.weight_D.double(), keys.bias_D.double()
    exact_TD = F.layer_norm(keys.key_TD[live_T].double(), weight_D.shape, weight_D, bias_D, keys.eps)
    exact_TD[:, :_ROPE] = _rotated(exact_TD[:, :_ROPE], rotation, live_T)
    return max(error, relative_error(decode_index_keys(q_TD, scale_T), exact_TD))


def _rotated(x_TR: torch.Tensor, rotation: Rotation, live_T: torch.Tensor) -> torch.Tensor:
    turn_TP = torch.complex(rotation.cos_TP[live_T].double(), rotation.sin_TP[live_T].double())
    return torch.view_as_real(torch.view_as_complex(x_TR.unflatten(1, (-1, 2)).contiguous()) * turn_TP).flatten(1)


def _in_torch(
    latents: LatentEntries,
    queries: QueryLatents,
    keys: IndexKeyEntries | None,
    rotation: Rotation,
    scratch_T: torch.Tensor,
) -> None:
    """Run the definition's steps with a scratch row for the rows of others: a mask cannot stand in a graph."""
    queries.out_TQ.copy_(rms_norm(queries.x_TQ, queries.weight_Q, eps=queries.eps))
    page_T, slot_T = scratch_T // _PAGE, scratch_T % _PAGE
    latent_TL = rms_norm(latents.kv_TX[:, :_LATENT], latents.weight_L, eps=latents.eps)
    record_TB = encode_fp8_packed(latent_TL, rotate(latents.kv_TX[:, _LATENT:], rotation))
    latents.pages_MB.unflatten(1, (_PAGE, -1)).index_put_((page_T, slot_T), record_TB)
    if keys is not None:
        key_TD = layer_norm(keys.key_TD, keys.weight_D, keys.bias_D, eps=keys.eps)
        key_TD = torch.cat((rotate(key_TD[:, :_ROPE], rotation), key_TD[:, _ROPE:]), dim=1)
        stored_TD, scale_T = encode_index_keys(key_TD)
        q_MSD, scale_MS = _index_fields(keys.pages_MB)
        q_MSD.index_put_((page_T, slot_T), stored_TD)
        scale_MS.index_put_((page_T, slot_T), scale_T)


def _index_fields(pages_MB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    key_bytes = _PAGE * _INDEX_DIM
    return pages_MB[:, :key_bytes].unflatten(1, (_PAGE, -1)), pages_MB[:, key_bytes:].view(torch.float32)
