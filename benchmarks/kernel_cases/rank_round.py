"""All 78 layers and the MTP layer of one TP8 rank of GLM-5.2, without communication: pass, draft chain, whole round.

93 GB of random weights, read as a server's rank would read them. Requests have pages of their own; layers share memory
for KV, which no pass notices: between two uses the weights of a layer pass the cache. Nothing is accepted, and the time
does not depend on it: a round refreshes K + 1 rows of each request, live or padding.

    rank_slice_step    verify: one graph of the pass
    draft_loop         refresh and K - 1 draft passes: one graph; beside it a graph a pass, and launches one by one
    round              everything and the copy of emitted ids: one graph, and the host's time to start it
"""

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu_timing import graph_us
from benchmarks.kernel_cases.result import CaseResult
from benchmarks.pass_floor import chain_us, target_us
from benchmarks.rank_weights import GLM_5_2, RankWeights
from specdec.device.decode_round import DecodeRound, RoundPages, RoundSizes
from specdec.device.round_graph import RoundGraph
from specdec.kernels.index_key_pages import IndexKeyPages
from specdec.kernels.latent_formats import encode_fp8_packed
from specdec.models.glm.layer_launches import LayerPages
from specdec.models.glm.layer_slice import ModelSlice

_PAGE, _K = 64, 1024
_REPLAYS = 12
_ROOM = 16 * _PAGE  # tokens that a request may grow while it is timed
_MOST_REQUESTS, _LONGEST = 32, 128 * _K
# B, K, context; the draft length sweeps at 32K, for the speed-up over none.
_SHAPES = (
    *((requests, drafts, 32 * _K) for requests in (1, 4, 16, 32) for drafts in (0, 1, 2, 3, 5)),
    *((requests, drafts, 128 * _K) for requests in (1, 16, 32) for drafts in (0, 5)),
)
_CHAINS = {(requests, drafts) for requests in (1, 16, 32) for drafts in (2, 5)}


def run() -> Iterator[CaseResult]:
    """Build the rank once, then time every shape."""
    model = RankWeights(max_rows=192).model(GLM_5_2, with_mtp=True)
    pages = _shared_pages()
    for requests, drafts, context in _SHAPES:
        yield from _measure(model, pages, requests, drafts, context)


def _shared_pages() -> LayerPages:
    """Pages full of plausible KV."""
    num_pages = _MOST_REQUESTS * (_LONGEST + _ROOM) // _PAGE
    latents = torch.empty((num_pages, _PAGE * 656), dtype=torch.uint8, device="cuda")
    part = encode_fp8_packed(torch.randn(1 << 16, 512, device="cuda"), torch.randn(1 << 16, 64, device="cuda"))
    rows = latents.view(-1, 656)
    for first in range(0, len(rows), len(part)):
        rows[first : first + len(part)] = part[: len(rows) - first]
    keys = torch.randint(0, 120, (num_pages, _PAGE * 132), dtype=torch.uint8, device="cuda")
    keys[:, _PAGE * 128 :] = torch.full((_PAGE,), 0.01, device="cuda").view(torch.uint8)
    return LayerPages(latent_MB=latents, index_keys=IndexKeyPages.of(keys))


def _measure(model: ModelSlice, pages: LayerPages, requests: int, drafts: int, context: int) -> Iterator[CaseResult]:
    decode_round = DecodeRound(
        model,
        RoundPages(target=[pages] * len(model.layers), draft=pages),
        RoundSizes(num_requests=requests, num_draft_tokens=drafts, max_positions=context + _ROOM),
    )
    graph = RoundGraph(decode_round)
    _admit(decode_round, len(pages.latent_MB), context)
    shape = f"B={requests} K={drafts} context={context // _K}K"
    verify_us = graph_us([decode_round.verify], replays=_REPLAYS)
    is_finite = bool(decode_round.verify().isfinite().all())
    floor_us = target_us(requests, drafts + 1, context)
    if drafts in {0, 5}:
        yield CaseResult(
            case="rank_slice_step",
            shape=f"B={requests} q={drafts + 1} context={context // _K}K",
            ours_us=verify_us,
            floor_us=floor_us,
            error=0.0 if is_finite else float("nan"),
            note="error: only whether all is finite; tests/models/glm/test_rank_pass.py compares",
        )
    if context == 32 * _K and (requests, drafts) in _CHAINS:
        yield _chain(decode_round, shape, chain_us(requests, drafts, context))
    round_us, host_us = _replayed(graph)
    yield CaseResult(
        case="round",
        shape=shape,
        ours_us=round_us,
        floor_us=floor_us + chain_us(requests, drafts, context),
        error=0.0 if bool(decode_round.runs.drawable_B.all()) else float("nan"),
        note=f"host {host_us:.0f} us a round",
    )


def _admit(decode_round: DecodeRound, num_pages: int, context: int) -> None:
    """Give every place a request of `context` tokens whose pages lie anywhere."""
    state = decode_round.state
    num_requests, most_pages = decode_round.page_id_BP.shape
    order = torch.randperm(num_pages, device="cuda")[: num_requests * most_pages].int()
    decode_round.page_id_BP.copy_(order.view(num_requests, most_pages))
    state.length_B.fill_(context)
    state.limit_B.fill_(1 << 30)
    state.num_rows_B.fill_(state.token_BQ.shape[1])
    state.token_BQ.random_(0, 19_000)


def _chain(decode_round: DecodeRound, shape: str, floor_us: float) -> CaseResult:
    """Time the chain as one graph, as a graph a pass, and launch by launch."""
    chain, runs, state = decode_round.chain, decode_round.runs, decode_round.state
    assert chain is not None
    hidden_TH = decode_round.verify().clone()
    decode_round.commit(hidden_TH)
    passes: list[Callable[[], None]] = [lambda: chain.refresh(hidden_TH, runs, state, None)]
    for drafted in range(1, state.token_BQ.shape[1] - 1):
        passes.append(lambda drafted=drafted: chain.recycle(drafted, runs, state, None))
    graphs = []
    for run_pass in passes:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_pass()
        graphs.append(graph)
    return CaseResult(
        case="draft_loop",
        shape=shape,
        ours_us=graph_us([lambda: chain.run(hidden_TH, runs, state, None)], replays=_REPLAYS),
        floor_us=floor_us,
        peers_us={
            "a graph a pass": _eager_us(lambda: [graph.replay() for graph in graphs]),
            "launch by launch": _eager_us(lambda: [run_pass() for run_pass in passes]),
        },
        error=0.0 if bool(chain.g_BH.isfinite().all()) else float("nan"),
    )


def _eager_us(call: Callable[[], object]) -> float:
    """Microseconds of a call that the host starts, until the device has ended: the median."""
    times = []
    for _ in range(_REPLAYS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def _replayed(graph: RoundGraph) -> tuple[float, float]:
    """Microseconds of a round among rounds that follow each other, and of the host in it, its wait left out."""
    graph.replay().wait()
    host_us = []
    started = time.perf_counter()
    for _ in range(_REPLAYS):
        began = time.perf_counter()
        emitted = graph.replay()
        host_us.append((time.perf_counter() - began) * 1e6)
    emitted.wait()
    return (time.perf_counter() - started) * 1e6 / _REPLAYS, statistics.median(host_us)
