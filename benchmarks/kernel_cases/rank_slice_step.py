"""A pass over all 78 layers of one TP8 rank of GLM-5.2 at its real dimensions, without communication.

91 GB of random block-FP8 experts, read as a server's rank would read them. Requests have pages of their own; layers
share memory, which no pass notices: between two uses a layer's weights pass the cache.
"""

import torch

from benchmarks.gpu_timing import graph_us
from benchmarks.kernel_cases.result import CaseResult
from benchmarks.rank_weights import RankWeights
from specdec.kernels.index_key_pages import IndexKeyPages
from specdec.kernels.latent_formats import encode_fp8_packed
from specdec.kernels.moe_experts import HIDDEN
from specdec.kernels.rotary import inverse_frequency, rotation_at
from specdec.models.glm.rank_pass import LayerPages, LayerSlice, PassInputs, RankPass

_PAGE = 64
_NUM_LAYERS, _NUM_DENSE = 78, 3
_FULL = {0, 1, 2, *range(6, _NUM_LAYERS, 4)}
# Milliseconds by the bytes of weights, KV and index keys at 4.3 TB/s and the products of the scan: B, Q, context.
_FLOOR_MS = {
    (1, 1, 32): 1.59, (1, 6, 32): 4.72, (16, 6, 32): 23.77, (32, 6, 32): 27.56,
    (1, 1, 128): 1.66, (1, 6, 128): 4.79, (16, 6, 128): 24.93, (32, 6, 128): 29.88,
}  # fmt: skip


def run() -> list[CaseResult]:
    """Build the slice once, then time every shape."""
    weights = RankWeights(max_rows=192)
    layers = [
        weights.layer(number, has_indexer=number in _FULL, is_sparse=number >= _NUM_DENSE)
        for number in range(_NUM_LAYERS)
    ]
    final_norm = weights.vector("norm", HIDDEN, dtype=torch.bfloat16)
    num_pages = 32 * (128 << 10) // _PAGE + 1
    latents = torch.empty((num_pages, _PAGE * 656), dtype=torch.uint8, device="cuda")
    part = encode_fp8_packed(torch.randn(1 << 16, 512, device="cuda"), torch.randn(1 << 16, 64, device="cuda"))
    rows = latents.view(-1, 656)
    for first in range(0, len(rows), len(part)):
        rows[first : first + len(part)] = part[: len(rows) - first]
    keys = torch.randint(0, 120, (num_pages, _PAGE * 132), dtype=torch.uint8, device="cuda")
    keys[:, _PAGE * 128 :] = torch.full((_PAGE,), 0.01, device="cuda").view(torch.uint8)
    pages = LayerPages(latent_MB=latents, index_keys=IndexKeyPages.of(keys))
    return [
        _measure(layers, pages, final_norm, num_requests=requests, num_rows=rows, context=context << 10)
        for requests, rows, context in _FLOOR_MS
    ]


def _measure(
    layers: list[LayerSlice],
    pages: LayerPages,
    final_norm: torch.Tensor,
    *,
    num_requests: int,
    num_rows: int,
    context: int,
) -> CaseResult:
    running = RankPass(
        layers,
        [pages] * len(layers),
        final_norm,
        num_requests=num_requests,
        rows_per_request=num_rows,
        max_positions=context,
        eps=1e-5,
        routed_scaling=2.5,
    )
    pages_each = context // _PAGE
    order = torch.randperm(num_requests * pages_each, device="cuda").int().view(num_requests, pages_each)
    position_T = torch.arange(context - num_rows, context, device="cuda").repeat(num_requests)
    page_T = order[:, -1].repeat_interleave(num_rows).long()
    frequency = inverse_frequency(theta=8e6, dim=64, device=torch.device("cuda"))
    embedded_TH = torch.randn(len(position_T), HIDDEN, device="cuda").bfloat16()
    inputs = PassInputs(
        hidden_TH=embedded_TH.clone(),
        position_T=position_T.int(),
        rotation=rotation_at(position_T, frequency),
        write_row_T=page_T * _PAGE + position_T % _PAGE,
        page_BP=order,
    )

    def step() -> None:
        inputs.hidden_TH.copy_(embedded_TH)
        running.forward(inputs)

    microseconds = graph_us([step], replays=10)
    hidden_TH = running.forward(inputs)
    return CaseResult(
        case="rank_slice_step",
        shape=f"B={num_requests} q={num_rows} context={context >> 10}K",
        ours_us=microseconds,
        floor_us=_FLOOR_MS[num_requests, num_rows, context >> 10] * 1e3,
        error=0.0 if bool(hidden_TH.isfinite().all()) else float("nan"),
        note="error: only whether all is finite; tests/models/glm/test_rank_pass.py compares",
    )
