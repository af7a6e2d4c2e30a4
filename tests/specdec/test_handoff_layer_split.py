"""What a prefill sends, and when: the ranks of a layer split send while they still compute.

Ranks are threads here. Tags such as B62 are explained in `tests/INVARIANTS.md`.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import nvtx
import pytest
import torch

from specdec.dcp.layer_split import split_layers
from specdec.dcp.layer_split_pool import LayerSplitPool
from specdec.dcp.pool import KvPool
from specdec.engine import Engine
from specdec.errors import SpecdecError, TransferError
from specdec.ranks import layer_parts
from specdec.ranks.worker import Worker
from specdec.transfer.transport import Peer, RegionCopies, Write
from tests.support.engines import Ask, Checkpoints, drawn, greedy, prompt_of, serve, tokens
from tests.support.handoff import Groups, serving
from tests.support.thread_engine import ThreadEngine, ThreadEngines

CHUNK = 8
LENGTHS = (1, 3, 4, 5, 15, 16, 17, 29)
ONE_RANK = {"tp_size": 1, "dcp_size": 1}
SHARED = {"page_size": 4, "max_num_requests": 4, "transport": "local"}


def test_a_rank_sends_its_layers_before_the_pass_comes_to_the_next_and_before_the_last_chunk(
    thread_engines: ThreadEngines,
) -> None:
    ask = Ask(prompt_of(3 * CHUNK), greedy(2))
    with prefill(thread_engines, cp_size=2) as running, serving(running.engine()) as server:
        first, second = (events_of(worker) for worker in running.workers)
        with decode(thread_engines, server.address) as group:
            serve(group.engine(), [ask])
    # Layer 0 is the first rank's, layer 1 the second's; each has the draft's pass behind it, whose KV goes on its own.
    assert first == [0, "post", 1] * 3
    assert second == [0, 1, "post"] * 3


def test_a_rank_with_all_layers_sends_the_first_before_the_pass_comes_to_the_last(
    thread_engines: ThreadEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_parts, "PART_BYTES", 1)
    ask = Ask(prompt_of(3 * CHUNK), greedy(4))
    with prefill(thread_engines) as running, serving(running.engine()) as server:
        events = layers_and_writes(running.workers[0])
        with decode(thread_engines, server.address) as group:
            results = serve(group.engine(), [ask])
    assert events == [0, "write", 1, "write"] * 3
    assert tokens(results) == tokens(thread_engines.plain([ask], **ONE_RANK, page_size=4))


def test_a_pass_that_breaks_off_between_two_writes_fails_its_request_alone(
    checkpoints: Checkpoints, thread_engines: ThreadEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_parts, "PART_BYTES", 1)
    asks = [Ask(prompt_of(3 * CHUNK, seed=seed), greedy(4)) for seed in range(2)]
    plain = tokens(thread_engines.plain(asks, **ONE_RANK, page_size=4))
    groups = Groups(checkpoints, thread_engines)
    with groups.prefill(prefill_chunk_tokens=CHUNK) as running, groups.decode(running) as engine:
        events = layers_and_writes(running.worker, faults_at=[3])
        with pytest.raises(TransferError, match="a layer failed"):
            serve(engine, asks[:1])
        assert events == [0, "write", 1, "write", 0, "write"]
        assert tokens(serve(engine, asks)) == plain
        assert engine.kv_pages()[0] == engine.kv_pages()[1]


def test_the_steps_of_a_hand_off_are_ranges_of_a_profile(
    thread_engines: ThreadEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    ended: list[str] = []

    @contextlib.contextmanager
    def annotate(name: str) -> Iterator[None]:
        begun.append(name)
        yield
        ended.append(name)

    monkeypatch.setattr(nvtx, "annotate", annotate)
    with (
        prefill(thread_engines, cp_size=2) as running,
        serving(running.engine()) as server,
        decode(thread_engines, server.address, tp_size=2, dcp_size=2) as group,
    ):
        serve(group.engine(), [Ask(prompt_of(3 * CHUNK), greedy(6))])
    assert {"draft", "verify", "agree", "send", "receive"} <= set(begun)
    assert sorted(ended) == sorted(begun)


def test_a_rank_that_lost_a_prefix_while_prompts_are_handed_over_changes_nothing(
    thread_engines: ThreadEngines,
) -> None:
    """B62: the pass is dropped with what it was to send, and both come again."""
    asks = [Ask(prompt_of(29, seed=seed), drawn(seed, 5) if seed else greedy(5)) for seed in range(3)]
    plain = thread_engines.plain(asks, **ONE_RANK, page_size=4)
    with prefill(thread_engines, cp_size=3) as running, serving(running.engine()) as server:
        forgets_before_pass(running.workers[1], passes=(2, 4, 7))
        with decode(thread_engines, server.address) as group:
            engine = group.engine()
            results = serve(engine, asks)
            assert engine.intake is not None
            assert engine.intake.counts.num_lost == 0
            assert engine.kv_pages()[0] == engine.kv_pages()[1]
        assert running.channel.sent.count("verify") > -(-3 * 29 // CHUNK) + 2
    assert tokens(results) == tokens(plain)


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 29])
def test_bytes_sent_are_those_of_the_rows(num_tokens: int, thread_engines: ThreadEngines) -> None:
    """O17, A41: exactly n target rows and n - 1 draft rows, from the ranks that hold them."""
    with prefill(thread_engines, cp_size=2) as running, serving(running.engine()) as server:
        with decode(thread_engines, server.address) as group:
            serve(group.engine(), [Ask(prompt_of(num_tokens), greedy(2))])
        target, draft = running.workers[0].pool.layout, running.workers[0].draft
        assert draft is not None
        sent = {path: counts.num_bytes for path, counts in server.counts.paths.items() if counts.num_bytes}
    wanted = {
        (0, 0, "target.latent"): num_tokens * target.latent.bytes_per_token,
        (1, 0, "target.latent"): num_tokens * target.latent.bytes_per_token,
        (0, 0, "target.index_keys"): num_tokens * target.index_keys.bytes_per_token,  # layer 1 has no indexer
        (1, 0, "draft.latent"): (num_tokens - 1) * draft.pool.layout.latent.bytes_per_token,
        (1, 0, "draft.index_keys"): (num_tokens - 1) * draft.pool.layout.index_keys.bytes_per_token,
    }
    assert sent == {path: size for path, size in wanted.items() if size}


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ({}, {"tp_size": 4, "dcp_size": 4}),
        ({"tp_size": 2}, {"tp_size": 2, "dcp_size": 2}),
        ({"tp_size": 2, "dcp_size": 2}, {"tp_size": 4, "dcp_size": 4}),
        ({"tp_size": 4, "dcp_size": 2}, {}),
        ({"cp_size": 2}, {"tp_size": 2, "dcp_size": 2}),
        ({"cp_size": 4}, {"tp_size": 4, "dcp_size": 2}),  # of the four ranks of the prefill two hold a layer
    ],
    ids=str,
)
def test_every_rank_is_sent_the_rows_that_it_holds_and_no_byte_more(
    source: Mapping[str, int], destination: Mapping[str, int], thread_engines: ThreadEngines
) -> None:
    """O17, A41: n target rows over the ranks of each dcp group, n - 1 draft rows to every rank, whoever sends them."""
    with (
        prefill(thread_engines, **source) as running,
        serving(running.engine()) as server,
        decode(thread_engines, server.address, **destination) as group,
    ):
        engine = group.engine()
        page_ids = pages_of_prompts(engine)
        sent: Counter[tuple[int, int, str]] = Counter()
        for num_tokens in LENGTHS:
            serve(engine, [Ask(prompt_of(num_tokens), greedy(2))])
            now = Counter({path: counts.num_bytes for path, counts in server.counts.paths.items()})
            assert to_each_rank(now - sent) == wanted_by_rank(group, num_tokens, page_ids[-1]), num_tokens
            sent = now
    if "cp_size" in source:  # each rank sends its own layers
        target, num_groups = running.workers[0].pool.layout, group.config.tp_size // group.config.dcp_size
        held = [len(layers) for layers in split_layers(target.num_latent_layers, source["cp_size"])]
        each = sum(LENGTHS) * target.latent.bytes_per_token * num_groups
        for rank, num_layers in enumerate(held):
            own = (size for path, size in sent.items() if path[0] == rank and path[2] == "target.latent")
            assert sum(own) == num_layers * each, rank


def test_a_group_that_is_closed_fails_what_waits_for_a_prompt(thread_engines: ThreadEngines) -> None:
    with (
        prefill(thread_engines, cp_size=2) as running,
        serving(running.engine()) as server,
        decode(thread_engines, server.address) as group,
    ):
        engine = group.engine()
        stream = engine.stream(prompt_of(3 * CHUNK), greedy(2))
        engine.step()
        engine.close()
        for later in (stream.result, lambda: engine.generate(prompt_of(3), greedy(1))):
            with pytest.raises(SpecdecError, match="closed"):
                later()


def prefill(thread_engines: ThreadEngines, **sizes: int) -> Any:
    return thread_engines.open(
        "parallel",
        **{**ONE_RANK, **sizes},
        num_draft_tokens=0,
        with_draft=True,
        prefill_chunk_tokens=CHUNK,
        **SHARED,
    )


def decode(thread_engines: ThreadEngines, address: str, **sizes: int) -> Any:
    return thread_engines.open("parallel", **{**ONE_RANK, **sizes}, num_draft_tokens=3, prefill=(address,), **SHARED)


def pages_of_prompts(engine: Engine) -> list[list[int]]:
    """Collects the page ids that a decode group gives to each prompt."""
    found: list[list[int]] = []
    intake: Any = engine.intake
    start = intake.start

    def started(request: Any, *, page_ids: list[int], **others: Any) -> None:
        found.append(page_ids)
        start(request, page_ids=page_ids, **others)

    intake.start = started
    return found


def to_each_rank(sent: Counter[tuple[int, int, str]]) -> Counter[tuple[int, str]]:
    """Bytes by destination rank and kind of entry."""
    found: Counter[tuple[int, str]] = Counter()
    for (_, rank, kind), num_bytes in sent.items():
        found[rank, kind] += num_bytes
    return found


def wanted_by_rank(group: ThreadEngine, num_tokens: int, page_ids: list[int]) -> Counter[tuple[int, str]]:
    """The bytes of the rows of a prompt that each rank of a decode group holds."""
    wanted: Counter[tuple[int, str]] = Counter()
    for rank, worker in enumerate(group.workers):
        assert worker.draft is not None
        page_size, dcp_size = worker.pool.layout.page_size, group.config.dcp_size
        num_rows = sum(
            min(page_size, num_tokens - place * page_size)
            for place, page_id in enumerate(page_ids)
            if page_id % dcp_size == rank % dcp_size
        )
        for name, pool, count in (("target", worker.pool, num_rows), ("draft", worker.draft.pool, num_tokens - 1)):
            for entry in pool.layout.entries:
                wanted[rank, f"{name}.{entry.kind.value}"] = count * entry.bytes_per_token * len(entry.layers)
    return +wanted


def events_of(worker: Worker) -> list[int | str]:
    """Collects, on one rank, the target layers as their latents are written, and where writes are posted in a pass."""
    assert isinstance(worker.pool, LayerSplitPool)
    assert worker.transfer is not None
    events: list[int | str] = []
    write_latent, post = worker.pool.transient.write_latent, worker.transfer.post_stored

    def written(layer: int, *arguments: torch.Tensor) -> None:
        events.append(layer)
        write_latent(layer, *arguments)

    def posted(layer: int) -> None:
        before = unposted(worker)
        post(layer)
        left = {order.order_id for order in unposted(worker)}
        if any(order.target and order.order_id not in left for order in before):
            events.append("post")

    worker.pool.transient.write_latent = written  # type: ignore[method-assign, assignment]
    worker.transfer.post_stored = posted  # type: ignore[method-assign]
    return events


def layers_and_writes(worker: Worker, *, faults_at: Sequence[int] = ()) -> list[int | str]:
    """Collects the target layers as their latents are written, and the writes of target KV.

    Args:
        worker: Of one rank with all layers.
        faults_at: Which of all these latents cannot be written, by number.
    """
    assert isinstance(worker.pool, KvPool)
    assert worker.transfer is not None
    events: list[int | str] = []
    write_latent, write = worker.pool.write_latent, worker.transfer.transport.write
    num_written = itertools.count()

    def written(layer: int, *arguments: Any) -> None:
        if next(num_written) in faults_at:
            raise RuntimeError("a layer failed")
        events.append(layer)
        write_latent(layer, *arguments)

    def sent(peer: Peer, copies: Sequence[RegionCopies]) -> Write:
        if copies[0].source_region.startswith("target."):
            events.append("write")
        return write(peer, copies)

    worker.pool.write_latent = written  # type: ignore[method-assign]
    worker.transfer.transport.write = sent  # type: ignore[method-assign]
    return events


def unposted(worker: Worker) -> list[Any]:
    assert worker.transfer is not None
    return [prepared.order for prepared in worker.transfer.unposted]


def forgets_before_pass(worker: Worker, *, passes: tuple[int, ...]) -> None:
    """Let a rank lose all but the first rows of every page before some of the target's passes."""
    verify, num_passes = worker.verify, 0

    def forgetful(task: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        if num_passes in passes:
            assert isinstance(worker.pool, LayerSplitPool)
            np.minimum(worker.pool.num_committed_M, 1, out=worker.pool.num_committed_M)
        return verify(task)

    worker.verify = forgetful  # type: ignore[method-assign]
