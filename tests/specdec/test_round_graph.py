"""Rounds replayed as one graph emit what plain decoding emits, bit by bit, at GLM-5.2's real dimensions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.layout import EntryKind, KvFormat, PoolLayout
from specdec.dcp.pool import KvPool
from specdec.device.decode_round import DecodeRound, RoundPages, RoundSizes
from specdec.device.round_graph import RoundGraph
from specdec.kernels.gumbel_noise import NoiseStream, stream_key
from specdec.kernels.index_key_format import encode_index_keys
from specdec.kernels.latent_formats import encode_fp8_packed
from specdec.models.glm.layer_launches import layer_pages
from specdec.models.glm.layer_slice import ModelSlice
from specdec.models.glm.mtp import MtpIndexSharing

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are Hopper's"),
    pytest.mark.xdist_group("real dimensions"),  # they would not fit beside each other
]

PAGE, NUM_PAGES, MAX_POSITIONS, TOKENS = 64, 200, 4096, 64
CONTEXTS = (3000, 70, 2047)  # more than the indexer chooses, a page and a bit, one token below the border
PLACES = (0, 1, 3)  # place 2 holds nobody
GAIN = 40  # tokens that each request emits


@pytest.fixture(scope="module")
def model() -> ModelSlice:
    from benchmarks.rank_weights import Depth, RankWeights  # noqa: PLC0415

    torch.manual_seed(0)
    depth = Depth(num_layers=3, num_dense=1, full=frozenset({0, 2}))
    weights = RankWeights(max_rows=24, branch_gain=0.05)
    return weights.model(depth, vocabulary=TOKENS, with_mtp=True)


class Pools:
    """KV of every context, random but the same in every pool of this class; NaN wherever nothing was written."""

    def __init__(self) -> None:
        self.target = self._pool(PoolRole.TARGET, 3, (0, 2))
        self.draft = self._pool(PoolRole.DRAFT, 1, (0,))
        order = torch.from_numpy(np.random.default_rng(2).permutation(NUM_PAGES)).int().cuda()
        self.page_BP = torch.zeros((4, MAX_POSITIONS // PAGE), dtype=torch.int32, device="cuda")
        begin = 0
        for place, context in zip(PLACES, CONTEXTS, strict=True):
            num_pages = -(-(context + GAIN + 16) // PAGE)
            self.page_BP[place, :num_pages] = order[begin : begin + num_pages]
            begin += num_pages
        generator = torch.Generator("cuda").manual_seed(1)
        for pool, num_layers, num_indexers in ((self.target, 3, 2), (self.draft, 1, 1)):
            for place, context in zip(PLACES, CONTEXTS, strict=True):
                position_N = torch.arange(context, device="cuda")
                page_N, slot_N = self.page_BP[place].long()[position_N // PAGE], position_N % PAGE

                def normal(width: int, rows: int = context) -> torch.Tensor:
                    return torch.randn(rows, width, device="cuda", generator=generator)

                latents, keys = pool.buffer(EntryKind.LATENT), pool.buffer(EntryKind.INDEX_KEYS)
                for layer in range(num_layers):
                    records = encode_fp8_packed(normal(512), normal(64))
                    latents[:, layer].unflatten(1, (PAGE, -1))[page_N, slot_N] = records
                for indexer in range(num_indexers):
                    stored, scale = encode_index_keys(normal(128))
                    pages = keys[:, indexer]
                    pages[:, : PAGE * 128].unflatten(1, (PAGE, -1))[page_N, slot_N] = stored
                    scales = pages[:, PAGE * 128 :].unflatten(1, (PAGE, -1))
                    scales[page_N, slot_N] = scale[:, None].view(torch.uint8)

    @staticmethod
    def _pool(role: PoolRole, num_layers: int, index_layers: tuple[int, ...]) -> KvPool:
        layout = PoolLayout(
            role=role, page_size=PAGE, kv_format=KvFormat.FP8_PACKED, kv_lora_rank=512, rope_head_dim=64,
            index_head_dim=128, num_latent_layers=num_layers, index_layers=index_layers,
        )  # fmt: skip
        pool = KvPool(layout, num_pages=NUM_PAGES, geometry=Geometry(1, 0, role), device="cuda")
        for kind in EntryKind:
            pool.buffer(kind).fill_(0xFF)
        return pool


def new_round(
    model: ModelSlice,
    num_draft_tokens: int,
    *,
    with_noise: bool = False,
    index_sharing: MtpIndexSharing = MtpIndexSharing.ANCHOR,
) -> DecodeRound:
    pools = Pools()
    decode_round = DecodeRound(
        model,
        RoundPages(target=layer_pages(pools.target), draft=layer_pages(pools.draft)[0]),
        RoundSizes(
            num_requests=4, num_draft_tokens=num_draft_tokens, max_positions=MAX_POSITIONS, with_noise=with_noise
        ),
        index_sharing=index_sharing,
    )
    decode_round.page_id_BP.copy_(pools.page_BP)
    return decode_round


def admit(decode_round: DecodeRound) -> None:
    state = decode_round.state
    for number, (place, context) in enumerate(zip(PLACES, CONTEXTS, strict=True)):
        state.length_B[place], state.limit_B[place], state.num_rows_B[place] = context + 1, context + 1 + GAIN, 1
        state.token_BQ[place, 0] = 7 + number
        if decode_round.noise is not None and number < 2:  # the last request stays greedy
            key = stream_key(seed=number, choice=0, stream=NoiseStream.TARGET)
            decode_round.noise.stream_key_B[place] = key - (1 << 64 if key >= 1 << 63 else 0)
            decode_round.noise.temperature_B[place] = 0.7
            decode_round.noise.greedy_B[place] = False


def decoded(
    decode_round: DecodeRound, *, as_graph: bool, told: list[list[int]] | None = None
) -> tuple[list[list[int]], int]:
    """Ids of every place, and the rounds it took.

    A model of random weights hardly drafts right. Where it is `told` what will be said, none, one, two... of the first
    drafts of a round are made right.
    """
    graph = RoundGraph(decode_round) if as_graph else None
    admit(decode_round)
    ids: list[list[int]] = [[] for _ in range(4)]
    for num_rounds in range(1, GAIN + 1):
        if graph is None:
            decode_round.launch()
            emitted = decode_round.runs.emitted_BQ.tolist()
            assert bool(decode_round.runs.drawable_B.all())
        else:
            replayed = graph.replay()
            replayed.wait()
            emitted = replayed.token_id_BQ.tolist()
            assert bool(replayed.drawable_B.all())
        for place, row in enumerate(emitted):
            ids[place] += [token for token in row if token >= 0]
        if not bool(decode_round.state.num_rows_B.any()):
            return ids, num_rounds
        if told is not None:
            num_right = num_rounds % decode_round.state.token_BQ.shape[1]
            for place, row in enumerate(ids):
                right = told[place][len(row) : len(row) + num_right]
                decode_round.state.token_BQ[place, 1 : 1 + len(right)] = torch.tensor(right, dtype=torch.int32)
    raise AssertionError(f"requests are not done after {GAIN} rounds: {ids}")


@torch.inference_mode()
@pytest.mark.parametrize("with_noise", [False, True])
def test_drafts_and_graphs_change_nothing_but_the_number_of_rounds(model: ModelSlice, with_noise: bool) -> None:
    plain, num_plain_rounds = decoded(new_round(model, 0, with_noise=with_noise), as_graph=False)
    assert [len(row) for row in plain] == [GAIN, GAIN, 0, GAIN]
    assert num_plain_rounds == GAIN
    assert len(set(plain[0])) > 1
    assert decoded(new_round(model, 0, with_noise=with_noise), as_graph=True)[0] == plain
    for num_draft_tokens in (1, 2, 5):
        for told in (None, plain):
            decode_round = new_round(model, num_draft_tokens, with_noise=with_noise)
            drafted, num_rounds = decoded(decode_round, as_graph=True, told=told)
            assert drafted == plain, (num_draft_tokens, told is None)
            assert told is None or num_rounds <= 2 * num_plain_rounds / (2 + num_draft_tokens) + 2


@torch.inference_mode()
def test_a_replay_gives_the_bits_of_launches(model: ModelSlice) -> None:
    launched, replayed = new_round(model, 5), new_round(model, 5)
    graph = RoundGraph(replayed)
    for decode_round in (launched, replayed):
        admit(decode_round)
    for _ in range(6):
        launched.launch()
        graph.replay().wait()
        assert torch.equal(launched.runs.emitted_BQ, replayed.runs.emitted_BQ)
        assert torch.equal(launched.state.token_BQ, replayed.state.token_BQ)
        assert launched.chain is not None
        assert replayed.chain is not None
        live = list(PLACES)
        assert torch.equal(launched.chain.g_BH[live], replayed.chain.g_BH[live])
        assert torch.equal(launched.chain.anchor.position_TK[live], replayed.chain.anchor.position_TK[live])


@torch.inference_mode()
def test_an_own_choice_in_every_draft_step_changes_no_output_either(model: ModelSlice) -> None:
    plain, _ = decoded(new_round(model, 0), as_graph=True)
    assert decoded(new_round(model, 3, index_sharing=MtpIndexSharing.OFF), as_graph=True)[0] == plain


@torch.inference_mode()
def test_a_round_that_holds_requests_is_not_captured(model: ModelSlice) -> None:
    decode_round = new_round(model, 1)
    admit(decode_round)
    with pytest.raises(ValueError, match="captured while it holds no request"):
        RoundGraph(decode_round)


@torch.inference_mode()
def test_a_row_that_is_not_finite_is_reported(model: ModelSlice) -> None:
    head_VH = model.vocabulary.head_VH.clone()
    head_VH[5] = torch.nan
    broken = replace(model, vocabulary=replace(model.vocabulary, head_VH=head_VH))
    decode_round = new_round(broken, 1)
    graph = RoundGraph(decode_round)
    admit(decode_round)
    emitted = graph.replay()
    emitted.wait()
    assert emitted.drawable_B.tolist() == [place not in PLACES for place in range(4)]


@torch.inference_mode()
def test_a_round_may_be_read_while_the_next_one_runs(model: ModelSlice) -> None:
    one_by_one, ahead = new_round(model, 3), new_round(model, 3)
    expected, graph = RoundGraph(one_by_one), RoundGraph(ahead)
    for decode_round in (one_by_one, ahead):
        admit(decode_round)
    behind = graph.replay()
    for _ in range(6):
        following = graph.replay()
        emitted = expected.replay()
        for each in (behind, emitted):
            each.wait()
        assert torch.equal(behind.token_id_BQ, emitted.token_id_BQ)
        behind = following
