"""What a layer-split prefill sends, and when: its ranks send while they still compute.

Ranks are threads here. Tags such as B62 are explained in `tests/INVARIANTS.md`.
"""

from typing import Any

import numpy as np
import pytest
import torch

from specdec.dcp.layer_split_pool import LayerSplitPool
from specdec.errors import SpecdecError
from specdec.ranks.worker import Worker
from tests.support.engines import Ask, drawn, greedy, prompt_of, serve, tokens
from tests.support.handoff import serving
from tests.support.thread_engine import ThreadEngines

CHUNK = 8
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


def prefill(thread_engines: ThreadEngines, *, cp_size: int) -> Any:
    return thread_engines.open(
        "parallel",
        **ONE_RANK,
        cp_size=cp_size,
        num_draft_tokens=0,
        with_draft=True,
        prefill_chunk_tokens=CHUNK,
        **SHARED,
    )


def decode(thread_engines: ThreadEngines, address: str) -> Any:
    return thread_engines.open("parallel", **ONE_RANK, num_draft_tokens=3, prefill=(address,), **SHARED)


def events_of(worker: Worker) -> list[int | str]:
    """Collects, on one rank, the target layers as their latents are written, and where writes are posted in a pass."""
    assert isinstance(worker.pool, LayerSplitPool)
    assert worker.transfer is not None
    events: list[int | str] = []
    write_latent, post = worker.pool.transient.write_latent, worker.transfer.post_prepared

    def written(layer: int, *arguments: torch.Tensor) -> None:
        events.append(layer)
        write_latent(layer, *arguments)

    def posted() -> None:
        if worker.transfer is not None and any(order.target for order in unposted(worker)):
            events.append("post")
        post()

    worker.pool.transient.write_latent = written  # type: ignore[method-assign, assignment]
    worker.transfer.post_prepared = posted  # type: ignore[method-assign]
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
