"""A rank's pass on a GPU is the target's pass, at GLM-5.2's real dimensions: three layers of a TP8 slice."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.dcp.communicator import SingleRank
from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.layout import EntryKind, KvFormat, PoolLayout
from specdec.dcp.metadata import BatchMetadata, build_metadata
from specdec.dcp.pool import KvPool
from specdec.kernels.cuda_program import CudaKernel
from specdec.kernels.decode_rows import DecodeRows
from specdec.kernels.rotary import Rotation, rotation_at
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.layer_launches import LayerLaunches, PassRows, PassSizes, layer_pages
from specdec.models.glm.rank_pass import RankPass
from specdec.models.glm.released import locate_model
from specdec.models.glm.target import GlmTarget
from specdec.models.glm.trace import ForwardTrace

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are Hopper's"),
    pytest.mark.xdist_group("real dimensions"),  # they would not fit beside each other
]

PAGE, ROWS, TOKENS = 64, 6, 64  # TOKENS of the vocabulary
CONTEXTS = (3000, 70, 2048)  # tokens before the rows: more than index_topk, one page and a bit, at the border


class Model:
    """Three real-size layers of a rank: as the kernels take them, and as their definition does."""

    def __init__(self) -> None:
        from benchmarks.rank_weights import HEADS, Depth, RankWeights  # noqa: PLC0415

        torch.manual_seed(0)
        self.config = replace(
            GlmConfig.from_file(locate_model("glm-5.2-fp8").config_path),
            num_layers=3,
            num_heads=HEADS,
            mlp_layer_types=("dense", "sparse", "sparse"),
            indexer_types=("full", "shared", "full"),
        )
        self.parameters: dict[str, torch.Tensor] = {}
        weights = RankWeights(max_rows=len(CONTEXTS) * ROWS, record=self.parameters.__setitem__)
        depth = Depth(num_layers=3, num_dense=1, full=frozenset({0, 2}))
        self.slice = weights.model(depth, vocabulary=TOKENS, with_mtp=False)

    def rank_pass(self, pool: KvPool, rows: PassRows) -> RankPass:
        num_requests = len(rows.page_BP)
        sizes = PassSizes(
            num_requests=num_requests,
            rows_per_request=len(rows.places.position_T) // num_requests,
            max_positions=4096,
            index_topk=2048,
            eps=self.slice.eps,
            routed_scaling=self.slice.routed_scaling,
        )
        return RankPass(
            self.slice, layer_pages(pool), LayerLaunches(self.slice.layers, sizes, tp=SingleRank("tp")), rows
        )


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def filled_pool(config: GlmConfig, page_id_RP: np.ndarray) -> KvPool:
    """A pool with random KV in front of each request's rows, and NaN wherever nothing was written."""
    layout = PoolLayout(
        role=PoolRole.TARGET,
        page_size=PAGE,
        kv_format=KvFormat.FP8_PACKED,
        kv_lora_rank=config.kv_lora_rank,
        rope_head_dim=config.qk_rope_head_dim,
        index_head_dim=config.index_head_dim,
        num_latent_layers=3,
        index_layers=config.full_layers,
    )
    pool = KvPool(layout, num_pages=200, geometry=Geometry(1, 0, PoolRole.TARGET), device="cuda")
    for kind in EntryKind:
        pool.buffer(kind).fill_(0xFF)
    request = np.repeat(np.arange(len(CONTEXTS)), CONTEXTS)
    position = np.concatenate([np.arange(context) for context in CONTEXTS])
    metadata = metadata_of(pool, page_id_RP, request, position)
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(width: int) -> torch.Tensor:
        return torch.randn(len(metadata.position_T), width, device="cuda", generator=generator)

    for layer in range(3):
        pool.write_latent(layer, normal(512), normal(64), metadata)
        if layer in config.full_layers:
            pool.write_index_key(layer, normal(128), metadata)
    return pool


def metadata_of(pool: KvPool, page_id_RP: np.ndarray, request: np.ndarray, position: np.ndarray) -> BatchMetadata:
    return build_metadata(
        geometry=pool.geometry,
        page_size=PAGE,
        num_pages=pool.num_pages,
        request_index=request,
        position=position,
        page_table=page_id_RP,
        device="cuda",
    )


