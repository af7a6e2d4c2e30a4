"""Ranks that share the rows of a pass and the layers of the pools compute what one rank computes, to the bit.

Ranks are threads here. Tags such as B61 are explained in `tests/INVARIANTS.md`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdec.dcp.geometry import PoolRole
from specdec.dcp.layer_split import split_layers
from specdec.dcp.layer_split_pool import LayerSplitPool
from specdec.dcp.layout import EntryKind, KvFormat
from specdec.dcp.metadata import BatchMetadata
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError, RoundError
from specdec.memory.kv_plan import plan_kv
from specdec.models.glm.mtp import MTP_LAYER
from specdec.ranks.worker import Worker
from tests.support.engines import Ask, Checkpoints, drawn, greedy, kv_settings, prompt_of, serve, tokens
from tests.support.matrix import name_of
from tests.support.pairwise import Row, all_rows, pairwise_rows
from tests.support.thread_engine import ThreadEngine, ThreadEngines

ONE_RANK = {"tp_size": 1, "dcp_size": 1}
CHUNK = 16
LENGTHS = (1, 2, 3, 4, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 60)
AXES: Mapping[str, Sequence[Any]] = {
    "cp_size": (2, 3, 4, 8),  # two layers: most ranks of eight hold none
    "page_size": (1, 4),
    "kv_format": (None, KvFormat.BFLOAT16, KvFormat.FP8, KvFormat.FP8_PACKED),
    "prefixes": ("off", "cold", "warm"),
    "memory": ("ample", "one request"),
}


@pytest.mark.parametrize("row", pairwise_rows(AXES, seed=5), ids=name_of)
def test_text_and_log_probabilities_are_those_of_one_rank(row: Row, thread_engines: ThreadEngines) -> None:
    check(row, thread_engines)


@pytest.mark.full
@pytest.mark.parametrize("row", list(all_rows(AXES)), ids=name_of)
def test_every_combination_gives_what_one_rank_gives(row: Row, thread_engines: ThreadEngines) -> None:
    check(row, thread_engines)


def check(row: Row, thread_engines: ThreadEngines) -> None:
    asks = asks_of(LENGTHS)
    shared = {"page_size": row["page_size"], **kv_settings(row["kv_format"])}
    plain = thread_engines.plain(asks, **ONE_RANK, **shared)
    with split(
        thread_engines,
        row["cp_size"],
        prefix_cache=row["prefixes"] != "off",
        num_pages=-(-128 // row["page_size"]) if row["memory"] == "one request" else None,
        **shared,
    ) as running:
        running.poison()
        engine = running.engine()
        if row["prefixes"] == "warm":
            serve(engine, [Ask(ask.prompt[: (len(ask.prompt) + 1) // 2], ask.params) for ask in asks])
        results = serve(engine, asks)
        assert engine.kv_pages()[0] == engine.kv_pages()[1]
    assert tokens(results) == tokens(plain)
    for ours, theirs in zip(results, plain, strict=True):
        assert ours.choices[0].logprobs == theirs.choices[0].logprobs


@pytest.mark.parametrize("kv_format", list(KvFormat))
def test_stored_bytes_are_those_of_one_rank(kv_format: KvFormat, thread_engines: ThreadEngines) -> None:
    """Every layer lies whole on its own rank, index keys and draft too; unused rows and pages stay as they were."""
    ask, shared = Ask(prompt_of(37), greedy(1)), {"page_size": 4, "prefix_cache": True, **kv_settings(kv_format)}
    with (
        thread_engines.open(
            **ONE_RANK, num_draft_tokens=0, with_draft=True, prefill_chunk_tokens=CHUNK, **shared
        ) as one,
        split(thread_engines, 3, **shared) as three,
    ):
        for running in (one, three):
            running.poison()
            serve(running.engine(), [ask])
        alone = one.workers[0]
        assert alone.draft is not None
        for role, whole in ((PoolRole.TARGET, alone.pool), (PoolRole.DRAFT, alone.draft.pool)):
            for entry in whole.layout.entries:
                for place, layer in enumerate(entry.layers):
                    pool = owner_of(three, role, layer)
                    own = pool.storage.held.place_of[entry.kind][layer]
                    # But for the scratch page, which takes the writes of padding.
                    ours = pool.buffer(entry.kind)[: pool.num_pages, own]
                    assert torch.equal(ours, whole.buffer(entry.kind)[: pool.num_pages, place]), (role, entry.kind)


def test_each_rank_computes_its_rows_only(thread_engines: ThreadEngines) -> None:
    with split(thread_engines, 4, page_size=4) as running:
        computed = [rows_computed(worker) for worker in running.workers]
        serve(running.engine(), [Ask(prompt_of(2 * CHUNK + 3), greedy(1))])
    per_pass = np.array(computed)  # [ranks, passes of the target]
    assert per_pass.sum(axis=0).tolist() == [CHUNK, CHUNK, 3]
    assert per_pass[:, 0].tolist() == [4, 4, 4, 4]
    assert per_pass[:, 2].tolist() == [1, 1, 1, 0]


def test_ranks_take_part_in_the_same_collectives_whatever_they_have_stored(thread_engines: ThreadEngines) -> None:
    """B60, B61, B62."""
    ask = Ask(prompt_of(40), greedy(2))
    with split(thread_engines, 3, page_size=4) as running:
        engine = running.engine()
        serve(engine, [ask])
        forget(running.workers[1], num_rows=9)
        engine.record_collectives(True)
        serve(engine, [ask])
        recorded = engine.record_collectives(False)
    assert recorded[0]
    for other in recorded[1:]:
        assert [each[:2] for each in other] == [each[:2] for each in recorded[0]]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("num_rows", [0, 3, 8, 21])
def test_a_rank_that_lost_a_prefix_makes_all_of_them_compute_it_again(
    rank: int, num_rows: int, thread_engines: ThreadEngines
) -> None:
    """B62: the ranks begin with the shortest prefix that any of them has."""
    asks = asks_of((40,))
    plain = thread_engines.plain(asks, **ONE_RANK, page_size=4)
    with split(thread_engines, 3, page_size=4) as running:
        engine = running.engine()
        assert tokens(serve(engine, asks)) == tokens(plain)
        running.channel.sent.clear()
        serve(engine, asks)
        num_passes = running.channel.sent.count("verify")
        running.channel.sent.clear()
        pool = running.workers[rank].pool
        for entry in pool.layout.entries:  # what it forgot may be anything
            pool.buffer(entry.kind)[num_rows // 4 + 1 : pool.num_pages].fill_(0xFF)
        forget(running.workers[rank], num_rows=num_rows)
        results = serve(engine, asks)
        assert running.channel.sent.count("verify") > num_passes
        assert results[0].usage.num_cached_tokens == 36
        assert engine.kv_pages()[0] == engine.kv_pages()[1]
    assert tokens(results) == tokens(plain)
    assert results[0].choices[0].logprobs == plain[0].choices[0].logprobs


def test_a_request_whose_prefix_is_lost_at_once_again_fails_alone(thread_engines: ThreadEngines) -> None:
    """The ranks would compute it for ever; no rank waits for another, and the pages come back."""
    long, short = asks_of((40, 5))
    with split(thread_engines, 3, page_size=4) as running:
        run = running.core_run()
        pool = running.workers[1].pool
        assert isinstance(pool, LayerSplitPool)
        committed_prefix = pool.committed_prefix

        def one_less(page_id_RP: np.ndarray, num_rows_R: np.ndarray) -> np.ndarray:
            return committed_prefix(page_id_RP, num_rows_R) - (num_rows_R > 20)

        pool.committed_prefix = one_less  # type: ignore[method-assign]
        requests = [run.add(ask) for ask in (long, short)]
        outputs = run.finish()
        updates = [run.updates[request.request_id][-1] for request in requests]
        assert outputs[1] == tokens(thread_engines.plain([short], **ONE_RANK, page_size=4))[0]
        assert [update.finish_reason for update in updates] == ["error", "length"]
        assert isinstance(updates[0].error, RoundError)
        assert "cp rank 1 has stored" in str(updates[0].error)
        assert run.core.scheduler.num_available_pages() == run.core.scheduler.allocator.num_pages


@pytest.mark.parametrize("cp_size", [2, 3, 8])
def test_a_rank_allocates_its_layers_and_one_more_of_each_kind(
    cp_size: int, checkpoints: Checkpoints, thread_engines: ThreadEngines
) -> None:
    with split(thread_engines, cp_size, page_size=4) as running:
        model = checkpoints.load("parallel").config
        for rank, worker in enumerate(running.workers):
            assert isinstance(worker.pool, LayerSplitPool)
            layout, layers = worker.pool.layout, split_layers(model.num_layers, cp_size)[rank]
            num_pages = worker.pool.num_pages + 2
            assert worker.pool.nbytes == {
                EntryKind.LATENT: num_pages * layout.latent.bytes_per_layer_page * (len(layers) + 1),
                EntryKind.INDEX_KEYS: num_pages
                * layout.index_keys.bytes_per_layer_page
                * (sum(layer in layers for layer in model.full_layers) + 1),
            }
            plan = plan_kv(model, running.config, dtype="torch.float32", with_draft=True, cp_rank=rank)
            assert worker.memory.pools == plan.pools
            assert worker.pool.nbytes == plan.pools.pool_bytes(PoolRole.TARGET)
            assert worker.draft is not None
            draft, is_last = worker.draft.pool, rank == cp_size - 1
            assert draft.nbytes == {  # the slot on every rank, the layer itself on the last
                entry.kind: num_pages * entry.bytes_per_layer_page * (1 + is_last) for entry in draft.layout.entries
            }
            assert draft.nbytes == plan.pools.pool_bytes(PoolRole.DRAFT)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"cp_size": 2, "tp_size": 2, "num_draft_tokens": 0}, "cannot be combined"),
        ({"cp_size": 2, "num_draft_tokens": 3}, "num_draft_tokens must be 0"),
        ({"cp_size": 2, "num_draft_tokens": 0, "prefill": ("127.0.0.1:1",)}, "prefill takes cp_size 1"),
        ({"cp_size": 0}, "cp_size must be an integer >= 1"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        EngineConfig(**settings)


def asks_of(lengths: Sequence[int]) -> list[Ask]:
    return [
        Ask(prompt_of(length, seed=length % 3), greedy(6, logprobs=0) if length % 2 else drawn(length, 6, logprobs=0))
        for length in lengths
    ]


def split(thread_engines: ThreadEngines, cp_size: int, **settings: Any) -> Any:
    defaults = {"num_draft_tokens": 0, "with_draft": True, "prefill_chunk_tokens": CHUNK, "max_num_requests": 4}
    return thread_engines.open(**ONE_RANK, cp_size=cp_size, **{**defaults, **settings})


def owner_of(running: ThreadEngine, role: PoolRole, layer: int) -> LayerSplitPool:
    """The pool that stores a layer; the draft's is on the last rank."""
    if role is PoolRole.DRAFT:
        assert layer == MTP_LAYER
    for worker in running.workers:
        pool = worker.pool if role is PoolRole.TARGET else worker.draft.pool if worker.draft else None
        assert isinstance(pool, LayerSplitPool)
        if layer in pool.layers:
            assert role is PoolRole.TARGET or worker is running.workers[-1]
            return pool
    raise AssertionError(f"no rank stores layer {layer}")


def rows_computed(worker: Worker) -> list[int]:
    """Collects the rows of each pass of a rank's target model."""
    found: list[int] = []
    forward = worker.target.forward

    def counted(token_id_T: torch.Tensor, *, metadata: BatchMetadata, **others: Any) -> torch.Tensor:
        found.append(metadata.num_tokens)
        return forward(token_id_T, metadata=metadata, **others)

    worker.target.forward = counted  # type: ignore[method-assign]
    return found


def forget(worker: Worker, *, num_rows: int) -> None:
    """Let a rank know of the first rows only: those of the first pages that were handed out."""
    assert isinstance(worker.pool, LayerSplitPool)
    page_size = worker.pool.layout.page_size
    first_row_M = np.arange(worker.pool.num_pages) * page_size
    np.minimum(
        worker.pool.num_committed_M, (num_rows - first_row_M).clip(0, page_size), out=worker.pool.num_committed_M
    )
