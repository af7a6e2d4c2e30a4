"""Whole rounds of two tensor-parallel ranks over eight layers of GLM-5.2's real widths and the MTP layer, in graphs.

Each round verifies K + 1 rows a request, draws, commits, refreshes and drafts. What is accepted does not change its
time: it refreshes K + 1 rows of each request, live or padding. Beside ranks that share pages are those that each have
all of them, with exchanges over the GPUs' memory and by NCCL; both give the same tokens, bit by bit.

Layers share memory for KV, which no pass notices: between two uses the weights of a layer pass the cache. Both ranks
have the same slice of every layer, as if a model's heads came in pairs, and each its own part of the vocabulary.
"""

import gc
from dataclasses import replace

import torch

from benchmarks.gpu_timing import replay_us
from benchmarks.kernel_cases.noise_pool import noise_pool
from benchmarks.kernel_cases.rates import memory_us
from benchmarks.kernel_cases.result import CaseResult
from benchmarks.rank_weights import Depth, RankWeights
from benchmarks.two_gpu_cases.ranks import Ranks
from specdec.dcp.communicator import Communicator, SingleRank
from specdec.device.decode_round import DecodeRound, RoundPages, RoundSizes
from specdec.device.round_graph import RoundGraph
from specdec.kernels.index_key_pages import IndexKeyPages
from specdec.kernels.latent_rows import LatentFormat
from specdec.kernels.moe_experts import HIDDEN
from specdec.models.glm.layer_launches import LayerPages
from specdec.models.glm.layer_slice import ModelSlice

_PAGE, _K = 64, 1024
_DRAFTS, _REPLAYS, _CHECKED_ROUNDS = 5, 15, 4
_ROOM = 16 * _PAGE  # tokens that a request may grow while it is timed
_DEPTH = Depth(num_layers=8, num_dense=3, full=frozenset({0, 1, 2, 6}))
_VOCABULARY = 154_880
_SHAPES = ((1, 32 * _K), (1, 128 * _K), (1, 500 * _K), (16, 32 * _K), (16, 128 * _K), (4, 500 * _K))
_MOST_ROWS = 16 * (_DRAFTS + 1)