def page_ids() -> np.ndarray:
    ids = np.full((len(CONTEXTS), 48), -1)
    free = iter(np.random.default_rng(2).permutation(200))
    for row, context in enumerate(CONTEXTS):
        for page in range(-(-(context + ROWS) // PAGE)):
            ids[row, page] = next(free)
    return ids


def batch(config: GlmConfig) -> tuple[KvPool, BatchMetadata]:
    """The rows of all requests behind their contexts, and a pool of their own; the same in every call."""
    ids = page_ids()
    pool = filled_pool(config, ids)
    request = np.repeat(np.arange(len(CONTEXTS)), ROWS)
    position = np.concatenate([np.arange(context, context + ROWS) for context in CONTEXTS])
    return pool, metadata_of(pool, ids, request, position)


def inputs_of(model: Model, metadata: BatchMetadata) -> tuple[torch.Tensor, PassRows]:
    """Tokens of the rows, and the rows as a pass takes them."""
    num_rows = metadata.num_tokens
    position_T = metadata.position_T[:num_rows]
    places = DecodeRows(
        position_T=position_T.int(),
        write_row_T=metadata.write_row_T[:num_rows].contiguous(),
        count_T=(position_T + 1).clamp(max=2048).int(),
        owned_T=(position_T + 1).int(),
        rotation=rotation_at(position_T, model.slice.inverse_frequency_F),
    )
    token_T = torch.arange(num_rows, device="cuda") * 7 % TOKENS
    return token_T, PassRows(places=places, page_BP=metadata.local_page_RP.int().contiguous())


def of_request(rows: PassRows, number: int) -> PassRows:
    """The rows of one request, in memory of their own."""
    part, places = slice(number * ROWS, (number + 1) * ROWS), rows.places
    return PassRows(
        places=DecodeRows(
            position_T=places.position_T[part].clone(),
            write_row_T=places.write_row_T[part].clone(),
            count_T=places.count_T[part].clone(),
            owned_T=places.owned_T[part].clone(),
            rotation=Rotation(cos_TP=places.rotation.cos_TP[part].clone(), sin_TP=places.rotation.sin_TP[part].clone()),
        ),
        page_BP=rows.page_BP[number : number + 1].clone(),
    )


@torch.inference_mode()
def test_a_pass_gives_what_the_target_gives(model: Model) -> None:
    plain_pool, metadata = batch(model.config)
    token_T, rows = inputs_of(model, metadata)
    padded = torch.nn.functional.pad(token_T, (0, len(metadata.position_T) - len(token_T)))
    trace = ForwardTrace()
    target = GlmTarget(model.config, model.parameters)
    expected_TH = target.forward(padded, metadata=metadata, pool=plain_pool, trace=trace)

    pool, _ = batch(model.config)
    running = model.rank_pass(pool, rows)
    hidden_TH = running.forward(token_T).float()
    expected_TH = expected_TH[: len(hidden_TH)]
    chosen = [set(row[row >= 0].tolist()) for row in running.choice.position_TK.cpu()]
    plain = [set(row[row >= 0].tolist()) for row in trace.selected_TK[2].cpu()]
    for row, (ours, theirs) in enumerate(zip(chosen, plain, strict=True)):
        assert len(ours) == min(int(rows.places.position_T[row]) + 1, 2048)
        assert len(ours & theirs) >= 0.97 * len(theirs)  # scored in FP8 here, in float32 there
    error_T = (hidden_TH - expected_TH).norm(dim=1) / expected_TH.norm(dim=1)
    # bfloat16 between the launches; a few rows give an expert or a position that is nearly as good as another.
    assert float(error_T.quantile(0.75)) < 0.02, error_T
    assert float(error_T.max()) < 0.5, error_T

    rows_B = metadata.write_row_T[: len(hidden_TH)]
    written = pool.buffer(EntryKind.LATENT)[:, 0].unflatten(1, (PAGE, -1))[rows_B // PAGE, rows_B % PAGE]
    stored = plain_pool.buffer(EntryKind.LATENT)[:, 0].unflatten(1, (PAGE, -1))[rows_B // PAGE, rows_B % PAGE]
    difference = written[:, :512].view(torch.float8_e4m3fn).float() - stored[:, :512].view(torch.float8_e4m3fn).float()
    assert float(difference.norm() / stored[:, :512].view(torch.float8_e4m3fn).float().norm()) < 0.03


@torch.inference_mode()
def test_a_request_alone_gives_the_bits_of_the_batch_and_a_graph_those_of_the_launches(model: Model) -> None:
    pool, metadata = batch(model.config)
    token_T, rows = inputs_of(model, metadata)
    running = model.rank_pass(pool, rows)
    together_TH = running.forward(token_T).clone()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden_TH = running.forward(token_T)
    graph.replay()
    assert torch.equal(hidden_TH, together_TH)

    for number in range(len(CONTEXTS)):
        part = slice(number * ROWS, (number + 1) * ROWS)
        alone_TH = model.rank_pass(pool, of_request(rows, number)).forward(token_T[part])
        assert torch.equal(alone_TH, together_TH[part]), number


@torch.inference_mode()
def test_launches_that_overlap_give_the_bits_of_launches_apart(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, metadata = batch(model.config)
    token_T, rows = inputs_of(model, metadata)
    running = model.rank_pass(pool, rows)
    launch = CudaKernel.__call__

    def launch_apart(kernel: CudaKernel, *arguments) -> None:
        torch.cuda.synchronize()
        launch(kernel, *arguments)
        torch.cuda.synchronize()

    with monkeypatch.context() as patch:
        patch.setattr(CudaKernel, "__call__", launch_apart)
        apart_TH = running.forward(token_T).clone()
    chosen_TK = running.choice.position_TK.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden_TH = running.forward(token_T)
    for _ in range(50):
        graph.replay()
        assert torch.equal(running.choice.position_TK, chosen_TK)
        assert torch.equal(hidden_TH, apart_TH)


@torch.inference_mode()
def test_padding_rows_read_and_write_nothing_and_change_no_other_row(model: Model) -> None:
    pool, metadata = batch(model.config)
    token_T, rows = inputs_of(model, metadata)
    padded_pool, _ = batch(model.config)
    is_live_T = torch.ones(metadata.num_tokens, dtype=torch.bool, device="cuda")
    is_live_T[ROWS + 2 : 2 * ROWS] = False  # two rows are left of the second request, none of the third
    is_live_T[2 * ROWS :] = False
    padded = PassRows(
        places=replace(
            rows.places,
            position_T=rows.places.position_T.masked_fill(~is_live_T, -1),
            write_row_T=rows.places.write_row_T.masked_fill(~is_live_T, -1),
            count_T=rows.places.count_T.masked_fill(~is_live_T, 0),
            owned_T=rows.places.owned_T.masked_fill(~is_live_T, 0),
        ),
        page_BP=rows.page_BP.clone(),
    )
    padded.page_BP[2] = -1
    whole_TH = model.rank_pass(pool, rows).forward(token_T).clone()
    running = model.rank_pass(padded_pool, padded)
    hidden_TH = running.forward(token_T.masked_fill(~is_live_T, -1))
    assert torch.equal(hidden_TH[is_live_T], whole_TH[is_live_T])
    assert bool(hidden_TH.isfinite().all())
    assert bool((running.choice.position_TK[~is_live_T] == -1).all())
    row_N = rows.places.write_row_T[~is_live_T]
    for kind in EntryKind:
        entries = padded_pool.buffer(kind)[row_N // PAGE]
        if kind is EntryKind.LATENT:
            written = entries.unflatten(2, (PAGE, -1))[torch.arange(len(row_N)), :, row_N % PAGE]
        else:
            written = entries[:, :, : PAGE * 128].unflatten(2, (PAGE, -1))[torch.arange(len(row_N)), :, row_N % PAGE]
        assert bool((written == 0xFF).all())


@torch.inference_mode()
def test_a_first_layer_that_cannot_choose_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, metadata = batch(model.config)
    _, rows = inputs_of(model, metadata)
    monkeypatch.setattr(model, "slice", replace(model.slice, layers=model.slice.layers[1:]))
    with pytest.raises(ValueError, match="first layer has no indexer"):
        model.rank_pass(pool, rows)
