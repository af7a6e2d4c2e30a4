"""Rounds that never leave the device emit what plain decoding emits, on a CPU with definitions for kernels."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.layout import EntryKind, KvFormat, PoolLayout
from specdec.dcp.metadata import BatchMetadata, build_metadata
from specdec.dcp.pool import KvPool
from specdec.device.decode_round import DecodeRound, RoundPages, RoundSizes
from specdec.kernels.gumbel_noise import NoiseStream, stream_key
from specdec.kernels.row_padding import pad_rows
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.layer_launches import layer_pages
from specdec.models.glm.layer_slice import ModelSlice
from specdec.models.glm.mtp import MTP_LAYER, MtpIndexSharing, MtpLayer
from specdec.models.glm.rank_slices import model_slice
from specdec.models.glm.target import GlmTarget
from tests.support.engines import write_engine_checkpoint
from tests.support.kernel_definitions import use_definitions
from tests.support.tiny_checkpoint import tiny_spec

PAGE, MAX_POSITIONS, NUM_PAGES = 64, 256, 16
PROMPT_LENGTHS = (100, 61)  # more than index_topk; a few tokens before a page's end
PLACES = (0, 2)  # place 1 holds nobody
LIMITS = (114, 84)
SPEC = tiny_spec(
    "real_dims", weights="fp8", hidden_size=512, q_lora_rank=512, intermediate_size=512, moe_intermediate_size=256,
    num_layers=2, num_heads=4, num_experts=4, index_topk=64, vocab_size=128, indexer_types=("full", "shared"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Model:
    """A tiny model with the real head dims: as the kernels take it, and as its definition does."""

    def __init__(self, path: Path) -> None:
        loaded = load_checkpoint(path, dtype=torch.bfloat16, keep_fp8=True)
        plain = load_checkpoint(path, dtype=torch.float32)
        self.config = loaded.config
        self.slice: ModelSlice = model_slice(loaded.config, loaded.parameters, max_rows=192)
        self.target = GlmTarget(self.config, plain.parameters)
        self.mtp = MtpLayer(self.config, plain.parameters, self.target, latent_norm_eps=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_engine_checkpoint(tmp_path_factory.mktemp("round"), SPEC)
    with pytest.MonkeyPatch.context() as patch:
        use_definitions(patch, load_checkpoint(path, dtype=torch.bfloat16).config)
        yield Model(path)


class Pools:
    """Target and draft pools with the prompts' KV, made by the definitions; NaN wherever nothing was written."""

    def __init__(self, model: Model) -> None:
        config = model.config
        self.target = self._pool(model, PoolRole.TARGET, config.num_layers, config.full_layers)
        self.draft = self._pool(model, PoolRole.DRAFT, 1, (MTP_LAYER,))
        order = np.random.default_rng(0).permutation(NUM_PAGES)
        self.page_id_RP = order[: 2 * (MAX_POSITIONS // PAGE)].reshape(2, -1)
        generator = torch.Generator().manual_seed(3)
        self.token_ids: list[list[int]] = []
        for number, length in enumerate(PROMPT_LENGTHS):
            prompt_T = torch.randint(0, SPEC.first_special_id, (length,), generator=generator)
            hidden_TH = model.target.forward(
                pad_rows(prompt_T), metadata=self.rows(self.target, number, range(length)), pool=self.target
            )[:length]
            first = int(model.target.logits(hidden_TH[-1:]).argmax())
            known = [*prompt_T.tolist(), first]
            model.mtp.forward(
                pad_rows(torch.tensor(known[1:])), pad_rows(hidden_TH),
                metadata=self.rows(self.draft, number, range(length)), pool=self.draft,
            )  # fmt: skip
            self.token_ids.append(known)

    def rows(self, pool: KvPool, number: int, positions: range) -> BatchMetadata:
        return build_metadata(
            geometry=pool.geometry, page_size=PAGE, num_pages=NUM_PAGES, page_table=self.page_id_RP,
            request_index=np.full(len(positions), number), position=np.asarray(positions),
        )  # fmt: skip

    def _pool(self, model: Model, role: PoolRole, num_layers: int, index_layers: tuple[int, ...]) -> KvPool:
        layout = PoolLayout(
            role=role, page_size=PAGE, kv_format=KvFormat.FP8_PACKED, kv_lora_rank=model.config.kv_lora_rank,
            rope_head_dim=model.config.qk_rope_head_dim, index_head_dim=model.config.index_head_dim,
            num_latent_layers=num_layers, index_layers=index_layers,
        )  # fmt: skip
        pool = KvPool(layout, num_pages=NUM_PAGES, geometry=Geometry(1, 0, role))
        for kind in EntryKind:
            pool.buffer(kind).fill_(0xFF)
        return pool


def admitted_round(
    model: Model,
    pools: Pools,
    num_draft_tokens: int,
    *,
    index_sharing: MtpIndexSharing = MtpIndexSharing.ANCHOR,
    temperature: float = 0.0,
) -> DecodeRound:
    decode_round = DecodeRound(
        model.slice,
        RoundPages(target=layer_pages(pools.target), draft=layer_pages(pools.draft)[0]),
        RoundSizes(
            num_requests=3, num_draft_tokens=num_draft_tokens, max_positions=MAX_POSITIONS, with_noise=temperature > 0
        ),
        index_sharing=index_sharing,
    )
    state = decode_round.state
    for number, place in enumerate(PLACES):
        known = pools.token_ids[number]
        state.length_B[place], state.limit_B[place], state.num_rows_B[place] = len(known), LIMITS[number], 1
        state.token_BQ[place, 0] = known[-1]
        decode_round.page_id_BP[place] = torch.from_numpy(pools.page_id_RP[number])
        if decode_round.noise is not None and number == 0:  # the other request stays greedy
            key = stream_key(seed=11, choice=0, stream=NoiseStream.TARGET)
            decode_round.noise.stream_key_B[place] = key - (1 << 64 if key >= 1 << 63 else 0)
            decode_round.noise.temperature_B[place] = temperature
            decode_round.noise.greedy_B[place] = False
    return decode_round


def decoded(decode_round: DecodeRound) -> tuple[list[list[int]], int]:
    """Run rounds until all requests are done; their ids, and how many rounds it took."""
    ids: list[list[int]] = [[], [], []]
    num_rounds = 0
    while decode_round.state.num_rows_B.any():
        decode_round.launch()
        num_rounds += 1
        assert bool(decode_round.runs.drawable_B.all())
        for place, row in enumerate(decode_round.runs.emitted_BQ.tolist()):
            ids[place] += [token for token in row if token >= 0]
    return ids, num_rounds


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_nothing_but_the_number_of_rounds(model: Model, temperature: float) -> None:
    plain, num_plain_rounds = decoded(admitted_round(model, Pools(model), 0, temperature=temperature))
    assert [len(row) for row in plain] == [13, 0, 22]
    for num_draft_tokens in (1, 3):
        pools = Pools(model)
        drafted, num_rounds = decoded(admitted_round(model, pools, num_draft_tokens, temperature=temperature))
        assert drafted == plain, num_draft_tokens
        assert num_rounds < num_plain_rounds, "some drafts are right"


def test_an_own_choice_in_every_draft_step_changes_no_output_either(model: Model) -> None:
    plain, _ = decoded(admitted_round(model, Pools(model), 0))
    assert decoded(admitted_round(model, Pools(model), 3, index_sharing=MtpIndexSharing.OFF))[0] == plain


def test_a_round_computes_what_the_target_and_the_mtp_layer_compute(model: Model) -> None:
    pools = Pools(model)
    decode_round = admitted_round(model, pools, 3)
    hidden_TH = decode_round.verify()
    decode_round.commit(hidden_TH)
    assert decode_round.chain is not None
    decode_round.chain.run(hidden_TH, decode_round.runs, decode_round.state, None)
    for number, place in enumerate(PLACES):
        last = len(pools.token_ids[number]) - 1
        row = place * 4
        expected_TH = model.target.forward(
            pad_rows(torch.tensor(pools.token_ids[number][-1:])),
            metadata=pools.rows(pools.target, number, range(last, last + 1)), pool=pools.target,
        )  # fmt: skip
        # The indexers score in FP8 and float32, and may choose another position that is nearly as good.
        assert relative(hidden_TH[row], expected_TH[0]) < 0.1
        output = model.mtp.forward(
            pad_rows(decode_round.runs.emitted_BQ[place, :1]), pad_rows(hidden_TH[row : row + 1].float()),
            metadata=pools.rows(pools.draft, number, range(last, last + 1)), pool=pools.draft,
        )  # fmt: skip
        assert relative(decode_round.chain.g_BH[place], output.g_TH[0]) < 0.1
        anchor = set(decode_round.chain.anchor.position_TK[place].tolist()) - {-1}
        assert len(anchor) == min(last + 1, 64)
        assert len(anchor & set(output.selection.position_TK[0].tolist())) >= 0.9 * len(anchor)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())