def run(ranks: Ranks) -> list[CaseResult]:
    """Build the slices once, then time every shape."""
    torch.manual_seed(0)
    num_ids = _VOCABULARY // ranks.size
    weights = RankWeights(max_rows=_MOST_ROWS, num_shares=ranks.size)
    model = weights.model(_DEPTH, vocabulary=num_ids, with_mtp=True, tp_size=ranks.size)
    assert model.mtp is not None
    model = replace(
        model,
        vocabulary=replace(model.vocabulary, first_id=ranks.rank * num_ids),
        mtp=replace(model.mtp, first_column=ranks.rank * 2 * HIDDEN // ranks.size),
    )
    num_pages = max(requests * (context + _ROOM) for requests, context in _SHAPES) // _PAGE
    pages = RoundPages(target=[_noise_pages(num_pages)] * _DEPTH.num_layers, draft=_noise_pages(num_pages))
    return [_measure(model, pages, ranks, requests, context) for requests, context in _SHAPES]


def _measure(model: ModelSlice, pages: RoundPages, ranks: Ranks, requests: int, context: int) -> CaseResult:
    ways: dict[str, tuple[Communicator, Communicator]] = {
        "pages shared": (ranks.peers, ranks.peers),
        "pages shared, NCCL": (ranks.nccl, ranks.nccl),
        "all pages on each": (ranks.peers, SingleRank("dcp")),
        "all pages on each, NCCL": (ranks.nccl, SingleRank("dcp")),
    }
    times_us, tokens = {}, {}
    for name, (tp, dcp) in ways.items():
        times_us[name], tokens[name] = _rounds(model, pages, requests, context, tp=tp, dcp=dcp)
        gc.collect()
    is_same = all(torch.equal(tokens[name], tokens[f"{name}, NCCL"]) for name in ("pages shared", "all pages on each"))
    is_same &= all(ranks.all_equal(each) for each in tokens.values())
    ours_us = times_us.pop("pages shared")
    return CaseResult(
        case="tp2_round",
        shape=f"B={requests} K={_DRAFTS} context={context // _K}K, {_DEPTH.num_layers} layers",
        ours_us=ours_us,
        floor_us=_floor_us(ranks, requests, context),
        error=0.0 if is_same else float("nan"),
        peers_us=times_us,
        note="error: nan where tokens of ranks or ways to exchange differ",
    )


def _rounds(
    model: ModelSlice, pages: RoundPages, requests: int, context: int, *, tp: Communicator, dcp: Communicator
) -> tuple[float, torch.Tensor]:
    """Give the microseconds of a round, and the tokens of the first ones, i64."""
    decode_round = DecodeRound(
        model,
        pages,
        RoundSizes(num_requests=requests, num_draft_tokens=_DRAFTS, max_positions=context + _ROOM),
        tp=tp,
        dcp=dcp,
    )
    graph = RoundGraph(decode_round)
    _admit(decode_round, context)
    tokens = []
    for _ in range(_CHECKED_ROUNDS):
        graph.replay().wait()
        tokens.append(decode_round.runs.emitted_BQ.clone())
    microseconds = replay_us(graph.replay, replays=_REPLAYS)
    graph.close()
    return microseconds, torch.stack(tokens)


def _admit(decode_round: DecodeRound, context: int) -> None:
    """Give every place a request of `context` tokens whose pages lie anywhere; the same in every way and rank."""
    generator = torch.Generator(device="cuda").manual_seed(context)
    state, page_id_BP = decode_round.state, decode_round.page_id_BP
    # Pages go round the ranks: even ids, then odd ones.
    half = page_id_BP.numel() // 2
    order = torch.stack([2 * torch.randperm(half, device="cuda", generator=generator) + owner for owner in (0, 1)])
    page_id_BP.copy_(order.T.reshape(page_id_BP.shape))
    decode_round.take_pages()
    state.length_B.fill_(context)
    state.limit_B.fill_(1 << 30)
    state.num_rows_B.fill_(state.token_BQ.shape[1])
    state.token_BQ.random_(0, _VOCABULARY, generator=generator)


def _noise_pages(num_pages: int) -> LayerPages:
    keys = torch.randint(0, 120, (num_pages, _PAGE * 132), dtype=torch.uint8, device="cuda")
    keys[:, _PAGE * 128 :] = torch.full((_PAGE,), 0.01, device="cuda").view(torch.uint8)
    return LayerPages(latent_MB=noise_pool(LatentFormat.FP8_PACKED, num_pages), index_keys=IndexKeyPages.of(keys))


def _floor_us(ranks: Ranks, requests: int, context: int) -> float:
    """Bytes that a rank must read in a round, at the copy rate; no communication."""
    size, num_rows = ranks.size, requests * (_DRAFTS + 1)
    attention = 12_582_912 + 3_538_944 + (33_554_432 + 29_360_128 + 100_663_296) / size  # kv_b in bfloat16
    indexer, expert, dense = 9_568_256, 3 * HIDDEN * 2048 / size, 3 * HIDDEN * 12_288 / size
    head, eh_proj = _VOCABULARY * HIDDEN * 2 / size, 2 * HIDDEN * HIDDEN * 2 / size

    def mixture(num_tokens: int) -> float:
        return 3_145_728 + (256 * (1 - (1 - 8 / 256) ** num_tokens) + 1) * expert

    num_sparse = _DEPTH.num_layers - _DEPTH.num_dense
    latents, keys = 2048 * 656, requests * context * 132
    target = _DEPTH.num_layers * (attention + num_rows * latents / size) + num_sparse * mixture(num_rows) + head
    target += _DEPTH.num_dense * dense + len(_DEPTH.full) * (indexer + keys / size)
    refresh = attention + mixture(num_rows) + eh_proj + head + num_rows * latents + indexer + keys
    draft = attention + mixture(requests) + eh_proj + head + requests * latents
    return memory_us(target + refresh + (_DRAFTS - 1) * draft)
